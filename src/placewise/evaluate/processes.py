"""An evaluator on processes of this machine."""

import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import final

from placewise.core.errors import InputError
from placewise.evaluate.worker_pool import Died, Team
from placewise.evaluate.worker_process import Answer, Make, Part

SERVE = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from placewise.evaluate.worker_process import serve; serve(*map(int, sys.argv[1:3]))"
)


@dataclass(frozen=True, eq=False)
class Process:
    """A worker and the line to it."""

    process: subprocess.Popen[bytes]
    connection: "Connection[bytes, Answer]"


@final
class Pooled(Team[Process]):
    """Evaluates on `workers` processes, each with the evaluator that `make` makes there, once.

    `make` must be picklable, of a module that can be imported. A worker is a fresh interpreter, neither a fork (threads of
    numba or torch in this process may hold locks) nor a child of multiprocessing (which would run the caller's script
    again). It is out of reach of the terminal's Ctrl-C and ends when this process does, however that ends.
    """

    def __init__(self, make: Make, workers: int, attempts: int = 3) -> None:
        if workers < 1:
            raise InputError(f"workers must be at least 1, there are {workers}")
        super().__init__(workers, attempts)
        self._factory = os.memfd_create("placewise-factory")
        self._release = weakref.finalize(self, _release, self._members, self._factory)
        with open(self._factory, "wb", closefd=False) as file:
            pickle.dump(make, file, protocol=5)  # 5 keeps arrays that can't be written so
        self._hire()  # they start while the caller makes its first batch

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The workers' process ids."""
        return tuple(member.process.pid for member in self._members)

    def close(self) -> None:
        """Ends all workers."""
        super().close()
        self._release()

    def _start(self) -> Process:
        ours, theirs = Pipe()
        fds = (theirs.fileno(), self._factory)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVE, *map(str, fds), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the standard output is the caller's
                pass_fds=fds,
                process_group=0,
            )
        return Process(process, ours)

    def _give(self, member: Process, part: Part | None) -> None:
        with suppress(OSError):
            member.connection.send_bytes(pickle.dumps(part, protocol=5))

    def _hear(self, members: Sequence[Process], seconds: float | None) -> list[tuple[Process, Answer | Died]]:
        ready = wait([member.connection for member in members], seconds)
        return [(member, _receive(member)) for member in members if member.connection in ready]

    def _stop(self, member: Process) -> None:
        _end(member)


def _receive(member: Process) -> Answer | Died:
    try:
        return member.connection.recv()
    except (EOFError, OSError):
        code = member.process.wait()
        return Died(f"process {member.process.pid} was killed by signal {-code}" if code < 0 else f"exit code {code}")


def _end(member: Process) -> None:
    member.connection.close()
    member.process.kill()  # it may be in the middle of a part, and has nothing to lose
    member.process.wait()


def _release(members: list[Process], factory: int) -> None:
    for member in members:
        _end(member)
    os.close(factory)
