"""Setups tried one after the other in a process of their own, which any of them may crash."""

import multiprocessing
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from textwrap import shorten
from time import perf_counter
from typing import Any

from placewise.core.errors import InputError, one_line
from placewise.experiments.training_setups import find_setup
from placewise.experiments.training_setups.agreement import FAILED, NOT_INSTALLED, REFUSED, Agreement, find_agreement
from placewise.experiments.training_setups.torchvision_ops import declare_missing_ops
from placewise.experiments.training_setups.training_setup import Setup
from placewise.experiments.training_setups.trajectories import Trajectory, train_eagerly, train_placed

TIMEOUT_SECONDS = 300.0  # for one setup, which takes about one; importing its library counts too

LONGEST_REASON = 300  # characters

FOLDERS = re.compile(r"(?:/[\w.+-]+)+/(?=[\w.-]+\.py)")

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}


@dataclass(frozen=True)
class Trial:
    """A setup, and how its training compares with eager code."""

    setup: Setup
    agreement: Agreement
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Returns the trial as plain data."""
        setup = self.setup
        words = {"model": setup.model, "optimizer": setup.optimizer.words, "precision": setup.precision}
        about = {"setup": setup.name, "library": setup.library, **words, "extras": setup.extra_words}
        return {**about, **asdict(self.agreement), "seconds": self.seconds}


class _EagerFailure(Exception):
    """The eager loop of a setup does not run."""


def _in_short(problem: Exception) -> str:
    """Returns the error's message in one line, without the folders of files."""
    text = FOLDERS.sub("", one_line(problem))
    text = text if isinstance(problem, InputError) else f"{type(problem).__name__}: {text}"
    return shorten(text, LONGEST_REASON, placeholder=" ...")


def try_setup(setup: Setup, *, finds_kernels: bool = True) -> Agreement:
    """Trains a setup with placewise and with an eager loop in this process, and compares."""

    def eager() -> Trajectory:
        try:
            return train_eagerly(setup)
        except Exception as problem:
            raise _EagerFailure(f"the eager loop fails: {_in_short(problem)}") from problem

    if find_spec(setup.library) is None:
        return Agreement(NOT_INSTALLED, why=f"pip install {setup.library}")
    declare_missing_ops()
    try:
        return find_agreement(lambda: train_placed(setup), eager, finds_kernels=finds_kernels)
    except InputError as problem:
        return Agreement(REFUSED, why=_in_short(problem))
    except _EagerFailure as problem:
        return Agreement(FAILED, why=str(problem))
    except Exception as problem:
        return Agreement(FAILED, why=_in_short(problem))


def try_setups(
    setups: Sequence[Setup],
    on_trial: Callable[[Trial], None] = lambda trial: None,
    find: Callable[[str], Setup] = find_setup,
) -> tuple[list[Trial], bool]:
    """Tries setups in a process of their own; returns the trials, and whether these are all: Ctrl-C ends it.

    The process finds a setup by its name with `find`, a function of a module.
    """
    trials: list[Trial] = []
    worker = _Worker(find)
    try:
        for setup in setups:
            started = perf_counter()
            agreement = worker.ask(setup.name)
            trials.append(Trial(setup, agreement, perf_counter() - started))
            on_trial(trials[-1])
    except KeyboardInterrupt:
        return trials, False
    finally:
        worker.close()
    return trials, True


class _Worker:
    """A process that tries setups; if it dies or takes too long, another one takes its place."""

    def __init__(self, find: Callable[[str], Setup]) -> None:
        self._find = find
        self._process: SpawnProcess | None = None

    def ask(self, name: str) -> Agreement:
        if self._process is None:
            self._start()
        assert self._process is not None
        with suppress(EOFError, ConnectionError):
            self._connection.send(name)
            if self._connection.poll(TIMEOUT_SECONDS):
                found: Agreement = self._connection.recv()
                return found
            self.close()
            return Agreement(FAILED, why=f"takes more than {TIMEOUT_SECONDS:g} s")
        self._process.join(5)  # it has closed its end, and is about to end
        code = self._process.exitcode or 0
        self.close()
        return Agreement(FAILED, why=f"the process died: {signal.Signals(-code).name if code < 0 else f'exit code {code}'}")

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._find, sys.path), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(connection: Connection, find: Callable[[str], Setup], path: list[str]) -> None:
    """Answers the name of a setup with its agreement until the other end is closed."""
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    os.environ.update(OFFLINE)
    warnings.simplefilter("ignore")
    with suppress(EOFError):
        while True:
            connection.send(try_setup(find(connection.recv())))
