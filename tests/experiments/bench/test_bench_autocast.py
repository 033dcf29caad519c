"""placewise bench autocast: rehearsed on CPU devices; another training is an error."""

import json

import pytest
import torch
from command_line import refused

from placewise.cli import main
from placewise.experiments.bench import bench_autocast


@pytest.mark.filterwarnings("ignore")
def test_a_rehearsal_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["bench", "autocast", "llama", "--steps", "3", "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["autocast"]
    assert [row["placement"] for row in rows] == ["one CPU", "two CPUs, in two parts", "two CPUs, at random"]
    for row in rows:
        assert row["model"] == "llama"
        assert row["result"] in ("equal bits", "equal to rounding")
        assert row["rounding"] > 0


@pytest.mark.parametrize(("losses", "result"), [((2.0, 1.0), "equal bits"), ((2.0, 1.02), "equal to rounding")])
def test_losses_within_the_noise_are_rounding(losses: tuple[float, float], result: str) -> None:
    assert compared(*losses)["result"] == result


def test_losses_beyond_the_noise_are_different() -> None:
    """The noise of step 2 is 0.01, and three times that is allowed."""
    assert compared(2.0, 1.04)["result"] == "DIFFERENT"
    assert compared(2.0001, 1.0)["result"] == "DIFFERENT", "step 1 has no noise but that of its last place"
    assert compared(2.0, float("nan"))["result"] == "DIFFERENT"


def compared(first: float, second: float) -> dict[str, object]:
    names = ("loss of step 1", "loss of step 2")
    found, expected = dict(zip(names, (first, second), strict=True)), dict(zip(names, (2.0, 1.0), strict=True))
    return bench_autocast._compared("m", "p", found, expected, {"loss of step 2": 0.01})


def test_wrong_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no model 'lama': did you mean" in refused(["bench", "autocast", "lama", "--device", "cpu"], capsys)
    if not torch.cuda.is_available():
        assert "--device cpu rehearses" in refused(["bench", "autocast"], capsys)
