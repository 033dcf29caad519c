"""Placements that need no search: one device for everything, or all devices in turn."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Proposal, Search
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem


@dataclass(frozen=True)
class CpuOnly:
    """Everything on the first CPU; a group that can't run there goes to the first device that can run it."""

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields one placement; raises StrategyError on a machine without a CPU."""
        found = cpus(problem)
        if not found:
            raise StrategyError(f"cpu-only needs a CPU, and {problem.cluster.name} has none")
        device = found[0]
        yield Proposal(move_to_allowed(problem, np.full((1, problem.num_groups), device)))


@dataclass(frozen=True)
class GpuOnly:
    """Everything on one GPU, a placement for each GPU; a group that can't run there goes to the CPU.

    Without a GPU, all devices take their place.
    """

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields a batch with a placement for each GPU."""
        devices = accelerators(problem)
        yield Proposal(move_to_allowed(problem, np.tile(devices[:, None], (1, problem.num_groups))))


@dataclass(frozen=True)
class RoundRobin:
    """Group i on device i mod n; a group that can't run there goes to the CPU."""

    devices: Literal["gpus", "all"] = "gpus"

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields one placement."""
        devices = accelerators(problem) if self.devices == "gpus" else np.arange(problem.num_devices)
        yield Proposal(move_to_allowed(problem, devices[np.arange(problem.num_groups) % len(devices)][None]))


def accelerators(problem: Problem) -> Ints:
    """Returns the devices that are not CPUs, or all devices if there are none, in their order: [at least 1]."""
    found = [d for d, device in enumerate(problem.cluster.devices) if device.kind != "cpu"]
    return np.array(found or range(problem.num_devices), np.int64)


def cpus(problem: Problem) -> list[int]:
    """Returns the devices of kind cpu, in their order."""
    return [d for d, device in enumerate(problem.cluster.devices) if device.kind == "cpu"]


def move_to_allowed(problem: Problem, wanted: Ints) -> Ints:
    """Returns the placements with every group on a device that it can run on: [batch, groups].

    A group that can't run on its wanted device goes to the first CPU that can run it, else to the first device that can.
    """
    others = [d for d in range(problem.num_devices) if d not in cpus(problem)]
    order = np.array([*cpus(problem), *others], np.int64)
    spare = order[problem.allowed[:, order].argmax(axis=1)]  # [groups]
    groups = np.arange(problem.num_groups)
    return np.where(problem.allowed[groups, wanted], wanted, spare)


def fastest(problem: Problem, devices: Ints) -> int:
    """Returns the device on which all ops that can run there take the least time; ties go to the first."""
    return int(devices[run_seconds(problem).sum(axis=0)[devices].argmin()])


def run_seconds(problem: Problem) -> Floats:
    """Returns each op's time on each device, 0 where it can't run, as it will run elsewhere: [ops, devices]."""
    return np.where(problem.allowed[problem.op_groups], problem.op_seconds, 0.0)
