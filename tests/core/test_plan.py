"""Plans: which graphs they are for, and how they print."""

import json
from pathlib import Path

import pytest
from builders import tiny_data
from command_line import refused, simulate_command, write_tiny_files

from placewise.cli import main
from placewise.core.plan import Plan


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the tiny graph, its cluster and a plan."""
    write_tiny_files(tmp_path)
    return tmp_path


def test_a_plan_of_a_placement_alone_prints() -> None:
    assert str(Plan(("gpu:0",))) == "? a step on None (None, ? evaluations, seed None)"


def test_a_plan_holds_under_another_name_of_the_graph(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step is `Sequential` in Python and `my_project.train:step` on the command line."""
    graph, cluster, plan = (str(files / name) for name in ("graph.json", "cluster.toml", "plan.json"))
    assert main(["place", graph, "--cluster", cluster, "--budget", "1", "-o", plan]) == 0
    (files / "graph.json").write_text(json.dumps({**tiny_data(), "name": "the same"}))
    assert main(simulate_command(files)) == 0
    data = tiny_data()
    data["tensors"][0]["nbytes"] += 1
    (files / "graph.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert "is for another graph" in refused(simulate_command(files), capsys)
