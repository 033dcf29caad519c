"""Evaluators that count, fail and die, to test with; a light module, because every worker imports it."""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Evaluator
from placewise.core.errors import ProblemError
from placewise.core.problem import Problem


def ints(*values: int) -> Ints:
    """Returns an array of these numbers."""
    return np.array(values, np.int64)


def assert_same(found: Evaluation, expected: Evaluation) -> None:
    """Asserts that two evaluations are equal to the bit."""
    for column, wanted in zip(found, expected, strict=True):
        assert column.dtype == wanted.dtype
        assert column.tobytes() == wanted.tobytes()


def simulators(problem: Problem, order: str = "priority") -> Callable[[], Evaluator]:
    """Returns what makes a simulator in a worker."""
    from placewise.simulate.simulator import Simulator

    return partial(Simulator, problem, order, threads=1)


class Sums:
    """An evaluator to count with: a row costs the sum of its devices, and 100 times its first launch."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []

    def __call__(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        self.batches.append(placements.tolist())
        if (placements < 0).any():
            raise ProblemError(f"placement {np.argwhere(placements < 0)[0][0]} is negative")
        sums = placements.sum(axis=1) + (0 if orders is None else 100 * orders[:, 0])
        return Evaluation(sums * 1.0, sums / 2, sums)


@dataclass(frozen=True)
class Dying:
    """Makes evaluators that, given a batch with device 9, write their process id to a pipe and wait to be killed.

    They do so `times` times in all, counted by files in a folder, and then answer.
    """

    folder: Path
    times: int

    def __call__(self) -> Evaluator:
        return self.evaluate

    def evaluate(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        deaths = len(list(self.folder.glob("death-*")))
        if (placements == 9).any() and deaths < self.times:
            (self.folder / f"death-{deaths}").touch()
            (self.folder / "pipe").write_text(f"{os.getpid()}\n")
            threading.Event().wait()
        return Sums()(placements, orders)


@dataclass(frozen=True)
class Telling:
    """Makes another's evaluators; each process that does leaves its id in a folder."""

    make: Callable[[], Evaluator]
    folder: Path

    def __call__(self) -> Evaluator:
        (self.folder / f"{os.getpid()}.pid").touch()
        return self.make()


@dataclass(frozen=True)
class Failing:
    """Makes nothing, but raises an error."""

    error: Exception

    def __call__(self) -> Evaluator:
        raise self.error


@dataclass(frozen=True)
class Leaving:
    """Makes nothing, but ends the process."""

    def __call__(self) -> Evaluator:
        os._exit(7)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def killer(folder: Path, end: Callable[[int], None] = kill) -> threading.Thread:
    """Returns a thread that ends each process whose id is written to the pipe in the folder."""
    os.mkfifo(folder / "pipe")

    def run() -> None:
        while (said := (folder / "pipe").read_text()) != "stop":
            for pid in said.split():
                end(int(pid))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
