"""A neighbourhood says of small changes what whole passes say, to the last bit."""

from functools import cache

import numpy as np
import pytest
from builders import graph_data, tensor, tiny_cluster_data, tiny_data
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Step, gpus, random_order, random_placements, random_step, steps, takes

from placewise.capture.models import load_graph
from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, Device, Link
from placewise.core.contracts import Evaluation
from placewise.core.errors import ProblemError
from placewise.core.problem import Problem
from placewise.simulate.changes import BLOCK, STRIDE
from placewise.simulate.neighbourhood import Neighbourhood
from placewise.simulate.simulator import Simulator

Changes = tuple[Ints, Ints, Ints]  # ends [changes + 1], groups and devices [entries]


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def random_changes(problem: Problem, rng: np.random.Generator, count: int) -> Changes:
    """Changes of 0 to 5 groups; a group may come twice, and may be put where it is."""
    sizes = rng.integers(0, 6, count) if problem.num_groups else np.zeros(count, np.int64)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    groups = rng.integers(0, max(problem.num_groups, 1), ends[-1])
    devices = random_placements(problem, rng, int(ends[-1]))[np.arange(ends[-1]), groups]
    return ends, groups, devices


def changed(placement: Ints, changes: Changes) -> Ints:
    """The placements that the changes make, one by one; the last entry of a group counts."""
    ends, groups, devices = changes
    placements = np.repeat(placement[None], len(ends) - 1, axis=0)
    for row in range(len(ends) - 1):
        for entry in range(ends[row], ends[row + 1]):
            placements[row, groups[entry]] = devices[entry]
    return placements


def rows_of(evaluation: Evaluation, rows: slice) -> Evaluation:
    return Evaluation(evaluation.cost[rows], evaluation.step_seconds[rows], evaluation.overflow_bytes[rows])


def assert_same(found: Evaluation, expected: Evaluation) -> None:
    assert found.step_seconds.tolist() == expected.step_seconds.tolist()
    assert found.overflow_bytes.tolist() == expected.overflow_bytes.tolist()
    assert found.cost.tolist() == expected.cost.tolist()


def assert_exact(near: Neighbourhood, changes: Changes) -> None:
    """With and without memory, the changes are worth what whole passes in the same order say."""
    simulator = near.simulator
    expected = simulator(changed(near.placement, changes), near.order[None].astype(np.int64))
    assert_same(near(*changes), expected)
    assert_same(
        near(*changes, with_memory=False),
        Evaluation(expected.step_seconds, expected.step_seconds, np.zeros_like(expected.overflow_bytes)),
    )


def start(step_problem: Problem, rng: np.random.Generator, order: str) -> Neighbourhood:
    """A neighbourhood of a random placement, in one of the simulator's orders or in a random one."""
    placement = random_placements(step_problem, rng, 1)[0]
    simulator = Simulator(step_problem, "program" if order == "random" else order, threads=1)
    return Neighbourhood(simulator, placement, random_order(step_problem, rng) if order == "random" else None)


ORDERS = ("program", "priority", "random")


# --- random steps ---


@settings(max_examples=400)
@given(steps(max_ops=12, memory=8), st.sampled_from(ORDERS))
def test_changes_are_exact(drawn: tuple[Step, np.random.Generator], order: str) -> None:
    step, rng = drawn
    near = start(step.problem, rng, order)
    for _ in range(3):
        changes = random_changes(step.problem, rng, 8)
        assert_exact(near, changes)
        near.move_to(changed(near.placement, changes)[0])


@settings(max_examples=25)
@given(steps(min_ops=3 * BLOCK, max_ops=5 * BLOCK, memory=8), st.sampled_from(ORDERS))
def test_changes_of_larger_steps_are_exact(drawn: tuple[Step, np.random.Generator], order: str) -> None:
    """Several saved states and several blocks of kept peaks."""
    step, rng = drawn
    near = start(step.problem, rng, order)
    for _ in range(3):
        changes = random_changes(step.problem, rng, 40)
        assert_exact(near, changes)
        near.move_to(changed(near.placement, changes)[-1])


