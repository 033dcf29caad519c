"""`placewise simulate`: what it prints, as JSON and for people."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders import graph_data, op, tensor
from command_line import TINY_CLUSTER_TOML, TINY_PLAN, refused, simulate_command, write_tiny_files

from placewise.cli import main


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with the tiny graph, its cluster and a plan."""
    write_tiny_files(tmp_path)
    return tmp_path


def test_simulate_prints_what_the_meaning_says(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Relu ends at 1 ms on gpu:0; h takes 1 + 2 ms to gpu:1; mm runs from 4 to 8; y takes 3 ms back; mm.backward runs from
    11 to 14; g takes 5 ms; the update runs from 19 to 21.
    """
    assert main(simulate_command(files, "--json")) == 0
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
    assert main(simulate_command(files)) == 0
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
    (files / "plan.json").write_text(json.dumps({**TINY_PLAN, "order": [0, 1, 2, 3]}))
    assert main(simulate_command(files, "--order", order, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(0.021)


def test_a_plan_that_does_not_fit_says_so(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "cluster.toml").write_text(TINY_CLUSTER_TOML.replace('memory = "1MiB"', "memory = 9500"))
    assert main(simulate_command(files)) == 0
    assert "does not fit" in capsys.readouterr().out


def test_disturbed_times_are_near_the_predicted_one(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ops take 10 of 21 ms and copies 11: off by 10% and 20%, the step is at most 1 + 2.2 ms shorter or longer."""
    assert main(simulate_command(files, "--disturb", "10%", "--json")) == 0
    seconds = json.loads(capsys.readouterr().out)["disturbed_seconds"]
    assert len(seconds) == 32
    assert len(set(seconds)) == 32
    assert all(0.021 - 0.0032 <= s <= 0.021 + 0.0032 for s in seconds)
    assert main(simulate_command(files, "--disturb", "0.1")) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "if op times are off by up to 10%: 19.7 ms to 22.6 ms in eight of ten draws, 23 ms in the worst of 32"
    assert sum(0.01965 < s < 0.02265 for s in seconds) in (25, 26)


def test_without_disturbance_nothing_changes(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(simulate_command(files, "--disturb", "0", "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["disturbed_seconds"] == [said["step_seconds"]] * 32


@pytest.mark.parametrize("given", ["50%", "-1%", "ten", "0.5", "nan"])
def test_a_wrong_disturbance_is_refused(files: Path, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(simulate_command(files, f"--disturb={given}"))
    assert "argument --disturb: must be a share of at least 0 and below 50%" in capsys.readouterr().err


def test_devices_that_share_hardware_are_not_disturbed(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--profile" in refused(simulate_command(files, "--disturb", "10%", "--together"), capsys)


def test_a_plan_with_ops_that_are_nowhere_is_disturbed_too(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`again` is nowhere: x, the copy of a, and y take 1 + 2 + 1 ms; off by 10% and 20%, at most 0.6 ms more or less."""
    tensors = [tensor("a", 1000), tensor("b", 1000, stands_for=0), tensor("c", 1000)]
    times: Any = {"seconds": {"gpu": 0.001}}
    ops = [op("x", 0, (), (0,), **times), op("again", 1, (), (1,), optional=True, **times), op("y", 2, (1,), (2,), **times)]
    (files / "graph.json").write_text(json.dumps(graph_data(tensors, ops)))
    (files / "plan.json").write_text(json.dumps({**TINY_PLAN, "placement": ["gpu:0", None, "gpu:1"]}))
    assert main(simulate_command(files, "--disturb", "10%", "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["step_seconds"] == pytest.approx(0.004)
    assert all(0.0034 <= s <= 0.0046 for s in said["disturbed_seconds"])
