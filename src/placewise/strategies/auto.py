"""The default strategy: a portfolio of starts, then annealed walks over placement and launch order in the simulator."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Proposal, Search
from placewise.core.errors import StrategyError
from placewise.core.graph import PHASES
from placewise.core.grouping import group_ops
from placewise.core.problem import Problem
from placewise.core.sets import merge_sets, numbered
from placewise.simulate.simulator import Simulator
from placewise.simulate.tables import Small
from placewise.strategies.auto_moves import Moves, build_moves
from placewise.strategies.auto_walk import Pace, Walker, new_walker, walk

PORTFOLIO = (
    "gpu-only", "cpu-only", "expert", "pipeline", "towers", "balanced", "metis", "mincut", "m-topo", "m-etf", "heft", "cpop",
)  # fmt: skip
BLOCKS = ("module", "module-by-micro-batch", "coarse:30", "coarse:100", "coarse:400", "coarse:1600")
COARSE = np.array([0, 1, 1, 1, 8, 2, 2])  # weights of the kinds of moves
FINE = np.array([1, 4, 4, 1, 4, 3, 3])


class Stand(NamedTuple):
    """Where a chain is: a placement, its launch order, and what they cost."""

    cost: float  # seconds, and more where it does not fit
    placement: Ints  # [groups]
    order: Small  # [ops]


@dataclass(frozen=True)
class Auto:
    """Walks from the best starts of a portfolio, in the simulator."""

    chains: int = 4
    effort: int = 4_000_000  # ops that the trials of a chain may pass between two proposals
    cycle: int = 12  # rounds from hot to cold; each cycle has half as many more
    hot: float = 1e-3  # the first temperature over the step's seconds
    cold: float = 1e-5  # the last one
    focus: float = 0.8  # the share of moves that are drawn where there is little slack

    def __post_init__(self) -> None:
        for name in ("chains", "effort", "cycle"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, it is {getattr(self, name)}")
        for name in ("hot", "cold"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be above 0 and below 1, it is {getattr(self, name)}")
        if not 0 <= self.focus <= 1:
            raise ValueError(f"focus must be from 0 to 1, it is {self.focus}")

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the portfolio, then the best of every chain, round by round, without end."""
        model = Simulator(problem, threads=1)
        stands = yield from _begin(problem, model, self.chains, rng)
        if not problem.num_ops:
            return
        crew = Crew(model, self.chains, rng)
        length, cycle = self.cycle, 0
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            while True:
                for round_number in range(length):
                    heat = self.hot * (self.cold / self.hot) ** (round_number / max(length - 1, 1))
                    pace = Pace(
                        max(self.effort // problem.num_ops, 1),
                        crew.trials,
                        heat,
                        heat,
                        COARSE if cycle % 2 == 0 else FINE,
                        max(problem.num_ops // 4, 2),
                        self.focus,
                        crew.checks_memory,
                    )
                    found = list(pool.map(crew.round, range(self.chains), stands, [pace] * self.chains))
                    crew.trials += pace.trials
                    stands = [f if f.cost <= s.cost else s for f, s in zip(found, stands)] if GREEDY else found
                    evaluation = yield Proposal(
                        np.stack([stand.placement for stand in found]),
                        np.stack([stand.order for stand in found]),
                        {"cycle": cycle, "heat": heat},
                    )
                best = min(stands, key=lambda stand: stand.cost)
                stands = [best if chain % 2 else stand for chain, stand in enumerate(stands)]
                cycle += 1
                length += length // 2


GREEDY = True
ALWAYS = False


class Crew:
    """The walkers of all chains."""

    def __init__(self, model: Simulator, chains: int, rng: np.random.Generator) -> None:
        problem = model.problem
        self.model, self.trials, self.checks_memory = model, 0, False
        self.moves = build_moves(problem, _partitions(problem))
        self.early = -_tails(problem)
        self.walkers = [new_walker(model.tables, problem.num_groups) for _ in range(chains)]
        for walker in self.walkers:
            walker.random[0] = rng.integers(1, 2**63)

    def round(self, chain: int, stand: Stand, pace: Pace) -> Stand:
        """Returns where a chain is after a walk."""
        walker = self.walkers[chain]
        walker.work.devices[:] = stand.placement
        walker.order[:] = stand.order
        pace = pace._replace(hot=pace.hot * stand.cost, cold=pace.cold * stand.cost)
        walk(self.model.tables, self.moves, self.early, walker, pace)
        placement = walker.best.astype(np.int64)[None]
        own = self.model.measure(placement, walker.best_order[None], keep_orders=True)
        priority = self.model.measure(placement, keep_orders=True)
        costs = [float(self.model.evaluation(m.step_seconds, m.peak_bytes).cost[0]) for m in (own, priority)]
        which = int(costs[1] < costs[0] or ALWAYS)
        return Stand(costs[which], placement[0], np.array((own, priority)[which].orders[0]))


def _begin(problem: Problem, model: Simulator, chains: int, rng: np.random.Generator):
    """Yields the portfolio's placements; returns the best and most different stands."""
    from placewise.strategies import make

    stands = []
    for name in PORTFOLIO:
        proposals, evaluation = make(name).search(problem, rng), None
        try:
            while True:
                proposal = proposals.send(evaluation)
                evaluation = yield proposal
                for row, cost in enumerate(evaluation.cost.tolist()):
                    order = None if proposal.orders is None else proposal.orders[row % len(proposal.orders)]
                    stands.append((cost, proposal.placements[row], order))
        except StopIteration:
            pass
        except StrategyError:
            pass
    stands.sort(key=lambda s: s[0])
    chosen = []
    for cost, placement, order in stands:
        if all((placement != other.placement).any() for other in chosen):
            chosen.append(Stand(cost, placement, model.order_of(placement) if order is None else order.astype(np.int32)))
        if len(chosen) == chains:
            break
    return [chosen[i % len(chosen)] for i in range(chains)]


def _partitions(problem: Problem) -> list[Ints]:
    """Returns sets of groups that move together."""
    phases = np.zeros(problem.num_groups, np.int64)
    phases[problem.op_groups[::-1]] = problem.graph.ops.phases[::-1]  # of each group's first op
    partitions = []
    for name in BLOCKS:
        merged = group_ops(problem.graph, name)
        of_group = np.zeros(problem.num_groups, np.int64)
        of_group[problem.merged] = merged
        partitions.append(numbered(of_group))
        if name.startswith("module"):
            partitions.append(numbered(of_group * len(PHASES) + phases))
    return partitions


def _tails(problem: Problem) -> Floats:
    """Returns the least time from each op's end to the end of any step: [ops]."""
    writers, readers, _ = problem.graph.edges
    after = problem.graph.ops.after
    source, target = np.concatenate([writers, after.values]), np.concatenate([readers, after.rows])
    order = np.argsort(-target, kind="stable")
    tails, fastest = np.zeros(problem.num_ops), problem.fastest_seconds.tolist()
    values = tails.tolist()
    for n, m in zip(source[order].tolist(), target[order].tolist(), strict=True):
        values[n] = max(values[n], values[m] + fastest[m])
    return np.array(values)
