"""The loop of a search: a strategy proposes placements, an evaluator judges them, within a budget."""

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
from placewise.core.plan import Simplicity
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.strategies.options.fitted import made_to_fit


class JudgedBatch(NamedTuple):
    """A proposal and its evaluation, as a run file records them."""

    evaluation: Evaluation
    notes: dict[str, Any]
    digest: bytes  # of the placements and orders
    seconds: float  # since the search began, without the time it was stopped
    best: tuple[Ints, Ints | None] | None  # placement and order, if this batch has the best so far


class Record(Protocol):
    """Keeps the judged batches of a run."""

    def batches(self) -> Iterable[JudgedBatch]:
        """Returns the batches recorded so far."""
        ...

    def add(self, batch: JudgedBatch) -> None:
        """Commits a batch before the next one is proposed."""
        ...


class Progress(NamedTuple):
    """How far a search has come."""

    evaluations: int
    seconds: float
    step_seconds: float  # of the best placement so far that fits; infinite until there is one
    notes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a search found."""

    status: str  # why it ended: finished (nothing more to propose), evaluations, seconds, patience, gap, stopped
    placement: Ints | None  # [groups], the best that fits; None: nothing fits
    order: Ints | None  # [ops], proposed with the placement; None: the evaluator's own
    step_seconds: float  # infinite if nothing fits
    evaluations: int
    seconds: float
    history: tuple[tuple[int, float], ...]  # (evaluations spent, best step seconds) after each batch
    closest: Ints | None = None  # if nothing fits: the placement that overflows least
    overflow_bytes: int = 0
    simplicity: Simplicity | None = None  # if the placement is a simpler one than the fastest
    fastest: tuple[Ints, Ints | None] | None = None  # then, the fastest placement that was judged, and its order


def unless_stopped(outcome: Outcome) -> Outcome:
    """Returns the outcome; KeyboardInterrupt if Ctrl-C stopped the search, for callers that run several."""
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
        """Adds a judged batch; returns whether it has a better placement. Ties go to the earlier one."""
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
    on_batch: Callable[[Progress], None] | None = None,
    at_once: int | None = None,
) -> Outcome:
    """Returns what a strategy finds within a budget; the same for the same seed, however many workers judge.

    A batch that exceeds the budget of evaluations is cut, so that equal budgets are equal. The batches of a record are
    replayed first, as if the search had never stopped. Ctrl-C ends the search with what it has. `on_batch` is called after
    each batch that was not replayed. `at_once` is the number of placements that are judged and recorded together (None: the
    whole batch), for slow evaluators. Where the graph has optional ops, a strategy's placements are made to fit.
    """
    best, spent, session = _Best(), 0, _Session(evaluator, record)
    sizes = chain(session.recorded_sizes, repeat(at_once))
    strategy = made_to_fit(strategy, problem)
    proposals = _in_parts(strategy.search(problem, np.random.default_rng(seed)), sizes)
    evaluation: Evaluation | None = None
    status: str | None = None
    try:
        while (status := _limit(budget, best, spent, session.seconds, bound_seconds)) is None:
            if (proposal := _ask(proposals, evaluation)) is None:
                status = "finished"
                break
            proposal = _cut(proposal, None if budget.evaluations is None else budget.evaluations - spent)
            evaluation = session.judge(proposal)
            spent += len(proposal.placements)
            is_better = best.update(proposal, evaluation, spent)
            if session.keep(proposal, evaluation, best if is_better else None) and on_batch is not None:
                on_batch(Progress(spent, session.seconds, best.step_seconds, dict(proposal.notes)))
    except KeyboardInterrupt:
        status = "stopped"
    finally:
        proposals.close()
    found = (best.placement, best.order, best.step_seconds, spent, session.seconds, tuple(best.history))
    return Outcome(status, *found, best.closest, best.overflow_bytes)


class _Session:
    """Judges proposals: replays the record as far as it goes, then asks the evaluator; and keeps the time."""

    def __init__(self, evaluator: Evaluator, record: Record | None) -> None:
        self._evaluator, self._record = evaluator, record
        self._recorded = list(record.batches()) if record is not None else []
        self._number = 0
        self._started = time.monotonic()

    @property
    def recorded_sizes(self) -> list[int]:
        """How many placements each recorded batch has."""
        return [len(batch.evaluation.cost) for batch in self._recorded]

    @property
    def seconds(self) -> float:
        """How long the search has taken, over all sessions; 0 during replay."""
        return 0.0 if self._number < len(self._recorded) else time.monotonic() - self._started

    def judge(self, proposal: Proposal) -> Evaluation:
        """Returns the evaluation of the next proposal."""
        if self._number < len(self._recorded):
            batch = self._recorded[self._number]
            if batch.digest != _digest(proposal):
                raise StoreError(
                    f"the run can't be resumed: its batch {self._number} has other placements than those proposed now; "
                    "was it recorded by another version?"
                )
            return batch.evaluation
        if not len(proposal.placements):
            return Evaluation(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
        return self._evaluator(proposal.placements, proposal.orders)

    def keep(self, proposal: Proposal, evaluation: Evaluation, best: _Best | None) -> bool:
        """Records the batch, with the placement if it is a new best; returns False for a replayed one."""
        self._number += 1
        if self._number <= len(self._recorded):
            self._started = time.monotonic() - self._recorded[self._number - 1].seconds  # replay does not count
            return False
        if self._record is not None:
            found = None if best is None or best.placement is None else (best.placement, best.order)
            self._record.add(JudgedBatch(evaluation, dict(proposal.notes), _digest(proposal), self.seconds, found))
        return True


def _in_parts(
    proposals: Generator[Proposal, Evaluation, None], sizes: Iterator[int | None]
) -> Generator[Proposal, Evaluation, None]:
    """Splits each proposal into parts of the next sizes (None: the rest); the strategy gets the evaluation of the whole."""
    whole: Evaluation | None = None
    try:
        while (proposal := _ask(proposals, whole)) is not None:
            count, found, first = len(proposal.placements), list[Evaluation](), 0
            while not found or first < count:  # an empty proposal is one part
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
    """Returns the limit that is reached first, or None."""
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
    """Returns some rows of a proposal; an order that all rows share stays shared."""
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
    """Returns a digest of the placements and orders."""
    hasher = hashlib.blake2b(np.ascontiguousarray(proposal.placements, np.int16).tobytes(), digest_size=16)
    if proposal.orders is not None:
        hasher.update(np.ascontiguousarray(proposal.orders, np.int32).tobytes())
    return hasher.digest()
