"""placewise memory, and what place, simulate and report do where memory is tight."""

import json
from pathlib import Path

import pytest
from builders import graph_data, tensor
from simulated import gpus, takes

from placewise.cli import main
from placewise.core.plan import Plan
from placewise.formats.cluster_file import parse_cluster, write_cluster
from placewise.formats.files import write_bytes
from placewise.report.memory_picture import draw_memory_curve


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a graph and a cluster, where the commands run.

    Twelve layers make 10 bytes each from those of the layer before, in 1 s; the backward pass reads them in the other order,
    in 1 s each, and each time makes a gradient of 10 bytes from the last one. So 24 s are the least on one GPU.
    """
    tensors = [tensor("x", 10, "input", home=0), *(tensor(f"t{n}", 10) for n in range(24))]
    ops = [takes(1, n, [n], [n + 1]) | {"name": f"layers.{n}.op"} for n in range(12)]
    for n in range(12, 24):
        row = takes(1, n, [24 - n, n], [n + 1], phase="backward")
        ops.append(row | {"name": f"layers.{23 - n}.op.backward"})
    write_bytes(tmp_path / "graph.json", json.dumps(graph_data(tensors, ops, [24])).encode())
    write_cluster(parse_cluster(gpus(1)), tmp_path / "cluster.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


WHERE = ["--cluster", "cluster.toml"]


def test_place_recomputes_where_memory_is_tight(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", "graph.json", *WHERE, "--budget", "20", "-o", "roomy.json"]) == 0
    roomy = Plan.load("roomy.json")
    assert not roomy.rewrites
    need = roomy.peak_bytes["gpu:0"]
    limit = [*WHERE, "--memory", f"gpu:0={need * 7 // 10}"]
    capsys.readouterr()
    assert main(["place", "graph.json", *limit, "--budget", "20", "-o", "tight.json", "--report", "page.html"]) == 0
    assert "to fit in memory: recomputes " in capsys.readouterr().out
    tight = Plan.load("tight.json")
    assert tight.rewrites
    assert tight.fits
    assert tight.peak_bytes["gpu:0"] <= need * 7 // 10
    assert roomy.step_seconds == 24.0
    assert tight.step_seconds is not None
    assert 25.0 <= tight.step_seconds <= 34.0
    assert main(["simulate", "graph.json", *limit, "--plan", "tight.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == tight.step_seconds
    assert found["peak_bytes"] == tight.peak_bytes
    assert main(["report", "tight.json", "roomy.json", "--graph", "graph.json", *limit, "-o", "page.html"]) == 0
    refused = main(["place", "graph.json", *limit, "--budget", "20", "--no-recompute", "--no-park", "-o", "none.json"])
    assert refused == 3
    assert not Path("none.json").exists()


def test_the_curve_never_rises(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "graph.json", *WHERE, "--budget", "5", "--json", "-o", "curve.svg"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["share"] for point in points] == [1.0, 0.8, 0.6, 0.4, 0.2]
    seconds = [point["step_seconds"] if point["fits"] else float("inf") for point in points]
    assert seconds == sorted(seconds)
    assert seconds[0] == 24.0 < seconds[1] < 30.0
    assert not points[-1]["fits"]
    assert "nothing fits" in Path("curve.svg").read_text()
    assert main(["memory", "graph.json", *WHERE, "--budget", "5"]) == 0
    assert "recomputes " in capsys.readouterr().out


def test_the_picture_has_a_dot_for_each_step_that_fits() -> None:
    picture = draw_memory_curve("a < b", [10, 20, 40], [float("inf"), 2.0, 1.0])
    assert picture.count("<circle") == 2
    assert picture.count("nothing fits") == 1
    assert "a &lt; b" in picture
    assert [f">{tick}</text>" in picture for tick in ("0 s", "500 ms", "1 s", "1.5 s", "2.5 s", "3 s")] == [True] * 5 + [
        False
    ]
