"""Warm starts: a learned strategy can begin near a placement of another strategy, or of a plan file."""

from collections.abc import Generator
from pathlib import Path

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Proposal
from placewise.core.errors import PlanError, StrategyError
from placewise.core.plan import Plan
from placewise.core.problem import Problem

NO_START = "none"


def check_start(start: str) -> None:
    """Raises ValueError unless a start is "none", the name of a strategy or the path of a plan file."""
    if start != NO_START and start not in _names() and not Path(start).is_file():
        raise ValueError(f"start must be none, the name of a strategy or the path of a plan file, it is {start!r}")


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
        placement = _planned(problem, start)
        yield Proposal(placement[None])
        return placement
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


def _planned(problem: Problem, path: str) -> Ints:
    """Returns the placement of a plan file: [groups]."""
    try:
        return Plan.load(path).resolve(problem, path)[0]
    except PlanError as rule:
        raise StrategyError(f"start: {rule}") from None


def _names() -> tuple[str, ...]:
    from placewise.strategies import STRATEGIES

    return tuple(STRATEGIES)
