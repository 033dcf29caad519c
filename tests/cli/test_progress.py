"""The line of progress: what it shows of a search, that it fits the terminal, and that nothing of it stays."""

import os
import pty
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import tiny_cluster, tiny_graph
from command_line import heed_ctrl_c, read_terminal, write_tiny_files
from rich.console import Console

from placewise.bounds.best_bound import Bound
from placewise.cli.progress import Line, Shown, describe_search, draw_line
from placewise.core.problem import Problem
from placewise.evaluate.measured import Measure
from placewise.search.budget import Budget
from placewise.search.driver import Progress
from placewise.search.planner import Planner
from placewise.search.request import Request

SPOKEN = Namespace(json=False, quiet=False)
PROGRESS = Progress(100, 4.0, 3.0, {})


def planner(budget: Budget, measure: Measure | None = None) -> Planner:
    problem = Problem.of(tiny_graph(), tiny_cluster())
    return Planner(problem, Request("auto", budget=budget, measure=measure), Bound(2.0, "path", {}))


def test_a_search_shows_its_gap_its_speed_and_what_is_left() -> None:
    """3 s found and a bound of 2 s: a gap of 50%; 100 evaluations in 4 s, 6 of 10 s left."""
    shown = describe_search(planner(Budget(seconds=10.0)), PROGRESS)
    assert shown == Shown("auto: best 3 s, gap 50.0%; 100 evaluations, 25/s; 6 s left", 0.4)
    nothing = describe_search(planner(Budget(seconds=10.0)), PROGRESS._replace(step_seconds=float("inf")))
    assert nothing.text == "auto: nothing fits yet; 100 evaluations, 25/s; 6 s left"


def test_the_limit_that_is_nearest_counts() -> None:
    """Half of 200 evaluations are done, and 4 of 5 s: 1 s is left."""
    shown = describe_search(planner(Budget(200, 5.0)), PROGRESS)
    assert (shown.text.rpartition("; ")[2], shown.share) == ("1 s left", 0.8)
    assert describe_search(planner(Budget(patience=9)), PROGRESS) == Shown(
        "auto: best 3 s, gap 50.0%; 100 evaluations, 25/s"
    )


def test_measured_times_have_no_gap() -> None:
    assert "gap" not in describe_search(planner(Budget(200), Measure()), PROGRESS).text


def drawn(shown: Shown, width: int) -> str:
    """Returns the line that rich draws."""
    console = Console(width=width, color_system=None, force_terminal=True, legacy_windows=False)
    with console.capture() as captured:
        console.print(draw_line(shown, width))
    return captured.get().removesuffix("\n")


@pytest.mark.parametrize(
    ("text", "share", "bar"), [("short", 0.5, 30), ("s" * 60, 0.5, 10), ("s" * 75, 0.5, 0), ("short", None, 0)]
)
def test_the_bar_takes_the_room_that_is_left(text: str, share: float | None, bar: int) -> None:
    line = drawn(Shown(text, share), 80)
    assert line.rstrip() == (f"{line[:bar]} {text}" if bar else text)
    assert set(line[:bar]) <= set("━╸╺ ")


@pytest.mark.parametrize("width", [20, 80, 140])
@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("text", ["", "auto: best [bold] 3 s", "long " * 50])
def test_it_is_one_line_that_fits(text: str, share: float | None, width: int) -> None:
    line = drawn(Shown(text, share), width)
    assert "\n" not in line
    assert len(line) <= width


def test_it_is_due_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown at 5 s stays until 5.1 s."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    now = iter([0.0, 5.0, 5.05, 5.15])
    with Line(SPOKEN) as line:
        monkeypatch.setattr("placewise.cli.progress.time", SimpleNamespace(monotonic=lambda: next(now)))
        assert line.is_due
        line.show(Shown("half"))
        assert [line.is_due, line.is_due] == [False, True]


@pytest.mark.parametrize(
    ("is_terminal", "options"),
    [(False, SPOKEN), (True, Namespace(json=True)), (True, Namespace(json=False, quiet=True))],
)
def test_nothing_is_shown_where_nobody_looks(
    is_terminal: bool, options: Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with Line(options) as line:
        assert not line.is_due
        line.show(Shown("half"))
    assert capsys.readouterr().err == ""


def test_ctrl_c_on_a_terminal_leaves_the_best_so_far_and_no_line_of_progress(tmp_path: Path) -> None:
    """The command is interrupted when its progress appears; the same command continues it."""
    write_tiny_files(tmp_path)
    command = [sys.executable, "-m", "placewise", "place", "graph.json", "--cluster", "cluster.toml"]
    command += ["--strategy", "hill-climb", "--run-file", "runs.db", "--budget", "30000"]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=heed_ctrl_c,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    assert "hill-climb: best" in read_terminal(ours, until="evaluations")
    process.send_signal(signal.SIGINT)
    rest = read_terminal(ours)
    assert process.wait() == 0
    _, _, after = rest.rpartition("\x1b[2K")  # erases the line of progress
    assert "hill-climb: best" not in after
    assert "a step on tiny" in after
    assert "this is the best so far; the same command continues it" in " ".join(after.split())
    assert "\x1b[?25h" in rest, "the cursor is back"
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stderr, "30,000 evaluations" in done.stdout) == ("", True)
