"""The best step there is, by trying everything."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator


def all_placements(problem: Problem) -> Ints:
    """Returns every placement: [placements, groups]."""
    choices = [np.flatnonzero(row).tolist() for row in problem.allowed]
    return np.array(list(product(*choices)), np.int64)  # one empty placement where there is no group


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
