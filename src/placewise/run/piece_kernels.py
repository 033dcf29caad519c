"""The kernels of pieces, which all steps of this process share, and how many of them are compiled at a time.

A piece that can't be compiled (no C++ compiler, no Triton) runs its calls one after the other, as it means the same.
"""

import atexit
import copyreg
import io
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from threading import Lock
from typing import IO, Any, NamedTuple
from unittest.mock import patch

import torch
from torch._ops import OpOverload

from placewise.core.errors import one_line
from placewise.core.quantities import format_count
from placewise.rewrite.piece import Piece

Kernel = Callable[..., Any]  # takes a piece's inputs, returns its results

FEW = 4  # pieces: for each process that compiles there are at least so many, because starting it takes about as long

MOST_PROCESSES = 16


class Wanted(NamedTuple):
    """A piece, and where it runs."""

    piece: Piece
    device: str  # as PyTorch calls it
    threads: int  # of a CPU device; 0 for others

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells its kernel from others."""
        return self.piece.digest, self.device, self.threads


_kernels: dict[tuple[str, str, int], Kernel] = {}

_failed: dict[tuple[str, str, int], str] = {}  # why some pieces have no kernel


def kernel_of(piece: Piece, device: str, threads: int) -> Kernel:
    """Returns the kernel of a piece on a device, or its calls one after the other if there is none."""
    wanted = Wanted(piece, device, threads)
    if wanted.key not in _kernels:
        compile_all([wanted])
    return _kernels[wanted.key]


def compile_all(pieces: Iterable[Wanted], report: Callable[[str], None] = lambda line: None) -> None:
    """Compiles pieces that have no kernel yet; `report` gets a line before each, and one for each reason that one fails."""
    missing = list({wanted.key: wanted for wanted in pieces if wanted.key not in _kernels}.values())
    new = [wanted for wanted in missing if not _marker(wanted).exists()]
    num_processes = min(len(os.sched_getaffinity(0)), len(new) // FEW, MOST_PROCESSES)
    if num_processes > 1:
        _compile_in_processes(new, num_processes, report)
    reasons: dict[str, int] = {}
    is_compiled = not new or num_processes > 1  # and only has to be loaded
    for number, wanted in enumerate(missing):
        if not is_compiled:
            report(f"compiling kernel {number + 1:,} of {len(missing):,}")
        try:
            with _without_more_processes() if is_compiled else nullcontext():
                _kernels[wanted.key] = _compiled(wanted)
        except Exception as problem:
            _failed[wanted.key] = reason = f"{type(problem).__name__}: {one_line(problem)[:200]}"
            reasons[reason] = reasons.get(reason, 0) + 1
            _kernels[wanted.key] = partial(wanted.piece.run, torch.device(wanted.device))
        else:
            _mark(wanted)
    if new:
        report("")  # nothing is being compiled any more
    for reason, count in reasons.items():
        report(f"{format_count(count, 'fused op')} can't be compiled and will run unfused, op by op: {reason}")


@contextmanager
def _without_more_processes() -> Iterator[None]:
    """Keeps Inductor from starting processes of its own, which take longer to start than kernels to be loaded."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


def _compiled(wanted: Wanted) -> Kernel:
    """Returns a new kernel. If that fails it is tried again with another cache.

    A process that is killed while it compiles can leave files in Inductor's cache that no later one can use.
    """
    from placewise.run.inductor import NO_COMPILER, compile_piece  # loads much of PyTorch that eager code does without

    given = (wanted.piece, torch.device(wanted.device), wanted.threads)
    try:
        return compile_piece(*given)
    except NotImplementedError:  # what this piece does can't be compiled, whatever the cache
        raise
    except Exception as problem:
        if NO_COMPILER in str(problem):
            raise
        from torch._inductor.utils import clear_inductor_caches

        with patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=_spare_cache()):
            clear_inductor_caches()
            return compile_piece(*given)


@cache
def _spare_cache() -> str:
    """Returns a folder for what this process alone compiles; it is removed when the process ends."""
    folder = mkdtemp(prefix="placewise-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def why_not_compiled(piece: Piece, device: str, threads: int) -> str | None:
    """Returns why a piece has no kernel of its own; None if it has, or has not been compiled yet."""
    return _failed.get(Wanted(piece, device, threads).key)


def print_progress(line: str) -> None:
    """Shows on standard error what is being compiled: in a terminal all in one line, elsewhere only that it begins."""
    is_progress = line.startswith("compiling")
    if sys.stderr.isatty():
        sys.stderr.write(
            f"\r\033[Kplacewise: {line}" if is_progress else f"\r\033[Kplacewise: {line}\n" if line else "\r\033[K"
        )
        sys.stderr.flush()
    elif line and (not is_progress or line.startswith("compiling kernel 1 ")):
        print(f"placewise: {line}", file=sys.stderr)


# --- what is in Inductor's cache ---


def _marker(wanted: Wanted) -> Path:
    """Returns the file that tells that a piece is in Inductor's cache; without it, it is compiled by several processes."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    name = wanted.device if wanted.device == "cpu" else torch.get_device_module(wanted.device).get_device_name(wanted.device)
    key = f"{wanted.piece.digest}-{torch.__version__}-{name}-{wanted.threads}".replace(" ", "-").replace("/", "-")
    return Path(cache_dir()) / "placewise" / key


def _mark(wanted: Wanted) -> None:
    path = _marker(wanted)
    if not path.exists():
        with suppress(OSError):  # a full or read-only disk: compiled again in the next process
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


# --- several processes ---


def _compile_in_processes(pieces: list[Wanted], num_processes: int, report: Callable[[str], None]) -> None:
    """Fills Inductor's cache from several processes; what goes wrong there is compiled in this one and seen then."""
    waiting, lock, count = iter(pieces), Lock(), [0]

    def take() -> Wanted | None:
        with lock:
            wanted = next(waiting, None)
            if wanted is not None:
                count[0] += 1
                report(f"compiling kernel {count[0]:,} of {len(pieces):,} in {num_processes} processes")
            return wanted

    with ThreadPoolExecutor(num_processes) as pool:
        for _ in range(num_processes):
            pool.submit(_feed, take)


def _feed(take: Callable[[], Wanted | None]) -> None:
    """Gives pieces to a process of its own, one after the other."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", "from placewise.run.piece_kernels import compile_from_input; compile_from_input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            while (wanted := take()) is not None:
                _send(wanted, process.stdin)
                if not process.stdout.readline():
                    return  # it has died


def compile_from_input() -> None:
    """Compiles the pieces that come on standard input, and answers each with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    for wanted in _receive(sys.stdin.buffer):
        with suppress(Exception):
            _compiled(wanted)
        answers.write("done\n")
        answers.flush()


def _send(wanted: Wanted, stream: IO[bytes]) -> None:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.dispatch_table = copyreg.dispatch_table.copy()
    pickler.dispatch_table[OpOverload] = lambda function: (_overload, (str(function),))
    pickler.dump(tuple(wanted))
    stream.write(buffer.getvalue())
    stream.flush()


def _receive(stream: IO[bytes]) -> Iterator[Wanted]:
    while True:
        try:
            yield Wanted(*pickle.load(stream))
        except EOFError:
            return


def _overload(name: str) -> Any:
    """Returns an overload of ATen by its full name, aten.add.Tensor."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
