"""The loop between those who propose and those who judge."""

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, NamedTuple, Protocol

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Evaluator, Proposal, Strategy
from placewise.core.errors import StoreError
from placewise.core.problem import Problem
from placewise.search.budget import Budget


class JudgedBatch(NamedTuple):
    """One proposal that was judged, as it is recorded."""

    evaluation: Evaluation
    notes: dict[str, Any]
    digest: bytes  # of the placements and orders that were judged
    seconds: float  # since the search began, over all of its sittings
    best: tuple[Ints, Ints | None] | None  # placement and order, where the step found a better one


class Record(Protocol):
    """Keeps the steps of a run."""

    def steps(self) -> Iterable[JudgedBatch]:
        """Returns the steps that are recorded already."""
        ...

    def add(self, step: JudgedBatch) -> None:
        """Keeps a step, for good, before the next one is asked for."""
        ...


class Progress(NamedTuple):
    """How far a search is."""

    evaluations: int
    seconds: float
    step_seconds: float  # of the best placement so far that fits; infinite while there is none
    notes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a search found."""

    status: str  # why it ended: finished (nothing more to propose), evaluations, seconds, patience, gap, stopped
    placement: Ints | None  # [groups], the best that fits
    order: Ints | None  # [ops], that it was proposed with; None: the evaluator's own
    step_seconds: float  # infinite where nothing fits
    evaluations: int
    seconds: float
    history: tuple[tuple[int, float], ...]  # (evaluations spent, best step seconds) after each step
    closest: Ints | None = None  # where nothing fits: the placement that overflows least
    overflow_bytes: int = 0


def unless_stopped(outcome: Outcome) -> Outcome:
    """Returns an outcome; KeyboardInterrupt where it was stopped: a search takes Ctrl-C for its own, more may be meant."""
    if outcome.status == "stopped":
        raise KeyboardInterrupt
    return outcome


@dataclass
class _Best:
    """The best so far."""

    step_seconds: float = np.inf
    cost: float = np.inf
    placement: Ints | None = None
    order: Ints | None = None
    found_at: int = 0  # evaluations
    closest: Ints | None = None
    overflow_bytes: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)

    def update(self, proposal: Proposal, evaluation: Evaluation, spent: int) -> bool:
        """Takes a judged batch in; returns whether it has a better placement. Ties go to the earlier one."""
        fits = evaluation.overflow_bytes == 0
        better = False
        if fits.any():
            row = int(np.where(fits, evaluation.cost, np.inf).argmin())
            if evaluation.cost[row] < self.cost:
                self.cost, self.step_seconds = float(evaluation.cost[row]), float(evaluation.step_seconds[row])
                self.placement = np.array(proposal.placements[row])
                self.order = None if proposal.orders is None else np.array(_row(proposal.orders, row))
                self.found_at, better = spent, True
        elif self.placement is None and len(fits):
            row = int(evaluation.overflow_bytes.argmin())
            if self.closest is None or evaluation.overflow_bytes[row] < self.overflow_bytes:
                self.closest, self.overflow_bytes = np.array(proposal.placements[row]), int(evaluation.overflow_bytes[row])
        self.history.append((spent, self.step_seconds))
        return better


def search(
    problem: Problem,
    strategy: Strategy,
    evaluator: Evaluator,
    *,
    budget: Budget,
    seed: int,
    bound_seconds: float | None = None,
    record: Record | None = None,
    on_step: Callable[[Progress], None] | None = None,
    at_once: int | None = None,
) -> Outcome:
    """Returns what a strategy finds within a budget; the same for the same seed, whatever the evaluator's workers.

    A batch that passes the budget of evaluations is cut there, so that equal budgets are equal. With a record the steps in
    it are replayed first, as if the search had never stopped. Ctrl-C ends the search with what it has. `at_once` is how
    many placements of a batch are judged and recorded at once (None: all), for evaluators that take long for each.
    """
    best, spent, sitting = _Best(), 0, _Sitting(evaluator, record)
    sizes = chain(sitting.recorded_sizes, repeat(at_once))
    proposals = _in_parts(strategy.search(problem, np.random.default_rng(seed)), sizes)
    evaluation: Evaluation | None = None
    status: str | None = None
    try:
        while (status := _limit(budget, best, spent, sitting.seconds, bound_seconds)) is None:
            if (proposal := _ask(proposals, evaluation)) is None:
                status = "finished"
                break
            proposal = _cut(proposal, None if budget.evaluations is None else budget.evaluations - spent)
            evaluation = sitting.judge(proposal)
            spent += len(proposal.placements)
            is_better = best.update(proposal, evaluation, spent)
            if sitting.keep(proposal, evaluation, best if is_better else None) and on_step is not None:
                on_step(Progress(spent, sitting.seconds, best.step_seconds, dict(proposal.notes)))
    except KeyboardInterrupt:
        status = "stopped"
    finally:
        proposals.close()
    found = (best.placement, best.order, best.step_seconds, spent, sitting.seconds, tuple(best.history))
    return Outcome(status, *found, best.closest, best.overflow_bytes)


class _Sitting:
    """Judges proposals: from the record as far as it goes, then by the evaluator."""

    def __init__(self, evaluator: Evaluator, record: Record | None) -> None:
        self._evaluator, self._record = evaluator, record
        self._recorded = list(record.steps()) if record is not None else []
        self._number = 0
        self._started = time.monotonic()

    @property
    def recorded_sizes(self) -> list[int]:
        """How many placements each recorded step judged."""
        return [len(step.evaluation.cost) for step in self._recorded]

    @property
    def seconds(self) -> float:
        """How long the search took so far, over all of its sittings; 0 while it is replayed."""
        return 0.0 if self._number < len(self._recorded) else time.monotonic() - self._started

    def judge(self, proposal: Proposal) -> Evaluation:
        """Returns the evaluation of the next proposal."""
        if self._number < len(self._recorded):
            step = self._recorded[self._number]
            if step.digest != _digest(proposal):
                raise StoreError(
                    f"the run can't be resumed: its step {self._number} was for other placements than those proposed now; "
                    "was it made by another version?"
                )
            return step.evaluation
        if not len(proposal.placements):
            return Evaluation(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
        return self._evaluator(proposal.placements, proposal.orders)

    def keep(self, proposal: Proposal, evaluation: Evaluation, best: _Best | None) -> bool:
        """Records the step, with the best placement where it is a new one; returns whether it was not replayed."""
        self._number += 1
        if self._number <= len(self._recorded):
            self._started = time.monotonic() - self._recorded[self._number - 1].seconds  # replaying does not count
            return False
        if self._record is not None:
            found = None if best is None or best.placement is None else (best.placement, best.order)
            self._record.add(JudgedBatch(evaluation, dict(proposal.notes), _digest(proposal), self.seconds, found))
        return True


def _in_parts(
    proposals: Generator[Proposal, Evaluation, None], sizes: Iterator[int | None]
) -> Generator[Proposal, Evaluation, None]:
    """Gives each proposal in parts of the next sizes (None: all that is left); the strategy gets the whole's evaluation."""
    whole: Evaluation | None = None
    try:
        while (proposal := _ask(proposals, whole)) is not None:
            count, found, first = len(proposal.placements), list[Evaluation](), 0
            while not found or first < count:  # one without rows is a part, too
                last = first + (next(sizes) or count)
                found.append((yield _rows(proposal, slice(first, last))))
                first = last
            whole = Evaluation(*map(np.concatenate, zip(*found, strict=True)))
    finally:
        proposals.close()


