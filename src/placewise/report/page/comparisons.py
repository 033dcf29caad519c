"""What a plan is compared with: everything on one device, and what an expert would do."""

from typing import NamedTuple

from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.report.words import fastest_alone
from placewise.search.budget import Budget
from placewise.search.driver import search
from placewise.simulate.simulator import Simulator
from placewise.strategies import make


class Comparisons(NamedTuple):
    """Other placements of the same problem."""

    alone: tuple[str, float] | None  # the fastest single device and its step seconds; None: everything fits on none
    expert_seconds: float | None  # None: it does not suit the problem, or does not fit


def comparisons_of(problem: Problem) -> Comparisons:
    """Returns the rivals of every plan of a problem."""
    try:
        outcome = search(problem, make("expert", {}), Simulator(problem), budget=Budget(evaluations=100), seed=0)
    except StrategyError:
        return Comparisons(fastest_alone(problem), None)
    return Comparisons(fastest_alone(problem), None if outcome.placement is None else outcome.step_seconds)
