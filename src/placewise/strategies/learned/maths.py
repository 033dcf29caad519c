"""The maths of learned strategies, as pure functions; each block's device has its own, independent distribution.

A distribution is `probabilities` [blocks, devices], 0 where a block can't run.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import StrategyError
from placewise.core.labels import sum_by_label

Advantage = Literal["relative", "normalised", "raw"]


def initial_probabilities(allowed: Bools, placement: Ints | None = None, confidence: float = 0.9) -> Floats:
    """Returns the distribution that a search begins with: [blocks, devices] from [blocks, devices] and [blocks] or None.

    It is uniform over the devices that a block can run on. With a known placement, the known device has the probability
    `confidence` (1 if there is no other), and the others share the rest.
    """
    counts = allowed.sum(axis=1, keepdims=True)
    if placement is None:
        return np.where(allowed, 1.0 / counts, 0.0)
    known = np.arange(allowed.shape[1]) == placement[:, None]
    others = np.maximum(counts - 1, 1)
    return np.where(known, np.where(counts > 1, confidence, 1.0), np.where(allowed, (1 - confidence) / others, 0.0))


def draw_placements(probabilities: Floats, batch: int, rng: np.random.Generator) -> Ints:
    """Returns placements drawn from a distribution: [batch, blocks]; a device of probability 0 is never drawn."""
    reach = probabilities.cumsum(axis=1)  # [blocks, devices]
    points = rng.random((batch, len(reach))) * reach[:, -1]
    placements = np.zeros(points.shape, np.int64)
    for device in range(reach.shape[1] - 1):
        placements += points >= reach[:, device]
    return placements


def softmax(logits: Floats) -> Floats:
    """Returns the probabilities of logits along the last axis; -inf gives 0."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return probabilities


def logits_of(probabilities: Floats) -> Floats:
    """Returns the inverse of softmax, log f; adding a constant changes nothing (Gao et al. 2018, Post, Theorem 1)."""
    with np.errstate(divide="ignore"):
        logits: Floats = np.log(probabilities)
    return logits


def log_probabilities(probabilities: Floats, placements: Ints) -> Floats:
    """Returns the logarithm of each placement's probability: [batch] from [blocks, devices] and [batch, blocks]."""
    chosen = probabilities[np.arange(len(probabilities)), placements]  # [batch, blocks]
    total: Floats = logits_of(chosen).sum(axis=1)
    return total


def entropy(probabilities: Floats) -> Floats:
    """Returns the entropy in nats along the last axis, with 0 log 0 = 0."""
    result: Floats = -(probabilities * _log(probabilities)).sum(axis=-1)
    return result


def kl(p: Floats, q: Floats) -> Floats:
    """Returns the Kullback-Leibler divergence of p from q along the last axis; q must be above 0 where p is."""
    result: Floats = (p * (_log(p) - _log(q))).sum(axis=-1)
    return result


def times(evaluation: Evaluation, failing_seconds: float) -> Floats:
    """Returns the times that a strategy learns from: [batch]; `failing_seconds`, if above 0, for all that do not fit."""
    if failing_seconds > 0:
        return np.where(evaluation.overflow_bytes > 0, failing_seconds, evaluation.cost)
    return evaluation.cost


def moving_average(average: float | None, seconds: Floats, decay: float) -> float:
    """Returns the exponential moving average after these times [batch], in their order; the first one is their mean."""
    if average is None:
        return float(seconds.mean())
    weights = decay ** np.arange(len(seconds), -1, -1.0)
    weights[1:] *= 1 - decay
    return float(weights @ np.array([average, *seconds]))


def advantages(seconds: Floats, baseline: float, form: Advantage) -> Floats:
    """Returns how much better than the baseline each time is: [batch].

    "raw" is baseline - time (Post, Eq. 11), in seconds. "relative" divides that by the baseline and clips it to -1 .. 1;
    "normalised" divides it by the standard deviation of the batch and clips it to -3 .. 3. These two do not depend on the
    unit of time, and one failing placement does not drown out the others; relative steps get smaller as the times get more
    alike, normalised ones do not.
    """
    better = baseline - seconds
    if form == "raw":
        return better
    scale, most = (baseline, 1.0) if form == "relative" else (float(seconds.std()), 3.0)
    return np.clip(better / scale, -most, most) if scale > 0 else np.zeros(len(seconds))


def elites(placements: Ints, seconds: Floats, share: float) -> Ints:
    """Returns the promising placements, those with T <= gamma: [elites, blocks] from [batch, blocks] and [batch].

    gamma is the (share * batch)-th lowest time, at least the lowest (Post, Eq. 9); equal times are treated equally.
    """
    rank = min(max(round(share * len(seconds)), 1), len(seconds))
    promising: Ints = placements[seconds <= np.sort(seconds)[rank - 1]]
    return promising


def shares(placements: Ints, num_devices: int) -> Floats:
    """Returns the share of placements with each block on each device: [blocks, devices] from [batch, blocks].

    It is the distribution under which the placements are most likely: the minimum of Eq. 9 (Post, Theorem 1).
    """
    return tally(placements, np.full(len(placements), 1.0 / len(placements)), num_devices)


def tally(placements: Ints, weights: Floats, num_devices: int) -> Floats:
    """Returns the sum of weights [batch] of placements [batch, blocks] that have a block on a device: [blocks, devices]."""
    num_blocks = placements.shape[1]
    cells = placements + np.arange(num_blocks) * num_devices
    return sum_by_label(cells.ravel(), np.repeat(weights, num_blocks), num_blocks * num_devices).reshape(
        num_blocks, num_devices
    )


def mix(probabilities: Floats, allowed: Bools, share: float) -> Floats:
    """Returns (1 - share) · distribution + share · uniform distribution: [blocks, devices] (Post, Algorithm 1)."""
    return (1.0 - share) * probabilities + share * initial_probabilities(allowed)


def ppo_objective(new: Floats, old: Floats, gain: Floats, kl_weight: float) -> float:
    """Returns Post's Eq. 11 for a new distribution [blocks, devices] that replaces the old one.

    `gain` is the tally of advantage / (batch * old probability). Its sum over devices with weights `new` is the mean over
    the samples of ratio * advantage, because the ratio of a block's probabilities depends only on its device.
    """
    return float((new * gain).sum() - kl_weight * kl(old, new).sum())


def ppo_gradient(new: Floats, old: Floats, gain: Floats, kl_weight: float) -> Floats:
    """Returns the gradient of `ppo_objective` with respect to the new logits, in closed form: [blocks, devices]."""
    gradient: Floats = new * (gain - (new * gain).sum(axis=1, keepdims=True)) - kl_weight * (new - old)
    return gradient


def check_finite(values: NDArray[Any], strategy: str, update: int) -> None:
    """Raises StrategyError if a number is NaN or infinite."""
    if not np.isfinite(values).all():
        raise StrategyError(
            f"strategy {strategy!r}: numbers are not finite at update {update}; "
            "try smaller steps, or an advantage other than raw"
        )


def _log(probabilities: Floats) -> Floats:
    """Returns the logarithm; log 0 is finite, so that 0 log 0 is 0."""
    logarithms: Floats = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    return logarithms
