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
EFFORT = 400_000_000  # ops that are simulated to make one placement fit
MANY = 1000  # changes that help, from which on several are made at once
TOGETHER = 64  # changes that are judged again before several are made at once
MISSES = 8  # times in a row that several were judged, but none made, after which they are made one by one
FREE = 1e-4  # share of the step up to which a change costs nothing
SLOWER = 1.5  # how much longer several changes may take together than the sum of what each takes alone


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
    judged again, with those made before it, when its turn comes. Where many help, the best are made together as long as they
    save at most half of what is too much. `effort` is the number of ops that are simulated at most.
    """
    placement = placement.copy()
    changes = find_changes(model.problem, placement) if changes is None else changes
    result = model.judge(placement, order)
    passes = max(effort // max(model.problem.num_ops, 1), 100)
    made: list[int] = []
    helped = again = True  # the simple changes alone at first, and again after many
    while result.area > 0 and helped and passes > 0:
        which = np.flatnonzero(changes.are_simple) if again else np.arange(len(changes.ends) - 1)
        heap = _rank(model, placement, order, changes, result, which)
        passes -= len(which)
        heapify(heap)
        helped = False
        again = len(heap) > MANY
        misses = 0 if again else MISSES
        while len(heap) > TOGETHER and result.area > 0 and passes > 0 and misses < MISSES:
            several, count = _several(model, placement, order, changes, result, heap)
            passes -= count
            misses = 0 if several else misses + 1
            if not several:
                continue
            placement, helped = _with(placement, changes, several), True
            result = model.judge(placement, order)
            made += several
        while heap and result.area > 0 and passes > 0:
            _, change = heappop(heap)
            judged = _rank(model, placement, order, changes, result, np.array([change]))
            passes -= 1
            if not judged:
                continue
            if heap and judged[0][0] > heap[0][0] * TOLERANCE:
                heappush(heap, judged[0])
                continue
            placement, helped = _with(placement, changes, [change]), True
            result = model.judge(placement, order)
            made.append(change)
    return _without_needless(model, Chosen(placement, order, result), changes, made)


def _with(placement: Ints, changes: Changes, which: list[int]) -> Ints:
    """Returns a placement with some changes."""
    placement = placement.copy()
    for change in which:
        part = slice(changes.ends[change], changes.ends[change + 1])
        placement[changes.groups[part]] = changes.targets[part]
    return placement


def _several(
    model: ChoiceModel, placement: Ints, order: Ints, changes: Changes, result: Result, heap: list[tuple[float, int]]
) -> tuple[list[int], int]:
    """Takes changes of different groups from the heap that are good together; returns them, and the number of judgements.

    The best are judged again; those that save up to half of the area are made, or half as many of them if together they take
    much longer, or save less than half of what each saves alone. The others go back.
    """
    first = np.array([heappop(heap)[1] for _ in range(min(TOGETHER, len(heap)))])
    seconds, areas = model.judge_changes(placement, order, changes, first)
    saved, slower = result.area - areas, np.maximum(seconds - result.seconds, 0.0)
    helps = np.flatnonzero(saved > 0)
    keys = (slower + LEAST * result.seconds)[helps] / saved[helps]
    ranked = helps[np.argsort(keys, kind="stable")].tolist()
    bound = heap[0][0] * TOLERANCE if heap else np.inf
    chosen: list[int] = []
    groups: set[int] = set()
    total = 0.0
    for i in ranked:
        mine = changes.groups[changes.ends[first[i]] : changes.ends[first[i] + 1]].tolist()
        is_free = slower[i] <= FREE * result.seconds
        is_good = is_free or (slower[i] + LEAST * result.seconds) / saved[i] <= bound
        if is_good and groups.isdisjoint(mine) and total + saved[i] <= result.area / 2:
            chosen.append(i)
            groups.update(mine)
            total += saved[i]
    judged = len(first)
    while len(chosen) > 1:
        found = model.judge(_with(placement, changes, first[chosen].tolist()), order)
        judged += 1
        least = FREE * result.seconds * len(chosen)
        is_fast = found.seconds - result.seconds <= SLOWER * slower[chosen].sum() + least
        if is_fast and result.area - found.area >= saved[chosen].sum() / 2:
            break
        chosen = chosen[: len(chosen) // 2]
    taken = set(chosen)
    for i in ranked:
        if i not in taken:
            heappush(heap, (float((slower[i] + LEAST * result.seconds) / saved[i]), int(first[i])))
    return [int(first[i]) for i in chosen if i in taken], judged


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
