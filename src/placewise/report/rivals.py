"""What a plan is compared with: everything on one device, and what an expert would do."""

from typing import NamedTuple

from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.report.words import fastest_alone
from placewise.search import Budget, search
from placewise.simulate.simulator import Simulator
from placewise.strategies import make


class Rivals(NamedTuple):
    """Other placements of the same problem."""

    alone: tuple[str, float] | None  # the fastest single device and its step seconds; None: everything fits on none
    expert_seconds: float | None  # None: it does not suit the problem, or does not fit


def rivals_of(problem: Problem) -> Rivals:
    """Returns the rivals of every plan of a problem."""
    try:
        outcome = search(problem, make("expert", {}), Simulator(problem), budget=Budget(evaluations=100), seed=0)
    except StrategyError:
        return Rivals(fastest_alone(problem), None)
    return Rivals(fastest_alone(problem), None if outcome.placement is None else outcome.step_seconds)
