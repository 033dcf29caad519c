"""The default strategy: a portfolio of starts, a coarse population, then annealed walks, all in the simulator.

With an evaluator that measures, the simulator is a model of it, which is corrected by what was measured.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.corrected_model import CorrectedModel, corrected, most_different
from placewise.strategies.auto.portfolio import evolve, portfolio
from placewise.strategies.auto.walk import Pace
from placewise.strategies.auto.walkers import Crew, Stand, best_of, settled
from placewise.strategies.sampling import Choices

COARSE = np.array([0, 0, 1, 1, 1, 8, 0, 0])  # how often each kind of move is drawn, in every other cycle

FINE = np.array([1, 1, 4, 4, 1, 4, 3, 3])  # in the cycles between

MOST_TRIALS = 1000  # of a walk: more would only make small problems wait

SMALL_STEP = 64  # ops of a step in which a walk gets from anywhere to anywhere

LARGE_STEP = 20_000  # ops of a step for which one population costs as much as all the others'

EXACT = 1e-9  # how close to the simulator an evaluator is that simulates


@dataclass(frozen=True)
class Auto:
    """Walks over placements and launch orders from good starts; deterministic for a seed and a number of evaluations.

    Every proposal is what the chains have found after some more trials in the simulator, which are not counted as
    evaluations: a budget in seconds says more here than one in evaluations.
    """

    chains: int = 4  # walks side by side, on as many cores as there are
    effort: int = 2_000_000  # ops that the trials of a chain pass between two proposals
    populations: int = 3  # that place coarse blocks, each by itself, before the walks; one for a large step
    blocks: int = 30  # of a population at first; then it has twice as many
    coarse: int = 4_000_000  # ops that judging it passes, each time
    cycle: int = 12  # rounds from hot to cold; each cycle has half as many more
    hot: float = 3e-4  # the first temperature over the step's seconds
    cold: float = 1e-5  # the last one
    focus: float = 0.9  # the share of moves that are drawn where there is little slack
    rounds: int = 40  # between two batches of measurements, where the evaluator measures
    batch: int = 3  # placements to measure at a time

    def __post_init__(self) -> None:
        for name in ("chains", "effort", "populations", "blocks", "coarse", "cycle", "rounds", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, it is {getattr(self, name)}")
        for name in ("hot", "cold"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be above 0 and below 1, it is {getattr(self, name)}")
        if not 0 <= self.focus <= 1:
            raise ValueError(f"focus must be from 0 to 1, it is {self.focus}")

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the best start, then what the chains find, round by round, without end; once where there is no op."""
        model = Simulator(problem)
        starts = portfolio(model, rng)
        evaluation = yield propose(starts[:1], {"stage": "start"})
        if not problem.num_ops:
            return
        if _agrees(starts[0], evaluation):
            for stands, notes in self._walks(model, starts, rng):
                yield propose(stands, notes)
        else:
            yield from self._measure(problem, starts, evaluation, rng)

    def _walks(
        self, model: Simulator, starts: list[Stand], rng: np.random.Generator
    ) -> Iterator[tuple[list[Stand], dict[str, object]]]:
        """Yields what is found after each round, with notes on it; without end."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            crew = pool.submit(Crew, model, rng.integers(1, 2**63, self.chains))  # made while the populations evolve
            coarse: list[Stand] = []  # the best of each population
            for _ in range(self._num_populations(model.problem.num_ops)):
                best: list[Stand] = []
                for blocks in (self.blocks, 2 * self.blocks):
                    for stand in evolve(model, [*best, *starts], f"coarse:{blocks}", self.coarse, rng):
                        best = [stand]
                        yield best, {"stage": "coarse", "blocks": blocks}
                coarse += best
            # What is best now need not be after a walk, so both kinds of start get one.
            first = [*settled(coarse)[: max(self.chains - 1, 1)], *starts]
            yield from self._rounds(pool, crew.result(), first, rng)

    def _rounds(
        self, pool: ThreadPoolExecutor, crew: Crew, starts: list[Stand], rng: np.random.Generator
    ) -> Iterator[tuple[list[Stand], dict[str, object]]]:
        """Yields where the chains stand after each round of walks, with notes; without end."""
        stands = [starts[chain % len(starts)] for chain in range(self.chains)]
        model, length = crew.model, self.cycle
        num_ops = model.problem.num_ops
        hot = max(self.hot, 1 / num_ops)  # where a single op takes a good part of the step
        for cycle in count():
            for turn in range(length):
                heat = hot * (self.cold / hot) ** (turn / max(length - 1, 1))
                pace = Pace(
                    trials=min(max(self.effort // num_ops, 1), MOST_TRIALS),
                    first=crew.trials,
                    hot=heat,
                    cold=heat,
                    weights=FINE if cycle % 2 else COARSE,
                    longest=max(num_ops // 4, min(num_ops, 64)),
                    focus=self.focus,
                    checks_memory=False,
                    price=0.0,
                )
                stands = list(pool.map(crew.walk, range(self.chains), stands, [pace] * self.chains))
                crew.trials += 2 * pace.trials
                yield stands, {"stage": "walk", "cycle": cycle, "heat": heat}
            stands = self._begin_anew(model, stands, starts[cycle % len(starts)], rng)
            length += 0 if num_ops <= SMALL_STEP else length // 2

    def _begin_anew(self, model: Simulator, stands: list[Stand], start: Stand, rng: np.random.Generator) -> list[Stand]:
        """Returns where the chains go on after a cycle: half of them at the best, and one at the next start.

        In a small step all but one go on at drawn placements.
        """
        best = best_of(stands)
        if model.problem.num_ops <= SMALL_STEP:
            drawn = Choices.of(model.problem).draw(rng, self.chains - 1)
            return [best, *(Stand.of(model, placement) for placement in drawn)]
        follow = [best if chain % 2 else stand for chain, stand in enumerate(stands)]
        return [*follow[:-1], start] if self.chains > 1 else follow

    def _num_populations(self, num_ops: int) -> int:
        """Returns how many populations a step is worth: none where walks alone get from anywhere to anywhere."""
        if num_ops <= SMALL_STEP:
            return 0
        return self.populations if num_ops < LARGE_STEP else 1

    def _measure(self, problem: Problem, starts: list[Stand], evaluation: Evaluation, rng: np.random.Generator) -> Search:
        """Yields a few promising and different placements, corrects the model by their times, searches there, and again."""
        chosen, tried, measured = starts[:1], list[Ints](), list[CorrectedModel]()
        while True:
            tried += [stand.placement for stand in chosen]  # those that failed too: they are not asked for again
            measured += [
                CorrectedModel(stand.placement, stand.order, seconds)
                for stand, seconds in zip(chosen, evaluation.step_seconds.tolist(), strict=True)
                if np.isfinite(seconds)
            ]
            model = Simulator(corrected(problem, measured))
            again = [Stand.of(model, m.placement, m.order) for m in measured]
            candidates = settled([*again, *portfolio(model, rng)])
            for stands, _ in islice(self._walks(model, candidates, rng), self.rounds):
                candidates = settled([*stands, *candidates])
            chosen = most_different(candidates, tried, self.batch)
            if len(tried) == 1:  # everything on one device is measured early: no copies, so the model is surest there
                chosen = most_different([*_singles(Simulator(problem)), *chosen], tried, self.batch)
            if not chosen:
                return
            evaluation = yield propose(chosen, {"stage": "measure", "expected": chosen[0].seconds})


def _singles(model: Simulator) -> list[Stand]:
    """Returns the fastest placement of everything on one device that fits, if there is one."""
    devices = np.flatnonzero(model.problem.allowed.all(axis=0))
    stands = [Stand.of(model, np.full(model.problem.num_groups, device, np.int64)) for device in devices]
    return settled([stand for stand in stands if not stand.overflow_bytes])[:1]


def propose(stands: list[Stand], notes: dict[str, object]) -> Proposal:
    """Returns the stands as a proposal."""
    orders: Ints = np.stack([stand.order for stand in stands]).astype(np.int64)
    return Proposal(np.stack([stand.placement for stand in stands]), orders, notes)


def _agrees(stand: Stand, evaluation: Evaluation) -> bool:
    """Returns whether the evaluator says what the simulator says."""
    return abs(float(evaluation.step_seconds[0]) - stand.seconds) <= EXACT * max(stand.seconds, EXACT)
