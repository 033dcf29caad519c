"""Plans that people trust: after a search, the simplest and most robust one that is hardly slower than the fastest.

The search leaves a front of candidates: the fastest placements for how complicated they are. Walks on which cuts have a
price find simpler ones; parts go where their neighbours are; modules that are split for nothing become whole again; and
orders become the program's.
Of those within the tolerance, the nearly simplest are judged again with wrong times, and the best of these is the answer.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Proposal, Search, Strategy
from placewise.core.errors import InputError
from placewise.core.labels import connected_components
from placewise.core.plan import Simplicity
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.simulate.cuts import Crossings
from placewise.simulate.disturbances import Disturbances, interval_of
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.auto import COARSE, FINE, MOST_TRIALS, Auto
from placewise.strategies.auto.candidates import Candidate
from placewise.strategies.auto.chains import Chains, move_partitions
from placewise.strategies.auto.coarse_first import CoarseFirst
from placewise.strategies.auto.walk import Pace

DEFAULT_TOLERANCE = 0.02  # of auto's plans; a strategy that is asked for by name answers with what it found

SHARE = 0.3  # of a budget in seconds: what is kept for making the plan simpler

ROUNDS, CYCLE = 80, 20  # of walks, without a deadline; each cycle goes from hot to cold

MOST_OPS = 16_000_000  # launches in the rounds' whole passes: large steps get fewer rounds

LEAST_ROUNDS = 4

PASSES = 12  # over the parts of a placement that could go elsewhere

MOST_COUNTED, MOST_SIMULATED = 200_000_000, 30_000_000  # reads that are counted, and ops that are simulated, in a pass

ALIKE = 0.25  # of the price of cuts: what is for all copies alike

FIRST, WALKS = 0.25, 0.7  # shares of the seconds at which the parts of the fastest are done, and the walks

HOT, COLD = 2.0, 0.05  # temperatures, relative to the price of a copy

STEEPER = 1.3  # by which the price changes after a round: up if the step is within the tolerance, else down

FEW = 3  # of the simplest placements that walks have found: their parts are looked at again

KEPT = 24  # candidates of the front that are looked at in the end

NEARLY = 1.3  # times the cuts and copies of the simplest plan, multiplied: up to this, the more robust one is the answer

SPREAD = 10.0  # times the tolerance: how much slower than the fastest a placement may be at which walks begin

MOST_ROWS = 8  # of a batch that are looked at

LARGE_STEP = 300_000  # ops of a step whose interval takes too long


class Judged(NamedTuple):
    """A candidate, and how complicated it is."""

    cuts: int
    copies: int
    candidate: Candidate

    @property
    def complexity(self) -> int:
        """How complicated it is: half as many cuts count as much as half as many copies."""
        return self.cuts * self.copies

    @property
    def seconds(self) -> float:
        """How long its step takes."""
        return self.candidate.seconds


@dataclass(eq=False)
class Front:
    """The fastest placements for each number of cuts times copies, among those that a search has judged."""

    model: Simulator
    crossings: Crossings
    tolerance: float
    best_seconds: float = np.inf
    _kept: dict[int, Judged] = field(default_factory=dict)

    def watch(self, proposal: Proposal, evaluation: Evaluation) -> None:
        """Looks at a judged batch."""
        fits = evaluation.overflow_bytes == 0
        seconds = np.where(fits, evaluation.step_seconds, np.inf)
        self.best_seconds = min(self.best_seconds, float(seconds.min(initial=np.inf)))
        for row in np.argsort(seconds, kind="stable")[:MOST_ROWS].tolist():
            placement = np.asarray(proposal.placements[row])
            if seconds[row] <= self.limit and self.is_better(self._complexity(placement), seconds[row]):
                orders = proposal.orders
                order = None if orders is None else orders[row if len(orders) > 1 else 0]
                self._keep(self._judge(Candidate.of(self.model, placement, order)))

    @property
    def limit(self) -> float:
        """The most seconds of a placement that is worth a look."""
        return self.best_seconds * (1 + SPREAD * self.tolerance)

    def is_better(self, complexity: int, seconds: float) -> bool:
        """Returns whether no placement that is as complicated is as fast."""
        return complexity not in self._kept or seconds < self._kept[complexity].seconds

    def add(self, candidate: Candidate) -> Judged:
        """Judges a candidate, and keeps it if it is on the front."""
        judged = self._judge(candidate)
        if not candidate.overflow_bytes:
            self.best_seconds = min(self.best_seconds, candidate.seconds)
            if candidate.seconds <= self.limit and self.is_better(judged.complexity, candidate.seconds):
                self._keep(judged)
        return judged

    def _complexity(self, placement: Ints) -> int:
        copies, cuts = self.crossings.count(placement)
        return copies * cuts

    def _keep(self, judged: Judged) -> None:
        self._kept[judged.complexity] = judged

    def _judge(self, candidate: Candidate) -> Judged:
        copies, cuts = self.crossings.count(candidate.placement)
        return Judged(cuts, copies, candidate)

    def within(self, limit: float) -> list[Judged]:
        """Returns the placements of the front that take at most this many seconds, the simplest first."""
        found: list[Judged] = []
        for complexity in sorted(self._kept):
            judged = self._kept[complexity]
            if judged.seconds <= limit and (not found or judged.seconds < found[-1].seconds):
                found.append(judged)
        return found


@dataclass(frozen=True, eq=False)
class Watched:
    """A strategy whose judged batches are seen by another."""

    strategy: Strategy
    watch: Callable[[Proposal, Evaluation], None]
    chooses_options: bool = True

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the strategy's proposals, and passes it their evaluations."""
        proposals = self.strategy.search(problem, rng)
        try:
            proposal = next(proposals)
            while True:
                evaluation = yield proposal
                self.watch(proposal, evaluation)
                proposal = proposals.send(evaluation)
        except StopIteration:
            return
        finally:
            proposals.close()


