"""placewise reproduce changes: plans on a machine that changed after they were made."""

import json
from pathlib import Path

import numpy as np
import pytest
from captured import GOLDEN
from command_line import refused
from simulated import Step, gpus, takes

from placewise.cli import main
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.experiments.papers import changed_machines
from placewise.experiments.papers.changed_machines import (
    CHANGES,
    SLOWER,
    ChangedRow,
    carry_to,
    measure_recoveries,
    recovery_table,
    with_slow_links,
    without_a_gpu,
)
from placewise.experiments.papers.reproduction import Effort

ROW = ChangedRow("net", str(GOLDEN / "captured.json.gz"), "4xK80", str(GOLDEN / "captured.json.gz"))
EFFORT = Effort(evaluations=24, own_evaluations=8, seeds=2)


def test_what_was_on_a_lost_gpu_goes_where_the_least_work_is() -> None:
    """Ops of 3, 1 and 1 s are on gpu:0, gpu:1 and gpu:2, and two more of 1 s on gpu:2, which is lost: gpu:1 gets the first
    and the second of the three, and then both have 3 s, so gpu:0 gets the last."""
    graph = {
        "format": "placewise-graph", "version": 1, "name": "g", "tensors": [], "outputs": [],
        "ops": [takes(seconds, n) for n, seconds in enumerate((3, 1, 1, 1, 1))],
    }  # fmt: skip
    problem = Step.of(graph, gpus(3)).problem
    changed = Problem.of(problem.graph, without_a_gpu(problem.cluster))
    assert carry_to(problem, np.array([0, 1, 2, 2, 2]), changed).tolist() == [0, 1, 1, 1, 0]
    assert carry_to(problem, np.array([0, 1, 0, 1, 1]), changed).tolist() == [0, 1, 0, 1, 1]


def test_the_changes() -> None:
    whole = Cluster.load("4xK80")
    less, slow = without_a_gpu(whole), with_slow_links(whole)
    assert less.device_names == ("gpu:0", "gpu:1", "gpu:2", "cpu:0")
    assert slow.device_names == whole.device_names
    last = whole.device_names.index("gpu:3")
    for a in range(5):
        for b in range(5):
            if a != b:
                expected = SLOWER if last in (a, b) else 1.0
                assert whole.bytes_per_second[a, b] / slow.bytes_per_second[a, b] == pytest.approx(expected)


def test_recoveries_are_the_same_twice_and_go_on_from_their_record(tmp_path: Path) -> None:
    systems = {"Post": "post", "placewise": "auto"}
    first = measure_recoveries(EFFORT, rows=(ROW,), systems=systems)
    assert [(found.system, found.change) for found in first.results] == [
        (system, change.name) for system in systems for change in CHANGES
    ]
    for found in first.results:
        assert found.before is not None
        assert found.carried is not None
        assert found.recovered is not None
    runs = tmp_path / "runs.db"
    assert measure_recoveries(EFFORT, rows=(ROW,), systems=systems, run_file=runs) == first
    assert measure_recoveries(EFFORT, rows=(ROW,), systems=systems, run_file=runs) == first
    assert len(recovery_table(first)[1]) == 4
    # placewise begins at its old plan, so it can't end with a worse one
    assert all(f.recovered <= f.carried for f in first.results if f.system == "placewise" and f.recovered and f.carried)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(changed_machines, "ROWS", (ROW,))
    command = ["reproduce", "changes", "--quick", "--columns", "Post"]
    assert main([*command, "-o", str(tmp_path / "found.json")]) == 0
    assert "a GPU less" in capsys.readouterr().out
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["system"] for row in rows] == ["Post", "Post"]
    assert "--columns: changes has no column 'Nothing'; its columns are Post" in refused(
        [*command[:3], "--columns", "Nothing"], capsys
    )
    assert "--models: changes has no model 'Nothing' in its quick version" in refused(
        [*command, "--models", "Nothing"], capsys
    )
    assert "--plots can't be used with changes" in refused([*command, "--plots", str(tmp_path)], capsys)
    assert "--slower-links can't be used with changes" in refused([*command, "--slower-links", "2"], capsys)
