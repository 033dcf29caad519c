"""The number of micro-batches for which a step is shortest: `micro_batches=auto` in the name of a model of the zoo."""

from collections.abc import Callable

from placewise.core.errors import ModelError, NothingFits
from placewise.core.problem import Problem
from placewise.search.budget import CLOSED, DEFAULT_SECONDS, Budget
from placewise.search.driver import unless_stopped
from placewise.search.planner import Planner
from placewise.search.request import Request

AUTO = "micro_batches=auto"

NUMBERS = (1, 2, 4, 8, 16)

SHARE = 0.2  # of the seconds of a search: what each number of micro-batches gets


def choose_micro_batches(
    model: str, problem_of: Callable[[str], Problem], seconds: float | None, seed: int, order: str = "priority"
) -> tuple[int, dict[int, float]]:
    """Returns the number with the shortest step, and the steps of all that divide the batch; ties go to the fewest.

    `problem_of` returns the problem of a model by name.
    """
    found: dict[int, float] = {}
    for number in NUMBERS:
        try:
            problem = problem_of(model.replace(AUTO, f"micro_batches={number}"))
        except ModelError:
            if number == 1:
                raise
            continue  # it does not divide the batch
        budget = Budget(seconds=SHARE * (seconds or DEFAULT_SECONDS), target_gap=CLOSED)
        outcome = unless_stopped(Planner(problem, Request(budget=budget, seed=seed, order=order)).search())
        if outcome.placement is not None:
            found[number] = outcome.step_seconds
    if not found:
        raise NothingFits("nothing fits with any number of micro-batches")
    return min(found, key=lambda number: found[number]), found
