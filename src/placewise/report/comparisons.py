"""What a plan is compared with: the fastest single device and the expert's placement. Both are simulated here."""

from typing import NamedTuple

import numpy as np

from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import search
from placewise.simulate.simulator import Simulator
from placewise.strategies import make


class Comparisons(NamedTuple):
    """Other placements of the same problem."""

    alone: tuple[str, float] | None  # the fastest single device and its step seconds; None: no device fits everything
    expert_seconds: float | None  # None: the expert does not suit the problem, or its placement does not fit


def simulate_comparisons(problem: Problem) -> Comparisons:
    """Returns what every plan of a problem is compared with."""
    try:
        outcome = search(problem, make("expert", {}), Simulator(problem), budget=Budget(evaluations=100), seed=0)
    except StrategyError:
        return Comparisons(fastest_alone(problem), None)
    return Comparisons(fastest_alone(problem), None if outcome.placement is None else outcome.step_seconds)


def fastest_alone(problem: Problem) -> tuple[str, float] | None:
    """Returns the device that runs everything fastest, and the step's time there; None if everything fits on no device."""
    whole = np.flatnonzero(problem.allowed.all(axis=0))
    if not len(whole):
        return None
    evaluation = Simulator(problem)(np.tile(whole[:, None], (1, problem.num_groups)))
    times = np.where(evaluation.overflow_bytes > 0, np.inf, evaluation.step_seconds)
    best = int(times.argmin())
    return (problem.cluster.device_names[whole[best]], float(times[best])) if np.isfinite(times[best]) else None
