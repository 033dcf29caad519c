"""auto for graphs with optional ops: placements made to fit, then walks over options and ops in turn."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

import numpy as np

from placewise.core.problem import Present, Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.candidates import Candidate, best_first
from placewise.strategies.auto.chains import Chains
from placewise.strategies.auto.walk import Pace
from placewise.strategies.options.changes import find_changes
from placewise.strategies.options.choice_walk import ChoiceModel, Tempo
from placewise.strategies.options.fit import Chosen, fit, tidy
from placewise.strategies.options.launch_order import with_options
from placewise.strategies.options.streamed import streamed
from placewise.strategies.sampling import Choices

STARTS = 6  # placements that are made to fit at first: the fastest
LARGE_STEP = 5_000  # ops of a step for which only two placements are made to fit at first
TURNS = 4  # walks from hot to cold
EFFORT = 12_000_000  # ops that a walk over options simulates
MOST_TRIALS = 100_000  # of such a walk, for a large step
FEWEST_TRIALS = 200
SMALL_TRIALS = 20_000  # for a small step
TIGHT, LOOSE = 0.01, 0.2  # shares of all memory that cost as much as the whole step; the chains take turns
WEIGHTS = np.array([6, 6, 6, 1])  # how often a walk toggles a change, swaps two, shifts an op in the order, moves a group
SMALL_WEIGHTS = np.array([3, 3, 6, 8])  # the same for a small step
OP_WALKS = np.array([1, 1, 4, 4, 1, 4, 3, 3])  # [kinds], the moves of ops


class Walks(NamedTuple):
    """How long the walks are, and how hot."""

    chains: int
    effort: int  # ops that a walk over ops simulates
    hot: float
    cold: float
    focus: float
    is_small: bool


def choose(
    problem: Problem, always: Present, starts: list[Candidate], walks: Walks, rng: np.random.Generator
) -> Iterator[tuple[list[Chosen], dict[str, object]]]:
    """Yields better and better choices with notes, without end. `starts` are placements of what always runs."""
    models = [ChoiceModel(problem) for _ in range(walks.chains)]
    fastest = sorted(starts, key=lambda candidate: candidate.seconds)[: STARTS if problem.num_ops < LARGE_STEP else 2]
    plain = _nowhere(models[0], always, best_first(starts)[0])
    chosen: list[Chosen] = []
    for candidate in fastest:
        chosen.append(_streamed(models[0], always, candidate))
        yield [min([plain, *chosen], key=lambda one: one.key)], {"stage": "start"}
    chosen += [_fitted(models[0], always, candidate) for candidate in fastest]
    chosen.sort(key=lambda one: one.key)
    yield [chosen[0]], {"stage": "start"}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        current, best = [chosen[i % len(chosen)] for i in range(walks.chains)], chosen[0]
        for cycle in count():
            for turn in range(TURNS):
                heat = walks.hot * (walks.cold / walks.hot) ** (turn / TURNS)
                cool = walks.hot * (walks.cold / walks.hot) ** ((turn + 1) / TURNS)
                seeds = rng.integers(1, 2**63, walks.chains).tolist()
                heats = [(heat, cool, TIGHT if (chain + cycle) % 2 else LOOSE) for chain in range(walks.chains)]
                sizes = [walks.is_small] * walks.chains
                current = list(pool.map(_walk, models, current, heats, seeds, sizes))
                best = min([best, *current], key=lambda one: one.key)
                yield current, {"stage": "options", "cycle": cycle}
            if not walks.is_small and problem.num_devices > 1:
                best = _move_ops(models[0], best, walks, int(rng.integers(1, 2**63)))
                yield [best], {"stage": "walk", "cycle": cycle}
            current = [best if chain % 2 == 0 else chosen[(cycle + chain) % len(chosen)] for chain in range(walks.chains)]
            if walks.is_small:
                drawn = Choices.of(always.problem).draw(rng, walks.chains)
                for chain in range(1, walks.chains):
                    candidate = Candidate.of(Simulator(always.problem), drawn[chain])
                    current[chain] = _fitted(models[0], always, candidate)


def _walk(model: ChoiceModel, start: Chosen, heat: tuple[float, float, float], seed: int, is_small: bool) -> Chosen:
    hot, cold, share = heat
    seconds = max(start.result.seconds, 1e-9)
    price = seconds / max(share * float(model.flat.memory_bytes.sum()), 1.0)
    if start.result.overflow_bytes:
        price *= 100.0
    num_ops = model.problem.num_ops
    most = SMALL_TRIALS if is_small else MOST_TRIALS
    trials = min(max(EFFORT // num_ops, FEWEST_TRIALS), most)
    changes = find_changes(model.problem, start.placement)
    pace = Tempo(trials, hot * seconds, cold * seconds, price, SMALL_WEIGHTS if is_small else WEIGHTS)
    placement, order, result = model.walk(start.placement, start.order, changes, pace, seed)
    return tidy(model, Chosen(placement, order, result))


def _move_ops(model: ChoiceModel, best: Chosen, walks: Walks, seed: int) -> Chosen:
    """Returns the best after a walk over the places of all ops that run, with the options as they are."""
    present = model.problem.present(best.placement)
    simulator = Simulator(present.problem)
    start = Candidate.of(simulator, best.placement[present.groups], present.reduce_order(best.order))
    num_ops = present.problem.num_ops
    pace = Pace(
        trials=min(max(walks.effort // num_ops, 1), 1000), first=0, hot=walks.hot, cold=walks.cold, weights=OP_WALKS,
        longest=max(num_ops // 4, 1), focus=walks.focus, checks_memory=True, price=0.0,
    )  # fmt: skip
    found = Chains(simulator, np.array([seed])).walk(0, start, pace)
    placement = present.restore_placement(found.placement)
    order = with_options(model.problem, present.ops[np.asarray(found.order, np.int64)])
    again = Chosen(placement, order, model.judge(placement, order))
    return min([best, again], key=lambda one: one.key)


def _fitted(model: ChoiceModel, always: Present, candidate: Candidate) -> Chosen:
    order = with_options(model.problem, always.ops[np.asarray(candidate.order, np.int64)])
    return fit(model, always.restore_placement(candidate.placement), order)


def _streamed(model: ChoiceModel, always: Present, candidate: Candidate) -> Chosen:
    order = with_options(model.problem, always.ops[np.asarray(candidate.order, np.int64)])
    return streamed(model, always.restore_placement(candidate.placement), order)


def _nowhere(model: ChoiceModel, always: Present, candidate: Candidate) -> Chosen:
    """Returns the candidate itself, without optional ops, in its own order."""
    placement = always.restore_placement(candidate.placement)
    order = always.restore_order(np.asarray(candidate.order, np.int64))
    return Chosen(placement, order, model.judge(placement, order))
