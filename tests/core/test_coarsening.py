"""Coarsening never makes a cycle, and gives about as many groups as asked for."""

from graphlib import TopologicalSorter

import numpy as np
import pytest
from builders import graphs, random_dag, wired
from hypothesis import given
from hypothesis import strategies as st

from placewise.core.arrays import Ints
from placewise.core.coarsening import coarsen
from placewise.core.graph import Graph
from placewise.core.grouping import group_edges, group_ops
from placewise.core.labels import renumber


def check_coarsening(merged: Ints, position: Ints, source: Ints, target: Ints, num_groups: int) -> None:
    """Asserts that there are at most `num_groups` groups, and no cycles between them along edges that point forward."""
    assert int(merged.max(initial=-1)) + 1 <= num_groups
    assert renumber(merged).tolist() == merged.tolist()
    behind: dict[int, set[int]] = {}
    for a, b in zip(source.tolist(), target.tolist(), strict=True):
        if position[a] < position[b] and merged[a] != merged[b]:
            behind.setdefault(int(merged[b]), set()).add(int(merged[a]))
    TopologicalSorter(behind).prepare()  # raises a CycleError


@given(graph=graphs(12), num_groups=st.integers(1, 12))
def test_coarse_groups_of_any_graph_have_no_cycle(graph: Graph, num_groups: int) -> None:
    source, target, _ = group_edges(graph)
    position = np.array([next(iter(np.flatnonzero(graph.ops.groups == g)), -1) for g in range(graph.num_groups)], np.int64)
    merged = group_ops(graph, f"coarse:{num_groups}")
    check_coarsening(merged, position, source, target, num_groups)
    if graph.num_groups <= num_groups:
        assert merged.tolist() == list(range(graph.num_groups))


@pytest.mark.parametrize("shape", ["sparse", "dense", "layers", "equal", "shuffled"])
def test_coarse_groups_of_random_dags_have_no_cycle(shape: str) -> None:
    """80 graphs of up to 300 nodes for each shape; those of `shuffled` are not numbered in their order."""
    rng = np.random.default_rng(7)
    for _ in range(80):
        num_nodes = int(rng.integers(1, 301))
        source, target = random_dag(rng, num_nodes, int(num_nodes * {"sparse": 1, "dense": 6}.get(shape, 2)))
        if shape == "layers":  # edges only between neighbouring layers of up to 20 nodes
            near = (target // 20 - source // 20) <= 1
            source, target = source[near], target[near]
        nbytes = np.ones(len(source)) if shape == "equal" else rng.exponential(1.0, len(source)).round(2)
        work = np.ones(num_nodes) if shape == "equal" else rng.exponential(1.0, num_nodes) * (rng.random(num_nodes) > 0.2)
        position = rng.permutation(num_nodes) if shape == "shuffled" else np.arange(num_nodes)
        num_groups = int(rng.integers(1, num_nodes + 1))
        merged = coarsen(work, position, source, target, nbytes, num_groups)
        check_coarsening(merged, position, source, target, num_groups)
        assert coarsen(work, position, source, target, nbytes, num_groups).tolist() == merged.tolist()


def test_coarse_groups_are_about_as_many_as_asked_for_and_balanced() -> None:
    """A chain of 300 equal ops cut in 10: exactly 10 groups, none of more than twice the average."""
    graph = wired([(n, n + 1) for n in range(299)], 300, flops=[1e13] * 300)
    merged = group_ops(graph, "coarse:10")
    sizes = np.bincount(merged)
    assert len(sizes) == 10
    assert sizes.max() <= 60


def test_coarsening_nothing() -> None:
    none = np.zeros(0, np.int64)
    assert coarsen(np.zeros(0), none, none, none, np.zeros(0), 3).tolist() == []
    assert coarsen(np.zeros(4), np.arange(4), none, none, np.zeros(0), 2).max() == 1  # no edges, no work
