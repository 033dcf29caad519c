"""The step time against memory: the same step where the GPUs have a part of the memory that it needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.search.driver import unless_stopped
from placewise.search.planner import Planner
from placewise.search.request import Request
from placewise.search.tight_memory import add_memory_options
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator
from placewise.strategies.single_device import accelerators

SHARES = (1.0, 0.8, 0.6, 0.4, 0.2)  # of what the step needs

ROOMY = 2**60  # bytes, more than any step needs


@dataclass(frozen=True, eq=False)
class MemoryPoint:
    """The best step that was found where the GPUs have a share of the memory that it needs."""

    share: float
    memory_bytes: dict[str, int]  # of the limited devices
    schedule: Schedule | None  # None: nothing was found that fits

    @property
    def step_seconds(self) -> float:
        """The step time, infinite if nothing fits."""
        return np.inf if self.schedule is None else self.schedule.step_seconds


def memory_curve(
    problem: Problem,
    request: Request,
    shares: Sequence[float] = SHARES,
    *,
    recompute: bool = True,
    park: bool = True,
    on_point: Callable[[MemoryPoint], None] = lambda point: None,
) -> list[MemoryPoint]:
    """Returns a point for each share, from the least: what the request's search finds, or what was found for less memory.

    So more memory never makes a step slower. What the step needs is the peak of the best placement where GPUs (all devices,
    if there are none) have more memory than any step needs; `problem` is without optional ops.
    """
    limited = accelerators(problem).tolist()
    roomy = _with_memory(problem, dict.fromkeys(limited, ROOMY))
    unlimited = _found(roomy, request)
    needed = [0] * problem.num_devices if unlimited is None else unlimited.peak_bytes.tolist()
    optional = add_memory_options(problem, recompute=recompute, park=park)
    points: list[MemoryPoint] = []
    for share in sorted(shares):
        memory = {d: int(np.ceil(share * needed[d])) for d in limited}
        here = _with_memory(optional, memory)
        schedules = [_found(here, request)]
        if points and points[-1].schedule is not None:
            schedules.append(Simulator(here, request.order).schedule(*whole_plan(points[-1].schedule)))
        if share >= 1.0:
            schedules.append(unlimited)
        best = min((one for one in schedules if one is not None), key=lambda one: one.step_seconds, default=None)
        names = {problem.cluster.device_names[d]: nbytes for d, nbytes in memory.items()}
        points.append(MemoryPoint(share, names, best))
        on_point(points[-1])
    return points


def _found(problem: Problem, request: Request) -> Schedule | None:
    """Returns what a search finds, None if nothing fits."""
    outcome = unless_stopped(Planner(problem, request).search())
    return (
        None if outcome.placement is None else Simulator(problem, request.order).schedule(outcome.placement, outcome.order)
    )


def whole_plan(schedule: Schedule) -> tuple[Ints, Ints]:
    """Returns the placement and the order of a schedule, of the whole problem."""
    present = schedule.present
    if present is None:
        return schedule.placement, schedule.order
    return present.restore_placement(schedule.placement), present.restore_order(schedule.order)


def _with_memory(problem: Problem, memory_bytes: dict[int, int]) -> Problem:
    """Returns the problem on devices with other memories, by their numbers."""
    devices = [
        replace(device, memory_bytes=memory_bytes.get(d, device.memory_bytes))
        for d, device in enumerate(problem.cluster.devices)
    ]
    cluster: Cluster = replace(problem.cluster, devices=tuple(devices))
    return replace(problem, cluster=cluster)
