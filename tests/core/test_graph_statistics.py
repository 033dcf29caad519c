"""A graph in numbers, by hand."""

import dataclasses

import numpy as np
import pytest
from builders import graph_of, graphs, op, tensor, tiny_graph, wired
from hypothesis import given

from placewise.core.costs import nominal_seconds
from placewise.core.graph import Graph
from placewise.core.graph_statistics import Statistics, depths, path_seconds


def test_the_tiny_graph_by_hand() -> None:
    """relu (1 ms) feeds mm (4 ms), mm.backward (3 ms) and the update (2 ms) follow: one path of 10 ms, all the work."""
    graph = tiny_graph()
    facts = Statistics.of(graph, nominal_seconds(graph))
    assert dataclasses.asdict(facts) == {
        "num_ops": 4,
        "num_groups": 3,
        "num_tensors": 6,
        "ops_by_phase": {"forward": 2, "backward": 1, "update": 1},
        "ops_by_kind": {"aten.mm": 2, "aten.add_": 1, "aten.relu": 1},
        "flops_by_phase": {"forward": 0, "backward": 0, "update": 0},
        "flops_by_type": {},
        "flops": 0,
        "nbytes_moved": 0,
        "resident_bytes": {"input": 1000, "parameter": 4000},
        "work_seconds": pytest.approx(0.010),
        "critical_path_seconds": pytest.approx(0.010),
        "parallelism": pytest.approx(1.0),
        "widest_level": 1,
        "depth": 4,
    }
    assert list(facts.ops_by_kind) == ["aten.mm", "aten.add_", "aten.relu"]  # most first, then by name


def test_a_diamond_by_hand() -> None:
    """0 (1 s) -> 1 (2 s), 2 (3 s) -> 3 (4 s), and 4 (5 s) apart: the path is 1 + 3 + 4, the work 15."""
    types = ["float32", "tf32", "float32", "float32", "tf32"]
    graph = wired([(0, 1), (0, 2), (1, 3), (2, 3)], 5, flops=[1, 2, 3, 4, 5], nbytes_moved=[10] * 5, compute=types)
    seconds = np.array([1.0, 2, 3, 4, 5])
    facts = Statistics.of(graph, seconds)
    assert path_seconds(graph, seconds).tolist() == [1, 3, 4, 8, 5]
    assert depths(graph).tolist() == [0, 1, 1, 2, 0]
    assert (facts.work_seconds, facts.critical_path_seconds, facts.parallelism) == (15, 8, 15 / 8)
    assert (facts.depth, facts.widest_level) == (3, 2)
    assert (facts.flops, facts.nbytes_moved, facts.flops_by_phase["forward"]) == (15, 50, 15)
    assert facts.flops_by_type == {"float32": 8, "tf32": 7}


def test_after_counts_as_waiting() -> None:
    graph = wired([], 3, after=[[], [0], [1]])
    assert path_seconds(graph, np.ones(3)).tolist() == [1, 2, 3]
    assert depths(graph).tolist() == [0, 1, 2]


def test_memory_that_is_shared_counts_once() -> None:
    """A parameter of 8 bytes, a resident view of it, and a version that an update makes in its place."""
    tensors = [tensor("w", 8, "parameter", home=0), tensor("v", 8, "parameter", home=0, alias_of=0)]
    graph = graph_of([*tensors, tensor("w'", 8, "parameter", alias_of=0)], [op(reads=[1], writes=[2])])
    assert Statistics.of(graph, np.zeros(1)).resident_bytes == {"parameter": 8}


def test_an_empty_graph_is_all_zeros() -> None:
    facts = Statistics.of(graph_of([], []), np.zeros(0))
    assert (facts.num_ops, facts.depth, facts.widest_level, facts.parallelism) == (0, 0, 0, 0)
    assert facts.resident_bytes == facts.ops_by_kind == {}


def test_ops_that_take_no_time_have_no_parallelism() -> None:
    assert Statistics.of(wired([(0, 1)], 2), np.zeros(2)).parallelism == 0


@given(graphs())
def test_the_path_is_at_most_the_work_and_at_least_the_longest_op(graph: Graph) -> None:
    seconds = nominal_seconds(graph)
    facts = Statistics.of(graph, seconds)
    assert seconds.max(initial=0) <= facts.critical_path_seconds <= facts.work_seconds * (1 + 1e-9)
    assert sum(facts.ops_by_phase.values()) == sum(facts.ops_by_kind.values()) == len(graph.ops)
    assert facts.widest_level <= len(graph.ops)
    assert facts.depth <= len(graph.ops) <= facts.depth * facts.widest_level
