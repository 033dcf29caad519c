"""bench neural: the systems with networks beside the control, from recorded searches."""

from pathlib import Path

import pytest
from captured import GOLDEN

from placewise.core.errors import InputError
from placewise.experiments.bench.bench_neural import CONTESTANTS, NeuralSystems
from placewise.strategies import make

MODEL = str(GOLDEN / "captured.json.gz")


def test_it_compares_the_samples_with_those_of_the_control(tmp_path: Path) -> None:
    options = NeuralSystems((MODEL,), ("even", "spotlight"), budget=40, seeds=2, run_file=str(tmp_path / "runs.db"))
    found = options.run()
    rows = found.data["neural"]
    assert [row["strategy"] for row in rows[:2]] == ["even", "spotlight"]
    assert len(rows) == 1 + sum(contestant.strategy == "spotlight" for contestant in CONTESTANTS)
    for row in rows:
        assert 0 < row["best_seconds"][0] <= row["median"] <= row["best_seconds"][1]
        assert row["median"] <= row["first_samples"]
    assert 0 < rows[1]["entropy"] < 1.7
    again = NeuralSystems((MODEL,), ("even", "spotlight"), budget=40, seeds=2, run_file=str(tmp_path / "runs.db")).run()
    assert again.data == found.data


def test_pictures_have_the_control_as_well(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    NeuralSystems((MODEL,), ("defaults",), budget=120, seeds=1, plots=str(tmp_path)).run()
    (picture,) = tmp_path.iterdir()
    text = picture.read_text()
    for name in ("even (learns nothing)", "post", "colocrl", "spotlight", "hdp"):
        assert f">{name}<" in text


def test_a_variant_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="--variants: none of spotligth is a variant"):
        NeuralSystems((MODEL,), ("spotligth",)).run()


def test_all_variants_can_be_made() -> None:
    for contestant in CONTESTANTS:
        make(contestant.strategy, dict(contestant.settings))