def _ask(proposals: Any, evaluation: Evaluation | None) -> Proposal | None:
    try:
        proposal: Proposal = proposals.send(evaluation)
        return proposal
    except StopIteration:
        return None


def _limit(budget: Budget, best: _Best, spent: int, seconds: float, bound_seconds: float | None) -> str | None:
    """Returns the limit that is reached, or None."""
    if budget.evaluations is not None and spent >= budget.evaluations:
        return "evaluations"
    if budget.seconds is not None and seconds >= budget.seconds:
        return "seconds"
    if budget.patience is not None and spent - best.found_at >= budget.patience:
        return "patience"
    if budget.target_gap is not None and bound_seconds and best.step_seconds <= bound_seconds * (1 + budget.target_gap):
        return "gap"
    return None


def _cut(proposal: Proposal, rows: int | None) -> Proposal:
    """Returns the first rows of a proposal."""
    return proposal if rows is None else _rows(proposal, slice(rows))


def _rows(proposal: Proposal, rows: slice) -> Proposal:
    """Returns some rows of a proposal; one order for all rows stays one."""
    orders = proposal.orders
    if rows.stop >= len(proposal.placements) and not rows.start:
        return proposal
    return Proposal(
        proposal.placements[rows], orders if orders is None or len(orders) == 1 else orders[rows], proposal.notes
    )


def _row(orders: Ints, row: int) -> Ints:
    order: Ints = orders[row if len(orders) > 1 else 0]
    return order


def _digest(proposal: Proposal) -> bytes:
    """Returns what tells a proposal from another."""
    hasher = hashlib.blake2b(np.ascontiguousarray(proposal.placements, np.int16).tobytes(), digest_size=16)
    if proposal.orders is not None:
        hasher.update(np.ascontiguousarray(proposal.orders, np.int32).tobytes())
    return hasher.digest()
