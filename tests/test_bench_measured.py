"""`placewise bench measured`, small."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from placewise import bench_measured
from placewise.bench_measured import rank_correlation
from placewise.capture.models import load_graph
from placewise.cli import main
from placewise.core.errors import StrategyError
from placewise.core.profile import Timing
from placewise.execute.profile import Measurements, measure_profile


def test_ranks_agree_or_do_not() -> None:
    first = np.array([1.0, 2.0, 3.0, 10.0])
    assert rank_correlation(first, first**2) == pytest.approx(1.0)
    assert rank_correlation(first, -first) == pytest.approx(-1.0)
    assert rank_correlation(np.array([1.0, 1.0, 2.0]), np.array([5.0, 5.0, 6.0])) == pytest.approx(1.0)


def test_placements_are_predicted_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["detect", "--cpus", "2", "-o", "two.toml"]) == 0
    capsys.readouterr()
    model = "rnnlm:layers=1,hidden=8,steps=2,batch=4,vocab=20"
    assert main(["bench", "measured", model, "two.toml", "--strategies", "cpu-only,heft", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["measured"]
    assert [row["placement"] for row in rows] == ["cpu-only", "heft"]
    assert all(row["measured ms"] > 0 and row["together ms"] >= 0.99 * row["alone ms"] > 0 for row in rows)
    assert found["median error %"] == pytest.approx(np.mean([abs(row["error %"]) for row in rows]))
    assert abs(found["rank correlation"]) == pytest.approx(1.0)


def test_rounds_are_profiled_and_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predictions are the median of what each round's profile says; the measured step is that of all steps."""
    slower = iter([1.0, 4.0, 2.0])

    def scaled(*args: Any, **settings: Any) -> Measurements:
        found, factor = measure_profile(*args, **settings), next(slower)
        timings = {
            signature: {device: Timing(factor, 0.0, 1) for device in times}
            for signature, times in found.profile.timings.items()
        }
        return replace(found, profile=replace(found.profile, timings=timings))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_measured, "measure_profile", scaled)
    assert main(["detect", "--cpus", "1", "-o", "one.toml"]) == 0
    capsys.readouterr()
    model = "rnnlm:layers=1,hidden=8,steps=2,batch=4,vocab=20"
    command = ["bench", "measured", model, "one.toml", "--strategies", "cpu-only,heft", "--rounds", "3", "--json"]
    assert main(command) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [row["alone ms"] for row in found["measured"]] == pytest.approx([2e3 * len(load_graph(model).ops)] * 2)
    assert found["rank correlation"] is None  # they are the same
    assert "round 2 of 3, cpu-only, heft: " in printed.err
    assert "round 3 of 3, cpu-only, heft: " in printed.err


@pytest.mark.parametrize(("stopped_in", "code"), [(1, 130), (2, 0)])
def test_a_stopped_benchmark_prints_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stopped_in: int, code: int
) -> None:
    rounds = iter([1, 2])

    def profile(*args: Any, **settings: Any) -> Measurements:
        if next(rounds) == stopped_in:
            raise KeyboardInterrupt
        return measure_profile(*args, **settings)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_measured, "measure_profile", profile)
    assert main(["detect", "--cpus", "1", "-o", "one.toml"]) == 0
    capsys.readouterr()
    model = "rnnlm:layers=1,hidden=8,steps=2,batch=4,vocab=20"
    command = ["bench", "measured", model, "one.toml", "--strategies", "cpu-only", "--rounds", "2", "--json"]
    assert main(command) == code
    printed = capsys.readouterr()
    assert "placewise: stopped" in printed.err
    if stopped_in == 2:
        found = json.loads(printed.out)
        assert [row["placement"] for row in found["measured"]] == ["cpu-only"]
        assert not found["is_complete"]


def test_what_is_not_installed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise StrategyError("metis: needs pymetis")

    monkeypatch.chdir(tmp_path)
    assert main(["detect", "--cpus", "1", "-o", "one.toml"]) == 0
    monkeypatch.setattr(bench_measured, "run", missing)
    capsys.readouterr()
    assert main(["bench", "measured", "rnnlm:layers=1,hidden=8,steps=2,batch=4,vocab=20", "one.toml"]) == 2
    told = capsys.readouterr().err
    assert "metis: needs pymetis" in told
    assert "there is nothing to run" in told
