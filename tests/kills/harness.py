"""Runs commands, ends them by signals, runs them again, and compares what is left with an undisturbed run's."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kills.phases import PHASES, Note
from kills.scenarios import PLAN_FOR_RUN, Scenario, prepare

ROOT = Path(__file__).parents[2]

NOTED = Path(__file__).parent / "noted.py"

MARK = "PLACEWISE_KILLS"  # in the environment of every process that a command starts

WRITTEN = ("runs.db", "plan.json", "page.html", "trace.json")


@dataclass(frozen=True)
class Ended:
    """How a command ended, in which phase it was, and what it said."""

    code: int
    phase: str
    errors: str
    seconds: float


@dataclass(frozen=True)
class Left:
    """What a command leaves: the rows of its run file, and its plan."""

    rows: tuple[tuple[Any, ...], ...]
    plan: dict[str, Any] | None


class Trial:
    """One scenario in a folder of its own."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder, self._note = scenario, folder, folder.with_suffix(".note")
        self.mark = f"{folder.name}-{os.getpid()}"
        prepare(folder)
        if "given.json" in scenario.arguments:
            run = subprocess.run(
                [sys.executable, "-m", "placewise", *PLAN_FOR_RUN], cwd=folder, env=self._environment(), capture_output=True
            )
            assert run.returncode == 0, run.stderr
        self._given = {path.name for path in folder.iterdir()}

    def _environment(self) -> dict[str, str]:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        return {**os.environ, "PYTHONPATH": paths, MARK: self.mark, "OMP_NUM_THREADS": "1"}

    def run(self, event: str = "-", *, kill_after: float | None = None) -> Ended:
        """Runs the command, in a process group of its own; kills it after so many seconds, or at an event."""
        self._note.unlink(missing_ok=True)
        note, began = Note(self._note), time.monotonic()
        with open(self.folder.with_suffix(".errors"), "w+b") as errors:
            process = subprocess.Popen(
                [sys.executable, str(NOTED), str(self._note), event, *self.scenario.arguments],
                cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip
            try:
                process.wait(kill_after if kill_after is not None else 300)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                if kill_after is None:
                    raise AssertionError(f"{self.scenario.name}: did not end in 300 s; it was in {note.phase}") from None
            errors.seek(0)
            text = errors.read().decode("utf-8", "replace")
        return Ended(process.returncode, note.phase, text, time.monotonic() - began)

    def events(self) -> dict[str, int]:
        """Returns how many calls and returns each phase has, by running the command to its end."""
        ended = self.run("count")
        assert ended.code == 0, ended.errors
        note = Note(self._note)
        return {phase: note.events(phase) for phase in PHASES if note.events(phase)}

    def left(self) -> Left:
        """Returns what is there now; what is half written is a ValueError."""
        page, plan, trace = (self.folder / name for name in ("page.html", "plan.json", "trace.json"))
        if page.exists() and not page.read_text("utf-8").rstrip().endswith("</html>"):
            raise ValueError("half a page")
        if trace.exists():
            json.loads(trace.read_bytes())
        return Left(self._rows(), json.loads(plan.read_bytes()) if plan.exists() else None)

    def _rows(self) -> tuple[tuple[Any, ...], ...]:
        if not (self.folder / "runs.db").exists():
            return ()
        with tempfile.TemporaryDirectory() as copy:  # reading may write: the log of a killed writer is merged
            for path in self.folder.glob("runs.db*"):
                shutil.copy(path, copy)
            connection = sqlite3.connect(Path(copy) / "runs.db")
            try:
                if connection.execute("pragma integrity_check").fetchall() != [("ok",)]:
                    raise ValueError("the run file is damaged")
                if not connection.execute("select 1 from sqlite_master where name = 'steps'").fetchall():
                    return ()
                if len(connection.execute("select * from runs").fetchall()) > 1:
                    raise ValueError("more than one run")
                return tuple(connection.execute("select number, digest, cost from steps order by number"))
            finally:
                connection.close()

    def strays(self) -> list[str]:
        """Returns files that are neither the command's nor given."""
        names = {path.name for path in self.folder.iterdir()} - self._given - set(WRITTEN)
        return sorted(name for name in names if name not in ("runs.db-wal", "runs.db-shm", "runs.db.lock", "__pycache__"))

    def orphans(self) -> list[str]:
        """Returns the processes that the command started and that are still there when they should be gone."""
        until = time.monotonic() + self.scenario.orphan_seconds
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(0.2)
        return left

    def _processes(self) -> list[str]:
        mark, found = f"{MARK}={self.mark}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(
                        f"{process.name} {(process / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()[:60]}"
                    )
            except OSError:
                continue
        return found


@contextmanager
def trial(scenario: Scenario) -> Iterator[Trial]:
    """Runs in a new folder; nothing is left of it."""
    with tempfile.TemporaryDirectory(prefix="placewise-kills-") as outer:
        folder = Path(outer) / "work"
        folder.mkdir()
        yield Trial(scenario, folder)


def undisturbed(scenario: Scenario) -> tuple[Left, float]:
    """Returns what a run leaves that nothing ends, and its seconds."""
    with trial(scenario) as run:
        ended = run.run()
        assert ended.code == 0, ended.errors
        return run.left(), ended.seconds


def check_after(run: Trial, before: Left, reference: Left, *, may_be_part: bool = False) -> Left:
    """Returns what an ended command has left; an AssertionError if rows were lost or differ from the undisturbed run's.

    Its plan is the undisturbed run's, or the best so far if that `may_be_part` of the way.
    """
    now = run.left()
    assert now.rows[: len(before.rows)] == before.rows, "recorded evaluations were lost"
    if run.scenario.is_exact:
        assert reference.rows[: len(now.rows)] == now.rows, "recorded evaluations differ from those of an undisturbed run"
        assert may_be_part or now.plan in (None, reference.plan), "another plan than an undisturbed run's"
    return now


def check_finished(run: Trial, before: Left, reference: Left) -> None:
    """Runs the same command to its end; an AssertionError if what it leaves is not what an undisturbed run leaves."""
    ended = run.run()
    assert ended.code == 0, f"the next run ended with {ended.code}: {ended.errors}"
    now = run.left()
    assert now.rows[: len(before.rows)] == before.rows, "recorded evaluations were lost by the next run"
    if run.scenario.is_exact:
        assert now == reference, "the next run's evaluations or plan differ from an undisturbed run's"
    assert not run.orphans(), f"processes are left: {run.orphans()}"


def check_signalled(ended: Ended, number: int, phase: str) -> None:
    """An AssertionError unless a command that Ctrl-C or SIGTERM ended says so in one line, with the usual exit code."""
    lines = [line for line in ended.errors.splitlines() if line.strip()]
    if number == signal.SIGTERM:
        if phase == "import" and ended.code == -signal.SIGTERM and not lines:
            return  # before it is handled
        assert ended.code == 143, f"exit code {ended.code}: {ended.errors[-500:]}"
        assert lines == ["placewise: ended by SIGTERM"], ended.errors[-2000:]
    elif ended.code == 0:
        assert len(lines) == 1, ended.errors[-2000:]
        assert "stopped after" in lines[0], ended.errors[-2000:]
    else:
        assert ended.code == 130, f"exit code {ended.code}: {ended.errors[-500:]}"
        assert lines == ["placewise: stopped"] or (len(lines) == 1 and "stopped" in lines[0]), ended.errors[-2000:]
