"""An evaluator that simulates placements."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import ProblemError
from placewise.core.problem import NOWHERE, Present, Problem
from placewise.simulate import kernels, priority
from placewise.simulate.dependencies import Dependencies, build_dependencies
from placewise.simulate.flat_problem import FlatProblem, Int32s, copied_tensors, flatten
from placewise.simulate.longest_step import longest_step_seconds
from placewise.simulate.schedule import Schedule
from placewise.simulate.timeline import record_timeline

ORDERS = ("priority", "program")

ROUNDING = 1e-9  # relative, above the rounding error of adding up a step

SHORTEST = 1e-9  # seconds, where no op takes any time

MOST_PRESENT = 16  # simulators that are kept, each for one choice of optional ops


class Simulation(NamedTuple):
    """What simulating a batch of placements gives."""

    step_seconds: Floats  # [batch]
    peak_bytes: Ints  # [batch, devices]
    orders: Int32s | None  # [batch, ops], the order of each placement, if they were asked for


def missing_bytes(peaks: Ints, memory_bytes: Ints) -> Ints:
    """Returns by how much peaks [..., devices] overflow all devices' memory [devices]: [...]; at most what 63 bits hold."""
    most = np.iinfo(np.int64).max // max(len(memory_bytes), 1)  # of a device, so that a sum never becomes 0
    return np.asarray(np.clip(peaks - memory_bytes, 0, most).sum(axis=-1), np.int64)


