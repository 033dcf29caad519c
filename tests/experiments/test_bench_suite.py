"""placewise bench suite and bench scale-out: equal budgets, scores, resuming, and workers that are killed."""

import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bless import GOLDEN
from builders import refused

from placewise.cli import main
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.experiments.bench import scale_out as bench_scale_out
from placewise.experiments.bench.scale_out import Delayed, Trial
from placewise.experiments.bench.suite import (
    ALL_CLUSTERS,
    ALL_MODELS,
    CLUSTERS,
    MODELS,
    Judged,
    Suite,
    bench_suite,
    markdown,
    scores,
)
from placewise.experiments.papers.recorded_searches import Found
from placewise.models import load_graph
from placewise.search.driver import Progress
from placewise.simulate.simulator import Simulator

CAPTURED = str(GOLDEN / "captured.json.gz")
SUITE = Suite((CAPTURED,), ("2xK80", "4090+3060"), ("gpu-only", "random", "post"), evaluations=24, seeds=2)
COMMAND = ["bench", "suite", CAPTURED, "--clusters", "2xK80,4090+3060", "--strategies", "gpu-only,random,post"]


def times(done: list[Judged]) -> list[list[tuple[float | None, ...]]]:
    return [[found.step_seconds for found in judged.found.values()] for judged in done]


def test_everything_that_is_asked_for_by_name_is_there() -> None:
    assert {model.partition(":")[0] for model in MODELS} <= {*ALL_MODELS}
    assert {*CLUSTERS} < {*ALL_CLUSTERS}


def test_scores_by_hand() -> None:
    """Problem 1: a 2 s (found after 3 s), b 2 s, c nothing. Problem 2: a 4 s, b 1.04 s (after 5 s), c 1 s.

    a and b win the first one together, c the second; b is within 5% of both. The mean of a's ratios 1 and 4 is 2.
    """

    def found(seconds: float | None, after: float = 1.0) -> Found:
        return Found("s", (seconds,), 10, 0.5, histories=() if seconds is None else (((1, 0.0, 9.0), (2, after, seconds)),))

    first = Judged("m", "c", 3, {"a": found(2.0, 3.0), "b": found(2.0), "c": found(None)})
    second = Judged("n", "c", 3, {"a": found(4.0), "b": found(1.04, 5.0), "c": found(1.0)})
    suite = Suite(("m", "n"), ("c",), ("a", "b", "c"))
    rows = {row["strategy"]: row for row in scores(suite, [first, second])}
    assert list(rows) == ["c", "b", "a"]  # one win each: by the mean ratio
    assert [rows[name]["wins"] for name in "abc"] == [1, 1, 1]
    assert [rows[name]["near"] for name in "abc"] == [1, 2, 1]
    assert [rows[name]["fits"] for name in "abc"] == [2, 2, 1]
    assert rows["a"]["mean_ratio"] == pytest.approx(2.0)
    assert rows["b"]["mean_ratio"] == pytest.approx(1.04**0.5)
    assert [rows[name]["seconds_to_near"] for name in "abc"] == [3.0, 3.0, 1.0]
    page = list(markdown(suite, [first, second]))
    assert "| c | 1 | 1 | 1/2 | 1.000 | 1.00 | 1.0 |" in page
    assert "| m on c | 3 | 2,000.0 | 2,000.0 | - |" in page
    assert scores(suite, [])[0]["mean_ratio"] is None
    del second.found["c"]  # stopped before
    problems = {row["strategy"]: row["problems"] for row in scores(suite, [first, second])}
    assert problems == {"a": 2, "b": 2, "c": 1}


