"""Many models' predictions in one run: the rows, the summary and the page."""

from pathlib import Path
from typing import Any

import pytest
from command_line import refused

from placewise.cli import main
from placewise.core.errors import ModelError
from placewise.experiments.bench import bench_predictions
from placewise.experiments.bench.bench_predictions import ZOO, Predictions, summary_of
from placewise.experiments.outside_models import NAMES
from placewise.models import load_graph


def row(placement: str, predicted: float, measured: float) -> dict[str, Any]:
    """A row of `bench measured`, in milliseconds."""
    error = (predicted / measured - 1) * 100
    return {"placement": placement, "together ms": predicted, "measured ms": measured, "error %": error, "spread %": 1.0}


def test_the_order_counts_where_placements_differ() -> None:
    """Of three pairs two differ by more than 3%; 100 before 150 was predicted, 100 before 149 was not."""
    rows = [row("gpu-only", 110.0, 100.0), row("auto", 120.0, 150.0), row("m-etf", 105.0, 149.0)]
    found = summary_of(rows)
    assert found["order"] == 0.5
    assert found["median error %"] == pytest.approx(20.0)
    assert found["largest error %"] == pytest.approx(-100 * (1 - 105 / 149))
    assert found["auto / fastest"] == 1.5


def test_what_ran_out_of_memory_does_not_count() -> None:
    lost = {**row("auto", 1.0, 1.0), "measured ms": "-", "error %": "-", "spread %": "-"}
    assert summary_of([lost]) == {
        "median error %": "-", "largest error %": "-", "order": "-", "auto / fastest": "-"
    }  # fmt: skip


def test_each_model_is_in_the_page_and_a_bad_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(options: Any, cluster: Any, tell: Any) -> Any:
        if options.model == ZOO[1]:
            raise ModelError("no such model")
        return [row("gpu-only", 110.0, 100.0), row("auto", 90.0, 100.0)], options.model != ZOO[2]

    monkeypatch.setattr(bench_predictions, "predict_and_measure", measure)
    page = tmp_path / "page.md"
    findings = Predictions("2xK80", page=str(page)).run()
    assert list(findings.data["predictions"]) == [ZOO[0], ZOO[2]]  # stopped there by Ctrl-C
    assert findings.warnings == (f"{ZOO[1]}: no such model",)
    assert not findings.is_complete
    text = page.read_text("utf-8")
    assert f"**`{ZOO[2]}`**\n\n| placement | predicted | measured | error | spread |" in text
    assert "| gpu-only | 110 ms | 100 ms | +10.0% | 1% |" in text
    capsys.readouterr()
    assert "no/such.toml" in refused(["bench", "predictions", "no/such.toml"], capsys)


def test_models_outside_of_the_zoo_are_captured() -> None:
    assert Predictions("2xK80", outside=True)._models()[:2] == tuple(
        f"placewise.experiments.outside_models:{name}" for name in NAMES[:2]
    )
    plain, autocast = (load_graph(f"placewise.experiments.outside_models:unet{end}") for end in ("", "_bf16"))
    assert len(set(autocast.ops.compute.tolist()) - set(plain.ops.compute.tolist())) == 1
    assert main(["bench", "predictions", "2xK80", "--only", "placewise.experiments.outside_models:unett"]) == 2
