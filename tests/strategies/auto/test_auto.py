"""auto: moves, walks, starts, and a model that measurements correct."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from auto_against_exact import ALIKE, Comparison, compare, small_step
from builders import graph_data, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Step, gpus, random_order, random_placements, random_step, takes

from placewise.bounds.best_bound import bound
from placewise.core.cluster import Cluster
from placewise.core.contracts import Evaluation, Strategy
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.models import load_graph
from placewise.search.budget import Budget
from placewise.search.driver import search
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.auto.auto import COARSE, FINE, Auto
from placewise.strategies.auto.candidates import Candidate, best_first
from placewise.strategies.auto.chains import Chains, move_partitions, remaining_seconds
from placewise.strategies.auto.coarse_first import CoarseFirst
from placewise.strategies.auto.corrected_model import MeasuredPlacement, correct_times, pick_different
from placewise.strategies.auto.moves import build_moves, new_undone, put_back, reorder
from placewise.strategies.auto.starts import PORTFOLIO, SLOW, evolve, portfolio, proposals_of
from placewise.strategies.auto.walk import Pace
from placewise.strategies.exact.exact import Exact

SEEDS = st.integers(0, 10_000)


def random_candidate(seed: int, memory: int = 10_000) -> tuple[Simulator, Candidate, np.random.Generator]:
    """Returns a random placement of a random step in a random order."""
    step, rng = random_step(seed, 40, 1 + seed % 4, memory, "colocated")
    model = Simulator(step.problem, threads=1)
    placement = random_placements(step.problem, rng, 1)[0]
    return model, Candidate.of(model, placement, random_order(step.problem, rng)), rng


def pace(trials: int = 300, heat: float = 0.01, kinds: list[int] | None = None) -> Pace:
    """Returns a pace for small steps."""
    weights = np.array(kinds) if kinds else FINE
    return Pace(trials, 0, heat, heat, weights, 20, 0.5, checks_memory=False, price=0.0)


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_a_walk_finds_what_the_simulator_confirms(seed: int) -> None:
    """Trials that begin in the middle and end early must not distort the result."""
    model, candidate, rng = random_candidate(seed)
    chains = Chains(model, rng.integers(1, 2**63, 1))
    found = chains.walk(0, candidate, pace())
    model.problem.check_placements(found.placement[None])
    model.problem.check_order(found.order.astype(np.int64))
    assert found.cost <= candidate.cost
    again = model(found.placement[None], found.order.astype(np.int64)[None])
    assert (again.cost[0], again.step_seconds[0]) == (found.cost, found.seconds)


@given(SEEDS, st.sampled_from(range(8)))
@settings(max_examples=80, deadline=None)
def test_the_walk_itself_knows_the_exact_seconds(seed: int, kind: int) -> None:
    """What the compiled walk returns equals a whole pass over its best placement, for every kind of move."""
    from placewise.strategies.auto.walk import new_walker, walk

    model, candidate, rng = random_candidate(seed)
    moves, walker = (
        build_moves(model.problem, move_partitions(model.problem)),
        new_walker(model.flat, model.problem.num_groups),
    )
    walker.random[0] = rng.integers(1, 2**63)
    walker.work.devices[:] = candidate.placement
    walker.order[:] = candidate.order
    kinds = [0] * 8
    kinds[kind] = 1
    heat = 0.05 * max(candidate.seconds, 1e-3)
    seconds, overflow = walk(
        model.flat,
        moves,
        -remaining_seconds(model.problem),
        walker,
        pace(200, heat, kinds)._replace(checks_memory=True, price=0.1),
    )
    placement, order = walker.best.astype(np.int64), walker.best_order.astype(np.int64)
    whole = model(placement[None], order[None])
    assert (whole.step_seconds[0], whole.overflow_bytes[0]) == (seconds, overflow)
    # where the walk ends, which it does not return, is right too
    at = model(walker.work.devices.astype(np.int64)[None], walker.order.astype(np.int64)[None])
    assert walker.trail.ends.max(initial=0.0) == at.step_seconds[0]


@given(SEEDS, SEEDS, SEEDS, st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_window_of_the_order_is_reordered_and_put_back(seed: int, a: int, b: int, hastens: bool) -> None:
    step, rng = random_step(seed, 20, 2, 1000, "colocated")
    problem = step.problem
    order = random_order(problem, rng).astype(np.int32)
    first, last = sorted((a % 20, b % 20))
    positions, undone = np.empty(20, np.int32), new_undone(20)
    positions[order] = np.arange(20)
    old = order.copy()
    is_new = reorder(build_moves(problem, []), order, positions, first, last, hastens, undone, 1)
    problem.check_order(order.astype(np.int64))
    assert is_new == (not np.array_equal(order, old))
    assert np.array_equal(positions[order], np.arange(20))
    assert np.array_equal(order[:first], old[:first])
    assert np.array_equal(order[last + 1 :], old[last + 1 :])
    put_back(order, positions, first, last, undone)
    assert np.array_equal(order, old)
    assert np.array_equal(positions[order], np.arange(20))


def test_an_op_is_hastened_with_what_it_needs() -> None:
    """Ops 0 -> 3 and 1 -> 2: hastening op 3 in 0 1 2 3 launches 0 and 3 first; delaying op 0 launches them last."""
    ops = [takes(1, 0, [], [0]), takes(1, 1, [], [1]), takes(1, 2, [1], [2]), takes(1, 3, [0], [3])]
    problem = Step.of(graph_data([tensor(f"t{n}", 1) for n in range(4)], ops), gpus(2)).problem
    for hastens, expected in ((True, [0, 3, 1, 2]), (False, [1, 2, 0, 3])):
        order, positions = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32)
        assert reorder(build_moves(problem, []), order, positions, 0, 3, hastens, new_undone(4), 1)
        assert order.tolist() == expected


@given(SEEDS)
@settings(max_examples=60, deadline=None)
def test_no_step_ends_sooner_than_the_tails_say(seed: int) -> None:
    model, candidate, _ = random_candidate(seed)
    ends = model.schedule(candidate.placement, candidate.order.astype(np.int64)).timeline.end
    assert (ends + remaining_seconds(model.problem) <= candidate.seconds * (1 + 1e-12)).all()


@pytest.mark.parametrize("seed", range(12))
def test_latest_ends_leave_no_slack_on_the_critical_path(seed: int) -> None:
    """Without launch costs, an op on the critical path must end when it does, and no op later than its latest end."""
    step, rng = random_step(seed, 30, 2 + seed % 3, 1000, "colocated")
    problem = replace(step.problem, cluster=replace(step.problem.cluster, dispatch_seconds=0.0))
    model = Simulator(problem, threads=1)
    candidate = Candidate.of(model, random_placements(problem, rng, 1)[0])
    chains = Chains(model, rng.integers(1, 2**63, 1))
    chains.walk(0, candidate, pace(trials=0))
    trail = chains._walkers[0].trail
    assert (trail.ends <= trail.latest + 1e-9).all()
    for leg in model.schedule(candidate.placement, candidate.order.astype(np.int64)).critical_path:
        if leg.kind == "op":
            assert trail.latest[leg.number] == pytest.approx(trail.ends[leg.number])


@pytest.mark.parametrize("seed", range(30))
def test_a_walk_from_what_fits_ends_at_what_fits(seed: int) -> None:
    model, candidate, rng = random_candidate(seed, memory=60)
    memory = replace(
        model.problem.cluster,
        devices=tuple(
            replace(device, memory_bytes=int(peak))
            for device, peak in zip(
                model.problem.cluster.devices,
                model.simulate(candidate.placement[None], candidate.order.astype(np.int64)[None]).peak_bytes[0],
                strict=True,
            )
        ),
    )
    tight = Simulator(replace(model.problem, cluster=memory), threads=1)
    candidate = Candidate.of(tight, candidate.placement, candidate.order)
    assert candidate.fullness == 1 or not candidate.seconds
    found = Chains(tight, rng.integers(1, 2**63, 1)).walk(0, candidate, pace())
    assert found.fullness <= 1


def test_what_overflows_is_repaired() -> None:
    """Eight parameters of 10 bytes on devices of 20, 30 and 40 bytes: only full devices hold them, from all on one."""
    parameters = [tensor(f"w{n}", 10, "parameter", home=n) for n in range(8)]
    cluster = gpus(3)
    for device, memory in zip(cluster["devices"], (20, 30, 40), strict=True):
        device["memory"] = memory
    problem = Step.of(graph_data(parameters, [takes(1.0, n, reads=[n]) for n in range(8)]), cluster).problem
    outcome = search(problem, Auto(), Simulator(problem), budget=Budget(evaluations=40), seed=0)
    assert outcome.placement is not None
    assert np.bincount(outcome.placement, minlength=3).tolist() in ([2, 3, 3], [2, 2, 4], [1, 3, 4])


def test_the_number_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small_step(5)
    found = []
    for threads in (1, 3):
        monkeypatch.setattr("placewise.strategies.auto.auto.ThreadPoolExecutor", lambda _, n=threads: ThreadPoolExecutor(n))
        proposals = Auto(exact_ops=0).search(problem, np.random.default_rng(3))
        simulator, evaluation, seen = Simulator(problem, threads=threads), None, []
        for _ in range(30):
            proposal = proposals.send(evaluation)  # type: ignore[arg-type]
            evaluation = simulator(proposal.placements, proposal.orders)
            seen.append((proposal.placements.tolist(), evaluation.cost.tolist()))
        proposals.close()
        found.append(seen)
    assert found[0] == found[1]


def test_a_step_of_few_ops_is_solved_and_the_search_ends() -> None:
    """The walks of one round alone don't find the optimum of all of these steps."""
    pytest.importorskip("ortools")
    walked = 0
    for seed in range(8):
        problem = small_step(seed)
        if compare(problem, Budget(evaluations=1)) in (None, Comparison(np.inf, np.inf, bound(problem).seconds)):
            continue  # no proof, or nothing fits
        optimum = search(problem, Exact(), Simulator(problem), budget=Budget(evaluations=100), seed=0)
        found = search(problem, Auto(), Simulator(problem), budget=Budget(evaluations=100), seed=0)
        assert found.step_seconds == pytest.approx(optimum.step_seconds)
        assert found.evaluations <= 2
        rounds = search(problem, Auto(exact_ops=0), Simulator(problem), budget=Budget(evaluations=2), seed=0)
        walked += rounds.step_seconds > optimum.step_seconds * (1 + 1e-9)
    assert walked > 0


