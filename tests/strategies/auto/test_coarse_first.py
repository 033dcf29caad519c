"""Walks that trade time for copies, and auto that places coarse blocks first."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import random_order, random_placements, random_step

from placewise.core.problem import Problem
from placewise.simulate.cuts import Crossings
from placewise.simulate.flat_problem import copied_tensors
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.auto import FINE
from placewise.strategies.auto.candidates import Candidate
from placewise.strategies.auto.chains import Chains, move_partitions, remaining_seconds
from placewise.strategies.auto.coarse_first import CoarseFirst
from placewise.strategies.auto.moves import build_moves
from placewise.strategies.auto.walk import Pace, new_walker, walk

SEEDS = st.integers(0, 10_000)


def pace(heat: float) -> Pace:
    return Pace(200, 0, heat, heat, FINE, 20, 0.5, checks_memory=False, price=0.1)


def random_candidate(seed: int) -> tuple[Simulator, Candidate, np.random.Generator]:
    step, rng = random_step(seed, 40, 1 + seed % 4, 10_000, "colocated")
    model = Simulator(step.problem, threads=1)
    placement = random_placements(step.problem, rng, 1)[0]
    return model, Candidate.of(model, placement, random_order(step.problem, rng)), rng


@given(SEEDS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_walk_that_trades_time_for_copies_knows_both(seed: int, checks_memory: bool) -> None:
    """What the compiled walk returns is the step's seconds, and the price of each copy that a whole pass makes."""
    model, candidate, rng = random_candidate(seed)
    walker = new_walker(model.flat, model.problem.num_groups)
    walker.random[0] = rng.integers(1, 2**63)
    walker.work.devices[:] = candidate.placement
    walker.order[:] = candidate.order
    price = float(rng.uniform(0.1, 3))
    prices = rng.uniform(0.0, 2.0, len(walker.copy_prices))  # [copied tensors * devices]
    walker.copy_prices[:] = prices
    copied = copied_tensors(model.problem)

    def paid(schedule: Schedule) -> float:
        places = np.searchsorted(copied, schedule.copy_tensors) * model.problem.num_devices + schedule.timeline.copy_target
        return price * float(prices[places].sum())

    cost, overflow = walk(
        model.flat,
        build_moves(model.problem, move_partitions(model.problem)),
        -remaining_seconds(model.problem),
        walker,
        pace(price)._replace(checks_memory=checks_memory, copy_price=price),
    )
    schedule = model.schedule(walker.best.astype(np.int64), walker.best_order.astype(np.int64))
    assert cost == pytest.approx(schedule.step_seconds + paid(schedule), rel=1e-12)
    start = model.schedule(candidate.placement, candidate.order.astype(np.int64))
    assert overflow or checks_memory or cost <= candidate.seconds + paid(start) + 1e-9


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_what_fits_still_fits_after_a_trade(seed: int) -> None:
    model, candidate, rng = random_candidate(seed)
    prices = Crossings.of(model.problem).prices(candidate.placement, 0.5)
    found = Chains(model, rng.integers(1, 2**63, 1)).trade(0, candidate, pace(1.0), 0.5, prices)
    assert not found.overflow_bytes or candidate.overflow_bytes


def test_coarse_blocks_come_first() -> None:
    """Every proposal keeps the blocks of its grouping whole; the walks of auto follow."""
    import placewise as pw
    from placewise.core.grouping import group_ops
    from placewise.models import load_graph

    graph = load_graph("rnnlm:layers=2,hidden=8,steps=3,batch=4,vocab=11")
    problem = Problem.of(graph, pw.Cluster.load("2xK80"))
    evaluate, search = Simulator(problem), CoarseFirst().search(problem, np.random.default_rng(0))
    proposal = next(search)
    stages = [proposal.notes["stage"]]
    for _ in islice(range(100), 60):
        proposal = search.send(evaluate(proposal.placements, proposal.orders))
        stages.append(proposal.notes["stage"])
        if stages[-1] == "blocks":
            blocks = group_ops(graph, str(proposal.notes["grouping"]))
            for placement in proposal.placements:
                devices = placement[problem.merged]
                assert len(np.unique(blocks * problem.num_devices + devices)) == len(np.unique(blocks))
    order = list(dict.fromkeys(stages))
    assert order[:2] == ["start", "blocks"]
    assert "walk" in order
