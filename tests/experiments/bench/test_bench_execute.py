"""`placewise bench execute`."""

import pytest

from placewise.experiments.bench.bench_execute import hand_overs, launches, two_branches

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


def test_the_benchmark_has_a_row_for_each_comparison() -> None:
    rows = [two_branches(rounds=1), launches("cpu", rounds=2), hand_overs(rounds=2)]
    assert all(
        row["microseconds"] > 0 and row["ratio"] == pytest.approx(row["microseconds"] / row["against"]) for row in rows
    )
    assert "2,040 ops" in rows[1]["what"]