@dataclass(frozen=True, eq=False)
class Simulator:
    """Simulates placements of one problem on all cores; the results do not depend on the number of threads.

    `order` is the launch order if a call does not give one: "program", as captured, or "priority" (the default), in which
    a list schedule of the placement starts the ops, unless the program order is better.
    """

    problem: Problem
    order: str = "priority"
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    _idle: list["_Workspaces"] = field(default_factory=list, repr=False)  # workspaces that no thread uses
    _present: dict[bytes, tuple[Present, "Simulator"]] = field(default_factory=dict, repr=False)  # by what is nowhere

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ProblemError(f"order must be one of {', '.join(ORDERS)}, it is {self.order!r}")
        if self.threads < 1:
            raise ProblemError(f"threads must be at least 1, it is {self.threads}")

    def __call__(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        """Returns the evaluation of a batch; a placement that does not fit costs more than any that fits."""
        seconds, peaks, _ = self.simulate(placements, orders)
        return self.evaluation(seconds, peaks)

    def evaluation(self, seconds: Floats, peaks: Ints, least: float = 0.0) -> Evaluation:
        """Returns the evaluation of placements with these times [batch] and peak bytes [batch, devices].

        One that does not fit costs more than `failing_seconds`, and more than `least`.
        """
        overflow = missing_bytes(peaks, self.problem.cluster.memory_bytes)
        total = float(self.problem.cluster.memory_bytes.sum(dtype=np.float64))
        failing = max(self.failing_seconds, least) * (1.0 + overflow / max(total, 1.0))
        return Evaluation(np.where(overflow > 0, failing, seconds), seconds, overflow)

    def simulate(self, placements: Ints, orders: Ints | None = None, *, keep_orders: bool = False) -> Simulation:
        """Returns step time and peak memory of placements [batch, groups] in these orders [batch, ops], or in its own."""
        placements = np.ascontiguousarray(self.problem.check_placements(placements))
        if self.problem.graph.has_options:
            return self._simulate_present(placements, orders, keep_orders)
        batch = len(placements)
        seconds, peaks = np.zeros(batch), np.zeros((batch, self.problem.num_devices), np.int64)
        kept = np.zeros((batch, self.problem.num_ops), np.int32) if keep_orders else None
        if orders is not None:
            for order in (orders := np.asarray(orders)):
                self.problem.check_order(order)
            if len(orders) not in (1, batch):
                raise ProblemError(f"expected 1 order or {batch}, one for each placement, got {len(orders)}")
        given = None if orders is None else np.ascontiguousarray(orders, np.int32)

        def part(first: int, last: int) -> None:
            rows = slice(first, last)
            self._run(placements[rows], given if given is None or len(given) == 1 else given[rows], seconds[rows],
                      peaks[rows], None if kept is None else kept[rows])  # fmt: skip

        self._in_parts(batch, part)
        return Simulation(seconds, peaks, kept)

    def schedule(self, placement: Ints, order: Ints | None = None) -> Schedule:
        """Returns the schedule of one placement [groups] in this order [ops], or in its own."""
        placement = self.problem.check_placements(np.asarray(placement)[None])[0]
        if self.problem.graph.has_options:
            present, simulator = self.present(placement)
            given = None if order is None else present.reduce_order(self.problem.check_plan(placement, order))
            return replace(simulator.schedule(placement[present.groups], given), present=present)
        launch = self.order_of(placement) if order is None else self.problem.check_order(order).astype(np.int32)
        workspace = self._workspace()
        workspace.times.devices[:] = placement
        usage = np.zeros((self.problem.num_ops, self.problem.num_devices), np.int64)
        peak = np.zeros(self.problem.num_devices, np.int64)
        timeline = record_timeline(self.flat, launch, workspace.times, workspace.memory, peak, usage)
        self._idle.append(workspace)
        tensors = copied_tensors(self.problem)
        return Schedule(self.problem, placement, launch.astype(np.int64), timeline, tensors, usage, peak)

    def order_of(self, placement: Ints) -> Int32s:
        """Returns the launch order of a placement [groups]: [ops]."""
        if self.order == "program":
            return self._program
        found = self.simulate(np.asarray(placement)[None], keep_orders=True)
        assert found.orders is not None
        order: Int32s = found.orders[0]
        return order

    def present(self, placement: Ints) -> "tuple[Present, Simulator]":
        """Returns what is left of the problem where a placement [groups] has optional ops nowhere, and its simulator."""
        key = np.packbits(placement == NOWHERE).tobytes()
        if key not in self._present:
            while len(self._present) >= MOST_PRESENT:
                del self._present[next(iter(self._present))]
            present = self.problem.present(placement)
            self._present[key] = present, Simulator(present.problem, self.order, self.threads)
        return self._present[key]

    def _simulate_present(self, placements: Ints, orders: Ints | None, keep_orders: bool) -> Simulation:
        """Returns what `simulate` does, for a problem with options: rows that leave the same ops nowhere are one batch."""
        batch, num_ops = len(placements), self.problem.num_ops
        seconds, peaks = np.zeros(batch), np.zeros((batch, self.problem.num_devices), np.int64)
        kept = np.zeros((batch, num_ops), np.int32) if keep_orders else None
        if orders is not None and len(orders) not in (1, batch):
            raise ProblemError(f"expected 1 order or {batch}, one for each placement, got {len(orders)}")
        _, choice = np.unique(placements == NOWHERE, axis=0, return_inverse=True)
        for number in range(int(choice.max(initial=-1)) + 1):
            rows = np.flatnonzero(choice.ravel() == number)
            present, simulator = self.present(placements[rows[0]])
            given = None
            if orders is not None:
                checked = [self.problem.check_plan(placements[row], orders[row % len(orders)]) for row in rows.tolist()]
                given = np.stack([present.reduce_order(order) for order in checked])
            found = simulator.simulate(placements[rows][:, present.groups], given, keep_orders=keep_orders)
            seconds[rows], peaks[rows] = found.step_seconds, found.peak_bytes
            if kept is not None and found.orders is not None:
                kept[rows] = [present.restore_order(order) for order in found.orders]
        return Simulation(seconds, peaks, kept)

    @cached_property
    def flat(self) -> FlatProblem:
        """The problem as flat arrays."""
        return flatten(self.problem)

    @cached_property
    def failing_seconds(self) -> float:
        """What a placement that does not fit costs at least: more than any step takes."""
        return max(longest_step_seconds(self.problem) * (1 + ROUNDING), SHORTEST)

    @cached_property
    def dependencies(self) -> Dependencies:
        """Which ops wait for which values and ops."""
        return build_dependencies(self.problem)

    @cached_property
    def _program(self) -> Int32s:
        return np.arange(self.problem.num_ops, dtype=np.int32)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, thread_name_prefix="simulate")

    def _run(self, placements: Ints, orders: Int32s | None, seconds: Floats, peaks: Ints, kept: Int32s | None) -> None:
        """Simulates some rows on this thread, into the given arrays."""
        workspace = self._workspace()
        if orders is None and self.order == "priority":
            priority.simulate_priority_batch(
                self.flat, self.dependencies, placements, self._program, workspace.times, workspace.memory,
                workspace.priority, seconds, peaks, kept,
            )  # fmt: skip
        else:
            orders = self._program[None] if orders is None else orders
            kernels.simulate_batch(self.flat, placements, orders, workspace.times, workspace.memory, seconds, peaks)
            if kept is not None:
                kept[:] = orders
        self._idle.append(workspace)

    def _in_parts(self, batch: int, part: Callable[[int, int], None]) -> None:
        """Calls `part` for all rows, split evenly over the threads."""
        if self.threads == 1 or batch == 1:
            part(0, batch)
            return
        bounds = np.linspace(0, batch, min(self.threads, batch) + 1).astype(int).tolist()
        self.flat, self.dependencies  # noqa: B018  made here once, not by every thread
        list(self._pool.map(part, bounds[:-1], bounds[1:]))

    def _workspace(self) -> "_Workspaces":
        try:
            return self._idle.pop()
        except IndexError:
            return _Workspaces(
                kernels.new_workspace(self.flat, self.problem.num_groups),
                kernels.new_memory_workspace(self.flat),
                priority.new_priority_workspace(self.flat, self.dependencies),
            )


class _Workspaces(NamedTuple):
    """What one thread works on."""

    times: kernels.Workspace
    memory: kernels.MemoryWorkspace
    priority: priority.PriorityWorkspace
