"""Whether a gap is the search's or the bound's."""

from placewise.core.cluster import Cluster
from placewise.experiments.bench.bench_gap import Gap, machines


def test_machines_differ_in_one_thing() -> None:
    found = machines(Cluster.load("2xK80"))
    assert list(found) == ["as it is", "copies cost nothing", "without the CPU"]
    assert found["without the CPU"].device_names == ("gpu:0", "gpu:1")
    assert found["copies cost nothing"].device_names == found["as it is"].device_names
    assert list(machines(found["without the CPU"])) == ["as it is", "copies cost nothing"]


def test_every_machine_has_a_bound_and_a_plan() -> None:
    rows = Gap("rnnlm:layers=1,hidden=64,steps=3,batch=8,vocab=50", "2xK80", seconds=0.1).run().data["gap"]
    assert [row["machine"] for row in rows] == ["as it is", "copies cost nothing", "without the CPU", "as it is"]
    assert [row["seconds"] for row in rows] == [0.1, 0.1, 0.1, 0.4]
    for row in rows:
        assert row["bound_seconds"] <= row["step_seconds"] * (1 + 1e-9)
        assert row["gap"] == row["step_seconds"] / row["bound_seconds"] - 1
        assert all(0 <= share <= 1 + 1e-9 for share in [*row["busy"], row["busiest_channel"]])