@pytest.mark.parametrize("num_ops", [STRIDE - 1, STRIDE, STRIDE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_every_move_around_the_ends_of_saved_states_and_blocks(num_ops: int) -> None:
    step, rng = random_step(num_ops, num_ops, 3, 8, "colocated")
    near = start(step.problem, rng, "program")
    groups, devices = np.nonzero(step.problem.allowed)
    expected = near.simulator(changed(near.placement, (np.arange(len(groups) + 1), groups, devices)))
    assert_same(near.moves(groups, devices), expected)


# --- a captured step ---


@cache
def captured() -> Problem:
    """A small language model's training step on three devices that are too small for it, two of them on one channel."""
    graph = load_graph("rnnlm:layers=2,hidden=8,steps=6,batch=4,vocab=11")
    devices = tuple(Device(f"gpu:{d}", "gpu", 1000 * (d + 1), 1e9, 1e9, 1e-6) for d in range(3))
    names = [device.name for device in devices]
    links = tuple(
        Link(a, b, 1e9, 1e-6, "bus" if "gpu:2" in (a, b) else None) for a in names for b in names if a != b
    )  # fmt: skip
    return Problem.of(graph, Cluster("three", devices, links, 1e-7))


@pytest.mark.parametrize("order", ORDERS)
def test_changes_of_a_captured_step_are_exact(order: str) -> None:
    problem, rng = captured(), np.random.default_rng(len(order))
    assert problem.num_ops >= 300
    near = start(problem, rng, order)
    for _ in range(3):
        changes = random_changes(problem, rng, 150)
        assert (near(*changes).overflow_bytes > 0).any()
        assert_exact(near, changes)
        near.move_to(changed(near.placement, changes)[7])
    near.move_to(np.zeros(problem.num_groups, np.int64))
    assert_exact(near, random_changes(problem, rng, 150))


def test_changes_of_a_captured_step_exceed_every_device() -> None:
    """So that wrong peaks of any device would show in the overflow."""
    problem, rng = captured(), np.random.default_rng(0)
    peaks = Simulator(problem, "program").measure(random_placements(problem, rng, 50)).peak_bytes
    assert (peaks > problem.cluster.memory_bytes).mean(axis=0).min() > 0.9


# --- by hand ---


def test_moves_by_hand() -> None:
    """a (2 s) makes 4 bytes that b (1 s) reads; both on gpu:0 they take 3 s and 4 bytes. A copy takes 5 s: 8 s for either
    move. A memory of 3 bytes is exceeded by 1 on gpu:0, and by 1 on both with a copy; 3 s cost 3 * (1 + 1 / 6) then.
    """
    rows = [takes(2, 0, [], [0]), takes(1, 1, [0])]
    problem = Step.of(graph_data([tensor("t", 4)], rows), gpus(2, memory=3)).problem
    near = Neighbourhood(Simulator(problem), ints(0, 0))
    assert near.step_seconds == 3
    found = near.moves(ints(0, 1, 0, 1), ints(0, 0, 1, 1))
    assert found.step_seconds.tolist() == [3, 3, 8, 8]
    assert found.overflow_bytes.tolist() == [1, 1, 2, 2]
    assert found.cost.tolist() == [3.5, 3.5, 4, 4]
    both = near(ints(0, 2, 2), ints(0, 1), ints(1, 1))  # both move, and none
    assert both.step_seconds.tolist() == [3, 3]
    assert both.overflow_bytes.tolist() == [1, 1]


def test_of_a_group_that_comes_twice_the_last_entry_counts() -> None:
    """Group 0 holds 4 resident bytes on gpu:0, of 1 byte each; moved twice, they are on gpu:1 once."""
    graph = graph_data([tensor("w", 4, "parameter", home=0)], [takes(1, 0, [0])])
    near = Neighbourhood(Simulator(Step.of(graph, gpus(2, memory=1)).problem), ints(0))
    found = near(ints(0, 2, 4, 6), ints(0, 0, 0, 0, 0, 0), ints(1, 1, 0, 1, 1, 0))
    assert found.overflow_bytes.tolist() == [3, 3, 3]
    assert found.step_seconds.tolist() == [1, 1, 1]


def test_the_last_change_may_begin_later_than_others() -> None:
    """The last change starts from a saved state, and reads a time from before it: of the base, not of the first change.

    STRIDE ops of 1 s in a chain, as many that do nothing, and one of 1 s that reads the end of the chain: 33 s. The copies
    of 1 byte take 2 s: the first change has them there and back, the last one there.
    """
    rows = [takes(1, n, [n - 1] if n else [], [n]) for n in range(STRIDE)] + [takes(0, STRIDE)] * STRIDE
    rows.append(takes(1, STRIDE + 1, [STRIDE - 1]))
    problem = Step.of(graph_data([tensor(f"t{n}", 1) for n in range(STRIDE)], rows), gpus(2)).problem
    near = Neighbourhood(Simulator(problem, "program"), np.zeros(problem.num_groups, np.int64))
    assert near.step_seconds == STRIDE + 1
    found = near.moves(ints(3, STRIDE + 1), ints(1, 1))
    assert found.step_seconds.tolist() == [STRIDE + 5, STRIDE + 3]


def test_a_later_call_finds_the_bases_copies() -> None:
    """x (5 s) and a (0 s) are on gpu:2 and gpu:0; a's byte arrives on gpu:1 at 2, for b and, behind a saved state, for c.

    With x on gpu:0 the byte arrives at 7. A call that then moves the op beside c must find it at 2 again: c is done at 3, x
    at 5.
    """
    rows = [takes(5, 0), takes(0, 1, [], [0]), takes(0, 2, [0])] + [takes(0, 3)] * STRIDE + [takes(0, 4), takes(1, 5, [0])]
    problem = Step.of(graph_data([tensor("t", 1)], rows), gpus(3)).problem
    near = Neighbourhood(Simulator(problem, "program"), ints(2, 0, 1, 0, 0, 1))
    assert near.moves(ints(0), ints(0)).step_seconds.tolist() == [8]
    assert near.moves(ints(4), ints(1)).step_seconds.tolist() == [5]


def test_the_neighbourhood_of_nothing() -> None:
    problem = Step.of(graph_data([tensor("t", 3)], []), gpus(2, memory=1)).problem
    near = Neighbourhood(Simulator(problem), ints())
    assert near.step_seconds == 0
    found = near(ints(0, 0, 0), ints(), ints())
    assert found.step_seconds.tolist() == [0, 0]
    assert found.overflow_bytes.tolist() == [2, 2]
    assert near(ints(0), ints(), ints()).cost.tolist() == []
    assert near.moves(ints(), ints()).cost.tolist() == []


def test_calls_leave_nothing_behind() -> None:
    """The same changes, alone or among others, before and after others, are worth the same."""
    step, rng = random_step(11, 3 * BLOCK, 4, 8, "colocated")
    near = start(step.problem, rng, "priority")
    groups, devices = np.nonzero(step.problem.allowed)
    together = near.moves(groups, devices)
    near(*random_changes(step.problem, rng, 100))
    again = near.moves(groups[::-1], devices[::-1])
    assert_same(rows_of(again, slice(None, None, -1)), together)
    for i in range(0, len(groups), 7):
        alone = near.moves(groups[i : i + 1], devices[i : i + 1])
        assert_same(alone, rows_of(together, slice(i, i + 1)))


def test_a_given_order_is_kept() -> None:
    step = Step.of(tiny_data(), tiny_cluster_data())
    near = Neighbourhood(Simulator(step.problem), ints(0, 1, 0), ints(0, 1, 2, 3))
    near.move_to(ints(1, 1, 1))
    assert near.order.tolist() == [0, 1, 2, 3]
    assert near.placement.tolist() == [1, 1, 1]
    assert near.step_seconds == pytest.approx(0.010)


def test_what_is_no_placement_or_no_order_is_refused() -> None:
    simulator = Simulator(Step.of(tiny_data(), tiny_cluster_data()).problem)
    with pytest.raises(ProblemError, match="Expected 0 <= device < 2"):
        Neighbourhood(simulator, ints(0, 2, 0))
    with pytest.raises(ProblemError, match="before"):
        Neighbourhood(simulator, ints(0, 0, 0), ints(1, 0, 2, 3))
    near = Neighbourhood(simulator, ints(0, 0, 0))
    with pytest.raises(ProblemError, match="of shape"):
        near.move_to(ints(0, 0))
    assert near.step_seconds == pytest.approx(0.010)
    assert near.placement.tolist() == [0, 0, 0]
