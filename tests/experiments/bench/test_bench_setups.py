"""placewise bench setups: the table, the page, and an error where something differs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import refused

from placewise.cli import main
from placewise.experiments.bench.bench_setups import in_total, setups_page
from placewise.experiments.training_setups import all_setups, find_setup
from placewise.experiments.training_setups.agreement import DIFFERENT, EQUAL_BITS, EQUAL_TO_ROUNDING, REFUSED, Agreement
from placewise.experiments.training_setups.trials import Trial

TRIALS = [
    Trial(find_setup("vae"), Agreement(EQUAL_BITS), 0.5),
    Trial(find_setup("gpt"), Agreement(EQUAL_TO_ROUNDING, 1.5e-6, "blocks.0.qkv.weight", 0.5, "oneDNN", 2), 0.5),
    Trial(find_setup("mlp-lbfgs"), Agreement(REFUSED, why="a | b"), 0.5),
]


@pytest.fixture
def given_trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    trials = list(TRIALS)
    monkeypatch.setattr("placewise.experiments.training_setups.trials.try_setups", lambda *_: (trials, True))
    return trials


def test_the_page() -> None:
    page = "\n".join(setups_page(TRIALS))
    counts = "3 setups: 1 equal bits, 1 equal to rounding, 1 refused; with plain kernels 1 more have equal bits"
    assert f"**{counts}.**" in page
    assert "| vae | variational autoencoder | Adam | float32 |  | equal bits |  |  |" in page
    assert "| equal to rounding, by oneDNN | 1.5e-06 (blocks.0.qkv.weight) | 2 tensors left to rounding |" in page
    assert "| tied weights, norm clipped at 1.0 |" in page
    assert "a \\| b" in page


def test_the_command(tmp_path: Path, given_trials: list[Trial], capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "setups.md"
    assert main(["bench", "setups", "vae", "gpt", "-o", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == in_total(TRIALS)
    assert page.read_text().splitlines() == "\n".join(setups_page(TRIALS)).splitlines()
    assert main(["bench", "setups", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["setups"]
    assert [row["setup"] for row in rows] == ["vae", "gpt", "mlp-lbfgs"]
    assert rows[1]["result"] == "equal to rounding"
    given_trials[0] = replace(TRIALS[0], agreement=Agreement(DIFFERENT, 0.5, "mean.weight", 100.0, why="too much"))
    assert main(["bench", "setups"]) == 1
    assert capsys.readouterr().err == "placewise: these setups don't train as in eager code: vae\n"


def test_wrong_names_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    assert "there is no setup 'gtp': did you mean" in refused(["bench", "setups", "gtp", "-o", str(page)], capsys)
    assert not page.exists()


def test_every_setup_has_words_for_the_table() -> None:
    for setup in all_setups().values():
        assert setup.name == setup.name.lower()
        assert " " not in setup.name
        assert setup.model
        assert setup.optimizer.words
        assert setup.precision
