"""Batches evaluated in parts by workers that may die: the pool, processes of this machine, and the worker's side.

`Pool` has what processes and the actors of a Ray cluster (`ray.py`) share. A worker is sent an evaluator's pickled factory
once, then part after part; it answers each with its evaluation.
"""

import math
import mmap
import os
import pickle
import subprocess
import sys
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, NamedTuple, NoReturn, Self, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Evaluator
from placewise.core.errors import InputError, PlacewiseError, WorkerDied, one_line

PARTS_PER_WORKER = 2  # a worker that is slow or dies holds up half of its share

START_SECONDS = 300.0  # how long to wait for a first worker, e.g. for a free CPU in a cluster

SILENT_SECONDS = 60.0  # without a sign of life: a worker is stopped (SIGSTOP), frozen or starved, and is replaced

PULSES = 20  # signs of life in that time

SERVE = (
    "import sys; sys.path[:] = sys.argv[4:]; from placewise.evaluate.pool import serve; "
    "serve(*map(int, sys.argv[1:3]), float(sys.argv[3]))"
)

MakeEvaluator = Callable[[], Evaluator]

Answer = Evaluation | Exception | None  # None: the worker has started; an exception is for the caller to raise

PULSE = "pulse"  # what a worker sends now and then, to show that it is alive

Handle = TypeVar("Handle")  # what a pool knows a worker by


class PackedInts(NamedTuple):
    """Integers in the narrowest type that holds them, to send few bytes, and the type that they had."""

    values: NDArray[Any]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, values: NDArray[Any]) -> "PackedInts":
        """Returns the values packed; other than integers, which the evaluator will refuse, stay as they are."""
        if values.dtype.kind not in "iu" or not values.size:
            return cls(values, values.dtype)
        narrow = np.result_type(np.min_scalar_type(values.min()), np.min_scalar_type(values.max()))
        return cls(values.astype(narrow) if narrow.kind in "iu" else values, values.dtype)

    def unpack(self) -> Ints:
        """Returns the values as they were."""
        return self.values.astype(self.dtype, copy=False)


class Part(NamedTuple):
    """Some rows of a batch."""

    placements: PackedInts  # [rows, groups]
    orders: PackedInts | None  # [rows or 1, ops]


@dataclass(frozen=True)
class Death:
    """How a worker died."""

    cause: str


# --- the pool ---


