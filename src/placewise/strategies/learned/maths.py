"""What learned strategies compute, as pure functions; the distribution of each block's device is independent of the others'.

A distribution is `probabilities` [blocks, devices], 0 where a block can't run.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import StrategyError

Advantage = Literal["normalised", "raw"]


def initial_probabilities(allowed: Bools, placement: Ints | None = None, confidence: float = 0.9) -> Floats:
    """Returns the distribution that a search begins with: [blocks, devices] from [blocks, devices] and [blocks] or None.

    It is even over the devices that a block can run on; with a known placement its device has `confidence` (all, where there
    is no other) and the others share the rest.
    """
    counts = allowed.sum(axis=1, keepdims=True)
    if placement is None:
        return np.where(allowed, 1.0 / counts, 0.0)
    known = np.arange(allowed.shape[1]) == placement[:, None]
    others = np.maximum(counts - 1, 1)
    return np.where(known, np.where(counts > 1, confidence, 1.0), np.where(allowed, (1 - confidence) / others, 0.0))


def draw(probabilities: Floats, batch: int, rng: np.random.Generator) -> Ints:
    """Returns placements that are drawn from a distribution: [batch, blocks]; never a device of probability 0."""
    reach = probabilities.cumsum(axis=1)  # [blocks, devices]
    points = rng.random((batch, len(reach))) * reach[:, -1]
    placements = np.zeros(points.shape, np.int64)
    for device in range(reach.shape[1] - 1):
        placements += points >= reach[:, device]
    return placements


def softmax(logits: Floats) -> Floats:
    """Returns the probabilities of logits along the last axis; -inf is a probability of 0."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return probabilities


def logits_of(probabilities: Floats) -> Floats:
    """Returns the softmax's inverse, log f: a constant more or less changes nothing (Gao et al. 2018, Post, Theorem 1)."""
    with np.errstate(divide="ignore"):
        logits: Floats = np.log(probabilities)
    return logits


def log_probabilities(probabilities: Floats, placements: Ints) -> Floats:
    """Returns the logarithm of each placement's probability: [batch] from [blocks, devices] and [batch, blocks]."""
    chosen = probabilities[np.arange(len(probabilities)), placements]  # [batch, blocks]
    total: Floats = logits_of(chosen).sum(axis=1)
    return total


def entropy(probabilities: Floats) -> Floats:
    """Returns the entropy in nats along the last axis; 0 log 0 is 0."""
    result: Floats = -(probabilities * _log(probabilities)).sum(axis=-1)
    return result


def kl(p: Floats, q: Floats) -> Floats:
    """Returns the Kullback-Leibler divergence of p from q along the last axis; q must be above 0 where p is."""
    result: Floats = (p * (_log(p) - _log(q))).sum(axis=-1)
    return result


def times(evaluation: Evaluation, failing_seconds: float) -> Floats:
    """Returns the times that a strategy learns from: [batch]; `failing_seconds`, where above 0, for all that do not fit."""
    if failing_seconds > 0:
        return np.where(evaluation.overflow_bytes > 0, failing_seconds, evaluation.cost)
    return evaluation.cost


def moving_average(average: float | None, seconds: Floats, decay: float) -> float:
    """Returns the exponential moving average after some more times [batch], in their order; it begins at their mean."""
    if average is None:
        return float(seconds.mean())
    weights = decay ** np.arange(len(seconds), -1, -1.0)
    weights[1:] *= 1 - decay
    return float(weights @ np.array([average, *seconds]))


def advantages(seconds: Floats, baseline: float, form: Advantage) -> Floats:
    """Returns how much better than the baseline each time is: [batch].

    raw is baseline - time (Post, Eq. 11), in seconds. normalised is that over the standard deviation of the batch, and
    within -3 and 3: it does not depend on the unit of time, and one failing placement does not drown the others.
    """
    better = baseline - seconds
    if form == "raw":
        return better
    deviation = float(seconds.std())
    return np.clip(better / deviation, -3.0, 3.0) if deviation > 0 else np.zeros(len(seconds))


def check_finite(values: NDArray[Any], strategy: str, update: int) -> None:
    """Raises StrategyError where a number is NaN or infinite, with the strategy's name and the number of the update."""
    if not np.isfinite(values).all():
        raise StrategyError(
            f"strategy {strategy!r}: update {update} has made numbers that are not finite; "
            "smaller steps or normalised advantages may help"
        )


def _log(probabilities: Floats) -> Floats:
    """Returns the logarithm, 0 where the probability is 0."""
    return np.log(np.where(probabilities > 0, probabilities, 1.0))
