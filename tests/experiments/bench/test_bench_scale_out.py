"""bench scale-out: delayed evaluations, and workers that are killed."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from captured import GOLDEN
from command_line import refused

from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.experiments.bench.bench_scale_out import Delayed, Killer, ScaleOut
from placewise.models import load_graph
from placewise.search.driver import Progress
from placewise.simulate.simulator import Simulator

CAPTURED = str(GOLDEN / "captured.json.gz")


def test_a_delayed_evaluator_says_the_same_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    problem = Problem.of(load_graph(CAPTURED), Cluster.load("2xK80"))
    placements = problem.allowed.argmax(axis=1)[None].repeat(3, axis=0)
    found = Delayed(partial(Simulator, problem, threads=1), 0.5, tmp_path)()(placements)
    assert slept == [1.5]
    assert np.array_equal(found.cost, Simulator(problem)(placements).cost)
    assert [path.name for path in tmp_path.iterdir()] == [f"{os.getpid()}.pid"]


def test_workers_are_killed_at_even_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them during 90 evaluations: after 30 and after 60."""
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr("threading.Timer", lambda seconds, act: type("Now", (), {"start": lambda _: act()})())
    for pid in (11, 12, 13):
        (tmp_path / f"{pid}.pid").touch()
    killer = Killer(tmp_path, kills=2, evaluations=90, delay_seconds=0.5)
    counts = []
    for evaluations in range(12, 91, 12):
        killer(Progress(evaluations, 0.0, 0.0, {}))
        counts.append(killer.killed)
    assert counts == [0, 0, 1, 1, 2, 2, 2]
    assert killed == [(11, signal.SIGKILL), (12, signal.SIGKILL)]


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two CPUs of this machine, as one cluster for all searches of a test."""
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.usefixtures("ray_cluster")
def test_killed_workers_change_nothing_on_ray() -> None:
    rows = ScaleOut(CAPTURED, "2xK80", budget=24, delay=0.1, counts=("2",), kills=1).run().data["scale-out"]
    assert [(row["workers"], row["killed"], row["evaluations"], row["same history"]) for row in rows] == [
        (2, 0, 24, "yes"),
        (2, 1, 24, "yes"),
    ]
    assert all(row["wall s"] >= row["ideal s"] == pytest.approx(1.2) for row in rows)


def test_a_wrong_number_of_workers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--counts: must be whole numbers" in refused(["bench", "scale-out", "--counts", "1,x"], capsys)
