"""Small problems, solved by trying everything."""

from collections.abc import Iterator
from itertools import count, product
from typing import NamedTuple

import numpy as np
from simulated import random_step

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Strategy
from placewise.core.problem import NOWHERE, Problem
from placewise.search.budget import Budget
from placewise.search.driver import search
from placewise.simulate.simulator import Simulator


def all_placements(problem: Problem) -> Ints:
    """Returns every placement: [placements, groups]."""
    choices = [np.flatnonzero(row).tolist() for row in problem.allowed]
    return np.array(list(product(*choices)), np.int64)  # one empty placement if there are no groups


def all_orders(problem: Problem) -> Iterator[list[int]]:
    """Yields every order in which the ops can be launched."""
    writers, readers, _ = problem.graph.edges
    after = problem.graph.ops.after
    needs: list[set[int]] = [set() for _ in range(problem.num_ops)]
    for before, behind in [(writers, readers), (after.values, after.rows)]:
        for m, n in zip(before.tolist(), behind.tolist(), strict=True):
            needs[n].add(m)

    def extend(order: list[int]) -> Iterator[list[int]]:
        if len(order) == problem.num_ops:
            yield order
        for n in range(problem.num_ops):
            if n not in order and needs[n] <= set(order):
                yield from extend([*order, n])

    yield from extend([])


def best_step(problem: Problem) -> float:
    """Returns the shortest step of all placements that fit, in all orders; infinite where none fits."""
    simulator, placements = Simulator(problem, threads=1), all_placements(problem)
    best = np.inf
    for order in all_orders(problem):
        evaluation = simulator(placements, np.array([order], np.int64).reshape(1, problem.num_ops))
        fits = evaluation.overflow_bytes == 0
        best = min(best, float(evaluation.step_seconds[fits].min(initial=np.inf)))
    return best


def best_choice(problem: Problem) -> float:
    """Returns the shortest step of all choices of optional groups, with all placements that fit, in all orders."""
    groups, best = np.flatnonzero(problem.optional), np.inf
    for there in product([False, True], repeat=len(groups)):
        placement = np.zeros(problem.num_groups, np.int64)
        placement[groups[~np.array(there, np.bool_)]] = NOWHERE
        best = min(best, best_step(problem.present(placement).problem))
    return best


class Enumerated(NamedTuple):
    """A problem with all its placements, evaluated."""

    problem: Problem
    simulator: Simulator
    placements: Ints  # [all, groups]
    evaluation: Evaluation  # of all

    @property
    def best_seconds(self) -> float:
        """The time of the best placement that fits."""
        return float(self.evaluation.step_seconds[self.evaluation.overflow_bytes == 0].min())


def enumerate_placements(problem: Problem) -> Enumerated:
    """Returns a problem with all its placements, evaluated."""
    simulator, placements = Simulator(problem, threads=1), all_placements(problem)
    return Enumerated(problem, simulator, placements, simulator(placements))


def small_problem(seed: int) -> Enumerated:
    """Returns a random problem of 3 or 4 groups on 2 or 3 devices, in which at most a ninth of the placements is best."""
    for attempt in count(1000 * seed):
        problem = random_step(attempt, 10, 2 + seed % 2, 60, "coarse:4")[0].problem
        if 3 <= problem.num_groups <= 4:
            found = enumerate_placements(problem)
            fits = found.evaluation.overflow_bytes == 0
            best = found.evaluation.step_seconds[fits].min(initial=np.inf)
            num_best = int((found.evaluation.step_seconds[fits] <= best * (1 + 1e-9)).sum())
            if 0 < num_best <= len(found.placements) / 9:
                return found
    raise AssertionError("endless")


def finds_the_best(strategy: Strategy, seed: int, evaluations: int) -> bool:
    """Returns whether a strategy finds the best placement of a small problem; it stops when it has."""
    small = small_problem(seed)
    budget = Budget(evaluations=evaluations, target_gap=1e-9)
    outcome = search(small.problem, strategy, small.simulator, budget=budget, seed=seed, bound_seconds=small.best_seconds)
    return outcome.step_seconds <= small.best_seconds * (1 + 1e-9)
