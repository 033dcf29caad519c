"""The worker's side: it holds one evaluator and answers parts of batches with it."""

import mmap
import os
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Evaluator
from placewise.core.errors import InputError, PlacewiseError, one_line

Make = Callable[[], Evaluator]

Answer = Evaluation | Exception | None  # None: the worker is here; an exception is for the caller to raise


class Column(NamedTuple):
    """Whole numbers in the narrowest type that holds them, and the type to give them back: few bytes to send."""

    values: NDArray[Any]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, values: NDArray[Any]) -> "Column":
        """Returns the values packed; what is no whole number stays as it is."""
        if values.dtype.kind not in "iu" or not values.size:
            return cls(values, values.dtype)
        narrow = np.result_type(np.min_scalar_type(values.min()), np.min_scalar_type(values.max()))
        return cls(values.astype(narrow) if narrow.kind in "iu" else values, values.dtype)

    def unpack(self) -> Ints:
        """Returns the values as they were."""
        return self.values.astype(self.dtype, copy=False)


class Part(NamedTuple):
    """Some rows of a batch."""

    placements: Column  # [rows, groups]
    orders: Column | None  # [rows or 1, ops]


class Worker:
    """Makes an evaluator once and evaluates parts with it; what goes wrong, also with the pickled factory, is an answer."""

    def __init__(self, factory: bytes) -> None:
        self._factory = factory
        self._evaluator: Evaluator | None = None

    def answer(self, part: Part | None) -> Answer:
        """Returns the evaluation of a part; for no part, makes the evaluator and says that it is here."""
        try:
            if self._evaluator is None:
                self._evaluator = _load(self._factory)()
            if part is None:
                return None
            orders = None if part.orders is None else part.orders.unpack()
            return self._evaluator(part.placements.unpack(), orders)
        except Exception as error:
            return _presentable(error)


def _load(factory: bytes) -> Make:
    try:
        make: Make = pickle.loads(factory)
    except (AttributeError, ImportError) as problem:  # it was of the caller's script or notebook, which is not run again
        raise InputError(
            f"a worker can't load what it needs ({one_line(problem)}): define models, losses and evaluators in a module "
            "that can be imported"
        ) from problem
    return make


def serve(connection_fd: int, factory_fd: int) -> None:
    """Answers the parts that come over a connection; ends at once, in the middle of a part too, when it is closed."""
    connection, parts = Connection(connection_fd), SimpleQueue[bytes]()
    Thread(target=_listen, args=(connection, parts), daemon=True).start()
    with mmap.mmap(factory_fd, 0, access=mmap.ACCESS_READ) as file:  # one file for all workers
        worker = Worker(bytes(file))
    while True:
        answer = worker.answer(pickle.loads(parts.get()))
        with suppress(OSError):  # nobody is there: the listener ends this process
            connection.send(answer)


def _listen(connection: "Connection[Answer, bytes]", parts: "SimpleQueue[bytes]") -> NoReturn:
    """Puts what comes into a queue; the end of the connection, also by the death of the other process, ends this one."""
    try:
        while True:
            parts.put(connection.recv_bytes())
    except (EOFError, OSError):
        os._exit(0)


def _presentable(error: Exception) -> Exception:
    """Returns the error in a form that can travel, with the place where it happened as a note."""
    error.add_note("In a worker:\n" + "".join(traceback.format_exception(error)).rstrip())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return PlacewiseError(f"a worker failed with {type(error).__name__}: {error}")
    return error