class Pool(ABC, Generic[Handle]):
    """Evaluates batches in ordered parts, so that neither the number of workers nor their deaths change a result.

    A worker that dies is replaced, and the next free worker evaluates its part again, `attempts` times in all at most.
    Parts go only to workers that have started, so a replacement that can't start holds up nobody. One call at a time.
    """

    def __init__(self, workers: int, attempts: int) -> None:
        if attempts < 1:
            raise InputError(f"attempts must be at least 1, it is {attempts}")
        self.workers, self.attempts = workers, attempts
        self._handles: list[Handle] = []  # of all workers
        self._idle: list[Handle] = []
        self._busy: dict[Handle, int] = {}  # the part of each; workers that are neither idle nor busy are starting
        self._deaths = 0  # since a worker last answered
        self._is_closed = False

    @abstractmethod
    def _start(self) -> Handle:
        """Returns a new worker."""

    @abstractmethod
    def _send(self, worker: Handle, part: Part | None) -> None:
        """Sends a worker a part, or None to ask whether it has started; `_receive` returns its answer, or its death."""

    @abstractmethod
    def _receive(self, workers: Sequence[Handle], seconds: float | None) -> list[tuple[Handle, Answer | Death]]:
        """Waits for an answer and returns all that have arrived; none when the seconds have passed."""

    @abstractmethod
    def _find_death(self, worker: Handle) -> Death | None:
        """Returns how a worker died, without waiting; None if it is alive, or if only an answer could tell."""

    @abstractmethod
    def _stop(self, worker: Handle) -> None:
        """Ends a worker, whatever it is doing."""

    def __call__(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        """Returns the evaluation of a batch, the same as one evaluator's."""
        placements, orders = np.asarray(placements), None if orders is None else np.asarray(orders)
        rows = _cut(placements, orders, self.workers * PARTS_PER_WORKER)
        try:
            done = self._evaluate(_Batch(placements, orders, rows))
        except InputError:
            if len(rows) == 1:
                raise
            done = self._evaluate(_Batch(placements, orders, [slice(None)]))  # so that its message counts all rows
        cost, step_seconds, overflow_bytes = zip(*done, strict=True)
        return Evaluation(np.concatenate(cost), np.concatenate(step_seconds), np.concatenate(overflow_bytes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers."""
        self._is_closed = True
        self._remove(list(self._handles))

    def _fill(self) -> None:
        """Starts workers up to the wanted number."""
        if self._is_closed:
            raise PlacewiseError("the evaluator is closed")
        while len(self._handles) < self.workers:
            self._handles.append(self._start())
            self._send(self._handles[-1], None)

    def _evaluate(self, batch: "_Batch") -> list[Evaluation]:
        """Returns the evaluation of each part; an error is raised when no worker is busy any more."""
        try:
            while batch.waiting or self._busy:
                self._replace_dead()
                self._fill()
                while batch.waiting and self._idle:
                    worker = self._idle.pop(0)
                    self._busy[worker] = batch.waiting.pop(0)
                    self._send(worker, batch.part(self._busy[worker]))
                any_started = self._idle or self._busy
                answers = self._receive(self._handles, None if any_started else START_SECONDS)
                if not answers:
                    raise PlacewiseError(f"none of {self.workers} workers started within {START_SECONDS:g} s")
                for worker, answer in answers:
                    self._handle(batch, worker, answer)
        except BaseException:  # Ctrl-C too: a late answer must not be taken for one of the next batch
            self._remove([worker for worker in self._handles if worker not in self._idle])
            raise
        return batch.evaluations()

    def _replace_dead(self) -> None:
        """Replaces idle workers that have died since their last answer, so that no part is sent to one of them."""
        for worker in list(self._idle):
            death = self._find_death(worker)
            if death is not None:
                self._replace(worker, death)

    def _handle(self, batch: "_Batch", worker: Handle, answer: Answer | Death) -> None:
        """Notes a worker's answer to its part, or that it has started or died."""
        number = self._busy.pop(worker, None)
        if isinstance(answer, Death):
            self._replace(worker, answer)
            if number is not None:
                batch.put_back(number, self.attempts, answer)
            return
        if number is None and isinstance(answer, Exception):
            raise answer  # the evaluator can't be made
        self._deaths = 0
        self._idle.append(worker)
        if number is not None and answer is not None:
            batch.note(number, answer)

    def _replace(self, worker: Handle, death: Death) -> None:
        """Removes a dead worker, and asks all idle ones for a sign of life: workers of one machine die together."""
        self._remove([worker])
        for other in self._idle:
            self._send(other, None)
        self._idle.clear()
        self._deaths += 1
        if self._deaths > self.attempts * self.workers:
            raise PlacewiseError(f"{self._deaths} workers died one after the other, the last one: {death.cause}")

    def _remove(self, workers: list[Handle]) -> None:
        for worker in workers:
            self._handles.remove(worker)
            self._busy.pop(worker, None)
            if worker in self._idle:
                self._idle.remove(worker)
            self._stop(worker)


class _Batch:
    """A batch in parts: those that wait, and those that are answered."""

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
            PackedInts.of(self.placements[rows] if self.placements.ndim else self.placements),
            None if orders is None else PackedInts.of(orders),
        )

    def note(self, number: int, answer: Evaluation | Exception) -> None:
        """Notes the answer to a part; after an error the parts that wait need not be evaluated."""
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

    def put_back(self, number: int, attempts: int, death: Death) -> None:
        """Lets a part whose worker died wait again; an error if it has had all its attempts."""
        self.deaths[number] += 1
        if self.deaths[number] >= attempts:
            rows = self.rows[number]
            where = "a batch" if rows.start is None else f"placements {rows.start} to {rows.stop - 1} of a batch"
            raise WorkerDied(f"{self.deaths[number]} workers died evaluating {where}, the last one: {death.cause}")
        self.waiting.insert(0, number)


def _cut(placements: Ints, orders: Ints | None, most: int) -> list[slice]:
    """Returns the rows of each part: at least one part, and only one if the evaluator will refuse the shapes."""
    batch = len(placements) if placements.ndim else 0
    if min(batch, most) <= 1 or (orders is not None and (not orders.ndim or len(orders) not in (1, batch))):
        return [slice(None)]
    bounds = np.linspace(0, batch, min(batch, most) + 1).astype(int).tolist()
    return [slice(first, last) for first, last in pairwise(bounds)]


# --- processes of this machine ---


@dataclass(eq=False)
class WorkerProcess:
    """A worker's process, the connection to it, and when it last sent something."""

    process: subprocess.Popen[bytes]
    connection: "Connection[bytes, Answer | str]"
    heard: float = field(default_factory=time.monotonic)


@final
class ProcessPool(Pool[WorkerProcess]):
    """Evaluates on `workers` processes, each with the evaluator that `make` makes there, once.

    `make` must be picklable, from a module that can be imported. A worker is a fresh interpreter, neither a fork (threads of
    numba or torch in this process may hold locks) nor a child of multiprocessing (which would run the caller's script
    again). The terminal's Ctrl-C does not reach it, and it ends when this process does, however that ends. One that gives no
    sign of life for `silent_seconds` is replaced as if it had died; how long it works on a part does not matter.
    """

    def __init__(self, make: MakeEvaluator, workers: int, attempts: int = 3, silent_seconds: float = SILENT_SECONDS) -> None:
        if workers < 1:
            raise InputError(f"workers must be at least 1, there are {workers}")
        super().__init__(workers, attempts)
        self._silent_seconds = silent_seconds
        self._factory = os.memfd_create("placewise-factory")
        self._release = weakref.finalize(self, _release, self._handles, self._factory)
        with open(self._factory, "wb", closefd=False) as file:
            pickle.dump(make, file, protocol=5)  # protocol 5 keeps read-only arrays read-only
        self._fill()  # they start while the caller makes its first batch

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return tuple(worker.process.pid for worker in self._handles)

    def close(self) -> None:
        """Ends all workers."""
        super().close()
        self._release()

    def _start(self) -> WorkerProcess:
        ours, theirs = Pipe()
        fds = (theirs.fileno(), self._factory)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE, *map(str, fds), str(self._silent_seconds / PULSES), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is the caller's
                pass_fds=fds,
                process_group=0,
            )
        return WorkerProcess(process, ours)

    def _send(self, worker: WorkerProcess, part: Part | None) -> None:
        with suppress(OSError):
            worker.connection.send_bytes(pickle.dumps(part, protocol=5))

    def _receive(
        self, workers: Sequence[WorkerProcess], seconds: float | None
    ) -> list[tuple[WorkerProcess, Answer | Death]]:
        until = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            patience = min(until - time.monotonic(), self._silent_seconds)
            ready = wait([worker.connection for worker in workers], max(patience, 0.0))
            now = time.monotonic()
            found = [(worker, _receive_from(worker)) for worker in workers if worker.connection in ready]
            for worker, _ in found:
                worker.heard = now
            answers = [(worker, answer) for worker, answer in found if not isinstance(answer, str)]
            for worker in workers:
                if worker.connection not in ready and now - worker.heard > self._silent_seconds:
                    answers.append((worker, Death(f"process {worker.process.pid} gave no sign of life")))
            if answers or now >= until:
                return answers

    def _find_death(self, worker: WorkerProcess) -> Death | None:
        code = worker.process.poll()
        return None if code is None else _death_of(worker, code)

    def _stop(self, worker: WorkerProcess) -> None:
        _end(worker)


def _receive_from(worker: WorkerProcess) -> Answer | Death | str:
    """Returns the next thing that a worker has sent: an answer, or a pulse; or how it died."""
    try:
        return worker.connection.recv()
    except (EOFError, OSError):
        return _death_of(worker, worker.process.wait())


def _death_of(worker: WorkerProcess, code: int) -> Death:
    return Death(f"process {worker.process.pid} was killed by signal {-code}" if code < 0 else f"exit code {code}")


def _end(worker: WorkerProcess) -> None:
    worker.connection.close()
    worker.process.kill()  # it may be in the middle of a part, and has nothing to lose
    worker.process.wait()


def _release(workers: list[WorkerProcess], factory: int) -> None:
    for worker in workers:
        _end(worker)
    os.close(factory)


# --- in the worker ---


class PartEvaluator:
    """Makes an evaluator once and answers parts with it; whatever goes wrong is an answer too."""

    def __init__(self, factory: bytes) -> None:
        self._factory = factory  # pickled
        self._evaluator: Evaluator | None = None

    def answer(self, part: Part | None) -> Answer:
        """Returns the evaluation of a part; of None, only makes the evaluator."""
        try:
            if self._evaluator is None:
                self._evaluator = _load(self._factory)()
            if part is None:
                return None
            orders = None if part.orders is None else part.orders.unpack()
            return self._evaluator(part.placements.unpack(), orders)
        except Exception as error:
            return _presentable(error)

    def pulse(self) -> None:
        """Shows that the worker is alive, for those that can be called while they answer."""


def _load(factory: bytes) -> MakeEvaluator:
    try:
        make: MakeEvaluator = pickle.loads(factory)
    except (AttributeError, ImportError) as problem:  # it is of the caller's script or notebook, which is not run again
        raise InputError(
            f"a worker can't load what it needs ({one_line(problem)}): define models, losses and evaluators in a module "
            "that can be imported"
        ) from problem
    return make


def serve(connection_fd: int, factory_fd: int, pulse_seconds: float) -> None:
    """Answers the parts that come over a connection; ends when that is closed, even in the middle of a part."""
    connection, parts, lock = Connection(connection_fd), SimpleQueue[bytes](), Lock()
    Thread(target=_listen, args=(connection, parts), daemon=True).start()
    Thread(target=_pulse, args=(connection, lock, pulse_seconds), daemon=True).start()
    with mmap.mmap(factory_fd, 0, access=mmap.ACCESS_READ) as file:  # one file for all workers
        evaluator = PartEvaluator(bytes(file))
    while True:
        answer = evaluator.answer(pickle.loads(parts.get()))
        with suppress(OSError), lock:  # the other end is closed: the listener ends this process
            connection.send(answer)


def _listen(connection: "Connection[Answer, bytes]", parts: "SimpleQueue[bytes]") -> NoReturn:
    """Puts what comes into a queue; ends this process when the other end is closed, or its process has died."""
    try:
        while True:
            parts.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _pulse(connection: "Connection[Answer | str, bytes]", lock: Lock, seconds: float) -> None:
    """Shows now and then that this process is alive."""
    with suppress(OSError):
        while True:
            time.sleep(seconds)
            with lock:
                connection.send(PULSE)


def _presentable(error: Exception) -> Exception:
    """Returns the error in a form that can be pickled, with its traceback as a note."""
    error.add_note("In a worker:\n" + "".join(traceback.format_exception(error)).rstrip())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PlacewiseError(f"a worker failed with {type(error).__name__}: {error}")
    return error
