"""Earliest starts and least times to the end: one device for those that are alike, and edges a few at a time."""

from dataclasses import replace

import numpy as np
import pytest
from builders import graph_of, op, tensor, wired
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Step, steps

from placewise.bounds import dag as dag_module
from placewise.bounds import shared_work
from placewise.bounds.best_bound import bound
from placewise.bounds.check.certificates import check
from placewise.bounds.dag import alike, build_dag
from placewise.core.cluster import Cluster, Device, Link
from placewise.core.problem import Problem

NEAR, FAST, FAR = (1.0, 1.0), (8.0, 3.0), (1.0, 5.0)  # bytes per second, seconds
KINDS = (NEAR, FAST, FAR)

Drawn = tuple[Step, np.random.Generator]


def step_of_two_kinds(seed: int, num_ops: int, twins: bool) -> Problem:
    """Returns a random step of ops for GPUs, for CPUs or for both, on four equal GPUs and two equal CPUs.

    Links are of three kinds, drawn for each pair of devices. With `twins` devices of one kind are near; to a device of the
    other kind half of them are near while the other half has faster links.
    """
    rng = np.random.default_rng(seed)
    names = [*(f"gpu:{i}" for i in range(4)), *(f"cpu:{i}" for i in range(2))]
    devices = tuple(Device(name, name[:3], 2**40, 1e9, 1e9) for name in names)
    links = []
    drawn = {(a, b): KINDS[int(rng.integers(len(KINDS)))] for a in names for b in names}
    for a in names:
        for b in names:
            kind = drawn[a, b]
            if twins:
                kind = NEAR if a[:3] == b[:3] else KINDS[(names.index(a) + names.index(b)) % 2]
            if a != b:
                links.append(Link(a, b, *kind))
    tensors = [tensor(f"t{n}", int(rng.integers(1, 9))) for n in range(num_ops)]
    ops = []
    for n in range(num_ops):
        seconds = {"gpu": int(rng.integers(4)), "cpu": int(rng.integers(4))}
        reads = sorted({int(t) for t in rng.integers(0, n, 2)}) if n else []
        row = op(f"op{n}", n, reads, [n], seconds=seconds)
        if only := [None, ["gpu"], ["cpu"]][int(rng.integers(3))]:
            row["devices"] = only
        ops.append(row)
    return Problem.of(graph_of(tensors, ops), Cluster("test", devices, tuple(links), float(rng.integers(2))))


@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 10), twins=st.booleans())
@settings(max_examples=200)
def test_devices_that_are_alike_have_the_same_times(seed: int, num_ops: int, twins: bool) -> None:
    """One device of each class gives the heads and tails of all; twins are one class for each kind."""
    problem = step_of_two_kinds(seed, num_ops, twins)
    classes = alike(problem)
    assert not twins or classes.tolist() in ([0] * 4 + [1] * 2, [0] * 6)
    whole, part = build_dag(problem), build_dag(problem, classes)
    np.testing.assert_array_equal(part.heads()[:, classes], whole.heads())
    np.testing.assert_array_equal(part.tails()[:, classes], whole.tails())
    for one in bound(problem).parts:
        check(problem, one.name, one.seconds, one.certificate)


@given(steps())
@settings(max_examples=50)
def test_edges_a_few_at_a_time_give_the_same_times(drawn: Drawn) -> None:
    step, _ = drawn
    whole = build_dag(step.problem)
    expected = whole.heads(), whole.tails()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dag_module, "EDGE_TIMES", 1)
        np.testing.assert_array_equal(whole.heads(), expected[0])
        np.testing.assert_array_equal(whole.tails(), expected[1])


@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 200))
@settings(max_examples=50)
def test_ancestors_are_counted_in_parts(seed: int, num_ops: int) -> None:
    """With 64 ops in each sweep the counts are those of plain sets; a longest chain has at most as many."""
    rng = np.random.default_rng(seed)
    edges = sorted({(int(b), int(rng.integers(b))) for b in rng.integers(1, max(num_ops, 2), 300) if b < num_ops})
    targets, sources = (np.array([edge[i] for edge in edges], np.int64) for i in range(2))
    before: list[set[int]] = [set() for _ in range(num_ops)]
    for target, source in edges:
        before[target] |= before[source] | {source}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dag_module, "ANCESTOR_BITS", 64)
        assert dag_module._count_ancestors(sources, targets, num_ops).tolist() == list(map(len, before))
    assert (dag_module._count_levels(sources, targets, num_ops) <= list(map(len, before))).all()


def test_launches_before_an_op_bound_its_start_in_steps_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops 0, 1 and 2 come before 3 in a fork and a join: it is launched fourth, or by the longest chain third."""
    graph = wired([(0, 1), (0, 2), (1, 3), (2, 3)], 4)
    cluster = replace(Cluster.load("2xK80"), dispatch_seconds=1.0)
    problem = Problem.of(graph, cluster)
    assert build_dag(problem).earliest[:, 0].tolist() == [1.0, 2.0, 2.0, 4.0]
    monkeypatch.setattr(dag_module, "COUNTED_OPS", 3)
    assert build_dag(problem).earliest[:, 0].tolist() == [1.0, 2.0, 2.0, 3.0]


@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(10, 40))
@settings(max_examples=50)
def test_prices_for_merged_groups_are_valid(seed: int, num_ops: int) -> None:
    """The linear program with 5 sums of groups proves no more than the one with all groups, and its certificates hold."""
    problem = step_of_two_kinds(seed, num_ops, True)
    expected = {one.name: one.seconds for one in bound(problem).parts}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_work, "MERGED_GROUPS", 5)
        found = {one.name: one for one in bound(problem).parts}
    assert 0.8 * expected["work"] <= found["work"].seconds <= expected["work"] * (1 + 1e-9)
    for one in found.values():
        check(problem, one.name, one.seconds, one.certificate)
