"""A placement made to fit: optional ops are chosen by seconds for each byte that they save where memory is too small."""

from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.problem import NOWHERE
from placewise.strategies.options.changes import Changes, find_changes
from placewise.strategies.options.choice_walk import ChoiceModel, Result

LEAST = 1e-7  # share of the step that every change costs at least, so that of free ones the largest is made first
TOLERANCE = 1.3  # how much more than the next best known change one may cost when its turn comes
EFFORT = 200_000_000  # ops that are simulated to make one placement fit


class Chosen(NamedTuple):
    """A placement with its choice of optional ops, in an order of all ops."""

    placement: Ints  # [groups]
    order: Ints  # [ops]
    result: Result

    @property
    def key(self) -> tuple[int, float]:
        """What is minimised: first the overflow, then the time."""
        return self.result.overflow_bytes, self.result.seconds


def fit(model: ChoiceModel, placement: Ints, order: Ints, changes: Changes | None = None, effort: int = EFFORT) -> Chosen:
    """Returns a placement with optional ops so that it fits, or overflows less; ties go to the change found first.

    Greedy: of all changes, the one with the least seconds for each byte by which launches exceed the memory. A change is
    judged again, with those made before it, when its turn comes. `effort` is the number of ops that are simulated at most.
    """
    placement = placement.copy()
    changes = find_changes(model.problem, placement) if changes is None else changes
    result = model.judge(placement, order)
    passes = max(effort // max(model.problem.num_ops, 1), 100)
    made: list[int] = []
    helped = True
    while result.area > 0 and helped and passes > 0:
        which = np.arange(len(changes.ends) - 1) if made else np.flatnonzero(changes.are_simple)
        heap = _rank(model, placement, order, changes, result, which)
        passes -= len(which)
        heapify(heap)
        helped = False
        while heap and result.area > 0 and passes > 0:
            _, change = heappop(heap)
            again = _rank(model, placement, order, changes, result, np.array([change]))
            passes -= 1
            if not again:
                continue
            if heap and again[0][0] > heap[0][0] * TOLERANCE:
                heappush(heap, again[0])
                continue
            part = slice(changes.ends[change], changes.ends[change + 1])
            placement[changes.groups[part]] = changes.targets[part]
            result, helped = model.judge(placement, order), True
            made.append(change)
    return _without_needless(model, Chosen(placement, order, result), changes, made)


def _rank(
    model: ChoiceModel, placement: Ints, order: Ints, changes: Changes, result: Result, which: Ints
) -> list[tuple[float, int]]:
    """Returns the changes that help, with their seconds for each byte."""
    seconds, areas = model.judge_changes(placement, order, changes, which)
    saved = result.area - areas
    cost = np.maximum(seconds - result.seconds, 0.0) + LEAST * result.seconds
    helps = np.flatnonzero(saved > 0)
    return list(zip((cost[helps] / saved[helps]).tolist(), which[helps].tolist(), strict=True))


def tidy(model: ChoiceModel, chosen: Chosen) -> Chosen:
    """Returns the choice without the optional groups that are not needed: the step is no slower and fits as well."""
    for group in np.flatnonzero(model.problem.optional & (chosen.placement != NOWHERE)).tolist():
        chosen = _unless_worse(model, chosen, np.array([group]), np.array([NOWHERE]))
    return chosen


def _without_needless(model: ChoiceModel, chosen: Chosen, changes: Changes, made: list[int]) -> Chosen:
    """Returns the choice without optional ops that are not needed: without them it overflows no more and is no slower."""
    for change in made:
        part = slice(changes.ends[change], changes.ends[change + 1])
        for entries in [range(part.start, part.stop), *([entry] for entry in range(part.start, part.stop))]:
            chosen = _unless_worse(model, chosen, changes.groups[list(entries)], changes.origins[list(entries)])
    return chosen


def _unless_worse(model: ChoiceModel, chosen: Chosen, groups: Ints, places: Ints) -> Chosen:
    """Returns the choice with some groups in these places, unless it then overflows more or is slower."""
    if (chosen.placement[groups] == places).all():
        return chosen
    moved = chosen.placement.copy()
    moved[groups] = places
    found = model.judge(moved, chosen.order)
    is_worse = found.overflow_bytes > chosen.result.overflow_bytes or found.seconds > chosen.result.seconds
    return chosen if is_worse else Chosen(moved, chosen.order, found)
