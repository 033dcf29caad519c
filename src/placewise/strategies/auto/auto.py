"""The default strategy: a portfolio of starts, populations of coarse blocks, then annealed walks, all in the simulator.

If the evaluator measures, the simulator is a model of the machine, and the measurements correct it.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.errors import StrategyError
from placewise.core.problem import NOWHERE, Problem
from placewise.simulate.longest_step import longest_step_seconds
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.candidates import Candidate, best_first, best_of
from placewise.strategies.auto.chains import Chains
from placewise.strategies.auto.choosing import Walks, choose
from placewise.strategies.auto.corrected_model import MeasuredPlacement, correct_times, pick_different
from placewise.strategies.auto.dealing import Deal, anneal
from placewise.strategies.auto.starts import (
    LARGE_STEP,
    evolve,
    growing_portfolio,
    memory_costs_time,
    portfolio,
    proposals_of,
)
from placewise.strategies.auto.walk import Pace
from placewise.strategies.exact.constraint_program import ConstraintProgram
from placewise.strategies.exact.exact import solve
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.sampling import Choices
from placewise.strategies.warm_start import NO_START, check_plan_start, planned

COARSE = np.array([0, 0, 1, 1, 1, 8, 0, 0])  # [kinds], how often each kind of move is drawn in even cycles
FINE = np.array([1, 1, 4, 4, 1, 4, 3, 3])  # [kinds], in odd cycles
MOST_TRIALS = 1000  # of a walk: with more, small problems would only wait
SMALL_STEP = 64  # ops of a step in which a walk gets from any placement to any other
EXACT_EFFORT = 1.0  # of the solver: about seconds
DEAL_TURNS = 20  # proposals while the calls of modules are dealt out
DEAL_PATIENCE = 1  # the turn by which a chain must have found something better than all starts
MOST_DEALS = 4000  # trials of a chain that deals: more hardly help, and a small step would only wait
DEAL_HEAT = (3e-2, 3e-4)  # first and last temperature, relative to the step time
NEAR = 0.05  # of the best start: if one device is as near, the search has little to gain
DIFFERENT = ("towers", "expert", "m-etf")  # measured first: few copies, few launches in a row, many of both
EXACT = 1e-9  # relative difference up to which the evaluator is taken to be the simulator


@dataclass(frozen=True)
class Auto:
    """Walks over placements and launch orders from good starts; deterministic for a seed and a number of evaluations.

    Every proposal is what the chains have found after some more trials in the simulator. Trials do not count as
    evaluations, so compare this strategy by a budget in seconds rather than in evaluations.
    """

    chains: int = 4  # walks in parallel, on all cores
    effort: int = 2_000_000  # ops that the trials of a chain simulate between two proposals
    populations: int = 3  # independent populations that place coarse blocks before the walks; one for a large step
    blocks: int = 30  # of a population at first; then twice as many
    coarse: int = 4_000_000  # ops that a population simulates, for each number of blocks
    deal: int = 25_000_000  # ops that a chain simulates to deal out the calls of modules, if there are any to deal
    cycle: int = 12  # rounds from hot to cold; each cycle is longer than the last by half
    hot: float = 3e-4  # the first temperature, relative to the step time
    cold: float = 1e-5  # the last one
    focus: float = 0.9  # share of moves that are drawn where there is little slack
    rounds: int = 40  # between two batches of measurements, if the evaluator measures
    batch: int = 3  # placements to measure at a time
    exact_ops: int = 20  # a step of at most so many ops is solved exactly, if that takes about a second
    start: str = NO_START  # or a plan file, also of a similar graph or another machine: one more start

    def __post_init__(self) -> None:
        counts = "chains effort populations blocks coarse deal cycle rounds batch"
        check_fields(self, counts, lambda v: v >= 1, "must be at least 1")
        check_fields(self, "hot cold", lambda v: 0 < v < 1, "must be above 0 and below 1")
        check_fields(self, "exact_ops", lambda v: v >= 0, "must be at least 0")
        check_fields(self, "focus", lambda v: 0 <= v <= 1, "must be from 0 to 1")
        check_plan_start(self.start)

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the best start, then what the chains find after each round, without end; without ops, only the start."""
        if problem.graph.has_options:
            yield from self._choose(problem, rng)
            return
        model = Simulator(problem)
        yield from self._search_from(model, self.begun(model, growing_portfolio(model, rng)), rng)

    @property
    def chooses_options(self) -> bool:
        """Whether it chooses among optional ops itself."""
        return True

    def begun(self, model: Simulator, growing: Iterator[list[Candidate]]) -> Iterator[list[Candidate]]:
        """Yields the starts with that of the plan, if there is one; its order counts if it is of this very graph."""
        if self.start == NO_START:
            yield from growing
            return
        carried = planned(model.problem, self.start)
        orders = [None] if carried.order is None else [None, carried.order]
        known = [Candidate.of(model, carried.placement, order) for order in orders]
        yield best_first(known)
        for starts in growing:
            yield best_first([*known, *starts])

    def _choose(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields choices of optional ops where memory costs time; else placements as if there were none."""
        always = problem.present(np.where(problem.optional, NOWHERE, 0))
        model = Simulator(always.problem)
        *_, starts = self.begun(model, iter([portfolio(model, rng)]))
        if problem.num_ops and memory_costs_time(starts):
            is_small = problem.num_ops <= SMALL_STEP
            hot = max(self.hot, 1 / problem.num_ops)
            walks = Walks(self.chains, self.effort, hot, self.cold, self.focus, is_small)
            for found, notes in choose(problem, always, starts, walks, rng):
                orders = np.stack([one.order for one in found])
                yield Proposal(np.stack([one.placement for one in found]), orders, notes)
            return
        proposals = self._search_from(model, iter([starts]), rng)
        try:
            proposal = next(proposals)
            while True:
                placements = np.stack([always.restore_placement(row) for row in proposal.placements])
                assert proposal.orders is not None
                restored = np.stack([always.restore_order(order) for order in proposal.orders])
                proposal = proposals.send((yield Proposal(placements, restored, proposal.notes)))
        except StopIteration:
            return
        finally:
            proposals.close()

    def _search_from(self, model: Simulator, growing: Iterator[list[Candidate]], rng: np.random.Generator) -> Search:
        """Yields the best start, as soon as there is one, and then what the chains find after each round, without end.

        A small step is solved exactly before that, if the solver is installed and needs little time; then the search ends.
        """
        problem = model.problem
        starts = next(growing)
        proposed = starts[0]
        evaluation = yield propose([proposed], {"stage": "start"})
        if not problem.num_ops:
            return
        if not _agrees(proposed, evaluation):
            yield from self._measure(problem, proposed, evaluation, rng)
            return
        for starts in growing:
            is_better = starts[0].cost < proposed.cost
            proposed = starts[0] if is_better else proposed
            yield propose([proposed], {"stage": "start"}) if is_better else nothing(problem)
        if problem.num_ops <= self.exact_ops:
            found = _solve(model, starts[0], int(rng.integers(2**31)))
            if found is not None:
                yield propose([found.best], {"stage": "exact", "status": found.status})
                if found.status == "optimal":
                    return
                starts = best_first([found.best, *starts])
        for candidates, notes in self._walks(model, starts, rng):
            yield propose(candidates, notes)

    def _walks(
        self, model: Simulator, starts: list[Candidate], rng: np.random.Generator
    ) -> Iterator[tuple[list[Candidate], dict[str, object]]]:
        """Yields the candidates and the notes of each round, without end."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            chains = pool.submit(Chains, model, rng.integers(1, 2**63, self.chains))  # made while the populations evolve
            coarse: list[Candidate] = []  # the best of each population, and of each chain that deals
            for dealt, turn in self._deal(pool, model, starts, rng):
                coarse = [candidate for candidate in dealt if candidate.cost < starts[0].cost]
                yield dealt, {"stage": "deal", "turn": turn}
            num_populations = 0 if coarse else self._num_populations(model.problem.num_ops)
            for _ in range(num_populations):
                best: list[Candidate] = []
                for blocks in (self.blocks, 2 * self.blocks):
                    for candidate in evolve(model, [*best, *starts], f"coarse:{blocks}", self.coarse, rng):
                        best = [candidate]
                        yield best, {"stage": "coarse", "blocks": blocks}
                coarse += best
            # The best candidate now need not be the best after a walk, so both kinds of start get one.
            first = [*best_first(coarse)[: max(self.chains - 1, 1)], *starts]
            yield from self._rounds(pool, chains.result(), first, rng)

    def _deal(
        self, pool: ThreadPoolExecutor, model: Simulator, starts: list[Candidate], rng: np.random.Generator
    ) -> Iterator[tuple[list[Candidate], int]]:
        """Yields the best of each chain that deals out the calls of modules, after each turn; nothing where none can be.

        It ends early where that gives nothing better than the starts.
        """
        deal = Deal.of(model.problem)
        if not deal.can_deal.any():
            return
        trials = min(max(self.deal // model.problem.num_ops, DEAL_TURNS), MOST_DEALS)
        seeds = rng.integers(1, 2**63, self.chains).tolist()
        chains = [
            anneal(model, deal, starts[chain % len(starts)], trials, trials // DEAL_TURNS, DEAL_HEAT, seed)
            for chain, seed in enumerate(seeds)
        ]
        for turn in range(DEAL_TURNS):
            found = list(pool.map(next, chains))
            yield found, turn
            if turn == DEAL_PATIENCE and best_of(found).cost >= starts[0].cost:
                return

    def walk_from(
        self, model: Simulator, starts: list[Candidate], rng: np.random.Generator
    ) -> Iterator[tuple[list[Candidate], dict[str, object]]]:
        """Yields the candidates and the notes of each round of walks from these starts, without end."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            yield from self._rounds(pool, Chains(model, rng.integers(1, 2**63, self.chains)), starts, rng)

    def _rounds(
        self, pool: ThreadPoolExecutor, chains: Chains, starts: list[Candidate], rng: np.random.Generator
    ) -> Iterator[tuple[list[Candidate], dict[str, object]]]:
        """Yields where the chains are after each round of walks, with notes, without end."""
        candidates = [starts[chain % len(starts)] for chain in range(self.chains)]
        model, length, is_flat = chains.model, self.cycle, _one_device_is_near(starts)
        num_ops = model.problem.num_ops
        hot = max(self.hot, 1 / num_ops)  # a single op may take a good part of a short step
        for cycle in count():
            for turn in range(length):
                heat = hot * (self.cold / hot) ** (turn / max(length - 1, 1))
                heats = [heat] * self.chains
                if cycle == 0 and is_flat:  # any heat leads away from a start that can hardly be improved
                    heats[0] = self.cold
                pace = Pace(
                    trials=min(max(self.effort // num_ops, 1), MOST_TRIALS),
                    first=chains.trials,
                    hot=heat,
                    cold=heat,
                    weights=FINE if cycle % 2 else COARSE,
                    longest=max(num_ops // 4, min(num_ops, 64)),
                    focus=self.focus,
                    checks_memory=False,
                    price=0.0,
                )
                paces = [pace._replace(hot=own, cold=own) for own in heats]
                candidates = list(pool.map(chains.walk, range(self.chains), candidates, paces))
                chains.trials += 2 * pace.trials
                yield candidates, {"stage": "walk", "cycle": cycle, "heat": heat}
            candidates = self._next_starts(model, candidates, starts[cycle % len(starts)], rng)
            length += 0 if num_ops <= SMALL_STEP else length // 2

    def _next_starts(
        self, model: Simulator, candidates: list[Candidate], start: Candidate, rng: np.random.Generator
    ) -> list[Candidate]:
        """Returns where the chains continue after a cycle: half of them at the best, and one at the next start.

        In a small step, all but one continue at random placements.
        """
        best = best_of(candidates)
        if model.problem.num_ops <= SMALL_STEP:
            drawn = Choices.of(model.problem).draw(rng, self.chains - 1)
            return [best, *(Candidate.of(model, placement) for placement in drawn)]
        follow = [best if chain % 2 else candidate for chain, candidate in enumerate(candidates)]
        return [*follow[:-1], start] if self.chains > 1 else follow

    def _num_populations(self, num_ops: int) -> int:
        """Returns how many populations are worth their time for a step; none for a small one."""
        if num_ops <= SMALL_STEP:
            return 0
        return self.populations if num_ops < LARGE_STEP else 1  # it costs as much as several of a smaller step

    def _measure(self, problem: Problem, first: Candidate, evaluation: Evaluation, rng: np.random.Generator) -> Search:
        """Yields a few promising, different placements, corrects the model by their times, searches in it, and repeats."""
        chosen, tried, measured = [first], list[Ints](), list[MeasuredPlacement]()
        while True:
            tried += [candidate.placement for candidate in chosen]  # failed ones too, so that they are not proposed again
            measured += [
                MeasuredPlacement(candidate.placement, candidate.order, seconds)
                for candidate, seconds in zip(chosen, evaluation.step_seconds.tolist(), strict=True)
                if np.isfinite(seconds)
            ]
            model = Simulator(correct_times(problem, measured))
            again = [Candidate.of(model, m.placement, m.order) for m in measured]
            candidates = best_first([*again, *portfolio(model, rng)])
            for found, _ in islice(self._walks(model, candidates, rng), self.rounds):
                candidates = best_first([*found, *candidates])
            chosen = pick_different(candidates, tried, self.batch)
            if len(tried) == 1:  # first placements of different kinds: each shows another part of the model that is wrong
                kinds = [*_singles(model), *proposals_of(DIFFERENT, model, rng), *chosen]
                chosen = pick_different(kinds, tried, max(self.batch, len(DIFFERENT)))
            if not chosen:
                return
            evaluation = yield propose(chosen, {"stage": "measure", "expected": chosen[0].seconds})


class _Solved(NamedTuple):
    """What the solver has found for a small step."""

    best: Candidate
    status: str  # "optimal", or "feasible"


def _solve(model: Simulator, start: Candidate, seed: int) -> _Solved | None:
    """Returns what the solver finds with little effort from a start; None if that is nothing, or it is not installed."""
    try:
        program = ConstraintProgram(model.problem, longest_step_seconds(model.problem))
    except StrategyError:
        return None
    hint = None if start.overflow_bytes else (start.placement, np.asarray(start.order, np.int64))
    answer = solve(program, EXACT_EFFORT, seed, hint)
    if answer.placement is None or answer.order is None:
        return None
    return _Solved(Candidate.of(model, answer.placement, answer.order), answer.status)


def _one_device_is_near(starts: list[Candidate]) -> bool:
    """Returns whether a start with everything on one device is nearly the best of the starts."""
    limit = best_of(starts).cost * (1 + NEAR)
    return any(start.cost <= limit and len(np.unique(start.placement)) == 1 for start in starts)


def _singles(model: Simulator) -> list[Candidate]:
    """Returns the fastest placement with everything on one device, if one fits."""
    devices = np.flatnonzero(model.problem.allowed.all(axis=0))
    candidates = [Candidate.of(model, np.full(model.problem.num_groups, device, np.int64)) for device in devices]
    return best_first([candidate for candidate in candidates if not candidate.overflow_bytes])[:1]


def propose(candidates: list[Candidate], notes: dict[str, object]) -> Proposal:
    """Returns the candidates as a proposal."""
    orders: Ints = np.stack([candidate.order for candidate in candidates]).astype(np.int64)
    return Proposal(np.stack([candidate.placement for candidate in candidates]), orders, notes)


def nothing(problem: Problem) -> Proposal:
    """Returns a proposal of no placements: a turn of the driver, which may end the search."""
    no_orders = np.zeros((0, problem.num_ops), np.int64)
    return Proposal(np.zeros((0, problem.num_groups), np.int64), no_orders, {"stage": "start"})


def _agrees(candidate: Candidate, evaluation: Evaluation) -> bool:
    """Returns whether the evaluator gives the simulator's time."""
    return abs(float(evaluation.step_seconds[0]) - candidate.seconds) <= EXACT * max(candidate.seconds, EXACT)
