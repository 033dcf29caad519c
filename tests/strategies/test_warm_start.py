"""Warm starts and blocks: what a learned strategy begins with, and what one of its decisions places."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import graph_of, mixed_cluster, op, tensor, tiny_cluster, tiny_graph, wired
from captured import captured_problem
from hypothesis import given
from hypothesis import strategies as st
from simulated import GROUPINGS, Step, random_placements, steps

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import StrategyError
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.blocks import Blocks
from placewise.strategies.warm_start import begin


def started(problem: Problem, start: str, evaluations: int, seed: int = 0) -> tuple[Ints | None, Ints, Evaluation | None]:
    """Returns the placement that a start knows, and all that it proposed [batch, groups] with their evaluation."""
    proposals = begin(problem, start, evaluations, np.random.default_rng(seed))
    simulator, seen, evaluation = Simulator(problem, threads=1), [], None
    try:
        proposal = next(proposals)
        while True:
            seen.append(proposal.placements)
            evaluation = simulator(proposal.placements, proposal.orders)
            proposal = proposals.send(evaluation)
    except StopIteration as end:
        placements = np.concatenate(seen) if seen else np.zeros((0, problem.num_groups), np.int64)
        return end.value, placements, evaluation


# --- starts ---


def test_no_start_proposes_nothing() -> None:
    known, proposed, _ = started(captured_problem(), "none", 100)
    assert known is None
    assert len(proposed) == 0


@pytest.mark.parametrize(("name", "evaluations", "spent"), [("genetic", 70, 70), ("gpu-only", 70, 2), ("post", 30, 30)])
def test_a_strategy_as_start_has_its_evaluations_and_its_best_placement_counts(
    name: str, evaluations: int, spent: int
) -> None:
    problem = captured_problem()
    known, proposed, _ = started(problem, name, evaluations)
    assert len(proposed) == spent
    assert known is not None
    cost = Simulator(problem, threads=1)(proposed).cost
    assert np.array_equal(known, proposed[cost.argmin()])
    assert (cost > cost.min()).any() or name == "gpu-only"


def test_a_start_keeps_the_orders_that_it_proposes() -> None:
    problem = captured_problem()
    alone = make("heft").search(problem, np.random.default_rng(0))
    begun = begin(problem, "heft", 480, np.random.default_rng(0))
    evaluation = Simulator(problem)(next(alone).placements)
    next(begun)
    expected, proposal = alone.send(evaluation), begun.send(evaluation)
    assert expected.orders is not None
    assert proposal.orders is not None
    assert np.array_equal(proposal.orders, expected.orders)


def test_a_plan_as_start_is_proposed_once(tmp_path: Path) -> None:
    problem = captured_problem()
    placement = random_placements(problem, np.random.default_rng(3), 1)
    path = str(tmp_path / "plan.json")
    Plan(problem.expand(placement[0]), graph_digest=problem.graph.digest).save(path)
    known, proposed, _ = started(problem, path, 100)
    assert known is not None
    assert np.array_equal(proposed, placement)
    assert np.array_equal(known, placement[0])
    first = next(make("post", {"start": path}).search(problem, np.random.default_rng(0)))
    assert np.array_equal(first.placements, placement)


def test_a_plan_of_another_graph_is_refused_with_its_name(tmp_path: Path) -> None:
    other = Problem.of(tiny_graph(), tiny_cluster())
    path = str(tmp_path / "other.json")
    Plan(other.expand(np.zeros(other.num_groups, np.int64)), graph_digest=other.graph.digest).save(path)
    with pytest.raises(StrategyError, match=r"start: .*other\.json: is for another graph"):
        started(captured_problem(), path, 100)
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{")
    with pytest.raises(StrategyError, match=r"start: .*damaged\.json"):
        started(captured_problem(), str(damaged), 100)


@pytest.mark.parametrize("text", ["", "no-such", "no/such/plan.json", "."])
def test_a_start_that_is_none_of_them_is_refused_before_any_work(text: str) -> None:
    rule = "strategy 'post': start must be none, the name of a strategy or the path of a plan file, it is "
    with pytest.raises(StrategyError) as refusal:
        make("post", {"start": text})
    assert str(refusal.value) == rule + repr(text)


# --- blocks ---


def test_blocks_by_hand() -> None:
    """Six groups in two modules: a has a CPU's op in group 1 and a GPU's in 2, so it falls in three; b stays together."""
    rows: list[dict[str, Any]] = [
        op("a.op", 0, writes=[0]),
        op("a.op_1", 1, [0], [1], devices=["cpu"]),
        op("a.op_2", 2, [1], [2], devices=["gpu"]),
        op("a.op_3", 3, [2], [3]),
        op("b.op", 4, [3], [4]),
        op("b.op_1", 5, [4], [5]),
    ]
    for n, row in enumerate(rows):
        row["flops"] = 10 * n
    graph = graph_of([tensor(f"t{n}") for n in range(6)], rows)
    problem = Problem.of(graph, mixed_cluster())
    kinds = [device.kind for device in problem.cluster.devices]
    blocks = Blocks.of(problem, "module")
    assert blocks.of_group.tolist() == [0, 1, 2, 0, 3, 3]
    assert blocks.allowed[1].tolist() == [kind == "cpu" for kind in kinds]
    assert blocks.allowed[2].tolist() == [kind == "gpu" for kind in kinds]
    assert blocks.allowed[[0, 3]].all()
    cpu, gpu = kinds.index("cpu"), kinds.index("gpu")
    assert blocks.expand(np.array([[gpu, cpu, gpu, cpu]])).tolist() == [[gpu, cpu, gpu, gpu, cpu, cpu]]
    # group 3 has three times the work of group 0, group 5 more than group 4
    assert blocks.contract(np.array([cpu, cpu, gpu, gpu, cpu, gpu])).tolist() == [gpu, cpu, gpu, gpu]


def test_groups_of_the_problem_and_of_a_strategy_are_joined() -> None:
    """The problem has joined groups 0 and 1, the strategy's modules 1 and 2: so all three are one block."""
    rows = [op("a.x", 0), op("b.x", 0), op("b.y", 1), op("c.z", 2)]
    problem = Problem.of(graph_of([], rows), tiny_cluster())
    assert Blocks.of(problem, "colocated").of_group.tolist() == [0, 1, 2]
    merged = Problem.of(wired([(0, 1), (1, 2), (2, 3)], 4, name=["a.x", "a.y", "b.x", "b.y"]), tiny_cluster(), "module")
    assert merged.num_groups == 2
    assert Blocks.of(merged, "name-prefix:1").num_blocks == 2
    assert Blocks.of(merged, "coarse:1").num_blocks == 1


@given(steps(), st.sampled_from(GROUPINGS))
def test_blocks_can_run_where_all_of_their_groups_can(case: tuple[Step, np.random.Generator], grouping: str) -> None:
    problem, rng = case[0].problem, case[1]
    blocks = Blocks.of(problem, grouping)
    assert blocks.allowed.any(axis=1).all()
    placements = np.where(blocks.allowed, rng.random((4, *blocks.allowed.shape)), -1.0).argmax(axis=2)
    expanded = problem.check_placements(blocks.expand(placements))
    for row in range(4):
        assert np.array_equal(blocks.contract(expanded[row]), placements[row])
    contracted = blocks.contract(random_placements(problem, rng, 1)[0])
    assert blocks.allowed[np.arange(blocks.num_blocks), contracted].all()


@pytest.mark.parametrize("text", ["", "no-such", "coarse", "coarse:0", "coarse:-1", "name-prefix:x", "module:2"])
def test_a_wrong_grouping_is_refused_before_any_work(text: str) -> None:
    with pytest.raises(StrategyError, match="strategy 'post': unknown grouping '") as refusal:
        make("post", {"grouping": text})
    assert repr(text) in str(refusal.value)
