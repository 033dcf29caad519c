"""The walkers of all chains, and where they stand."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.graph import PHASES
from placewise.core.labels import renumber
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import Int32s
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.moves import build_moves
from placewise.strategies.auto.walk import Pace, new_walker, walk
from placewise.strategies.blocks import Blocks

PARTITIONS = ("module", "module-by-micro-batch", "coarse:30", "coarse:100", "coarse:400", "coarse:1600")

ROOMY = 0.7  # of a device's memory: walks that begin below it look at memory only when they have passed it

PRICES = (0.02, 0.2, 2.0)  # the share of all memory that costs as much as the whole step, in turns of the chains


class Stand(NamedTuple):
    """A placement in a launch order, and what the simulator says of it."""

    cost: float  # seconds, and more where it does not fit
    seconds: float
    overflow_bytes: int
    fullness: float  # the largest peak over a device's memory
    placement: Ints  # [groups]
    order: Int32s  # [ops]

    @classmethod
    def of(cls, model: Simulator, placement: Ints, order: Ints | Int32s | None = None) -> "Stand":
        """Returns the stand of a placement in an order, or in the one that counts for it."""
        given = None if order is None else np.asarray(order, np.int64)[None]
        measured = model.simulate(placement[None], given, keep_orders=True)
        assert measured.orders is not None
        evaluation = model.evaluation(measured.step_seconds, measured.peak_bytes)
        fullness = (measured.peak_bytes[0] / np.maximum(model.problem.cluster.memory_bytes, 1)).max()
        return cls(
            cost=float(evaluation.cost[0]),
            seconds=float(evaluation.step_seconds[0]),
            overflow_bytes=int(evaluation.overflow_bytes[0]),
            fullness=float(fullness),
            placement=placement,
            order=measured.orders[0],
        )


def best_of(stands: Sequence[Stand]) -> Stand:
    """Returns the stand of least cost, the first of equals."""
    return min(stands, key=lambda stand: stand.cost)


def settled(stands: Sequence[Stand]) -> list[Stand]:
    """Returns the stands by cost, each placement once; ties go to the earlier one."""
    kept: list[Stand] = []
    for stand in sorted(stands, key=lambda stand: stand.cost):
        if not any(np.array_equal(stand.placement, other.placement) for other in kept):
            kept.append(stand)
    return kept


class Crew:
    """A walker for each chain; they share the problem's tables and moves."""

    def __init__(self, model: Simulator, seeds: Ints) -> None:
        problem = model.problem
        self.model = model
        self.trials = 0  # that each walker has made
        self._memory_bytes = float(problem.cluster.memory_bytes.sum())
        self._moves = build_moves(problem, move_partitions(problem))
        self._early = -tails(problem)
        self._walkers = [new_walker(model.flat, problem.num_groups) for _ in seeds]
        for walker, seed in zip(self._walkers, seeds, strict=True):
            walker.random[0] = seed

    def walk(self, chain: int, stand: Stand, pace: Pace) -> Stand:
        """Returns the best stand of a walk, which may be where it began; the heat of the pace is over the step's seconds."""
        heated = self._heated(chain, stand, pace)
        found = stand
        if stand.fullness < ROOMY:
            found = self._walk(chain, stand, heated)
        if found.overflow_bytes or stand.fullness >= ROOMY:
            found = self._walk(chain, stand, heated._replace(checks_memory=True, first=pace.first + pace.trials))
        return best_of([stand, found])

    def _heated(self, chain: int, stand: Stand, pace: Pace) -> Pace:
        """Returns the pace with temperatures and a byte's price in seconds; where nothing fits yet, bytes alone count."""
        if stand.overflow_bytes:
            price = 1e3 * max(stand.seconds, 1e-9)
            return pace._replace(
                hot=0.3 * price * stand.overflow_bytes, cold=0.01 * price * stand.overflow_bytes, price=price
            )
        price = stand.seconds / max(PRICES[chain % len(PRICES)] * self._memory_bytes, 1.0)
        return pace._replace(hot=pace.hot * stand.seconds, cold=pace.cold * stand.seconds, price=price)

    def _walk(self, chain: int, stand: Stand, pace: Pace) -> Stand:
        walker = self._walkers[chain]
        walker.work.devices[:] = stand.placement
        walker.order[:] = stand.order
        walk(self.model.flat, self._moves, self._early, walker, pace)
        placement = walker.best.astype(np.int64)
        own, renewed = Stand.of(self.model, placement, walker.best_order), Stand.of(self.model, placement)
        return best_of([own, renewed])


def move_partitions(problem: Problem) -> list[Ints]:
    """Returns what moves together: for each partition the block of each group [groups]."""
    phases = np.zeros(problem.num_groups, np.int64)
    phases[problem.op_groups[::-1]] = problem.graph.ops.phases[::-1]  # of each group's first op
    found = []
    has_micro_batches = (problem.graph.ops.micro_batches >= 0).any()
    for name in PARTITIONS if has_micro_batches else PARTITIONS[:1] + PARTITIONS[2:]:
        of_group = Blocks.of(problem, name).of_group
        found.append(of_group)
        if name.startswith("module"):
            found.append(renumber(of_group * len(PHASES) + phases))
    return found


def tails(problem: Problem) -> Floats:
    """Returns the least time from each op's end to the end of any step: [ops]."""
    writers, readers, _ = problem.graph.edges
    after = problem.graph.ops.after
    source, target = np.concatenate([writers, after.values]), np.concatenate([readers, after.rows])
    backwards = np.argsort(-target, kind="stable")
    longest, fastest = [0.0] * problem.num_ops, problem.fastest_seconds.tolist()
    for n, m in zip(source[backwards].tolist(), target[backwards].tolist(), strict=True):
        longest[n] = max(longest[n], longest[m] + fastest[m])
    return np.array(longest)