def test_equal_budgets_the_same_on_processes_and_from_the_record(tmp_path: Path) -> None:
    done, is_complete = bench_suite(SUITE, run_file=tmp_path / "runs.db")
    assert is_complete
    assert [(judged.model, judged.cluster) for judged in done] == [(CAPTURED, "2xK80"), (CAPTURED, "4090+3060")]
    assert [found.evaluations for found in done[0].found.values()][1:] == [24, 24]
    assert times(bench_suite(SUITE, workers=1)[0]) == times(done)
    again, _ = bench_suite(SUITE, run_file=tmp_path / "runs.db")
    assert again == done  # seconds too


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    told = []

    def stop(judged: Judged, name: str) -> None:
        told.append(name)
        if len(told) == 4:
            raise KeyboardInterrupt

    done, is_complete = bench_suite(SUITE, run_file=tmp_path / "runs.db", on_found=stop)
    assert not is_complete
    assert [list(judged.found) for judged in done] == [["gpu-only", "random", "post"], ["gpu-only"]]
    assert {row["strategy"]: row["fits"] for row in scores(SUITE, done)} == {"gpu-only": 2, "random": 1, "post": 1}
    assert times(bench_suite(SUITE, run_file=tmp_path / "runs.db")[0]) == times(bench_suite(SUITE)[0])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "suite.json"
    rest = ["--budget", "24", "--seeds", "2", "--run-file", str(tmp_path / "runs.db"), "-o", str(output)]
    assert main([*COMMAND, *rest, "--plots", str(tmp_path / "plots")]) == 0
    names = ["suite-captured-json-gz-on-2xk80.svg", "suite-captured-json-gz-on-4090-3060.svg"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == names
    assert capsys.readouterr().out.split()[:2] == ["strategy", "wins"]
    kept = json.loads(output.read_text())
    assert [problem["cluster"] for problem in kept["problems"]] == ["2xK80", "4090+3060"]
    assert main([*COMMAND, *rest, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == kept
    assert main([*COMMAND, *rest, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| strategy | wins |")


def test_wrong_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--run-file", str(tmp_path / "runs.db")]
    assert "3xK80: is neither a file nor a preset" in refused(["bench", "suite", "--clusters", "3xK80", *rest], capsys)
    assert "lenet: is neither a file" in refused(["bench", "suite", CAPTURED, "lenet", *rest], capsys)
    assert "unknown strategy 'none'" in refused(["bench", "suite", "--strategies", "none", *rest], capsys)
    assert "--counts: must be whole numbers" in refused(["bench", "scale-out", "--counts", "1,x"], capsys)
    assert list(tmp_path.iterdir()) == []


# --- scale-out ---


def test_a_delayed_evaluator_says_the_same_later(tmp_path: Path) -> None:
    problem = Problem.of(load_graph(CAPTURED), Cluster.load("2xK80"))
    placements = problem.allowed.argmax(axis=1)[None].repeat(3, axis=0)
    evaluator = Delayed(partial(Simulator, problem, threads=1), 0.02, tmp_path)()
    started = time.monotonic()
    found = evaluator(placements)
    assert time.monotonic() - started >= 0.06
    assert np.array_equal(found.cost, Simulator(problem)(placements).cost)
    assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}.pid"]


def test_workers_are_killed_at_even_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them during 90 evaluations: after 30 and after 60."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr("threading.Timer", lambda seconds, act: type("Now", (), {"start": lambda _: act()})())
    for pid in (11, 12, 13):
        (tmp_path / f"{pid}.pid").touch()
    killer = bench_scale_out._Killer(tmp_path, Trial(evaluations=90), 2)
    counts = []
    for evaluations in range(12, 91, 12):
        killer(Progress(evaluations, 0.0, 0.0, {}))
        counts.append(killer.killed)
    assert counts == [0, 0, 1, 1, 2, 2, 2]
    assert killed == [(11, signal.SIGKILL), (12, signal.SIGKILL)]


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two CPUs of this machine, as one cluster for all searches of a test."""
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.usefixtures("ray_cluster")
def test_killed_workers_change_nothing_on_ray() -> None:
    rows = bench_scale_out.bench_scale_out(Trial((2,), 0.1, 24, kills=1), (CAPTURED, "2xK80"))
    assert [(row["workers"], row["killed"], row["evaluations"], row["same history"]) for row in rows] == [
        (2, 0, 24, "yes"),
        (2, 1, 24, "yes"),
    ]
    assert all(row["wall s"] >= row["ideal s"] == pytest.approx(1.2) for row in rows)
