"""What a plan is compared with: the fastest single device and the expert's placement. Both are simulated here."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.search.advice import fastest_alone
from placewise.search.budget import Budget
from placewise.search.driver import Outcome, search
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator
from placewise.strategies import make


class Comparisons(NamedTuple):
    """Other placements of the same problem."""

    alone: tuple[str, float] | None  # the fastest single device and its step seconds; None: no device fits everything
    expert_seconds: float | None  # None: the expert does not suit the problem, or its placement does not fit


def other_plans(problem: Problem, fastest: tuple[Ints, Ints | None] | None = None) -> list[tuple[str, Schedule]]:
    """Returns what a plan's page shows by one click: one device, the expert's, and the fastest plan, as far as they fit."""
    simulator, found = Simulator(problem), list[tuple[str, Schedule]]()
    if (alone := fastest_alone(problem)) is not None:
        placement = np.full(problem.num_groups, problem.cluster.device_names.index(alone[0]))
        found.append((alone[0], simulator.schedule(placement)))
    expert = _expert(problem)
    if expert is not None and expert.placement is not None:
        found.append(("expert", simulator.schedule(expert.placement, expert.order)))
    if fastest is not None:
        found.append(("fastest", simulator.schedule(*fastest)))
    return found


def _expert(problem: Problem) -> Outcome | None:
    """Returns what the expert finds; None if it does not suit the problem."""
    try:
        return search(problem, make("expert", {}), Simulator(problem), budget=Budget(evaluations=100), seed=0)
    except StrategyError:
        return None


def simulate_comparisons(problem: Problem) -> Comparisons:
    """Returns what every plan of a problem is compared with."""
    expert = _expert(problem)
    return Comparisons(fastest_alone(problem), None if expert is None or expert.placement is None else expert.step_seconds)
