"""Runs mutations in a folder of their own, and says what a command did that it must never do."""

import contextlib
import io
import os
import random
import resource
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from fuzz.targets import STRATEGIES, TARGETS, TINY, Command, Target, write_good_files
from placewise.cli import main

MOST_SECONDS = 5.0  # of the processor

HANG_SECONDS = 60.0  # of the clock

MOST_BYTES = 2**30

OUTPUTS = ("out.json", "out.toml", "page.html", "new.db", "new.safetensors")


class Finding(NamedTuple):
    """What a command did that it must never do."""

    number: int
    target: str
    command: str
    what: str


class TooSlow(BaseException):
    """A command hangs."""


@dataclass
class Fuzzer:
    """Mutates one file after the other, each by its own seed, and runs a command that reads it, in the current folder."""

    folder: Path
    seed: int
    most_seconds: float | None = MOST_SECONDS  # None: however long it takes

    def __post_init__(self) -> None:
        os.chdir(self.folder)
        self.good = _good_files()
        self._restore()
        self.scripts: int | None = None  # on a good page
        self.codes: Counter[int] = Counter()  # exit codes

    def run(self, number: int) -> list[Finding]:
        """Returns what mutation `number` found; nothing, if all is well."""
        rng = random.Random(f"{self.seed}:{number}")
        target = rng.choices(TARGETS, [target.weight for target in TARGETS])[0]
        self._restore()
        path = self.folder / target.name
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.mutate(path, rng)
        command = target.commands(rng)
        before = {entry.name: entry.read_bytes() for entry in self.folder.iterdir()}
        return [Finding(number, target.name, _text(command), what) for what in self._judged(command, before)]

    def run_unchanged(self, target: Target, number: int) -> tuple[int, str]:
        """Returns the exit code of a command of a target that reads the good file, and what it says on standard error."""
        self._restore()
        ran = _run(target.commands(random.Random(number)), None)
        return ran.code, ran.failure or ran.error

    def warm_up(self) -> None:
        """Compiles all kernels, so that no mutation is the first to need one: that takes up to 12 s in a new tree."""
        for strategy in STRATEGIES:
            self._restore()
            _run(["place", "graph.json", *TINY, "--strategy", strategy, "--budget", "1"], None)
        _run(["place", "optional.json", "--cluster", "hosts.toml", "--budget", "3"], None)

    def _restore(self) -> None:
        for entry in self.folder.iterdir():
            if entry.name not in self.good:
                entry.unlink()
        for name, data in self.good.items():
            path = self.folder / name
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)

    def _judged(self, command: Command, before: dict[str, bytes]) -> Iterator[str]:
        ran = _run(command, self.most_seconds)
        self.codes[ran.code] += 1
        if ran.failure:
            yield ran.failure
        elif ran.code not in (0, 2, 3):
            yield f"exit code {ran.code}: {ran.error.strip()[:200]}"
        elif ran.code and ran.error.count("\n") != 1:
            yield f"{ran.error.count(chr(10))} lines on standard error: {ran.error[:300]!r}"
        if any(not (character.isprintable() or character == "\n") for character in ran.output + ran.error):
            yield f"control characters: {ran.output[:100]!r} {ran.error[:100]!r}"
        if self.most_seconds is not None and ran.seconds > self.most_seconds:
            yield f"took {ran.seconds:.1f} s of the processor"
        if ran.extra_bytes > MOST_BYTES:
            yield f"took {ran.extra_bytes / 2**20:.0f} MiB"
        after = {entry.name: entry.read_bytes() for entry in self.folder.iterdir()}
        for name in sorted(after.keys() - before.keys()):
            if name not in OUTPUTS:
                yield f"left {name}"
            elif ran.code and not (name == "new.db" and ran.code == 3):  # a search in which nothing fits is recorded
                yield f"wrote {name} with exit code {ran.code}"
        for name, data in before.items():
            is_written = (
                name in ("runs.db", "record.db") and ran.code == 0 and (callable(command) or "--run-file" in command)
            )
            if after.get(name) != data and not is_written:
                yield f"changed {name}"
        yield from self._page(after.get("page.html"))

    def _page(self, page: bytes | None) -> Iterator[str]:
        """A name must not end the page's script, or begin one of its own."""
        if page is not None:
            scripts = page.count(b"<script")
            self.scripts = self.scripts or scripts
            if scripts != self.scripts or page.count(b"</script") != page.count(b"<script"):
                yield f"page has {scripts} scripts, not {self.scripts}"


@cache
def _good_files() -> dict[str, bytes]:
    """Returns a good file of each kind, by name; they are made once for a process, in a folder of their own."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="placewise-fuzz-good-") as folder:
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                write_good_files(Path(folder))
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        finally:
            os.chdir(before)


class _Ran(NamedTuple):
    code: int
    output: str
    error: str
    failure: str  # the last lines of a traceback
    seconds: float
    extra_bytes: int


def _run(command: Command, most_seconds: float | None) -> _Ran:
    output, error, failure, code = io.StringIO(), io.StringIO(), "", -1
    memory = _peak_bytes()
    if most_seconds is not None:
        signal.signal(signal.SIGALRM, _too_slow)
        signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    began = time.process_time()  # however busy the machine is
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = command() if callable(command) else main(command)
    except SystemExit as ended:
        code = int(ended.code or 0) if not isinstance(ended.code, str) else 2
    except BaseException as problem:
        frames = traceback.extract_tb(problem.__traceback__)[-3:]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
        failure = f"{type(problem).__name__}: {str(problem)[:200]} ({where})"
    finally:
        seconds = time.process_time() - began
        if most_seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return _Ran(code, output.getvalue(), error.getvalue(), failure, seconds, _peak_bytes() - memory)


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _text(command: Command) -> str:
    if isinstance(command, list):
        return " ".join(command)
    name: Any = getattr(command, "func", command)
    return f"{name.__name__}{getattr(command, 'args', ())}"