def tolerance_of(strategy: str, given: float | None, *, is_measured: bool) -> float:
    """Returns by how much a plan may be slower than the fastest one found; 2% for auto, 0 for all other strategies."""
    if is_measured:
        if given:
            raise InputError("simple can't be used when placements are measured: it judges plans by simulated times")
        return 0.0
    if given is None:
        return DEFAULT_TOLERANCE if strategy == "auto" else 0.0
    if not 0 <= given < 0.5:
        raise InputError(f"simple must be at least 0 and below 50%, got {given:.0%}")
    return float(given)


def search_share(budget: Budget) -> Budget:
    """Returns the part of a budget that is for the search itself."""
    return budget if budget.seconds is None else replace(budget, seconds=budget.seconds * (1 - SHARE))


def prepared(strategy: Strategy) -> Strategy:
    """Returns the strategy for a search whose plan shall be simple: auto then begins with coarse blocks."""
    return CoarseFirst(strategy) if isinstance(strategy, Auto) else strategy


class Simplified(NamedTuple):
    """What making a plan simpler gives."""

    answer: Candidate
    fastest: Candidate
    gave: Simplicity


def simplify(front: Front, fastest: Candidate, rng: np.random.Generator, seconds: float | None = None) -> Simplified:
    """Returns the answer, the fastest plan, and what the answer gave; deterministic unless `seconds` ends it early.

    It takes at most `front.tolerance` longer than the fastest placement that is known in the end.
    """
    first, begun = front.add(fastest), time.monotonic()
    ends = [None if seconds is None else begun + share * seconds for share in (FIRST, WALKS, 1.0)]
    if first.copies:
        partitions = move_partitions(front.model.problem)
        _without_parts(front, first, partitions, ends[0])
        _walk(front, rng, ends[1])
        for judged in front.within(_limit(front, fastest))[:FEW]:
            _without_parts(front, judged, partitions, ends[2])
    limit = _limit(front, fastest)
    found = [_made_whole(front, judged, limit) for judged in front.within(limit)[:KEPT]] or [first]
    simple = _nearly_simplest(found)
    simple += [_in_program_order(front.model, judged) for judged in simple]
    simple = [judged for judged in simple if judged.seconds <= limit and not judged.candidate.overflow_bytes] or [first]
    answer = simple[_most_robust(front.model, [judged.candidate for judged in simple])]
    quickest = min((first, *front.within(np.inf)), key=lambda judged: judged.seconds)
    devices = [len(np.unique(judged.candidate.placement)) for judged in (answer, quickest)]
    gave = Simplicity(
        front.tolerance,
        answer.cuts,
        answer.copies,
        devices[0],
        quickest.seconds,
        quickest.cuts,
        quickest.copies,
        devices[1],
    )
    return Simplified(answer.candidate, quickest.candidate, gave)


