"""Partitioners: the weights by hand, the parts of graphs whose best cut is plain, and the same answer on one core."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import graph_data, mixed_cluster, op, tensor, tiny_cluster, tiny_graph
from captured import captured_problem
from hypothesis import given
from simulated import Step, gpus, steps, takes

from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.formats.cluster_file import parse_cluster
from placewise.formats.graph_file import parse_graph
from placewise.strategies import make
from placewise.strategies.partition import TOTAL_WEIGHT, Metis, MinCut, Scotch, weigh

PARTITIONERS = ("metis", "scotch", "mincut")
ONE_CORE = """
import json, os, sys
import numpy as np
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from captured import captured_problem
from placewise.strategies import make
problem = captured_problem()
answers = {}
for name in sys.argv[1:]:
    answers[name] = [next(make(name).search(problem, np.random.default_rng(s))).placements.tolist() for s in range(6)]
print(json.dumps(answers))
"""


def placed(name: str, problem: Problem, seed: int = 0, **settings: str) -> list[int]:
    """Returns the first placement of a strategy."""
    first = next(make(name, settings).search(problem, np.random.default_rng(seed)))
    placement: list[int] = problem.check_placements(first.placements)[0].tolist()
    return placement


def two_clusters(num_devices: int = 2) -> Problem:
    """Returns two chains of four equal ops with 90 bytes along each, and one byte from the first to the second."""
    nbytes = [90, 90, 90, 1, 90, 90, 90, 90]
    ops = [takes(1.0, n, reads=[n - 1] if n else [], writes=[n]) for n in range(8)]
    return Step.of(graph_data([tensor(f"t{n}", size) for n, size in enumerate(nbytes)], ops), gpus(num_devices)).problem


def test_weights_of_the_tiny_step() -> None:
    """A copy takes 1 ms and 1 us for each byte. h (2000 bytes) goes from relu to mm and to mm.backward: 3 ms each. y
    (2000) goes from mm to mm.backward, and g (4000) back to mm's group, which updates w: 3 + 5 = 8 ms. w and its update
    are at home. relu takes 1 ms, mm with its update 6, mm.backward 3.
    """
    graph = weigh(Problem.of(tiny_graph(), tiny_cluster()), np.arange(2))
    assert graph.offsets.tolist() == [0, 2, 4, 6]
    assert graph.neighbours.tolist() == [1, 2, 0, 2, 0, 1]
    shares = np.array([3, 3, 3, 8, 3, 8]) / 14
    assert graph.edge_weights == pytest.approx(TOTAL_WEIGHT * shares, abs=1)
    assert graph.vertex_weights == pytest.approx(TOTAL_WEIGHT * np.array([1, 6, 3]) / 10, abs=1)
    assert graph.speeds.tolist() == [1, 1]


def test_a_parameter_that_is_read_away_from_its_home_is_an_edge() -> None:
    rows = [takes(1.0, 0), takes(1.0, 1, reads=[0])]
    problem = Step.of(graph_data([tensor("w", 7, "parameter", home=0)], rows), gpus(2)).problem
    assert weigh(problem, np.arange(2)).neighbours.tolist() == [1, 0]


@given(steps())
def test_graphs_are_symmetric_whole_and_positive(case: tuple[Step, np.random.Generator]) -> None:
    step, rng = case
    problem = step.problem
    devices = np.flatnonzero(rng.random(problem.num_devices) < 0.7)
    devices = devices if len(devices) else np.arange(problem.num_devices)
    graph = weigh(problem, devices)
    matrix = np.zeros((len(graph.groups),) * 2, np.int64)
    rows = np.repeat(np.arange(len(graph.groups)), np.diff(graph.offsets))
    matrix[rows, graph.neighbours] = graph.edge_weights
    assert np.array_equal(matrix, matrix.T)
    assert not matrix.diagonal().any()
    assert np.count_nonzero(matrix) == len(graph.neighbours)
    assert (graph.vertex_weights >= 1).all()
    assert graph.groups.tolist() == np.flatnonzero(problem.allowed[:, devices].any(axis=1)).tolist()
    assert ((graph.speeds > 0) & (graph.speeds <= 1)).all()


@pytest.mark.parametrize("name", PARTITIONERS)
def test_the_light_edge_is_cut(name: str) -> None:
    placement = placed(name, two_clusters())
    assert placement in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_work_is_shared_out_by_speed(name: str) -> None:
    """Twelve ops without edges on GPUs of which the second is twice as fast: four and eight of them."""
    devices = [
        {"name": f"gpu:{d}", "kind": "gpu", "memory": 100, "flops": flops, "bytes_per_second": 1}
        for d, flops in enumerate((1, 2))
    ]
    link = {"latency_seconds": 1, "bytes_per_second": 1}
    cluster = parse_cluster({"name": "unequal", "devices": devices, "default_link": link})
    problem = Problem.of(parse_graph(graph_data([], [op(f"op{n}", n, flops=6) for n in range(12)])), cluster)
    assert weigh(problem, np.arange(2)).speeds.tolist() == [0.5, 1]
    assert np.bincount(placed(name, problem)).tolist() == [4, 8]


def test_scotch_uses_the_cpu_and_the_others_only_for_what_no_gpu_can_run() -> None:
    """The CPU has a tenth of the GPU's speed but half an op's overhead less: 10 flop take 0.6 s and 1 s."""
    rows: list[dict[str, Any]] = [op(f"op{n}", n, flops=10) for n in range(8)]
    rows[3]["devices"] = ["cpu"]
    problem = Problem.of(parse_graph(graph_data([], rows)), mixed_cluster())
    for name in ("metis", "mincut"):
        assert placed(name, problem) == [0, 0, 0, 1, 0, 0, 0, 0]
    on_all = placed("scotch", problem)
    assert on_all[3] == 1
    assert 3 <= sum(on_all) <= 4  # 0.6 / 1.6 of 8 ops, and the one that Scotch may have had elsewhere


def test_more_gpus_than_groups() -> None:
    problem = Step.of(graph_data([tensor("t", 1)], [takes(1.0, 0, writes=[0]), takes(1.0, 1, reads=[0])]), gpus(5)).problem
    assert placed("metis", problem) == [0, 0]
    assert len(placed("mincut", problem)) == 2


def test_metis_proposes_all_of_its_tries_at_once() -> None:
    first = next(make("metis", {"tries": "7"}).search(captured_problem(), np.random.default_rng(0)))
    assert first.placements.shape[0] == 7
    assert len(np.unique(first.placements, axis=0)) > 1


def test_the_answer_is_the_same_on_one_core() -> None:
    """Scotch's own default is a thread for each core, and then its answers change from call to call."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-W", "error", "-c", ONE_CORE, *PARTITIONERS]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    problem = captured_problem()
    for name, answers in json.loads(done.stdout).items():
        for seed, answer in enumerate(answers):
            assert placed(name, problem, seed) == answer[0], (name, seed)


@pytest.mark.parametrize(("name", "package"), [("metis", "pymetis"), ("scotch", "pyscotch"), ("mincut", "pyscotch")])
def test_a_missing_package_is_named_with_its_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StrategyError, match=rf"needs {package}: pip install 'placewise\[partition\]'"):
        next(make(name).search(two_clusters(), np.random.default_rng(0)))


@pytest.mark.parametrize("kind", [Metis, Scotch, MinCut])
def test_imbalance_out_of_range_is_refused(kind: type[Metis | Scotch | MinCut]) -> None:
    for imbalance in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"imbalance must be at least 0\.001 and at most 1"):
            kind(imbalance=imbalance)
    with pytest.raises(ValueError, match="tries must be at least 1"):
        Metis(tries=0)