def test_without_the_solver_a_step_of_few_ops_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise StrategyError("not installed")

    monkeypatch.setattr("placewise.strategies.exact.constraint_program.import_solver", missing)
    problem = small_step(5)
    assert search(problem, Auto(), Simulator(problem), budget=Budget(evaluations=10), seed=0).evaluations == 10


def test_starts_of_a_large_step_are_proposed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each proposal is better than the last one, and the walks begin at the same placement as those of a small step."""
    problem = Problem.of(load_graph("rnnlm:layers=2,hidden=4,batch=2,steps=3,vocab=8"), Cluster.load("4xK80"))
    found = []
    cases: tuple[tuple[int, Strategy], ...] = ((10**6, Auto()), (10, Auto()), (10, CoarseFirst()))
    for large, strategy in cases:
        monkeypatch.setattr("placewise.strategies.auto.starts.LARGE_STEP", large)
        proposals = strategy.search(problem, np.random.default_rng(0))
        proposal, costs, turns = next(proposals), list[float](), 0
        while proposal.notes["stage"] == "start":
            evaluation = Simulator(problem)(proposal.placements, proposal.orders)
            costs += evaluation.cost.tolist()
            turns += 1
            proposal = proposals.send(evaluation)
        proposals.close()
        assert costs == sorted(costs, reverse=True)
        assert turns == (1 if large > 10 else len(PORTFOLIO + SLOW) + 1)  # the driver looks at the clock after each
        found.append(costs)
    assert len(found[0]) == 1 < len(found[1])
    assert found[0][0] == found[1][-1] == found[2][-1]


def test_a_start_can_be_a_strategy_with_a_parameter() -> None:
    problem = Problem.of(load_graph("rnnlm:layers=2,hidden=4,batch=2,steps=3,vocab=8"), Cluster.load("4xK80"))
    model, rng = Simulator(problem), np.random.default_rng(0)
    found = list(proposals_of(["m-etf:ties=path"], model, rng))
    proposals = make("m-etf", {"ties": "path"}).search(problem, rng)
    assert np.array_equal(found[0].placement, next(proposals).placements[0])
    assert len(found) == 2


@pytest.mark.parametrize("chains", [1, 3])
def test_a_start_on_one_device_gets_a_cold_walk_first(chains: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heats: list[tuple[int, float]] = []

    def walk(self: Chains, chain: int, candidate: Candidate, pace: Pace) -> Candidate:
        heats.append((chain, pace.hot))
        return candidate

    monkeypatch.setattr(Chains, "walk", walk)
    model, candidate, rng = random_candidate(3)
    auto = Auto(chains=chains, cycle=2, hot=0.1, cold=0.01)
    list(islice(auto.walk_from(model, [candidate], rng), 2))
    assert {heat for _, heat in heats} == {0.01, 0.1}  # no start is on one device
    assert sorted(heat for chain, heat in heats if chain == 0) == [0.01, 0.1]
    heats.clear()
    alone = Candidate.of(model, np.zeros_like(candidate.placement))
    list(islice(auto.walk_from(model, [alone], rng), 4))
    first, others = sorted(heats[: 2 * chains]), sorted(heats[2 * chains :])
    assert [heat for chain, heat in first if chain == 0] == [0.01, 0.01]
    assert {heat for chain, heat in [*first, *others] if chain > 0} <= {0.01, 0.1}
    assert sorted(heat for chain, heat in others if chain == 0) == [0.01, 0.1]


def test_it_finds_the_proved_optimum_of_small_problems() -> None:
    """The whole comparison is a command: python tests/auto_against_exact.py."""
    pytest.importorskip("ortools")
    found = [compare(small_step(seed), Budget(evaluations=400, target_gap=ALIKE)) for seed in range(16)]
    rows = [row for row in found if row is not None]
    assert len(rows) >= 12
    assert all(row.bound <= row.optimum * (1 + ALIKE) for row in rows)
    assert sum(row.found <= row.optimum * (1 + ALIKE) for row in rows) >= len(rows) - 1


def test_the_portfolio_is_sorted_and_has_every_placement_once() -> None:
    model = Simulator(small_step(3))
    candidates = portfolio(model, np.random.default_rng(0))
    assert [candidate.cost for candidate in candidates] == sorted(candidate.cost for candidate in candidates)
    assert len({tuple(candidate.placement.tolist()) for candidate in candidates}) == len(candidates)
    assert len(best_first([*candidates, *candidates])) == len(candidates)


def test_the_population_gets_better_and_ends() -> None:
    model = Simulator(random_step(1, 60, 3, 10_000, "colocated")[0].problem)
    starts = portfolio(model, np.random.default_rng(0))
    costs = [candidate.cost for candidate in evolve(model, starts[-1:], "coarse:20", 200_000, np.random.default_rng(0))]
    assert costs
    assert costs == sorted(costs, reverse=True)
    assert costs[0] < starts[-1].cost


# --- with an evaluator that measures ---


class Machine:
    """Replaces real devices: a simulator whose matmuls and copies take longer than in the model."""

    def __init__(self, problem: Problem, factors: dict[str, float], copy: float) -> None:
        slower = np.array([factors.get(kind, 1.0) for kind in problem.graph.ops.kinds])
        links = tuple(replace(link, bytes_per_second=link.bytes_per_second / copy) for link in problem.cluster.links)
        cluster = replace(problem.cluster, links=links)
        self.simulator = Simulator(replace(problem, op_seconds=problem.op_seconds * slower[:, None], cluster=cluster))
        self.count = 0

    def __call__(self, placements: np.ndarray, orders: np.ndarray | None = None) -> Evaluation:
        """Judges placements, and counts them."""
        self.count += len(placements)
        return self.simulator(placements, orders)


def test_measurements_correct_the_model() -> None:
    """Half of the placements teach; the error on the other half must shrink."""
    from captured import captured_problem

    problem = captured_problem()
    machine = Machine(problem, {"aten.mm": 2.0, "aten.addmm": 2.0}, copy=3.0)
    model = Simulator(problem)
    candidates = portfolio(model, np.random.default_rng(0))
    measured = [
        MeasuredPlacement(
            s.placement, s.order, float(machine(s.placement[None], s.order.astype(np.int64)[None]).step_seconds[0])
        )
        for s in candidates
    ]

    def error(simulator: Simulator, some: list[MeasuredPlacement]) -> float:
        said = [Candidate.of(simulator, m.placement, m.order).seconds for m in some]
        return float(np.mean([abs(np.log(s / m.seconds)) for s, m in zip(said, some, strict=True)]))

    better = Simulator(correct_times(problem, measured[::2]))
    assert error(better, measured[1::2]) < 0.5 * error(model, measured[1::2])


def test_wrong_launches_are_corrected() -> None:
    """Ten ops of 1 s in a chain, each launched in 4 s as the model believes and in 1 s on the machine.

    The machine takes 1 + 10 = 11 s for them on one device, and the model 10 * 4 + 1 = 41 s. Nothing else is wrong.
    """
    tensors = [tensor(f"t{n}") for n in range(10)]
    ops = [takes(1.0, n, [n - 1] if n else [], [n]) for n in range(10)]
    model = Step.of(graph_data(tensors, ops), gpus(1, dispatch=4.0)).problem
    everything = np.zeros(model.num_groups, np.int64)
    order = np.arange(10, dtype=np.int32)
    assert Simulator(model).schedule(everything).step_seconds == pytest.approx(41.0)
    corrected = correct_times(model, [MeasuredPlacement(everything, order, 11.0)])
    assert Simulator(corrected).schedule(everything).step_seconds == pytest.approx(11.0, rel=0.1)
    assert corrected.cluster.dispatch_seconds < 1.2


def test_few_measurements_are_spent_on_different_placements() -> None:
    """On a machine that the model does not know, twelve measurements find a better step than the model's own answer."""
    from captured import captured_problem

    problem = captured_problem()
    machine = Machine(problem, {"aten.mm": 0.5, "aten.addmm": 0.5}, copy=6.0)
    auto = Auto(effort=300_000, coarse=300_000, rounds=12)
    outcome = search(problem, auto, machine, budget=Budget(evaluations=12), seed=0)
    assert machine.count == 12
    model = Simulator(problem)
    walks = islice(auto._walks(model, portfolio(model, np.random.default_rng(0)), np.random.default_rng(0)), 40)
    best = min((candidate for candidates, _ in walks for candidate in candidates), key=lambda candidate: candidate.cost)
    assert outcome.step_seconds < machine(best.placement[None], best.order.astype(np.int64)[None]).step_seconds[0]


