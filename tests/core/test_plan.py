"""Plans: their file, what is refused, and `placewise simulate`."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders import refused, tiny_data

from placewise.cli import main
from placewise.core.errors import PlanError
from placewise.core.plan import Plan
from placewise.core.quantities import at_most

CLUSTER = """
name = "tiny"
[[devices]]
name = "gpu:0"
kind = "gpu"
memory = "1MiB"
flops = 1e12
bytes_per_second = 1e11
[[devices]]
name = "gpu:1"
kind = "gpu"
memory = "1MiB"
flops = 1e12
bytes_per_second = 1e11
[default_link]
latency_seconds = 0.001
bytes_per_second = 1e6
"""
PLAN: dict[str, Any] = {"format": "placewise-plan", "version": 1, "placement": ["gpu:0", "gpu:1", "gpu:0"]}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the tiny graph, its cluster and a plan."""
    (tmp_path / "graph.json").write_text(json.dumps(tiny_data()))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    return tmp_path


def command(files: Path, *others: str) -> list[str]:
    paths = [str(files / name) for name in ("graph.json", "cluster.toml", "plan.json")]
    return ["simulate", paths[0], "--cluster", paths[1], "--plan", paths[2], *others]


def test_simulate_prints_what_the_meaning_says(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Relu ends at 1 ms on gpu:0; h takes 1 + 2 ms to gpu:1; mm runs from 4 to 8; y takes 3 ms back; mm.backward runs from
    11 to 14; g takes 5 ms; the update runs from 19 to 21.
    """
    assert main(command(files, "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said) == ["step_seconds", "fits", "peak_bytes", "start", "end", "copies"]
    assert said["step_seconds"] == pytest.approx(0.021)
    assert said["fits"] is True
    assert said["peak_bytes"] == {"gpu:0": 9000, "gpu:1": 10000}
    assert said["start"] == pytest.approx([0, 0.004, 0.011, 0.019])
    assert said["end"] == pytest.approx([0.001, 0.008, 0.014, 0.021])
    assert [(c["tensor"], c["from"], c["to"], c["for"]) for c in said["copies"]] == [
        (2, "gpu:0", "gpu:1", 1),
        (3, "gpu:1", "gpu:0", 2),
        (4, "gpu:0", "gpu:1", 3),
    ]


def test_simulate_prints_for_people(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The copies of h, y and g are 8,000 bytes and take 3 + 3 + 5 of 21 ms; gpu:1 runs mm and the update, 6 of 10 ms."""
    assert main(command(files)) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiny on tiny: 21 ms a step\n\ndevice ")
    assert text.endswith(
        "\n\nops in no module split over gpu:0 and gpu:1 (40/60 by time); 3 copies, 7.81 KiB\n"
        "critical path: 48% ops, 52% copies; gpu:1 is busy 29% of the step, channel gpu:0->gpu:1 38%\n"
        "no placement can be more than 110.0% faster: the longest chain of ops takes at least 10 ms; "
        "gpu:0 alone takes 10 ms: more devices can't help\n"
    )


@pytest.mark.parametrize("order", ["program", "priority"])
def test_simulate_in_another_order(files: Path, order: str, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "plan.json").write_text(json.dumps({**PLAN, "order": [0, 1, 2, 3]}))
    assert main(command(files, "--order", order, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(0.021)


def test_a_plan_that_does_not_fit_says_so(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "cluster.toml").write_text(CLUSTER.replace('memory = "1MiB"', "memory = 9500"))
    assert main(command(files)) == 0
    assert "does not fit" in capsys.readouterr().out


def test_a_saved_plan_is_the_same_when_loaded(tmp_path: Path) -> None:
    findings: dict[str, Any] = {"graph_digest": "ab", "cluster": "c", "strategy": "heft", "parameters": {"k": 1}, "seed": 3}
    numbers: dict[str, Any] = {"evaluations": 5, "step_seconds": 0.25, "bound_seconds": 0.125, "gap": 1.0, "fits": True}
    plan = Plan(("a", "b"), (1, 0), **findings, **numbers, peak_bytes={"a": 7}, history=((1, 0.5), (5, 0.25)))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_of_a_placement_alone_prints() -> None:
    assert str(Plan(("gpu:0",))) == "? a step on None (None, ? evaluations, seed None)"


def test_a_plan_holds_under_another_name_of_the_graph(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step is `Sequential` in Python and `my_project.train:step` on the command line."""
    graph, cluster, plan = (str(files / name) for name in ("graph.json", "cluster.toml", "plan.json"))
    assert main(["place", graph, "--cluster", cluster, "--budget", "1", "-o", plan]) == 0
    (files / "graph.json").write_text(json.dumps({**tiny_data(), "name": "the same"}))
    assert main(command(files)) == 0
    data = tiny_data()
    data["tensors"][0]["nbytes"] += 1
    (files / "graph.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert "is for another graph" in refused(command(files), capsys)


def test_another_kind_of_file_is_named(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "plan.json").write_text((files / "graph.json").read_text())
    assert "plan.json: format must be 'placewise-plan', got 'placewise-graph'" in refused(command(files), capsys)


def test_a_file_must_have_a_name(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = command(files)
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
    ({"seed": -1}, "seed must be a whole number"),
    ({"step_seconds": "fast"}, "step_seconds must be a finite number"),
    ({"fits": 1}, "fits must be true or false"),
    ({"peak_bytes": []}, "peak_bytes must be a dict"),
    ({"peak_bytes": {"gpu:0": -1}}, "peak_bytes: gpu:0 must be a whole number"),
    ({"history": [[1]]}, "history[0] must be [evaluations, seconds]"),
    ({"devices": []}, "unknown field 'devices'"),
]


@pytest.mark.parametrize(("change", "rule"), BROKEN, ids=[rule for _, rule in BROKEN])
def test_a_broken_plan_is_refused(
    files: Path, change: dict[str, Any], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "plan.json").write_text(json.dumps({**PLAN, **change}))
    message = refused(command(files, "--trace", str(files / "trace.json")), capsys)
    assert "plan.json" in message
    assert rule in message
    assert not (files / "trace.json").exists()


def test_what_is_at_most_so_much_is_rounded_up() -> None:
    assert [at_most(share) for share in (0.022, 0.02201, 1e-9, 0.0, -0.1)] == ["2.2%", "2.3%", "0.0%", "0.0%", "0.0%"]
