"""What a plan is compared with: the fastest single device and the expert's placement. Both are simulated here."""

from typing import NamedTuple

from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.search.advice import fastest_alone
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
