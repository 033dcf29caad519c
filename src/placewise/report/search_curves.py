"""How a search went: the best step so far and the average of the placements tried, by evaluations and by seconds."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.search.driver import JudgedBatch

MOST_POINTS = 400  # of a curve on a page


class Point(NamedTuple):
    """How far a search had come after a batch."""

    evaluations: int
    seconds: float
    best: float  # step seconds; infinite while nothing fits


class Curve(NamedTuple):
    """How a search went; what is not known is NaN."""

    evaluations: Ints  # [points], spent so far
    seconds: Floats  # [points], since the search began
    best: Floats  # [points], step seconds; infinite while nothing fits
    average: Floats  # [points], step seconds of the placements that fit, since the point before


def curve_of(history: Sequence[tuple[int, float]]) -> Curve:
    """Returns the curve of a plan's history, which has neither seconds nor averages."""
    spent, best = [pair[0] for pair in history], [pair[1] for pair in history]
    unknown = np.full(len(history), np.nan)
    return Curve(np.array(spent, np.int64), unknown, np.array(best, np.float64), unknown)


def curve_of_progress(points: Sequence[Point]) -> Curve:
    """Returns the curve of a search whose progress was watched."""
    columns = np.array(points, np.float64).reshape(-1, 3)
    unknown = np.full(len(columns), np.nan)
    return thinned(Curve(columns[:, 0].astype(np.int64), columns[:, 1], columns[:, 2], unknown), np.ones(len(columns)))


def curve_of_batches(batches: Iterable[JudgedBatch]) -> Curve:
    """Returns the curve of a recorded run."""
    rows, counts, spent, best = [], [], 0, np.inf
    for batch in batches:
        evaluation = batch.evaluation
        times = evaluation.step_seconds[evaluation.overflow_bytes == 0]
        spent += len(evaluation.cost)
        if batch.best is not None:
            best = float(times.min())
        rows.append((spent, batch.seconds, best, float(times.mean()) if len(times) else np.nan))
        counts.append(len(times))
    columns = np.array(rows, np.float64).reshape(-1, 4)
    curve = Curve(columns[:, 0].astype(np.int64), columns[:, 1], columns[:, 2], columns[:, 3])
    return thinned(curve, np.array(counts, np.float64))


def thinned(curve: Curve, weights: Floats) -> Curve:
    """Returns a curve with at most about MOST_POINTS points and all improvements; averages are weighted means."""
    count = len(curve.evaluations)
    if count <= MOST_POINTS:
        return curve
    part = curve.evaluations * MOST_POINTS // (int(curve.evaluations[-1]) + 1)  # [points]
    better = np.append(False, curve.best[1:] < curve.best[:-1])  # every improvement stays
    kept = np.flatnonzero(np.append(part[1:] != part[:-1], True) | better)
    owner = np.searchsorted(kept, np.arange(count))  # [points], the kept point that each counts for
    known = np.where(np.isnan(curve.average), 0.0, weights)
    sums = np.bincount(owner, known * np.nan_to_num(curve.average))
    total = np.bincount(owner, known)
    average = np.where(total > 0, sums / np.where(total > 0, total, 1.0), np.nan)
    return Curve(curve.evaluations[kept], curve.seconds[kept], curve.best[kept], average)
