"""One device for everything, and all devices in turn."""

import numpy as np
import pytest
from builders import graphs, mixed_cluster, op, tiny_cluster, tiny_graph
from hypothesis import given
from simulated import Step, steps

from placewise.core.errors import ProblemError, StrategyError
from placewise.core.graph import Graph
from placewise.core.problem import Problem
from placewise.formats.cluster_file import parse_cluster
from placewise.strategies import make
from placewise.strategies.single_device import accelerators, cpus, fastest, move_to_allowed

NAMES = ("cpu-only", "gpu-only", "round-robin")


def machine(*kinds: str) -> dict[str, object]:
    """Returns devices d0, d1, ... of these kinds."""
    speeds = {"memory": 1000, "flops": 1, "bytes_per_second": 1}
    devices = [{"name": f"d{i}", "kind": kind, **speeds} for i, kind in enumerate(kinds)]
    link = {"latency_seconds": 1, "bytes_per_second": 1}
    return {"name": "machine", "devices": devices, "default_link": link}


def step_of(kinds: tuple[str, ...], *only: str) -> Problem:
    """Returns a group for each entry, that can run on that kind of device alone ("": on all), on these devices."""
    rows = [op(f"op{i}", i, flops=1) | ({"devices": [kind]} if kind else {}) for i, kind in enumerate(only)]
    graph = {"format": "placewise-graph", "version": 1, "name": "g", "tensors": [], "ops": rows, "outputs": []}
    return Step.of(graph, machine(*kinds)).problem


def placements(name: str, problem: Problem, **settings: str) -> list[list[int]]:
    """Returns all placements that a strategy proposes, which must all be valid."""
    proposals = list(make(name, settings).search(problem, np.random.default_rng(0)))
    found: list[list[int]] = []
    for proposal in proposals:
        found += problem.check_placements(proposal.placements).tolist()
    return found


def test_cpu_only_is_the_first_cpu_that_can() -> None:
    """Devices are gpu, cpu, cpu: all is on d1, but what only a GPU can run is on d0."""
    assert placements("cpu-only", step_of(("gpu", "cpu", "cpu"), "", "gpu", "cpu")) == [[1, 0, 1]]
    with pytest.raises(StrategyError, match="cpu-only needs a CPU, and machine has none"):
        placements("cpu-only", step_of(("gpu", "gpu"), "", "gpu"))


def test_gpu_only_has_a_row_for_each_gpu() -> None:
    """Devices are cpu, gpu, gpu: what only a CPU can run is on d0 in both rows."""
    assert placements("gpu-only", step_of(("cpu", "gpu", "gpu"), "", "cpu", "gpu")) == [[1, 0, 1], [2, 0, 2]]
    assert placements("gpu-only", step_of(("cpu", "cpu"), "", "cpu")) == [[0, 0], [1, 1]]  # no GPU


def test_round_robin_deals_groups_in_turn() -> None:
    """Devices are gpu, cpu, gpu: groups 0 to 4 are on d0, d2, d0, d2, d0, or on d0, d1, d2, d0, d1."""
    problem = step_of(("gpu", "cpu", "gpu"), "", "", "", "cpu", "")
    assert placements("round-robin", problem) == [[0, 2, 0, 1, 0]]
    assert placements("round-robin", problem, devices="all") == [[0, 1, 2, 1, 1]]
    with pytest.raises(StrategyError, match="devices must be one of gpus, all, it is 'some'"):
        make("round-robin", {"devices": "some"})


def test_groups_move_to_the_cpu_and_else_to_the_first_device() -> None:
    """d0 is a TPU, d1 a GPU, d2 a CPU. A group for GPUs and CPUs that is wanted on d0 is on d2; one for GPUs is on d1."""
    problem = step_of(("tpu", "gpu", "cpu"), "", "gpu", "cpu")
    allowed = np.array([[False, True, True], [False, True, False], [False, False, True]])
    problem = Problem(problem.graph, problem.cluster, problem.grouping, problem.merged, problem.op_seconds, allowed)
    assert move_to_allowed(problem, np.zeros((1, 3), np.int64)).tolist() == [[2, 1, 2]]
    assert accelerators(problem).tolist() == [0, 1]


def test_fastest_is_the_first_of_equals() -> None:
    """Of two equal GPUs the first; of a GPU (0.5 s overhead for each of 4 ops) and a CPU that takes no time, the CPU."""
    assert fastest(Problem.of(tiny_graph(), tiny_cluster()), np.array([0, 1])) == 0
    rows = [op(f"op{i}", i, flops=1, seconds={"cpu": 0}) for i in range(4)]
    graph = {"format": "placewise-graph", "version": 1, "name": "g", "tensors": [], "ops": rows, "outputs": []}
    problem = Problem.of(Step.of(graph, machine("cpu")).problem.graph, mixed_cluster())
    assert fastest(problem, np.array([0, 1])) == 1


def is_refused(name: str, problem: Problem) -> bool:
    """Returns whether a strategy can't be used here, after it has said so."""
    if name != "cpu-only" or cpus(problem):
        return False
    with pytest.raises(StrategyError, match="cpu-only needs a CPU"):
        placements(name, problem)
    return True


@pytest.mark.parametrize("name", NAMES)
@given(graph=graphs())
def test_any_graph_is_placed(name: str, graph: Graph) -> None:
    for cluster in (mixed_cluster(), tiny_cluster(), parse_cluster(machine("cpu"))):
        try:
            problem = Problem.of(graph, cluster)
        except ProblemError:
            continue  # the machine can't run it
        if not is_refused(name, problem):
            assert all(len(row) == problem.num_groups for row in placements(name, problem))


@pytest.mark.parametrize("name", NAMES)
@given(drawn=steps())
def test_any_grouping_is_placed(name: str, drawn: tuple[Step, np.random.Generator]) -> None:
    problem = drawn[0].problem
    if is_refused(name, problem):
        return
    assert len(placements(name, problem)) == (len(accelerators(problem)) if name == "gpu-only" else 1)
