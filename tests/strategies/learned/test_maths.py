"""The maths of learned strategies: closed forms against optimisers and automatic differentiation, small cases by hand."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import StrategyError
from placewise.strategies.learned import maths

SEEDS = range(5)


def random_probabilities(rng: np.random.Generator, num_blocks: int, num_devices: int) -> Floats:
    """Returns a distribution over devices for each block; some devices of a block may have probability 0."""
    allowed = rng.random((num_blocks, num_devices)) < 0.8
    allowed[np.arange(num_blocks), rng.integers(num_devices, size=num_blocks)] = True
    weights = np.where(allowed, rng.uniform(0.1, 1, allowed.shape), 0.0)
    probabilities: Floats = weights / weights.sum(axis=1, keepdims=True)
    return probabilities


# --- Post, Theorem 1 ---


def cross_entropy(logits: Any, promising: Ints, num_samples: int) -> Any:
    """Returns Eq. 9 as it stands: -(1/N) times the log-likelihood of the promising placements, in torch."""
    logs = torch.log_softmax(logits, dim=1)
    return -logs[torch.arange(len(logs)), torch.tensor(promising)].sum() / num_samples


def minimised(promising: Ints, num_samples: int, num_devices: int) -> tuple[Floats, float]:
    """Returns the logits [blocks, devices] that an optimiser finds for Eq. 9 from zeros, and the value there."""
    shape = (promising.shape[1], num_devices)

    def value_and_gradient(flat: Floats) -> tuple[float, Floats]:
        logits = torch.tensor(flat.reshape(shape), requires_grad=True)
        value = cross_entropy(logits, promising, num_samples)
        value.backward()
        assert logits.grad is not None
        return value.item(), logits.grad.numpy().ravel()

    found = minimize(value_and_gradient, np.zeros(shape).ravel(), jac=True, method="BFGS", options={"gtol": 1e-10})
    return found.x.reshape(shape), float(found.fun)


@pytest.mark.parametrize("seed", SEEDS)
def test_theorem_1_is_the_optimum_that_an_optimiser_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_devices, num_blocks, num_elites = int(rng.integers(2, 5)), int(rng.integers(1, 5)), int(rng.integers(6, 12))
    promising = rng.integers(num_devices, size=(num_elites, num_blocks))
    promising[:num_devices] = np.arange(num_devices)[:, None]  # with a share of 0 the optimum is infinitely far away
    closed = maths.shares(promising, num_devices)
    logits, _ = minimised(promising, 10 * num_elites, num_devices)
    assert maths.softmax(logits) == pytest.approx(closed, abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_theorem_1_is_not_beaten_where_some_devices_have_no_share(seed: int) -> None:
    rng = np.random.default_rng(seed)
    promising = rng.integers(3, size=(3, 4))
    logits = torch.tensor(maths.logits_of(maths.shares(promising, 3)))
    _, lowest = minimised(promising, 30, 3)
    assert float(cross_entropy(logits, promising, 30)) <= lowest + 1e-12


@pytest.mark.parametrize("seed", SEEDS)
def test_the_softmax_is_inverted(seed: int) -> None:
    probabilities = random_probabilities(np.random.default_rng(seed), 6, 4)
    assert maths.softmax(maths.logits_of(probabilities)) == pytest.approx(probabilities, abs=1e-15)
    assert maths.softmax(maths.logits_of(probabilities) + 700.0) == pytest.approx(probabilities, abs=1e-12)


def test_the_promising_placements_are_those_with_the_lowest_times() -> None:
    placements = np.array([[0], [1], [2], [3], [4]])
    seconds = np.array([5.0, 1.0, 4.0, 1.0, 3.0])
    assert maths.elites(placements, seconds, 0.1).tolist() == [[1], [3]]  # the lowest, with its equal
    assert maths.elites(placements, seconds, 0.6).tolist() == [[1], [3], [4]]
    assert maths.elites(placements, seconds, 1.0).tolist() == placements.tolist()


def test_shares_and_mixing_by_hand() -> None:
    """Of four placements three have block 0 on device 1; block 1 can't run on device 2, and never gets there."""
    shares = maths.shares(np.array([[1, 0], [1, 0], [0, 0], [1, 1]]), 3)
    assert shares.tolist() == [[0.25, 0.75, 0.0], [0.75, 0.25, 0.0]]
    allowed = np.array([[True, True, True], [True, True, False]])
    mixed = maths.mix(shares, allowed, 0.3)
    assert mixed == pytest.approx(np.array([[0.275, 0.625, 0.1], [0.675, 0.325, 0.0]]))


