"""`placewise bench measured`, small."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placewise.cli import main
from placewise.core.errors import StrategyError
from placewise.core.profile import Timing
from placewise.experiments.bench.bench_measured import rank_correlation
from placewise.measure.profiler import Profiling, measure_profile
from placewise.measure.steps import MeasuredSteps, measure_steps
from placewise.models import load_graph

MODEL = "rnnlm:layers=1,hidden=8,steps=2,batch=4,vocab=20"
Bench = Callable[..., tuple[int, str, str]]


def test_ranks_agree_or_do_not() -> None:
    first = np.array([1.0, 2.0, 3.0, 10.0])
    assert rank_correlation(first, first**2) == pytest.approx(1.0)
    assert rank_correlation(first, -first) == pytest.approx(-1.0)
    assert rank_correlation(np.array([1.0, 1.0, 2.0]), np.array([5.0, 5.0, 6.0])) == pytest.approx(1.0)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs `placewise bench measured MODEL` on this many CPU devices; returns its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(cpus: int, *options: str) -> tuple[int, str, str]:
        assert main(["detect", "--cpus", str(cpus), "-o", "here.toml"]) == 0
        capsys.readouterr()
        code = main(["bench", "measured", MODEL, "here.toml", *options])
        return code, *capsys.readouterr()

    return run


def test_placements_are_predicted_and_measured(bench: Bench) -> None:
    code, printed, _ = bench(2, "--strategies", "cpu-only,heft", "--json")
    assert code == 0
    found = json.loads(printed)
    rows = found["measured"]
    assert [row["placement"] for row in rows] == ["cpu-only", "heft"]
    assert all(row["measured ms"] > 0 and row["together ms"] >= 0.99 * row["alone ms"] > 0 for row in rows)
    assert found["median error %"] == pytest.approx(np.mean([abs(row["error %"]) for row in rows]))
    assert abs(found["rank correlation"]) == pytest.approx(1.0)
    assert found["is_complete"]


def test_rounds_are_profiled_and_run_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions are the median over the rounds' profiles; the measured step is the median over all steps."""
    slower, taken = iter([1.0, 4.0, 2.0]), iter([1.0, 3.0, 8.0])

    def scaled(*args: Any, **settings: Any) -> Profiling:
        found, factor = measure_profile(*args, **settings), next(slower)
        timings = {
            signature: {device: Timing(factor, 1) for device in times} for signature, times in found.profile.timings.items()
        }
        return replace(found, profile=replace(found.profile, timings=timings))

    def clocked(*args: Any) -> MeasuredSteps:
        return replace(measure_steps(*args), step_seconds=np.full(5, next(taken)))

    monkeypatch.setattr("placewise.measure.profiler.measure_profile", scaled)
    monkeypatch.setattr("placewise.measure.steps.measure_steps", clocked)
    code, printed, errors = bench(1, "--strategies", "cpu-only,heft", "--rounds", "3", "--json")
    assert code == 0
    found = json.loads(printed)
    predicted = 2e3 * len(load_graph(MODEL).ops)
    for row in found["measured"]:
        assert row["alone ms"] == pytest.approx(predicted)
        assert (row["measured ms"], row["spread %"]) == pytest.approx((3e3, 700 / 3))
        assert row["error %"] == pytest.approx((predicted / 3e3 - 1) * 100)
    assert found["rank correlation"] is None  # both are the same
    assert "round 2 of 3, cpu-only, heft: " in errors
    assert "round 3 of 3, cpu-only, heft: " in errors


@pytest.mark.parametrize(("stopped_in", "expected"), [(1, 130), (2, 0)])
def test_a_stopped_benchmark_prints_what_it_has(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stopped_in: int, expected: int
) -> None:
    rounds = iter([1, 2])

    def profile(*args: Any, **settings: Any) -> Profiling:
        if next(rounds) == stopped_in:
            raise KeyboardInterrupt
        return measure_profile(*args, **settings)

    monkeypatch.setattr("placewise.measure.profiler.measure_profile", profile)
    code, printed, errors = bench(1, "--strategies", "cpu-only", "--rounds", "2", "--json")
    assert code == expected
    assert "placewise: stopped" in errors
    if stopped_in == 2:
        found = json.loads(printed)
        assert [row["placement"] for row in found["measured"]] == ["cpu-only"]
        assert not found["is_complete"]


def test_what_is_not_installed_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise StrategyError("metis: needs pymetis")

    monkeypatch.setattr("placewise.search.planner.Planner.search", missing)
    code, _, errors = bench(1)
    assert code == 2
    assert "metis: needs pymetis" in errors
    assert "nothing to run" in errors
