"""placewise place --tensorboard: learning curves that TensorBoard reads."""

import json
import sys
from pathlib import Path

import pytest
from captured import GOLDEN
from command_line import refused
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from placewise.cli import main

PLACE = ["place", str(GOLDEN / "captured.json.gz"), "--cluster", "2xK80", "--strategy", "post", "--budget", "120", "--json"]


def test_curves_for_tensorboard_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLACE, "--tensorboard", str(tmp_path / "curves")]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    events = EventAccumulator(str(tmp_path / "curves")).Reload()
    expected = {"best_step_seconds", "update", "loss", "entropy", "baseline", "average_seconds", "best_seconds"}
    assert set(events.Tags()["scalars"]) == expected
    best = events.Scalars("best_step_seconds")
    assert [event.step for event in best] == list(range(12, 121, 12))
    assert best[-1].value == pytest.approx(json.loads(captured.out)["step_seconds"], rel=1e-6)
    assert [event.step for event in events.Scalars("loss")] == list(range(24, 121, 12))


def test_curves_that_cannot_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert "file is not a folder" in refused([*PLACE, "--tensorboard", str(tmp_path / "file" / "x")], capsys)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert "pip install 'placewise[learned]'" in refused([*PLACE, "--tensorboard", str(tmp_path / "curves")], capsys)
    assert not (tmp_path / "curves").exists()
