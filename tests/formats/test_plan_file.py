"""Plan files: what is written reads back, and what is broken is refused with one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import TINY_PLAN, refused, simulate_command, write_tiny_files

from placewise.core.errors import PlanError
from placewise.core.plan import Plan


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the tiny graph, its cluster and a plan."""
    write_tiny_files(tmp_path)
    return tmp_path


def test_a_saved_plan_is_the_same_when_loaded(tmp_path: Path) -> None:
    findings: dict[str, Any] = {"graph_digest": "ab", "cluster": "c", "strategy": "heft", "parameters": {"k": 1}, "seed": 3}
    numbers: dict[str, Any] = {"evaluations": 5, "step_seconds": 0.25, "bound_seconds": 0.125, "gap": 1.0, "fits": True}
    plan = Plan(("a", "b"), (1, 0), **findings, **numbers, peak_bytes={"a": 7}, history=((1, 0.5), (5, 0.25)))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_another_kind_of_file_is_named(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "plan.json").write_text((files / "graph.json").read_text())
    assert "plan.json: format must be 'placewise-plan', got 'placewise-graph'" in refused(simulate_command(files), capsys)


def test_a_file_must_have_a_name(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = simulate_command(files)
    arguments[-1] = ""
    assert "plan: must not be empty" in refused(arguments, capsys)
    with pytest.raises(PlanError, match="expected the name of a file"):
        Plan.load("")


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"format": "placewise-graph"}, "format must be 'placewise-plan'"),
    ({"version": 2}, "version must be 1"),
    ({"placement": None}, "placement must be a list"),
    ({"placement": ["gpu:0", 1, "gpu:0"]}, "placement[1] must be a device's name"),
    ({"placement": ["gpu:0", "gpu:0"]}, "placement has 2 entries, the graph has 3 groups"),
    ({"placement": ["gpu:0", "tpu:9", "gpu:0"]}, "there is no device 'tpu:9'"),
    ({"order": [0, 1, 2]}, "an order must name each of the 4 ops once"),
    ({"order": [3, 0, 1, 2]}, "the order launches ops[3]"),
    ({"order": [0, 1, 2, -3]}, "order[3] must be a whole number"),
    ({"order": "program"}, "order must be a list"),
    ({"graph_digest": "0123456789abcdef"}, "is for another graph"),
    ({"graph_digest": 7}, "graph_digest must be text"),
    ({"groups": ["a"]}, "groups has 1 names, placement has 3 entries"),
    ({"groups": ["a", "b", 7]}, "groups[2] must be text"),
    ({"seed": -1}, "seed must be a whole number"),
    ({"step_seconds": "fast"}, "step_seconds must be a finite number"),
    ({"fits": 1}, "fits must be true or false"),
    ({"peak_bytes": []}, "peak_bytes must be a dict"),
    ({"peak_bytes": {"gpu:0": -1}}, "peak_bytes: gpu:0 must be a whole number"),
    ({"history": [[1]]}, "history[0] must be [evaluations, seconds]"),
    ({"history": [[1, 0.5], 7]}, "history[1] must be [evaluations, seconds]"),
    ({"history": [[-1, 0.5]]}, "history[0]: evaluations must be a whole number"),
    (
        {"history": [[10**4000, 0.5]]},
        "history[0]: evaluations must be a whole number from 0 to 2**63 - 1, got a whole number",
    ),
    ({"history": [[1.5, 0.5]]}, "history[0]: evaluations must be a whole number"),
    ({"history": [[1, -0.5]]}, "history[0]: seconds must be a finite number at least 0"),
    ({"history": [[1, 10**4000]]}, "history[0]: seconds must be a finite number"),
    ({"devices": []}, "unknown field 'devices'"),
]


@pytest.mark.parametrize(("change", "rule"), BROKEN, ids=[rule for _, rule in BROKEN])
def test_a_broken_plan_is_refused(
    files: Path, change: dict[str, Any], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "plan.json").write_text(json.dumps({**TINY_PLAN, **change}))
    message = refused(simulate_command(files, "--trace", str(files / "trace.json")), capsys)
    assert "plan.json" in message
    assert rule in message
    assert not (files / "trace.json").exists()


def test_a_number_beyond_all_floats_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has no limit for numbers; Python reads 1e999 as infinity."""
    for field in ('"history": [[1, 1e999]]', '"step_seconds": 1e999', '"gap": 1e999'):
        (files / "plan.json").write_text(json.dumps(TINY_PLAN)[:-1] + f", {field}}}")
        assert "must be a finite number" in refused(simulate_command(files), capsys)


def test_a_plan_holds_its_machine(tmp_path: Path) -> None:
    """Only a preset is known by its name alone."""
    from compiled_steps import cpu_cluster, small_training
    from torch import nn

    import placewise as pw

    model, optimizer, batch = small_training()
    step = pw.capture(model, nn.MSELoss(), optimizer, batch)
    plan = pw.place(step, cpu_cluster(2), evaluations=1)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == plan
    assert read.machine is not None
    assert read.machine.digest == cpu_cluster(2).digest
    train_step = read.compile(step)  # without a cluster
    assert [device.name for device in train_step.placed.devices] == ["cpu:0", "cpu:1"]
    train_step.close()
    assert pw.place(step, "4090+3060", evaluations=1).machine is None


def test_the_machine_of_a_plan_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": "placewise-plan", "version": 1, "placement": ["a"], "machine": {"devices": []}}')
    with pytest.raises(PlanError, match=r"plan.json: machine: devices: a cluster needs at least one device"):
        Plan.load(path)
