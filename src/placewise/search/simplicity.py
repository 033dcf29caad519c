"""Plans that people trust: after a search, the simplest and most robust one that is hardly slower than the fastest.

The search leaves a front of candidates: for each number of copies, the fastest placement that it has judged. Walks on which
a copy has a price find simpler ones; modules that are split for nothing become whole again; and orders become the program's.
Of those within the tolerance, the nearly simplest are judged again with wrong times, and the best of these is the answer.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
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
from placewise.strategies.auto.chains import Chains
from placewise.strategies.auto.coarse_first import CoarseFirst
from placewise.strategies.auto.walk import Pace

DEFAULT_TOLERANCE = 0.02  # of auto's plans; a strategy that is asked for by name answers with what it found

SHARE = 0.2  # of a budget in seconds: what is kept for making the plan simpler

ROUNDS, CYCLE = 80, 20  # of walks; each cycle goes from hot to cold

MOST_OPS = 16_000_000  # launches in the rounds' whole passes: large steps get fewer rounds

LEAST_ROUNDS = 4

PASSES, MOST_ISLANDS = 3, 400  # over the islands of a placement, and how many of them are tried in each

HOT, COLD = 2.0, 0.05  # temperatures, relative to the price of a copy

STEEPER = 1.3  # by which the price changes after a round: up if the step is within the tolerance, else down

FEW = 3  # of the simplest placements that walks have found: their islands are looked at again

KEPT = 24  # candidates of the front that are looked at in the end

NEARLY = 1.15  # times the cuts and copies of the simplest plan: up to this, the more robust one is the answer

SPREAD = 10.0  # times the tolerance: how much slower than the fastest a placement may be at which walks begin

MOST_ROWS = 8  # of a batch that are looked at

LARGE_STEP = 300_000  # ops of a step whose interval takes too long


class Judged(NamedTuple):
    """A candidate, and how complicated it is."""

    cuts: int
    copies: int
    candidate: Candidate

    @property
    def seconds(self) -> float:
        """How long its step takes."""
        return self.candidate.seconds


@dataclass(eq=False)
class Front:
    """The fastest placements for each number of copies, among those that a search has judged."""

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
            if seconds[row] <= self.limit and self.is_better(copies := self.crossings.count_copies(placement), seconds[row]):
                orders = proposal.orders
                order = None if orders is None else orders[row if len(orders) > 1 else 0]
                self._keep(copies, Candidate.of(self.model, placement, order))

    @property
    def limit(self) -> float:
        """The most seconds of a placement that is worth a look."""
        return self.best_seconds * (1 + SPREAD * self.tolerance)

    def is_better(self, copies: int, seconds: float) -> bool:
        """Returns whether no placement with as few copies is as fast."""
        return copies not in self._kept or seconds < self._kept[copies].seconds

    def add(self, candidate: Candidate) -> Judged:
        """Judges a candidate, and keeps it if it is on the front."""
        copies = self.crossings.count_copies(candidate.placement)
        if not candidate.overflow_bytes:
            self.best_seconds = min(self.best_seconds, candidate.seconds)
            if candidate.seconds <= self.limit and self.is_better(copies, candidate.seconds):
                return self._keep(copies, candidate)
        return self._judge(copies, candidate)

    def _keep(self, copies: int, candidate: Candidate) -> Judged:
        self._kept[copies] = judged = self._judge(copies, candidate)
        return judged

    def _judge(self, copies: int, candidate: Candidate) -> Judged:
        return Judged(self.crossings.count_cuts(candidate.placement), copies, candidate)

    def within(self, limit: float) -> list[Judged]:
        """Returns the placements of the front that take at most this many seconds, fewest copies first."""
        found: list[Judged] = []
        for copies in sorted(self._kept):
            judged = self._kept[copies]
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


def simplify(
    front: Front, fastest: Candidate, rng: np.random.Generator, seconds: float | None = None
) -> tuple[Candidate, Simplicity]:
    """Returns the answer, and what it gave; deterministic unless `seconds` ends it early.

    It takes at most `front.tolerance` longer than the fastest placement that is known in the end.
    """
    first = front.add(fastest)
    if first.copies:
        _without_islands(front, first)
        _walk(front, rng, None if seconds is None else time.monotonic() + seconds)
    limit = min(front.best_seconds, fastest.seconds) * (1 + front.tolerance)
    for judged in front.within(limit)[:FEW]:
        _without_islands(front, judged)
    limit = min(front.best_seconds, fastest.seconds) * (1 + front.tolerance)
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
    return answer.candidate, gave


def _walk(front: Front, rng: np.random.Generator, deadline: float | None) -> None:
    """Adds what walks find on which a copy has a price; the price rises while the step is within the tolerance.

    The walks of a cycle begin at the front: at its simplest placement, its fastest, and between; in every second cycle only
    where the step is within the tolerance.
    """
    num_ops, auto = front.model.problem.num_ops, Auto()
    rounds = int(np.clip(MOST_OPS // (num_ops * auto.chains), LEAST_ROUNDS, ROUNDS))
    trials = min(max(auto.effort // num_ops, 1), MOST_TRIALS)
    chains = Chains(front.model, rng.integers(1, 2**63, auto.chains))
    candidates, prices = list[Candidate](), list[float]()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for turn in range(rounds):
            if deadline is not None and time.monotonic() >= deadline:
                return
            limit = front.best_seconds * (1 + front.tolerance)
            if turn % CYCLE == 0:
                on_front = front.within(front.limit if turn // CYCLE % 2 == 0 else limit) or front.within(front.limit)
                at = np.linspace(0, len(on_front) - 1, auto.chains).round().astype(int).tolist()
                begin = [on_front[i] for i in at]
                candidates = [judged.candidate for judged in begin]
                prices = [front.tolerance * front.best_seconds * 3 / max(judged.copies, 10) for judged in begin]
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
            candidates = list(pool.map(chains.trade, range(auto.chains), candidates, [pace] * auto.chains, prices))
            chains.trials += 2 * pace.trials
            for chain, candidate in enumerate(candidates):
                front.add(candidate)
                prices[chain] *= STEEPER if candidate.seconds <= limit else 1 / STEEPER


def _without_islands(front: Front, judged: Judged) -> None:
    """Adds the placement with more and more of its islands gone, the cheapest first: seconds for each copy less.

    An island is a connected set of groups on one device. It goes to a device of its neighbours; one that makes the step
    longer than the tolerance allows stays.
    """
    model, problem, crossings = front.model, front.model.problem, front.crossings
    pairs = np.unique(np.stack([crossings.sources, crossings.targets]), axis=1)
    for _ in range(PASSES):
        placement, order = judged.candidate.placement, np.asarray(judged.candidate.order, np.int64)
        here = placement[pairs]
        same = here[0] == here[1]
        island = connected_components(problem.num_groups, pairs[:, same].T.tolist())  # [groups]
        edges = np.concatenate([pairs[:, ~same], pairs[::-1, ~same]], axis=1)
        offers = np.unique(np.stack([island[edges[0]], placement[edges[1]]]), axis=1).T.tolist()  # (island, device)
        sizes = np.bincount(island)
        moves = []
        for number, device in offers:
            if sizes[number] <= problem.num_groups // 2:
                groups = np.flatnonzero(island == number)
                if problem.allowed[groups, device].all():
                    moves.append((groups, device))
        trials = np.tile(placement, (len(moves), 1))
        for row, (groups, device) in enumerate(moves):
            trials[row, groups] = device
        fewer = np.array([judged.copies - crossings.count_copies(trial) for trial in trials], np.int64)
        useful = np.flatnonzero(fewer > 0)[:MOST_ISLANDS]
        if not len(useful):
            return
        longer = model.simulate(trials[useful], order[None]).step_seconds - judged.seconds
        is_better = False
        for choice in np.argsort(longer / fewer[useful], kind="stable").tolist():
            groups, device = moves[useful[choice]]
            moved = judged.candidate.placement.copy()
            moved[groups] = device
            candidate = Candidate.of(model, moved, order)
            if candidate.overflow_bytes or candidate.seconds > front.best_seconds * (1 + front.tolerance):
                continue
            found = front.add(candidate)
            if found.copies < judged.copies:
                judged, is_better = found, True
        if not is_better:
            return


def _made_whole(front: Front, judged: Judged, limit: float) -> Judged:
    """Returns the placement with each split module on one of its devices, where that makes no more cuts and copies."""
    model, problem = front.model, front.model.problem
    modules = front.crossings.modules
    placement = judged.candidate.placement
    number = modules * problem.num_devices
    split = np.flatnonzero(np.bincount(np.unique(number + placement) // problem.num_devices) > 1)
    for module in split.tolist():
        groups = np.flatnonzero(modules == module)
        for device in np.unique(judged.candidate.placement[groups]).tolist():
            moved = judged.candidate.placement.copy()
            moved[groups] = np.where(problem.allowed[groups, device], device, moved[groups])
            copies, cuts = front.crossings.count_copies(moved), front.crossings.count_cuts(moved)
            if (moved == judged.candidate.placement).all() or copies > judged.copies or cuts > judged.cuts:
                continue
            candidate = Candidate.of(model, moved, judged.candidate.order)
            if not candidate.overflow_bytes and candidate.seconds <= limit:
                judged = Judged(cuts, copies, candidate)
                break
    return judged


def _nearly_simplest(found: list[Judged]) -> list[Judged]:
    """Returns the plans with nearly the fewest cuts and copies; both count, each relative to the fewest of any plan."""
    fewest_cuts = max(min(judged.cuts for judged in found), 1)
    fewest_copies = max(min(judged.copies for judged in found), 1)
    scores = [judged.cuts / fewest_cuts + judged.copies / fewest_copies for judged in found]
    return [judged for judged, score in zip(found, scores, strict=True) if score <= NEARLY * min(scores)]


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
