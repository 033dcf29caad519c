"""bench curve: the best step against the clock."""

import pytest
from bless import GOLDEN

from placewise.experiments.bench import curve as bench_curve
from placewise.strategies import STRATEGIES


def test_every_strategy_has_a_row_with_what_it_knew_at_each_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_curve, "SECONDS", 0.05)
    monkeypatch.setattr(bench_curve, "STRATEGIES", {n: STRATEGIES[n] for n in ("expert", "random", "auto")})
    rows = bench_curve.bench_curve((str(GOLDEN / "captured.json.gz"), "2xK80"))
    assert {row["strategy"] for row in rows} == {"expert", "random", "auto"}
    for row in rows:
        known = [row[f"ms at {moment:g} s"] for moment in bench_curve.MOMENTS]
        found = [ms for ms in known if ms != "-"]
        assert found == sorted(found, reverse=True)
        assert found[-1] > 0
    assert rows[0]["s to 5%"] != "-"
    assert rows == sorted(rows, key=lambda row: row["ms at 10 s"])
