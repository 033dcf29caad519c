"""The exact strategy against trying everything, and its notes."""

import sys
from typing import Any

import numpy as np
import pytest
from builders import graph_data, tensor
from captured import captured_problem
from exhaustive import best_choice, best_step
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import GROUPINGS, Step, gpus, random_step, takes

from placewise.bounds.best_bound import bound
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import Outcome, search
from placewise.simulate.simulator import Simulator
from placewise.strategies.exact.exact import Exact


def solve(problem: Problem, strategy: Exact | None = None) -> tuple[Outcome, dict[str, Any]]:
    """Returns what the strategy finds, and its last notes."""
    notes: list[dict[str, Any]] = [{}]
    outcome = search(
        problem,
        strategy or Exact(),
        Simulator(problem, threads=1),
        budget=Budget(evaluations=1000),
        seed=0,
        on_batch=lambda progress: notes.append(progress.notes),
    )
    return outcome, notes[-1]


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 5),
    st.integers(1, 3),
    st.sampled_from([10, 15, 30, 60]),
    st.sampled_from(GROUPINGS),
)
@settings(max_examples=80)
def test_it_finds_what_trying_everything_finds(
    seed: int, num_ops: int, num_devices: int, memory: int, grouping: str
) -> None:
    problem = random_step(seed, num_ops, num_devices, memory, grouping)[0].problem
    best = best_step(problem)
    outcome, notes = solve(problem)
    if np.isinf(best):
        assert outcome.placement is None
        assert notes["status"] == "infeasible"
    else:
        assert outcome.step_seconds == pytest.approx(best, rel=1e-6)
        assert notes["status"] == "optimal"
        assert best * (1 - 1e-6) <= notes["bound_seconds"] <= best * (1 + 1e-9)
        assert bound(problem, seconds=10.0).seconds <= best


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 2), st.sampled_from([10, 15, 30]), st.booleans())
@settings(max_examples=80)
def test_it_chooses_among_optional_ops_as_trying_everything_does(
    seed: int, num_ops: int, num_devices: int, memory: int, hosts: bool
) -> None:
    problem = random_step(seed, num_ops, num_devices, memory, "colocated", options=True, hosts=hosts)[0].problem
    best = best_choice(problem)
    outcome, notes = solve(problem)
    if np.isinf(best):
        assert outcome.placement is None
        assert notes["status"] == "infeasible"
    else:
        assert outcome.step_seconds == pytest.approx(best, rel=1e-6)
        assert notes["status"] == "optimal"
        assert best * (1 - 1e-6) <= notes["bound_seconds"] <= best * (1 + 1e-9)
        assert bound(problem, seconds=10.0).seconds <= best


@pytest.mark.parametrize("seed", range(4))
def test_bounds_do_not_exceed_the_optimum_of_larger_steps(seed: int) -> None:
    problem = random_step(seed, 14, 2 + seed % 2, 1000, "colocated")[0].problem
    outcome, notes = solve(problem)
    assert notes["status"] == "optimal"
    assert bound(problem, seconds=10.0).seconds <= outcome.step_seconds


def test_a_copy_waits_for_those_that_are_launched_before_it() -> None:
    """Prefetching is bound to the launch order: op 2 needs op 1's result, so its copies come after op 1's on the channel.

    gpu:1 alone can run ops 1 and 2. Tensor a (7 bytes, resident on gpu:0, read by op 2) takes 1 + 7 s, tensor b (0 bytes,
    made by op 0 after 7 s on gpu:0, read by op 1) takes 1 s. If a could go first, op 1 would run at 9 s and op 2 at 10 s.
    But op 1 is launched before op 2, so b is queued before a, and a arrives at 7 + 1 + 8 = 16 s: op 2 ends at 17 s.
    """
    cluster = gpus(1)
    cluster["devices"].append({"name": "cpu:0", "kind": "cpu", "memory": 1000, "flops": 1, "bytes_per_second": 1})
    tensors = [tensor("a", 7, "parameter", home=0), tensor("b", 0), tensor("c", 0)]
    ops = [
        takes(7, 0, [], [1], devices=["gpu"]),
        takes(1, 1, [1], [2], devices=["cpu"]) | {"seconds": {"cpu": 1}},
        takes(1, 2, [2, 0], [], devices=["cpu"]) | {"seconds": {"cpu": 1}},
    ]
    problem = Step.of(graph_data(tensors, ops), cluster).problem
    outcome, notes = solve(problem)
    assert best_step(problem) == pytest.approx(17.0)
    assert outcome.step_seconds == pytest.approx(17.0)
    assert notes["status"] == "optimal"


def test_a_large_step_gets_one_device_and_a_bound() -> None:
    problem = captured_problem()
    outcome, notes = solve(problem)
    assert notes["status"] == "too large"
    assert 0.0 < notes["bound_seconds"] <= outcome.step_seconds
    assert outcome.evaluations == problem.num_devices


def test_little_effort_is_honest() -> None:
    problem = random_step(1, 24, 3, 1000, "colocated")[0].problem
    outcome, notes = solve(problem, Exact(effort=1e-3, first_effort=1e-3))
    assert notes["status"] in ("unknown", "feasible")
    assert notes["bound_seconds"] < outcome.step_seconds


def test_without_ortools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(StrategyError, match=r"pip install 'placewise\[exact\]'"):
        solve(captured_problem())
