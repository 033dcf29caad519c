"""bench learning: averages of the samples, and the best step."""

import pytest
from captured import GOLDEN

from placewise.experiments.bench import bench_learning
from placewise.experiments.bench.bench_learning import CONTESTANTS, Learning


def test_it_counts_the_last_samples_and_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_learning, "BUDGET", 120)
    monkeypatch.setattr(bench_learning, "SEEDS", 2)
    rows = Learning((str(GOLDEN / "captured.json.gz"),)).run().data["learning"]
    assert [(row["strategy"], row["variant"]) for row in rows] == [contestant[:2] for contestant in CONTESTANTS]
    for row in rows:
        assert 0 < row["best"] <= row["last samples"] * (1 + 1e-9)
        assert row["machine"] == "4xK80"
    by_name = {row["strategy"]: row for row in rows if row["variant"] == "default"}
    assert by_name["post"]["last samples"] < by_name["random"]["last samples"]
    assert by_name["heft"]["± of best"] == 0