def test_a_profile_with_wrong_launches_is_mended_by_twenty_measurements() -> None:
    """The model believes that a launch takes four times as long as it does.

    Twenty measurements find what a search in the right model finds. The wrong model's own answer takes three times as long.
    """
    from captured import captured_problem

    right = captured_problem()
    right = replace(right, cluster=replace(right.cluster, dispatch_seconds=30e-6))
    wrong = replace(right, cluster=replace(right.cluster, dispatch_seconds=120e-6))
    auto = Auto(effort=300_000, coarse=300_000, rounds=12)

    def found(model: Problem, judge: Problem, evaluations: int) -> float:
        outcome = search(model, auto, Simulator(judge), budget=Budget(evaluations), seed=0)
        assert outcome.placement is not None
        return Simulator(right).schedule(outcome.placement, outcome.order).step_seconds

    best = found(right, right, 40)
    assert found(wrong, right, 20) < 1.02 * best
    assert found(wrong, wrong, 40) > 2 * best


def test_what_is_measured_next_differs_from_what_was() -> None:
    model = Simulator(small_step(4))
    candidates = portfolio(model, np.random.default_rng(0))
    chosen = pick_different(candidates, [candidates[0].placement], 2)
    assert len(chosen) == min(2, len(candidates) - 1)
    assert not any(np.array_equal(candidate.placement, candidates[0].placement) for candidate in chosen)
    assert not pick_different(candidates, [candidate.placement for candidate in candidates], 2)


def test_weights_are_for_every_kind_of_move() -> None:
    assert len(COARSE) == len(FINE) == 8
