"""Benchmarks are discovered automatically."""

from dataclasses import MISSING
from pathlib import Path
from typing import get_args

import pytest
from captured import GOLDEN

from placewise.experiments import bench
from placewise.experiments.bench import Kind, find_benchmarks
from placewise.experiments.bench.bench_capture import CaptureSpeed
from placewise.experiments.bench.bench_simulate import SimulatorSpeed

FILES = sorted(Path(bench.__path__[0]).glob("bench_*.py"))
SMALL = "rnnlm:layers=1,hidden=4,steps=2,batch=2,vocab=5"


def test_every_file_is_a_benchmark_of_its_name() -> None:
    found = find_benchmarks()
    assert {name.replace("-", "_") for name in found} == {path.stem.removeprefix("bench_") for path in FILES}
    assert len(found) >= 13


@pytest.mark.parametrize("name", find_benchmarks())
def test_a_benchmark_has_a_summary_and_options_that_can_be_left_out(name: str) -> None:
    benchmark = find_benchmarks()[name]
    assert benchmark.summary()
    assert not benchmark.summary().endswith(".")
    for entry in benchmark.options():
        assert entry.metadata["kind"] in get_args(Kind)
        assert entry.default is not MISSING or entry.name in ("model", "cluster")


def test_rows_are_data_and_a_table() -> None:
    found = CaptureSpeed((SMALL,)).run()
    (row,) = found.data["capture"]
    assert (row["model"], row["µs per op"]) == (SMALL, pytest.approx(row["seconds"] / row["ops"] * 1e6))
    assert found.text.splitlines()[0].split()[:2] == ["model", "ops"]


def test_every_way_to_simulate_has_a_speed() -> None:
    rows = SimulatorSpeed((str(GOLDEN / "captured.json.gz"),)).run().data["simulate"]
    assert [row["placements"] for row in rows] == ["random", "parts"]
    assert all(speed > 0 for row in rows for speed in list(row.values())[2:])
    assert list(rows[0])[2:] == ["time", "time+memory", "all cores", "priority", "priority, all cores", "plain Python"]
