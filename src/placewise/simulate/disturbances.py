"""How long a step takes if the predicted times are wrong: the same placement, simulated under drawn disturbances."""

from dataclasses import dataclass

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.errors import InputError
from placewise.simulate import kernels
from placewise.simulate.flat_problem import FlatProblem, Int32s
from placewise.simulate.simulator import Simulator

BUSY = 0.25  # the share of draws in which the CPU is busy
BUSY_SLOWDOWN = 1.5  # how much longer its ops and all launches take then
LOW, HIGH = 0.1, 0.9  # the quantiles between which an interval is


@dataclass(frozen=True)
class Disturbances:
    """Draws of wrong times: each op's by its device and its kind, each link's, and now and then a busy CPU.

    Half of what an op's time is off by is common to all ops of its device, the other half to all ops of its kind there.
    """

    ops: float = 0.1  # how far an op's time is off at most, as a share; links are off by up to twice as much
    draws: int = 32

    def __post_init__(self) -> None:
        if not 0 <= self.ops < 0.5:
            raise InputError(f"a disturbance must be at least 0 and below 50%, got {self.ops:.0%}")
        if self.draws < 1:
            raise InputError(f"the number of draws must be at least 1, got {self.draws}")

    def step_seconds(self, simulator: Simulator, placements: Ints, orders: Ints, rng: np.random.Generator) -> Floats:
        """Returns the times of placements [batch, groups] in their launch orders [batch, ops]: [batch, draws].

        All placements meet the same draws. The orders stay as they are: nobody knows the real times when ops are launched.
        """
        problem = simulator.problem
        placements = problem.check_placements(placements)
        launches: Int32s = np.ascontiguousarray(orders, np.int32)
        work = kernels.new_workspace(simulator.flat, problem.num_groups)
        seconds, peaks = np.zeros((self.draws, len(placements))), np.zeros((1, problem.num_devices), np.int64)
        kinds, kind_of = np.unique(np.array(problem.graph.ops.kinds, str), return_inverse=True)  # [kinds], [ops]
        for draw in range(self.draws):
            disturbed = self._draw(simulator, len(kinds), kind_of, rng)
            kernels.simulate_batch(disturbed, placements, launches, work, None, seconds[draw], peaks)
        return seconds.T

    def _draw(self, simulator: Simulator, num_kinds: int, kind_of: Ints, rng: np.random.Generator) -> FlatProblem:
        """Returns the problem with other times."""
        problem, flat = simulator.problem, simulator.flat
        num_devices, half = problem.num_devices, self.ops / 2
        off = rng.uniform(-half, half, (num_kinds, num_devices)) + rng.uniform(-half, half, num_devices)
        links = 1 + rng.uniform(-2 * self.ops, 2 * self.ops, num_devices * num_devices)
        slowdown = BUSY_SLOWDOWN if self.ops and rng.random() < BUSY else 1.0
        cpus = np.array([device.kind == "cpu" for device in problem.cluster.devices], np.bool_)
        op_seconds = problem.op_seconds * (1 + off)[kind_of] * np.where(cpus, slowdown, 1.0)
        return flat._replace(
            op_seconds=op_seconds.reshape(-1),
            latency_seconds=flat.latency_seconds * links,
            bytes_per_second=flat.bytes_per_second / links,
            delay_seconds=flat.delay_seconds * links,
            dispatch_seconds=flat.dispatch_seconds * slowdown,
            copy_dispatch_seconds=flat.copy_dispatch_seconds * slowdown,
        )


def interval_of(seconds: Floats) -> tuple[float, float]:
    """Returns between which times eight of ten draws are: the 10th and the 90th percentile of seconds [draws]."""
    low, high = np.quantile(seconds, (LOW, HIGH)).tolist()
    return low, high
