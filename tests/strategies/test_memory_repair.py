"""Placements that do not fit are repaired with few moves."""

import numpy as np
import pytest
from builders import graph_data, tensor
from hypothesis import given
from hypothesis import strategies as st
from simulated import Step, gpus, random_step, takes

from placewise.core.contracts import Proposal
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.memory_repair import propose_or_repair, repair


def stored(sizes: list[int], memory: int, num_gpus: int = 2) -> Problem:
    """Returns ops of 1 s, each with a parameter of so many bytes, on GPUs with this memory."""
    tensors = [tensor(f"w{n}", size, "parameter", home=n) for n, size in enumerate(sizes)]
    return Step.of(graph_data(tensors, [takes(1, n, [n]) for n in range(len(sizes))]), gpus(num_gpus, memory)).problem


def test_the_smallest_group_that_is_enough_moves() -> None:
    """5 + 4 + 3 = 12 bytes on gpu:0, which has 9: 3 bytes have to go, and the last group has just these."""
    problem = stored([5, 4, 3], 9)
    assert repair(Simulator(problem), np.zeros(3, np.int64)).tolist() == [0, 0, 1]


def test_the_largest_groups_move_where_one_is_not_enough() -> None:
    """17 bytes on gpu:0, which has 9: of the 8 that have to go the largest group has 6, and the smallest other 2."""
    problem = stored([6, 5, 4, 2], 9)
    assert repair(Simulator(problem), np.zeros(4, np.int64)).tolist() == [1, 0, 0, 1]


def test_what_fits_is_left_as_it_is() -> None:
    problem = stored([5, 4, 3], 12)
    assert repair(Simulator(problem), np.zeros(3, np.int64)).tolist() == [0, 0, 0]


def test_nothing_is_added_if_one_proposal_fits() -> None:
    problem = stored([5, 4, 3], 9)
    both = Proposal(np.array([[0, 0, 0]])), Proposal(np.array([[0, 1, 0]]))
    assert len(judged(problem, *both)) == 2
    assert len(judged(problem, both[0])) == 2
    assert judged(problem, both[0])[1].notes == {"num_moved": 1}


def judged(problem: Problem, *proposals: Proposal) -> list[Proposal]:
    """Returns all that is proposed."""
    search, found, evaluation = propose_or_repair(problem, *proposals), [], None
    while True:
        try:
            found.append(next(search) if evaluation is None else search.send(evaluation))
        except StopIteration:
            return found
        evaluation = Simulator(problem)(found[-1].placements, found[-1].orders)


def test_where_no_placement_fits_devices_alone_are_the_last_proposal() -> None:
    found = judged(stored([5, 5, 5], 4), Proposal(np.array([[0, 0, 0]])))
    assert found[-1].placements.tolist() == [[0, 0, 0], [1, 1, 1]]


@given(seed=st.integers(0, 10**6))
def test_a_repair_never_overflows_more(seed: int) -> None:
    problem = random_step(seed, 14, 3, 60, "colocated")[0].problem
    model = Simulator(problem)
    placement = problem.allowed.argmax(axis=1)
    found = repair(model, placement)
    problem.check_placements(found[None])
    before, after = model(np.stack([placement, found])).overflow_bytes
    assert after <= before


@pytest.mark.parametrize("name", ["m-topo", "m-etf", "m-sct", "critical-path"])
def test_memory_constrained_placers_find_what_fits(name: str) -> None:
    """GPUs of 6 bytes hold the parameters of 5 and 4 only one by one, and the CPU all of them."""
    tensors = [tensor(f"w{n}", size, "parameter", home=n) for n, size in enumerate((5, 4, 5, 4, 5))]
    ops = [{**takes(1, n, [n]), "seconds": {"gpu": 1, "cpu": 9}} for n in range(5)]
    machine = gpus(2, 6)
    machine["devices"].append({**machine["devices"][0], "name": "cpu", "kind": "cpu", "memory": 99})
    problem = Step.of(graph_data(tensors, ops), machine).problem
    search, evaluation, fits = make(name).search(problem, np.random.default_rng(0)), None, False
    while not fits:
        proposal = next(search) if evaluation is None else search.send(evaluation)
        evaluation = Simulator(problem)(proposal.placements, proposal.orders)
        fits = bool((evaluation.overflow_bytes == 0).any())
    assert fits
