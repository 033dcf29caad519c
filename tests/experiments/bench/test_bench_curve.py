"""bench curve: the best step against the clock."""

import numpy as np
from captured import GOLDEN

from placewise.experiments.bench.bench_curve import MOMENTS, BestOverTime, curve_rows


def test_every_strategy_has_a_row_with_what_it_knew_at_each_moment() -> None:
    """a finds 4 s at 0.2 s and 2.05 s at 3 s; b finds 2 s at 6 s; c finds nothing. 2.05 s is within 5% of 2 s."""
    curves = {
        "c": (np.zeros(0), np.zeros(0)),
        "a": (np.array([0.2, 3.0]), np.array([4.0, 2.05])),
        "b": (np.array([6.0]), np.array([2.0])),
    }
    assert MOMENTS == (0.5, 1.0, 2.0, 5.0, 10.0)
    assert [list(row.values()) for row in curve_rows(curves)] == [
        ["b", "-", "-", "-", "-", 2000.0, 6.0],
        ["a", 4000.0, 4000.0, 4000.0, 2050.0, 2050.0, 3.0],
        ["c", "-", "-", "-", "-", "-", "-"],
    ]


def test_it_searches_with_each_strategy() -> None:
    strategies = ("expert", "random", "auto")
    rows = BestOverTime(str(GOLDEN / "captured.json.gz"), "2xK80", strategies, seconds=0.05).run().data["curve"]
    assert {row["strategy"] for row in rows} == {*strategies}
    assert rows[0]["s to 5%"] != "-"
