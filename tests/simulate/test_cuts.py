"""Copies and cuts, against the schedule and by hand."""

import numpy as np
import pytest
from builders import graph_data, op, tensor
from hypothesis import given
from hypothesis import strategies as st
from simulated import Step, gpus, random_order, random_placements, steps

from placewise.simulate import cuts
from placewise.simulate.cuts import Crossings
from placewise.simulate.flat_problem import copied_tensors
from placewise.simulate.simulator import Simulator


@given(steps(min_ops=1))
def test_copies_are_those_that_the_simulator_makes(drawn: tuple[Step, np.random.Generator]) -> None:
    step, rng = drawn
    crossings, simulator = Crossings.of(step.problem), Simulator(step.problem, threads=1)
    for placement in random_placements(step.problem, rng, 3):
        made = len(simulator.schedule(placement, random_order(step.problem, rng)).copy_tensors)
        assert crossings.count_copies(placement) == made
        assert (crossings.count_cuts(placement) > 0) == (made > 0)
        assert crossings.count_cuts(placement) <= made


@given(steps(min_ops=1), st.booleans())
def test_moves_are_counted_as_the_placements_that_they_make(
    drawn: tuple[Step, np.random.Generator], has_table: bool
) -> None:
    step, rng = drawn
    problem = step.problem
    crossings = Crossings.of(problem)
    (placement,) = random_placements(problem, rng, 1)
    moves = [
        (rng.permutation(problem.num_groups)[: rng.integers(1, 4)], int(rng.integers(problem.num_devices))) for _ in range(5)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "MOST_CUTS", 2**24 if has_table else 0)
        counts = crossings.count_moved(placement, moves)
    for (groups, device), count in zip(moves, counts.tolist(), strict=True):
        moved = placement.copy()
        moved[groups] = device
        assert crossings.count(moved) == tuple(count)


@given(steps(min_ops=1), st.floats(0, 1))
def test_prices_of_copies_add_up_to_the_cuts(drawn: tuple[Step, np.random.Generator], share: float) -> None:
    step, rng = drawn
    crossings, simulator = Crossings.of(step.problem), Simulator(step.problem, threads=1)
    (placement,) = random_placements(step.problem, rng, 1)
    schedule = simulator.schedule(placement)
    prices = crossings.prices(placement, share)
    rows = np.searchsorted(copied_tensors(step.problem), schedule.copy_tensors)
    assert len(prices) == len(copied_tensors(step.problem))
    assert (prices > 0).all()
    assert prices[rows, schedule.timeline.copy_target].sum() == pytest.approx(crossings.count_cuts(placement))


def test_a_pair_of_modules_is_cut_once() -> None:
    """a makes tensors 0 and 1, b reads both and makes 2, which the backward op of a reads: three copies, one cut.

    If a's ops are on two devices, a is cut too.
    """
    ops = [
        op("a.mm", 0, (), (0, 1)),
        op("b.mm", 1, (0, 1), (2,)),
        op("a.mm.backward", 2, (0, 2), ()),
    ]
    crossings = Crossings.of(Step.of(graph_data([tensor(f"t{n}", 1) for n in range(3)], ops), gpus(3)).problem)
    whole, split = np.array([0, 1, 0]), np.array([0, 1, 2])
    assert (crossings.count_copies(whole), crossings.count_cuts(whole)) == (3, 1)
    assert (crossings.count_copies(split), crossings.count_cuts(split)) == (4, 3)


def test_without_modules_each_group_counts() -> None:
    ops = [op("x", 0, (), (0,)), op("y", 1, (0,), (1,)), op("z", 2, (0, 1), ())]
    crossings = Crossings.of(Step.of(graph_data([tensor(f"t{n}", 1) for n in range(2)], ops), gpus(2)).problem)
    assert crossings.count_cuts(np.array([0, 1, 1])) == 1  # one tensor goes to the other device, y reads it first
    assert crossings.count_cuts(np.array([0, 0, 1])) == 2
    assert crossings.count_cuts(np.array([1, 1, 1])) == 0
