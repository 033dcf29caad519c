"""Curves of searches: best and average by evaluations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewise.core.contracts import Evaluation
from placewise.report.search_curves import MOST_POINTS, Curve, Point, curve_of, curve_of_batches, curve_of_progress
from placewise.search.driver import JudgedBatch


def judged(times: list[float], *, fits: bool = True, is_better: bool = False, seconds: float = 0.0) -> JudgedBatch:
    column = np.array(times)
    best = (np.zeros(1, np.int64), None) if is_better else None
    return JudgedBatch(Evaluation(column, column, np.full(len(times), 0 if fits else 1)), {}, b"", seconds, best)


def test_a_recorded_run_has_best_and_average() -> None:
    """The second step fits nothing: it counts, and has no average."""
    curve = curve_of_batches(
        [judged([4.0, 2.0], is_better=True, seconds=1.0), judged([9.0], fits=False), judged([5.0, 1.0], is_better=True)]
    )
    assert curve.evaluations.tolist() == [2, 3, 5]
    assert curve.best.tolist() == [2.0, 2.0, 1.0]
    assert curve.seconds[0] == 1.0
    np.testing.assert_array_equal(curve.average, [3.0, np.nan, 3.0])


@given(st.lists(st.integers(1, 100), min_size=1, max_size=2000), st.integers(0, 2**30))
@settings(max_examples=30)
def test_a_long_curve_is_thinned_without_a_change_of_its_meaning(counts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches, best, bests = [], np.inf, []
    for n in counts[:1] * 600 + counts:
        times = rng.uniform(1, 2, n).tolist()
        batches.append(judged(times, is_better=min(times) < best))
        best = min(best, *times)
        bests.append(best)
    curve = curve_of_batches(batches)
    everything = np.concatenate([batch.evaluation.step_seconds for batch in batches])
    assert curve.evaluations[-1] == len(everything)
    assert curve.best[-1] == everything.min()
    np.testing.assert_array_equal(curve.best, np.minimum.accumulate(everything)[curve.evaluations - 1])
    assert np.isin(bests, curve.best).all()  # no better placement is left out
    lengths = np.diff(curve.evaluations, prepend=0)
    assert (curve.average * lengths).sum() == pytest.approx(everything.sum())
    assert len(curve.best) <= MOST_POINTS + len(np.unique(curve.best))


def test_curves_of_plans_and_of_progress() -> None:
    plan = curve_of([(1, 3.0), (7, 2.0)])
    assert (plan.evaluations.tolist(), plan.best.tolist()) == ([1, 7], [3.0, 2.0])
    assert np.isnan(plan.seconds).all()
    watched = curve_of_progress([Point(1, 0.5, np.inf), Point(4, 0.9, 2.0)])
    assert isinstance(watched, Curve)
    assert (watched.seconds.tolist(), watched.best.tolist()) == ([0.5, 0.9], [np.inf, 2.0])
    assert len(curve_of_progress([]).best) == len(curve_of_batches([]).best) == 0
