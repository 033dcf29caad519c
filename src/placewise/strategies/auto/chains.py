"""The chains of walks: a walker for each, at its own pace."""

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.graph import PHASES
from placewise.core.labels import renumber
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.candidates import Candidate, best_of
from placewise.strategies.auto.moves import build_moves
from placewise.strategies.auto.walk import Pace, new_walker, walk
from placewise.strategies.blocks import Blocks

PARTITIONS = ("module", "module-by-micro-batch", "coarse:30", "coarse:100", "coarse:400", "coarse:1600")
ROOMY = 0.7  # share of a device's memory: a walk that begins below it checks memory only if its result does not fit
PRICES = (0.02, 0.2, 2.0)  # share of all memory that costs as much as the whole step; the chains take turns


class Chains:
    """A walker for each chain; they share the flat problem and the moves."""

    def __init__(self, model: Simulator, seeds: Ints) -> None:
        problem = model.problem
        self.model = model
        self.trials = 0  # made by each walker so far
        self._memory_bytes = float(problem.cluster.memory_bytes.sum())
        self._moves = build_moves(problem, move_partitions(problem))
        self._early = -remaining_seconds(problem)
        self._walkers = [new_walker(model.flat, problem.num_groups) for _ in seeds]
        for walker, seed in zip(self._walkers, seeds, strict=True):
            walker.random[0] = seed

    def walk(self, chain: int, candidate: Candidate, pace: Pace) -> Candidate:
        """Returns the best candidate of a walk, which may be its start; the pace's temperatures are relative to the step."""
        heated = self._heated(chain, candidate, pace)
        found = candidate
        if candidate.fullness < ROOMY:
            found = self._walk(chain, candidate, heated)
        if found.overflow_bytes or candidate.fullness >= ROOMY:
            found = self._walk(chain, candidate, heated._replace(checks_memory=True, first=pace.first + pace.trials))
        return best_of([candidate, found])

    def trade(self, chain: int, candidate: Candidate, pace: Pace, copy_price: float, copy_prices: Floats) -> Candidate:
        """Returns the best candidate of a walk on which a copy costs seconds besides its time.

        It costs `copy_price` times its entry in `copy_prices` [copied tensors, devices]. The pace's temperatures are
        relative to the price. The best may be slower than the start, if its copies cost less.
        """
        self._walkers[chain].copy_prices[:] = copy_prices.reshape(-1)
        checks = candidate.fullness >= ROOMY
        price = self._heated(chain, candidate, pace).price
        heated = pace._replace(hot=pace.hot * copy_price, cold=pace.cold * copy_price, price=price, copy_price=copy_price)
        found = self._best_of_walk(chain, candidate, heated._replace(checks_memory=checks))
        if found.overflow_bytes and not checks:
            found = self._best_of_walk(chain, candidate, heated._replace(checks_memory=True, first=pace.first + pace.trials))
        return candidate if found.overflow_bytes else found

    def _heated(self, chain: int, candidate: Candidate, pace: Pace) -> Pace:
        """Returns the pace with temperatures and a byte's price in seconds; if the start does not fit, only bytes count."""
        if candidate.overflow_bytes:
            price = 1e3 * max(candidate.seconds, 1e-9)
            return pace._replace(
                hot=0.3 * price * candidate.overflow_bytes, cold=0.01 * price * candidate.overflow_bytes, price=price
            )
        price = candidate.seconds / max(PRICES[chain % len(PRICES)] * self._memory_bytes, 1.0)
        return pace._replace(hot=pace.hot * candidate.seconds, cold=pace.cold * candidate.seconds, price=price)

    def _walk(self, chain: int, candidate: Candidate, pace: Pace) -> Candidate:
        own = self._best_of_walk(chain, candidate, pace)
        return best_of([own, Candidate.of(self.model, own.placement)])

    def _best_of_walk(self, chain: int, candidate: Candidate, pace: Pace) -> Candidate:
        walker = self._walkers[chain]
        walker.work.devices[:] = candidate.placement
        walker.order[:] = candidate.order
        walk(self.model.flat, self._moves, self._early, walker, pace)
        return Candidate.of(self.model, walker.best.astype(np.int64), walker.best_order.copy())


def move_partitions(problem: Problem) -> list[Ints]:
    """Returns the partitions whose blocks move together: for each of them, the block of each group [groups]."""
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


def remaining_seconds(problem: Problem) -> Floats:
    """Returns the least time from each op's end to the end of any step: [ops]."""
    writers, readers, _ = problem.graph.edges
    after = problem.graph.ops.after
    source, target = np.concatenate([writers, after.values]), np.concatenate([readers, after.rows])
    backwards = np.argsort(-target, kind="stable")
    longest, fastest = [0.0] * problem.num_ops, problem.fastest_seconds.tolist()
    for n, m in zip(source[backwards].tolist(), target[backwards].tolist(), strict=True):
        longest[n] = max(longest[n], longest[m] + fastest[m])
    return np.array(longest)
