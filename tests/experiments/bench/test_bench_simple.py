"""The fastest and the simple plan of small models."""

from pathlib import Path

import pytest

from placewise.cli import main
from placewise.experiments.bench.bench_simple import _summary


def test_the_page_says_how_it_was_made_and_has_a_row_for_each_pair(tmp_path: Path) -> None:
    page = tmp_path / "simple.md"
    model = "rnnlm:layers=2,hidden=8,steps=2,batch=2,vocab=9"
    rows = str(tmp_path / "rows.json")
    command = ["bench", "simple", model, "--seconds", "0.3", "-o", str(page), "--rows-file", rows, "--clusters"]
    assert main([*command, "2xK80"]) == 0
    text = page.read_text()
    with pytest.MonkeyPatch.context() as patch:  # what is in the rows' file is not placed again
        patch.setattr("placewise.search.planner.place", None)
        assert main([*command, "2xK80"]) == 0
    assert page.read_text() == text
    assert main([*command, "2xK80", "--simple", "3%"]) == 2
    assert f"placewise bench simple {model} --clusters 2xK80 --seconds 0.3 -o docs/results/simple.md" in text
    assert f"| {model} | 2xK80 | " in text


def test_medians_count_the_plans_that_use_several_devices() -> None:
    """Cuts of 10, 12 and 7 become 2, 3 and 0: 5, 4 and infinitely many times fewer, in the median 5; two have 5 or more."""

    def figures(cuts: int, step_seconds: float) -> dict[str, object]:
        interval = (step_seconds, 1.1 * step_seconds)
        return {"cuts": cuts, "copies": 2 * cuts, "step_seconds": step_seconds, "interval_seconds": interval}

    pairs = [(10, 2), (12, 3), (7, 0), (0, 0)]
    rows = [{"fastest": figures(one, 1.0), "simple": figures(other, 1.02)} for one, other in pairs]
    text = _summary([*rows, {"model": "does not fit"}])
    assert text.startswith("3 of 4 fastest plans use several devices.")
    assert "5 times fewer cuts and 5 times fewer copies, and takes +2.0%; 2 have at least 5 times fewer cuts" in text
    assert "10.0% above the predicted step for the fastest plan, 10.0% for the simple one" in text
