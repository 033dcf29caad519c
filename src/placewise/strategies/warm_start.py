"""Warm starts: a strategy can begin near a placement of another strategy, or of a plan file, also one of a similar graph."""

from collections.abc import Generator, Mapping
from pathlib import Path

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Proposal
from placewise.core.errors import PlanError, StrategyError
from placewise.core.problem import Problem
from placewise.strategies.carried_plan import CarriedPlan, carry_plan

NO_START = "none"


def check_start(start: str) -> None:
    """Raises ValueError unless a start is "none", the name of a strategy or the path of a plan file."""
    if start != NO_START and start not in _names() and not Path(start).is_file():
        raise ValueError(f"start must be none, the name of a strategy or the path of a plan file, it is {start!r}")


def check_plan_start(start: str) -> None:
    """Raises ValueError unless a start is "none" or the path of a plan file."""
    if start != NO_START and not Path(start).is_file():
        raise ValueError(f"start must be none or the path of a plan file, it is {start!r}")


def with_start(strategy: str, settings: Mapping[str, str], path: str) -> dict[str, str]:
    """Returns a strategy's settings with a plan file as its start; a StrategyError if it can't begin at one."""
    from placewise.strategies import parameters

    if parameters(strategy).get("start") != NO_START:
        raise StrategyError(f"strategy {strategy!r} can't begin at a plan; auto and the learned strategies can")
    if "start" in settings:
        raise StrategyError(f"strategy {strategy!r}: there are two starts: {path} and {settings['start']}")
    if not Path(path).is_file():
        raise StrategyError(f"start: {path}: there is no such file")
    return {**settings, "start": path}


def begin(
    problem: Problem, start: str, evaluations: int, rng: np.random.Generator
) -> Generator[Proposal, Evaluation, Ints | None]:
    """Yields the proposals of a start and returns its best placement: [groups]; None without a start.

    A strategy runs with its defaults (so a learned one has no warm start itself) until it ends or has used its evaluations,
    which count against the budget. A plan's placement is proposed once. Ties go to the earlier placement.
    """
    if start == NO_START:
        return None
    if start not in _names():
        carried = planned(problem, start)
        yield Proposal(carried.placement[None])
        return carried.placement
    return (yield from _searched(problem, start, evaluations, rng))


def _searched(
    problem: Problem, name: str, evaluations: int, rng: np.random.Generator
) -> Generator[Proposal, Evaluation, Ints | None]:
    """Yields at most `evaluations` placements of a strategy, and returns the best of them."""
    from placewise.strategies import make

    proposals = make(name).search(problem, rng)
    best, best_cost, spent = None, np.inf, 0
    try:
        proposal = next(proposals)
        while True:
            left = evaluations - spent
            placements, orders = proposal.placements[:left], proposal.orders
            evaluation = yield Proposal(placements, orders if orders is None else orders[:left], proposal.notes)
            spent += len(placements)
            row = int(evaluation.cost.argmin())
            if best is None or evaluation.cost[row] < best_cost:
                best, best_cost = np.array(placements[row]), evaluation.cost[row]
            if spent >= evaluations:
                break
            proposal = proposals.send(evaluation)
    except StopIteration:
        pass
    finally:
        proposals.close()
    return best


def planned(problem: Problem, path: str) -> CarriedPlan:
    """Returns what a plan file says about this problem; a StrategyError names the file and the rule."""
    try:
        return carry_plan(problem, path)
    except PlanError as rule:
        raise StrategyError(f"start: {rule}") from None


def _names() -> tuple[str, ...]:
    from placewise.strategies import STRATEGIES

    return tuple(STRATEGIES)