# --- Post, Eq. 11 ---


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kl_weight", [0.0, 1.0, 3.5])
def test_the_proximal_gradient_is_that_of_automatic_differentiation(seed: int, kl_weight: float) -> None:
    rng = np.random.default_rng(seed)
    old = random_probabilities(rng, 7, 4)
    placements, advantage = maths.draw_placements(old, 12, rng), rng.normal(size=12)
    start = np.where(old > 0, rng.normal(size=old.shape), -np.inf)
    logits = torch.tensor(np.maximum(start, -80.0), requires_grad=True)  # -inf has no gradient; exp(-80) is next to nothing
    new, blocks = torch.softmax(logits, dim=1), torch.arange(7)
    before = torch.tensor(old)
    objective = torch.zeros((), dtype=torch.float64)
    for row, gained in zip(torch.tensor(placements), advantage, strict=True):  # Eq. 11 as it stands
        ratio = new[blocks, row] / before[blocks, row]
        divergence = torch.xlogy(before, before).sum(dim=1) - torch.xlogy(before, new).sum(dim=1)
        objective = objective + (ratio * gained - kl_weight * divergence).sum() / 12
    (expected,) = torch.autograd.grad(objective, logits)
    weighted = maths.tally(placements, advantage / 12, 4)
    gain = np.divide(weighted, old, out=np.zeros_like(old), where=old > 0)
    closed = maths.ppo_gradient(maths.softmax(start), old, gain, kl_weight)
    assert maths.ppo_objective(maths.softmax(start), old, gain, kl_weight) == pytest.approx(objective.item(), abs=1e-10)
    assert (closed[old == 0] == 0).all()
    assert closed[old > 0] == pytest.approx(expected.numpy()[old > 0], abs=1e-8)


# --- distributions ---


def test_entropy_and_divergence_by_hand() -> None:
    even, sure = np.array([[0.5, 0.5, 0.0]]), np.array([[0.0, 1.0, 0.0]])
    assert maths.entropy(even).tolist() == pytest.approx([np.log(2)])
    assert maths.entropy(sure).tolist() == [0.0]
    assert maths.kl(sure, even).tolist() == pytest.approx([np.log(2)])
    assert maths.kl(even, even).tolist() == [0.0]


@pytest.mark.parametrize("seed", SEEDS)
def test_draws_follow_the_distribution_and_never_have_probability_0(seed: int) -> None:
    rng = np.random.default_rng(seed)
    probabilities = random_probabilities(rng, 5, 4)
    drawn = maths.draw_placements(probabilities, 20_000, rng)
    assert maths.shares(drawn, 4) == pytest.approx(probabilities, abs=0.02)
    assert (maths.shares(drawn, 4)[probabilities == 0] == 0).all()
    chances = probabilities[0][drawn[:3, 0]] * probabilities[1][drawn[:3, 1]]
    assert np.exp(maths.log_probabilities(probabilities[:2], drawn[:3, :2])) == pytest.approx(chances)


class Zeros(np.random.Generator):
    """Draws 0, the least that a generator can draw."""

    def random(self, size: Any = None, *_: Any, **__: Any) -> Any:
        return np.zeros(size)


def test_the_least_number_does_not_draw_a_device_of_probability_0() -> None:
    probabilities = np.array([[0.0, 0.25, 0.75], [0.5, 0.5, 0.0]])
    assert maths.draw_placements(probabilities, 1, Zeros(np.random.PCG64())).tolist() == [[1, 0]]


def test_a_search_begins_even_or_near_what_is_known() -> None:
    allowed = np.array([[True, True, True], [True, False, True], [False, True, False]])
    thirds = [1 / 3, 1 / 3, 1 / 3]
    assert maths.initial_probabilities(allowed) == pytest.approx(np.array([thirds, [0.5, 0, 0.5], [0, 1, 0]]))
    known = maths.initial_probabilities(allowed, np.array([2, 0, 1]), 0.8)
    assert known == pytest.approx(np.array([[0.1, 0.1, 0.8], [0.8, 0, 0.2], [0, 1, 0]]))


# --- times ---


def test_times_of_placements_that_do_not_fit() -> None:
    evaluation = Evaluation(np.array([1.0, 50.0]), np.array([1.0, 0.5]), np.array([0, 7]))
    assert maths.times(evaluation, 0.0).tolist() == [1.0, 50.0]
    assert maths.times(evaluation, 100.0).tolist() == [1.0, 100.0]


def test_the_baseline_is_a_moving_average_time_by_time() -> None:
    average = maths.moving_average(None, np.array([1.0, 3.0]), 0.9)
    assert average == 2.0
    for value in (4.0, 1.0, 7.0):
        average = 0.9 * average + 0.1 * value
    assert maths.moving_average(2.0, np.array([4.0, 1.0, 7.0]), 0.9) == pytest.approx(average)


def test_advantages() -> None:
    seconds = np.array([1.0, 2.0, 3.0, 2.0])
    assert maths.advantages(seconds, 2.0, "raw").tolist() == [1.0, 0.0, -1.0, 0.0]
    normalised = maths.advantages(seconds, 2.0, "normalised")
    assert normalised == pytest.approx(np.array([1.0, 0.0, -1.0, 0.0]) / seconds.std())
    assert maths.advantages(1000 * seconds, 2000.0, "normalised") == pytest.approx(normalised)
    assert maths.advantages(np.full(4, 3.0), 2.0, "normalised").tolist() == [0.0] * 4
    assert maths.advantages(seconds, 2.0, "relative").tolist() == [0.5, 0.0, -0.5, 0.0]
    assert maths.advantages(np.array([0.5, 100.0]), 2.0, "relative").tolist() == [0.75, -1.0]
    assert maths.advantages(np.zeros(2), 0.0, "relative").tolist() == [0.0, 0.0]  # a step in which nothing takes time


def test_numbers_that_are_not_finite_are_an_error_that_names_strategy_and_update() -> None:
    maths.check_finite(np.array([0.0, 1.0]), "post", 3)
    for bad in (np.nan, np.inf):
        with pytest.raises(StrategyError, match=r"strategy 'post': numbers are not finite at update 3"):
            maths.check_finite(np.array([0.0, bad]), "post", 3)
