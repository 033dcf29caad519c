"""Placements that need no search: one device for everything, or all devices in turn."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Proposal, Search
from placewise.core.problem import Problem


@dataclass(frozen=True)
class CpuOnly:
    """Everything on the first CPU; a group that can't run there is on the first device that can.

    A machine without a CPU has its first device in its place.
    """

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields one placement."""
        device = [*cpus(problem), 0][0]
        yield Proposal(move_to_allowed(problem, np.full((1, problem.num_groups), device)))


@dataclass(frozen=True)
class GpuOnly:
    """Everything on one GPU, a placement for each of them; a group that can't run there is on the CPU.

    A machine without a GPU has all of its devices in their place.
    """

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields a batch with a placement for each GPU."""
        devices = accelerators(problem)
        yield Proposal(move_to_allowed(problem, np.tile(devices[:, None], (1, problem.num_groups))))


@dataclass(frozen=True)
class RoundRobin:
    """Groups in turn, by their numbers: group i is on device i mod n; where it can't run there, as for `GpuOnly`."""

    devices: Literal["gpus", "all"] = "gpus"

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields one placement."""
        devices = accelerators(problem) if self.devices == "gpus" else np.arange(problem.num_devices)
        yield Proposal(move_to_allowed(problem, devices[np.arange(problem.num_groups) % len(devices)][None]))


def accelerators(problem: Problem) -> Ints:
    """Returns the devices that are no CPUs, or all devices if there are none: [at least 1], in their order."""
    found = [d for d, device in enumerate(problem.cluster.devices) if device.kind != "cpu"]
    return np.array(found or range(problem.num_devices), np.int64)


def cpus(problem: Problem) -> list[int]:
    """Returns the devices of kind cpu, in their order."""
    return [d for d, device in enumerate(problem.cluster.devices) if device.kind == "cpu"]


def move_to_allowed(problem: Problem, wanted: Ints) -> Ints:
    """Returns the placements with every group where it can run: [batch, groups].

    A group stays on the device that is wanted for it; where it can't run there, it is on the first CPU that can run it,
    else on the first device that can.
    """
    others = [d for d in range(problem.num_devices) if d not in cpus(problem)]
    order = np.array([*cpus(problem), *others], np.int64)
    spare = order[problem.allowed[:, order].argmax(axis=1)]  # [groups]
    groups = np.arange(problem.num_groups)
    return np.where(problem.allowed[groups, wanted], wanted, spare)


def fastest(problem: Problem, devices: Ints) -> int:
    """Returns the one of the devices on which all ops that can run there take the least time; the first of equals."""
    return int(devices[run_seconds(problem).sum(axis=0)[devices].argmin()])


def run_seconds(problem: Problem) -> Floats:
    """Returns each op's time on each device, 0 where it can't run, for it will be elsewhere: [ops, devices]."""
    return np.where(problem.allowed[problem.op_groups], problem.op_seconds, 0.0)