def _limit(front: Front, fastest: Candidate) -> float:
    """Returns the most seconds that the answer may take."""
    return min(front.best_seconds, fastest.seconds) * (1 + front.tolerance)


def _walk(front: Front, rng: np.random.Generator, deadline: float | None) -> None:
    """Adds what walks find on which cuts have a price; the price rises while the step is within the tolerance.

    The walks of a cycle begin at the front: at its simplest placement, its fastest, and between; in every second cycle only
    where the step is within the tolerance.
    """
    num_ops, auto = front.model.problem.num_ops, Auto()
    rounds = int(np.clip(MOST_OPS // (num_ops * auto.chains), LEAST_ROUNDS, ROUNDS))
    trials = min(max(auto.effort // num_ops, 1), MOST_TRIALS)
    chains = Chains(front.model, rng.integers(1, 2**63, auto.chains))
    candidates, prices = list[Candidate](), list[float]()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for turn in range(rounds) if deadline is None else count():
            if deadline is not None and time.monotonic() >= deadline:
                return
            limit = front.best_seconds * (1 + front.tolerance)
            if turn % CYCLE == 0:
                on_front = front.within(front.limit if turn // CYCLE % 2 == 0 else limit) or front.within(front.limit)
                at = np.linspace(0, len(on_front) - 1, auto.chains).round().astype(int).tolist()
                begin = [on_front[i] for i in at]
                candidates = [judged.candidate for judged in begin]
                prices = [front.tolerance * front.best_seconds * 3 / max(judged.cuts, 10) for judged in begin]
            heat = HOT * (COLD / HOT) ** (turn % CYCLE / CYCLE)
            pace = Pace(
                trials=trials,
                first=chains.trials,
                hot=heat,
                cold=heat,
                weights=FINE if turn // 2 % 2 else COARSE,
                longest=max(num_ops // 4, min(num_ops, 64)),
                focus=auto.focus / 2,
                checks_memory=False,
                price=0.0,
            )
            shares = [front.crossings.prices(candidate.placement, ALIKE) for candidate in candidates]
            candidates = list(pool.map(chains.trade, range(auto.chains), candidates, [pace] * auto.chains, prices, shares))
            chains.trials += 2 * pace.trials
            for chain, candidate in enumerate(candidates):
                front.add(candidate)
                prices[chain] *= STEEPER if candidate.seconds <= limit else 1 / STEEPER


def _without_parts(front: Front, judged: Judged, partitions: list[Ints], deadline: float | None) -> None:
    """Adds the placement with more and more of its parts elsewhere, first what costs the fewest seconds for what it gives.

    A part that would make the step longer than the tolerance allows stays where it is.
    """
    model, crossings = front.model, front.crossings
    for _ in range(PASSES):
        placement, order = judged.candidate.placement, np.asarray(judged.candidate.order, np.int64)
        moves = _moves(model.problem, crossings, partitions, placement)
        moves = moves[: max(MOST_COUNTED // max(len(crossings.tensors), 1), 1)]
        copies, cuts = crossings.count_moved(placement, moves).T
        gains = np.log(judged.complexity + 1) - np.log(copies * cuts + 1)  # [moves]
        useful = np.argsort(-gains, kind="stable")[: max(MOST_SIMULATED // model.problem.num_ops, 1)]
        useful = useful[gains[useful] > 0]
        if not len(useful) or (deadline is not None and time.monotonic() >= deadline):
            return
        trials = np.stack([_moved(placement, moves[choice]) for choice in useful])
        longer = model.simulate(trials, order[None]).step_seconds - judged.seconds
        limit, is_better = front.best_seconds * (1 + front.tolerance), False
        for choice in np.argsort(longer / gains[useful], kind="stable").tolist():
            if longer[choice] > limit - judged.seconds:
                continue
            moved = _moved(judged.candidate.placement, moves[useful[choice]])
            copies, cuts = crossings.count(moved)
            if copies * cuts >= judged.complexity:
                continue
            candidate = Candidate.of(model, moved, order)
            if not candidate.overflow_bytes and candidate.seconds <= limit:
                judged, is_better = front.add(candidate), True
            if deadline is not None and time.monotonic() >= deadline:
                return
        if not is_better:
            return
        again = Candidate.of(model, judged.candidate.placement)  # in an order of its own
        if not again.overflow_bytes and again.seconds < judged.seconds:
            judged = front.add(again)


class _Move(NamedTuple):
    """Groups that go to a device."""

    groups: Ints
    device: int


def _moved(placement: Ints, move: _Move) -> Ints:
    moved = placement.copy()
    moved[move.groups] = move.device
    return moved


def _moves(problem: Problem, crossings: Crossings, partitions: list[Ints], placement: Ints) -> list[_Move]:
    """Returns the moves of parts to devices of their neighbours, each once: what a block has on a device, or all of it.

    The blocks are islands, i.e. connected groups on one device, and those of the partitions. No part is larger than half.
    """
    num_groups, num_devices = problem.num_groups, problem.num_devices
    pairs = np.unique(np.stack([crossings.sources, crossings.targets]), axis=1)
    here = placement[pairs]
    near = np.zeros((num_groups, num_devices), np.bool_)  # where its neighbours are
    near[pairs[0], here[1]] = True
    near[pairs[1], here[0]] = True
    islands = connected_components(num_groups, pairs[:, here[0] == here[1]].T.tolist())
    found: dict[tuple[bytes, int], _Move] = {}
    for number, blocks in enumerate([islands, *partitions]):
        parts = blocks * num_devices + placement
        for labels in (parts,) if number == 0 else (parts, blocks):
            by_label = np.argsort(labels, kind="stable")
            for groups in np.split(by_label, np.flatnonzero(np.diff(labels[by_label])) + 1):
                if len(groups) > num_groups // 2:
                    continue
                targets = near[groups].any(axis=0) & problem.allowed[groups].all(axis=0)
                for device in np.flatnonzero(targets).tolist():
                    move = _Move(groups[placement[groups] != device], device)
                    if len(move.groups):
                        found.setdefault((move.groups.tobytes(), device), move)
    return list(found.values())


def _made_whole(front: Front, judged: Judged, limit: float) -> Judged:
    """Returns the placement with each split module on one of its devices, where that makes no more cuts and copies."""
    model, problem = front.model, front.model.problem
    modules = front.crossings.modules
    parts = np.unique(modules * problem.num_devices + judged.candidate.placement)  # of modules on devices
    split = np.flatnonzero(np.bincount(parts // problem.num_devices) > 1)
    for module in split.tolist():
        groups = np.flatnonzero(modules == module)
        for device in np.unique(judged.candidate.placement[groups]).tolist():
            moved = judged.candidate.placement.copy()
            moved[groups] = np.where(problem.allowed[groups, device], device, moved[groups])
            copies, cuts = front.crossings.count(moved)
            if (moved == judged.candidate.placement).all() or copies > judged.copies or cuts > judged.cuts:
                continue
            candidate = Candidate.of(model, moved, judged.candidate.order)
            if not candidate.overflow_bytes and candidate.seconds <= limit:
                judged = Judged(cuts, copies, candidate)
                break
    return judged


def _nearly_simplest(found: list[Judged]) -> list[Judged]:
    """Returns the plans that are nearly as simple as the simplest."""
    fewest = min(judged.complexity for judged in found)
    return [judged for judged in found if judged.complexity <= NEARLY * fewest]


def _in_program_order(model: Simulator, judged: Judged) -> Judged:
    """Returns the placement in the program's launch order."""
    program = np.arange(model.problem.num_ops)
    return judged._replace(candidate=Candidate.of(model, judged.candidate.placement, program))


def _most_robust(model: Simulator, candidates: list[Candidate]) -> int:
    """Returns the number of the candidate with the best 90th percentile under disturbances; ties go to the first."""
    if len(candidates) == 1 or model.problem.num_ops > LARGE_STEP:
        return 0
    placements = np.stack([candidate.placement for candidate in candidates])
    orders: Ints = np.stack([candidate.order for candidate in candidates]).astype(np.int64)
    disturbed = Disturbances().step_seconds(model, placements, orders, np.random.default_rng(0))
    return int(np.argmin([interval_of(row)[1] for row in disturbed]))


def interval(schedule: Schedule) -> tuple[float, float] | None:
    """Returns between which seconds eight of ten steps are if times are off by 10%; None if the step is too large."""
    problem = schedule.problem
    if not problem.num_ops or problem.num_ops > LARGE_STEP:
        return None
    rows = (schedule.placement[None], schedule.order[None])
    return interval_of(Disturbances().step_seconds(Simulator(problem), *rows, np.random.default_rng(0))[0])
