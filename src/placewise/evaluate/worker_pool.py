"""Batches cut into parts for workers that may die: what processes and Ray have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, Self, TypeVar

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import InputError, PlacewiseError, WorkerDied
from placewise.evaluate.worker_process import Answer, Column, Part

PARTS_PER_WORKER = 2  # a worker that is slow or has died holds up half of its share

START_SECONDS = 300.0  # how long to wait for a first worker, e.g. for a free CPU in a cluster


class Died(Exception):
    """A worker is gone; the message says how."""


Member = TypeVar("Member")


class Team(ABC, Generic[Member]):
    """Evaluates batches in ordered parts, so that neither the number of workers nor their deaths change a result.

    A worker that dies is replaced, and its part is evaluated again by whoever is free, `attempts` times at most. Parts go
    only to workers that have started, so a replacement that finds no place holds up nobody. One call at a time.
    """

    def __init__(self, workers: int, attempts: int) -> None:
        if attempts < 1:
            raise InputError(f"attempts must be at least 1, it is {attempts}")
        self.workers, self.attempts = workers, attempts
        self._members: list[Member] = []
        self._idle: list[Member] = []
        self._busy: dict[Member, int] = {}  # the part of each; members that are neither idle nor busy are starting
        self._failed_starts = 0  # since a worker has started
        self._is_closed = False

    @abstractmethod
    def _start(self) -> Member:
        """Returns a new worker."""

    @abstractmethod
    def _give(self, member: Member, part: Part | None) -> None:
        """Gives a worker a part to evaluate, or asks it to say that it is here; that it is gone is heard later."""

    @abstractmethod
    def _hear(self, members: Sequence[Member], seconds: float | None) -> list[tuple[Member, Answer | Died]]:
        """Returns the answers that are there, waiting for the first; none when the seconds have passed."""

    @abstractmethod
    def _stop(self, member: Member) -> None:
        """Ends a worker, whatever it does."""

    def __call__(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        """Returns the evaluation of a batch, the same as one evaluator's."""
        placements, orders = np.asarray(placements), None if orders is None else np.asarray(orders)
        rows = _cut(placements, orders, self.workers * PARTS_PER_WORKER)
        try:
            done = self._evaluate(_Batch(placements, orders, rows))
        except InputError:
            if len(rows) == 1:
                raise
            done = self._evaluate(_Batch(placements, orders, [slice(None)]))  # its message counts the whole batch's rows
        cost, step_seconds, overflow_bytes = zip(*done, strict=True)
        return Evaluation(np.concatenate(cost), np.concatenate(step_seconds), np.concatenate(overflow_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers."""
        self._is_closed = True
        self._dismiss(list(self._members))

    def _hire(self) -> None:
        """Starts workers up to the wanted number."""
        if self._is_closed:
            raise PlacewiseError("the evaluator is closed")
        while len(self._members) < self.workers:
            self._members.append(self._start())
            self._give(self._members[-1], None)

    def _evaluate(self, batch: "_Batch") -> list[Evaluation]:
        """Returns the evaluation of each part; an error is raised when no worker is busy any more."""
        try:
            while batch.waiting or self._busy:
                self._hire()
                while batch.waiting and self._idle:
                    member = self._idle.pop(0)
                    self._busy[member] = batch.waiting.pop(0)
                    self._give(member, batch.part(self._busy[member]))
                any_started = self._idle or self._busy
                answers = self._hear(self._members, None if any_started else START_SECONDS)
                if not answers:
                    raise PlacewiseError(f"none of {self.workers} workers has started in {START_SECONDS:g} s")
                for member, answer in answers:
                    self._take(batch, member, answer)
        except BaseException:  # Ctrl-C too: a late answer must not be taken for one of the next batch
            self._dismiss([member for member in self._members if member not in self._idle])
            raise
        return batch.evaluations()

    def _take(self, batch: "_Batch", member: Member, answer: Answer | Died) -> None:
        """Notes what a worker has answered to its part, or that it has started, or died."""
        number = self._busy.pop(member, None)
        if isinstance(answer, Died):
            self._replace(member, answer)
            if number is not None:
                batch.put_back(number, self.attempts, answer)
            return
        if number is None and isinstance(answer, Exception):
            raise answer  # the evaluator can't be made
        self._failed_starts = 0
        self._idle.append(member)
        if number is not None and answer is not None:
            batch.note(number, answer)

    def _replace(self, member: Member, death: Died) -> None:
        """Dismisses a dead worker, and asks all idle ones whether they are here: a machine's workers die together."""
        self._dismiss([member])
        for other in self._idle:
            self._give(other, None)
        self._idle.clear()
        self._failed_starts += 1
        if self._failed_starts > self.attempts * self.workers:
            raise PlacewiseError(f"{self._failed_starts} workers died one after the other, the last one: {death}")

    def _dismiss(self, members: list[Member]) -> None:
        for member in members:
            self._members.remove(member)
            self._busy.pop(member, None)
            if member in self._idle:
                self._idle.remove(member)
            self._stop(member)


class _Batch:
    """A batch in parts: those that wait, and those that have an answer."""

    def __init__(self, placements: Ints, orders: Ints | None, rows: list[slice]) -> None:
        self.placements, self.orders, self.rows = placements, orders, rows
        self.waiting = list(range(len(rows)))
        self.deaths = [0] * len(rows)
        self.answers: dict[int, Evaluation | Exception] = {}

    def part(self, number: int) -> Part:
        """Returns what a worker needs; one order for all rows stays one."""
        rows, orders = self.rows[number], self.orders
        if orders is not None and len(self.rows) > 1 and len(orders) > 1:
            orders = orders[rows]
        return Part(
            Column.of(self.placements[rows] if self.placements.ndim else self.placements),
            None if orders is None else Column.of(orders),
        )

    def note(self, number: int, answer: Evaluation | Exception) -> None:
        """Notes the answer to a part; after an error the other parts need not be evaluated."""
        self.answers[number] = answer
        if isinstance(answer, Exception):
            self.waiting.clear()

    def evaluations(self) -> list[Evaluation]:
        """Returns the evaluation of each part, or raises the first part's error."""
        answers = [self.answers[number] for number in sorted(self.answers)]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [answer for answer in answers if isinstance(answer, Evaluation)]

    def put_back(self, number: int, attempts: int, death: Died) -> None:
        """Lets a part wait again whose worker has died."""
        self.deaths[number] += 1
        if self.deaths[number] >= attempts:
            rows = self.rows[number]
            where = "a batch" if rows.start is None else f"placements {rows.start} to {rows.stop - 1} of a batch"
            raise WorkerDied(f"{self.deaths[number]} workers died evaluating {where}, the last one: {death}")
        self.waiting.insert(0, number)


def _cut(placements: Ints, orders: Ints | None, most: int) -> list[slice]:
    """Returns the rows of each part: at least one part, and only one where the shapes are for the evaluator to refuse."""
    batch = len(placements) if placements.ndim else 0
    if min(batch, most) <= 1 or (orders is not None and (not orders.ndim or len(orders) not in (1, batch))):
        return [slice(None)]
    bounds = np.linspace(0, batch, min(batch, most) + 1).astype(int).tolist()
    return [slice(first, last) for first, last in pairwise(bounds)]
