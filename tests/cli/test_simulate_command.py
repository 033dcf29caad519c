"""`placewise simulate`: what it prints, as JSON and for people."""

import json
from pathlib import Path

import pytest
from command_line import TINY_CLUSTER_TOML, TINY_PLAN, simulate_command, write_tiny_files

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
