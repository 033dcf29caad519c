"""Problems: where ops can run, placements, orders, and lists of device names."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from builders import graph_of, graphs, mixed_cluster, op, tensor, tiny_cluster, tiny_graph, wired
from hypothesis import given
from hypothesis import strategies as st

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.errors import ProblemError
from placewise.core.graph import Graph
from placewise.core.problem import Problem


def ints(*values: Any) -> Ints:
    return np.array(values, np.int64)


# --- where ops can run ---


def two_kinds(**others: Any) -> Graph:
    """Group 0 runs anywhere, group 1 has an op for the CPU alone, group 2 one that both kinds can run."""
    rows = [op("op0", 0), op("op1", 1, devices=["cpu"]), op("op2", 1), op("op3", 2, devices=["gpu", "cpu"])]
    rows = [row | {"flops": 100} for row in rows]
    rows[0] |= others
    return graph_of([], rows)


def test_a_group_can_run_where_all_of_its_ops_can() -> None:
    problem = Problem.of(two_kinds(), mixed_cluster())
    assert problem.allowed.tolist() == [[True, True], [False, True], [True, True]]
    assert (problem.num_ops, problem.num_groups, problem.num_devices) == (4, 3, 2)
    assert problem.op_groups.tolist() == [0, 1, 1, 2]


def test_the_fastest_device_is_one_that_can_run_the_op() -> None:
    """100 flops take 1.5 s on the GPU and 10 s on the CPU; the ops of group 1 have only the CPU."""
    assert Problem.of(two_kinds(), mixed_cluster()).fastest_seconds.tolist() == [1.5, 10, 10, 1.5]


def test_an_op_that_no_device_can_run_is_refused() -> None:
    with pytest.raises(ProblemError) as caught:
        Problem.of(two_kinds(devices=["tpu"]), mixed_cluster())
    assert str(caught.value) == (
        "graph 'test' on cluster 'mixed': no device can run the group of ops[0] 'op0'; "
        "the cluster's kinds of device are cpu, gpu"
    )


@pytest.mark.parametrize(
    ("what", "op_seconds", "link"),
    [
        ("ops", 5e299, {}),
        ("copies", 1, {"latency_seconds": 9e299}),
        ("copies", 1, {"bytes_per_second": 1e-300}),
        ("launches", 1, {"dispatch_seconds": 9e299}),
    ],
)
def test_a_step_whose_times_can_not_be_added_up_is_refused(what: str, op_seconds: float, link: dict[str, Any]) -> None:
    """Two ops with a tensor between them, on two devices; each time alone is one that files may have."""
    graph, cluster = wired([(0, 1)], 2, seconds=[{"gpu": op_seconds, "cpu": 1}] * 2), mixed_cluster()
    dispatch = link.pop("dispatch_seconds", 0.0)
    links = tuple(dataclasses.replace(entry, **link) for entry in cluster.links)
    cluster = dataclasses.replace(cluster, links=links, dispatch_seconds=dispatch)
    with pytest.raises(ProblemError, match=f"the {what} of a step could take 1e.300 s"):
        Problem.of(graph, cluster)


def test_a_group_whose_ops_have_no_device_in_common_is_refused() -> None:
    graph = graph_of([], [op("a", 0, devices=["gpu"]), op("b", 0, devices=["cpu"])])
    with pytest.raises(ProblemError, match=r"no device can run the group of ops\[0\] 'a'"):
        Problem.of(graph, mixed_cluster())


def test_a_grouping_that_leaves_no_device_is_refused() -> None:
    graph = wired([(0, 1)], 2, devices=[["gpu"], ["cpu"]])
    assert Problem.of(graph, mixed_cluster()).num_groups == 2
    with pytest.raises(ProblemError, match=r"no device can run the group of ops\[0\] 'op0'"):
        Problem.of(graph, mixed_cluster(), "single-consumer")


def test_an_unknown_grouping_is_refused() -> None:
    with pytest.raises(ProblemError, match="unknown grouping 'finest': expected one of colocated"):
        Problem.of(tiny_graph(), tiny_cluster(), "finest")


@pytest.mark.parametrize("grouping", ["colocated", "single-consumer", "name-prefix:1", "module", "coarse:3"])
def test_an_empty_graph_is_a_problem_without_groups(grouping: str) -> None:
    problem = Problem.of(graph_of([], []), tiny_cluster(), grouping)
    assert (problem.num_ops, problem.num_groups) == (0, 0)
    assert problem.check_placements(np.zeros((2, 0), np.int64)).shape == (2, 0)
    assert problem.check_order(ints()).tolist() == []
    assert problem.contract(problem.expand(ints())).tolist() == []
    assert problem.fastest_seconds.tolist() == []


# --- placements ---


def test_good_placements_come_back_as_int64() -> None:
    problem = Problem.of(two_kinds(), mixed_cluster())
    placements = problem.check_placements(np.array([[0, 1, 0], [1, 1, 1]], np.uint8))
    assert placements.dtype == np.dtype(np.int64)
    assert placements.tolist() == [[0, 1, 0], [1, 1, 1]]
    assert problem.check_placements(np.zeros((0, 3), np.int64)).shape == (0, 3)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([0, 1, 0], "placements must be whole numbers of shape [batch, 3], got int64 of shape [3]"),
        ([[0, 1]], "placements must be whole numbers of shape [batch, 3], got int64 of shape [1, 2]"),
        ([[0.0, 1.0, 0.0]], "placements must be whole numbers of shape [batch, 3], got float64 of shape [1, 3]"),
        ([[False, True, False]], "placements must be whole numbers of shape [batch, 3], got bool"),
        ([[0, 1, 0], [0, 1, 2]], "Expected 0 <= device < 2, placement 1 has 2 for group 2."),
        ([[0, -1, 0]], "Expected 0 <= device < 2, placement 0 has -1 for group 1."),
        ([[1, 1, 1], [0, 0, 0]], "placement 1 puts group 1 on 'gpu:0', which can't run all of its ops"),
    ],
)
def test_what_is_no_placement_is_refused(placements: Any, message: str) -> None:
    with pytest.raises(ProblemError) as caught:
        Problem.of(two_kinds(), mixed_cluster()).check_placements(np.array(placements))
    assert str(caught.value).startswith(message)


# --- orders ---


def test_orders_by_hand() -> None:
    """Ops 1 and 2 read what op 0 writes, and op 3 only has to come after 1: 2 and 3 can be swapped."""
    graph = wired([(0, 1), (0, 2)], 4, after=[[], [], [], [1]])
    problem = Problem.of(graph, tiny_cluster())
    for good in ([0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 3, 2]):
        assert problem.check_order(np.array(good, np.int32)).tolist() == good
    for wrong, message in {
        (1, 0, 2, 3): "the order launches ops[1] 'op1' before ops[0] 'op0', which it needs",
        (0, 3, 1, 2): "the order launches ops[3] 'op3' before ops[1] 'op1', which it needs",
        (0, 1, 2): "an order must name each of the 4 ops once",
        (0, 1, 2, 2): "an order must name each of the 4 ops once",
        (0, 1, 2, 4): "an order must name each of the 4 ops once",
        (-1, 1, 2, 3): "an order must name each of the 4 ops once",
        (0.0, 1.0, 2.0, 3.0): "an order must name each of the 4 ops once",
        ((0, 1), (2, 3)): "an order must name each of the 4 ops once",
    }.items():
        with pytest.raises(ProblemError) as caught:
            problem.check_order(np.array(wrong))
        assert str(caught.value) == message


@given(graphs())
def test_program_order_is_an_order(graph: Graph) -> None:
    problem = anywhere(graph)
    assert problem.check_order(np.arange(len(graph.ops))).tolist() == list(range(len(graph.ops)))


# --- plans ---


def anywhere(graph: Graph, grouping: str = "colocated") -> Problem:
    """Returns the problem of a graph whose ops all run on every kind of device."""
    free = dataclasses.replace(graph.ops, devices=(None,) * len(graph.ops))
    return Problem.of(dataclasses.replace(graph, ops=free), mixed_cluster(), grouping)


def test_expand_by_hand() -> None:
    """Ops 0 and 1 are one group under single-consumer, ops 2 and 3 are alone."""
    problem = Problem.of(wired([(0, 1)], 4), tiny_cluster(), "single-consumer")
    assert problem.merged.tolist() == [0, 0, 1, 2]
    assert problem.expand(ints(1, 0, 1)) == ("gpu:1", "gpu:1", "gpu:0", "gpu:1")
    assert problem.contract(["gpu:1", "gpu:1", "gpu:0", "gpu:1"]).tolist() == [1, 0, 1]


@given(data=st.data(), graph=graphs(), grouping=st.sampled_from(["colocated", "single-consumer", "module", "coarse:2"]))
def test_expand_and_contract_are_each_others_inverse(data: st.DataObject, graph: Graph, grouping: str) -> None:
    problem = anywhere(graph, grouping)
    placement = np.array([data.draw(st.integers(0, 1)) for _ in range(problem.num_groups)], np.int64)
    names = problem.expand(placement)
    assert len(names) == graph.num_groups
    assert problem.contract(names).tolist() == placement.tolist()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["gpu:0"], "placement has 1 entries, the graph has 4 groups"),
        (["gpu:0", "gpu:0", "gpu:7", "gpu:0"], "placement[2]: there is no device 'gpu:7'; the devices are gpu:0, gpu:1"),
        (["gpu:0", "gpu:1", "gpu:0", "gpu:0"], "placement[0]: 'gpu:0' splits a group that 'single-consumer'"),
    ],
)
def test_names_that_are_no_placement_are_refused(names: list[str], message: str) -> None:
    problem = Problem.of(wired([(0, 1)], 4), tiny_cluster(), "single-consumer")
    with pytest.raises(ProblemError) as caught:
        problem.contract(names)
    assert str(caught.value).startswith(message)


def test_a_plan_on_a_device_that_cannot_run_it_is_refused() -> None:
    with pytest.raises(ProblemError, match="puts group 1 on 'gpu:0', which can't run all of its ops"):
        Problem.of(two_kinds(), mixed_cluster()).contract(["gpu:0"] * 3)


# --- the problem as a whole ---


def slower(cluster: Cluster) -> Cluster:
    return dataclasses.replace(cluster, dispatch_seconds=1.0)


def test_the_digest_is_of_the_graph_the_cluster_and_the_groups() -> None:
    graph, cluster = wired([(0, 1), (1, 2), (0, 2)], 3), mixed_cluster()
    digest = Problem.of(graph, cluster).digest
    assert Problem.of(graph, cluster).digest == digest
    assert Problem.of(graph, cluster, "coarse:3").digest == digest  # another name for the same groups
    others = [
        Problem.of(graph, cluster, "single-consumer"),
        Problem.of(graph, slower(cluster)),
        Problem.of(dataclasses.replace(graph, name="other"), cluster),
        dataclasses.replace(Problem.of(graph, cluster), op_seconds=np.ones((3, 2))),
    ]
    assert len({digest, *(problem.digest for problem in others)}) == 5


def test_no_column_can_be_written() -> None:
    problem = Problem.of(two_kinds(), mixed_cluster())
    for column in (problem.merged, problem.op_seconds, problem.allowed, problem.op_groups, problem.fastest_seconds):
        assert not column.flags.writeable


def test_a_tensor_of_any_size_is_no_problem() -> None:
    assert Problem.of(graph_of([tensor(nbytes=2**62)], [op(reads=[0])]), tiny_cluster()).num_groups == 1
