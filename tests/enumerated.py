"""Problems that are small enough to judge every placement."""

import itertools
from typing import NamedTuple

import numpy as np
from simulated import random_step

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Strategy
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import search
from placewise.simulate.simulator import Simulator


class Enumerated(NamedTuple):
    """A problem with all of its placements, judged."""

    problem: Problem
    simulator: Simulator
    placements: Ints  # [all, groups]
    evaluation: Evaluation  # of all

    @property
    def best_seconds(self) -> float:
        """The time of the best placement that fits."""
        return float(self.evaluation.step_seconds[self.evaluation.overflow_bytes == 0].min())


def enumerate_placements(problem: Problem) -> Enumerated:
    """Returns a problem with all of its placements, judged."""
    allowed = [np.flatnonzero(row).tolist() for row in problem.allowed]
    placements = np.array(list(itertools.product(*allowed)), np.int64).reshape(-1, problem.num_groups)
    simulator = Simulator(problem, threads=1)
    return Enumerated(problem, simulator, placements, simulator(placements))


def small_problem(seed: int) -> Enumerated:
    """Returns a random problem of 3 or 4 groups on 2 or 3 devices, in which at most every ninth placement is the best."""
    for attempt in itertools.count(1000 * seed):
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
