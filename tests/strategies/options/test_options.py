"""Choosing optional ops: what is repeated and what waits, so that a step fits."""

import numpy as np
import pytest
from auto_against_exact import compare
from builders import graph_data, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_steps import optional_step
from simulated import Step, gpus, leave_some_out, random_order, random_placements, steps, takes

from placewise.core.problem import NOWHERE, Problem
from placewise.search.budget import Budget
from placewise.search.driver import Outcome, search
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.options.changes import find_changes
from placewise.strategies.options.choice_walk import ChoiceModel
from placewise.strategies.options.fit import fit
from placewise.strategies.options.launch_order import with_options


def two_tensors(memory: int) -> Problem:
    """Returns a step on one GPU in which a is kept until the last op reads it again; a, b and c have 10 bytes each.

    Op 0 makes a in 1 s, op 1 makes b from a in 5 s, op 2 makes c from b in 1 s, op 4 reads a and c in 1 s. Op 3 would make a
    again before op 4. Launches of ops 0, 1, 2 and 4 need 10, 20, 30 and 20 bytes; with op 3 no launch needs more than 20.
    """
    tensors = [tensor("a", 10), tensor("b", 10), tensor("c", 10), tensor("again", 10, stands_for=0)]
    ops = [
        takes(1, 0, [], [0]),
        takes(5, 1, [0], [1]),
        takes(1, 2, [1], [2]),
        takes(1, 3, [], [3], optional=True),
        takes(1, 4, [3, 2], []),
    ]
    return Step.of(graph_data(tensors, ops), gpus(1, memory)).problem


def run(problem: Problem, strategy: str, evaluations: int = 20) -> Outcome:
    return search(problem, make(strategy), Simulator(problem, threads=1), budget=Budget(evaluations), seed=0)


@pytest.mark.parametrize("strategy", ["gpu-only", "heft", "auto", "exact"])
def test_what_does_not_fit_is_made_again(strategy: str) -> None:
    """With 30 bytes the step takes 8 s; with 20 op 0's result is made twice, in 9 s; with 19 nothing fits."""
    assert run(two_tensors(30), strategy).step_seconds == 8.0
    outcome = run(two_tensors(20), strategy)
    assert outcome.step_seconds == 9.0
    assert outcome.placement is not None
    assert (outcome.placement == 0).all()
    assert run(two_tensors(19), strategy).placement is None


@pytest.mark.parametrize("strategy", ["gpu-only", "genetic", "auto", "exact"])
def test_where_everything_fits_nothing_is_made_again(strategy: str) -> None:
    outcome = run(two_tensors(30), strategy)
    assert outcome.placement is not None
    assert outcome.placement.tolist() == [0, 0, 0, 0, NOWHERE]  # the group of optional ops has the last number


@given(steps(options=True), st.booleans())
@settings(max_examples=80)
def test_an_order_of_what_runs_becomes_one_for_every_choice(
    drawn: tuple[Step, np.random.Generator], is_program: bool
) -> None:
    step, rng = drawn
    problem = step.problem
    present = problem.present(np.where(problem.optional, NOWHERE, 0))
    order = np.arange(present.problem.num_ops) if is_program else random_order(present.problem, rng)
    whole = with_options(problem, present.ops[order])
    assert sorted(whole.tolist()) == list(range(problem.num_ops))
    for placement in leave_some_out(problem, random_placements(problem, rng, 4), rng):
        problem.check_plan(placement, whole)  # refuses an order that does not suit


@pytest.mark.parametrize("seed", range(6))
def test_a_change_is_judged_as_the_simulator_does(seed: int) -> None:
    problem = optional_step(seed, 4, 1 + seed % 3)
    model, simulator = ChoiceModel(problem), Simulator(problem, threads=1)
    placement, order = np.where(problem.optional, NOWHERE, 0), np.arange(problem.num_ops)
    changes = find_changes(problem, placement)
    which = np.arange(len(changes.ends) - 1)
    seconds, _ = model.judge_changes(placement, order, changes, which)
    for change in which.tolist():
        part = slice(changes.ends[change], changes.ends[change + 1])
        changed = placement.copy()
        changed[changes.groups[part]] = changes.targets[part]
        assert simulator(changed[None], order[None]).step_seconds[0] == pytest.approx(seconds[change], rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_fitting_keeps_its_word(seed: int) -> None:
    """What `fit` says about its choice is what the simulator finds, it does not overflow more, and it walks no worse."""
    problem = optional_step(seed, 4, 2)
    model, simulator = ChoiceModel(problem), Simulator(problem, threads=1)
    placement, order = np.where(problem.optional, NOWHERE, 0), np.arange(problem.num_ops)
    chosen = fit(model, placement, order)
    found = simulator(chosen.placement[None], chosen.order[None])
    assert (int(found.overflow_bytes[0]), float(found.step_seconds[0])) == pytest.approx(chosen.key)
    assert chosen.key[0] <= model.judge(placement, order).overflow_bytes


def test_auto_is_as_good_as_exact() -> None:
    """On six small steps with scarce memory, auto finds one within 3% of the optimum, and the bound holds.

    `python tests/auto_against_exact.py 200 0.5 options` compares more of them, for longer.
    """
    for seed in range(6):
        comparison = compare(optional_step(seed, 2 + seed % 2, 1 + seed % 3), Budget(evaluations=30))
        assert comparison is not None
        assert comparison.bound <= comparison.optimum * (1 + 1e-9)
        assert np.isinf(comparison.optimum) or comparison.found <= comparison.optimum * 1.03


def test_the_same_seed_finds_the_same() -> None:
    problem = optional_step(4, 4, 3)
    first, again = run(problem, "auto", 40), run(problem, "auto", 40)
    assert first.history == again.history
    assert np.array_equal(first.placement, again.placement)  # type: ignore[arg-type]
