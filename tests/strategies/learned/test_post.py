"""Post and its parts: that they follow Algorithm 1, learn, and find the optimum of small problems."""

from typing import Any

import numpy as np
import pytest
from captured import captured_problem
from exhaustive import all_placements
from simulated import random_step
from small_problems import one_for_each_kind, two_chains

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import search
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.learned import maths

NAMES = ("post", "cross-entropy", "ppo", "policy-gradient")
BUDGET = 2400


class Known:
    """An evaluator that has all placements of a problem in memory."""

    def __init__(self, problem: Problem) -> None:
        self.placements = all_placements(problem)
        self.weights = problem.num_devices ** np.arange(problem.num_groups)
        self.rows = np.argsort(self.placements @ self.weights)
        self.keys = (self.placements @ self.weights)[self.rows]
        self.evaluation = Simulator(problem, threads=1)(self.placements)

    def __call__(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        rows = self.rows[np.searchsorted(self.keys, placements @ self.weights)]
        cost, step_seconds, overflow_bytes = self.evaluation
        return Evaluation(cost[rows], step_seconds[rows], overflow_bytes[rows])


def lowest(name: str, problem: Problem, evaluator: Known, seed: int) -> float:
    """Returns the lowest cost that a strategy finds; it ends there when that is the optimum."""
    proposals = make(name).search(problem, np.random.default_rng(seed))
    best, optimum, spent, proposal = np.inf, evaluator.evaluation.cost.min(), 0, next(proposals)
    while spent < BUDGET:
        evaluation = evaluator(proposal.placements)
        spent += len(evaluation.cost)
        best = min(best, float(evaluation.cost.min()))
        if best <= optimum:
            break
        try:
            proposal = proposals.send(evaluation)
        except StopIteration:
            break
    return best


@pytest.mark.parametrize("name", NAMES)
def test_the_optimum_of_small_problems_is_found(name: str) -> None:
    found = 0
    for seed in range(20):
        problem = random_step(seed, 12, 3, 60, "coarse:4")[0].problem
        assert problem.num_groups <= 4
        evaluator = Known(problem)
        found += lowest(name, problem, evaluator, seed) <= evaluator.evaluation.cost.min() * (1 + 1e-12)
    assert found >= 19


def judged(seconds: Floats) -> Evaluation:
    """Returns an evaluation of placements that fit."""
    return Evaluation(seconds, seconds, np.zeros(len(seconds), np.int64))


def drawn_devices(name: str, num_updates: int, settings: dict[str, str] | None = None) -> tuple[list[Ints], list[Any]]:
    """Returns the batches and notes of a search in which a placement takes 1 s more for each group on device 0."""
    batches, notes = [], []
    proposals = make(name, settings).search(two_chains(8, 3), np.random.default_rng(0))
    proposal = next(proposals)
    for _ in range(num_updates):
        batches.append(proposal.placements)
        proposal = proposals.send(judged(1.0 + (proposal.placements == 0).sum(axis=1)))
        notes.append(dict(proposal.notes))
    return batches, notes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("advantage", ["raw", "normalised"])
def test_what_is_slow_is_left(name: str, advantage: str) -> None:
    batches, notes = drawn_devices(name, 60, {} if name == "cross-entropy" else {"advantage": advantage})
    assert (batches[0] == 0).mean() > 0.2
    assert np.mean([(batch == 0).mean() for batch in batches[-5:]]) < 0.1
    for key in ("loss", "entropy", "baseline", "average_seconds", "best_seconds"):
        assert np.isfinite(notes[-1][key])
    assert notes[-1]["entropy"] < np.log(3)
    assert notes[-1]["average_seconds"] == pytest.approx(1.0 + (batches[-1] == 0).sum(axis=1).mean())
    assert notes[-1]["best_seconds"] == 1.0


def test_post_does_as_algorithm_1_says() -> None:
    """After 12, 24, 36 and 48 samples it ascends Eq. 11; after 60 it imitates the best 6, and mixes.

    The updates are worked out here from the samples and their times alone.
    """
    batches, notes = drawn_devices("post", 6)
    drawn = np.concatenate(batches[:5])
    seconds = 1.0 + (drawn == 0).sum(axis=1)
    promising = drawn[seconds <= np.sort(seconds)[5]]
    shares = np.stack([(promising == device).mean(axis=0) for device in range(3)], axis=1)
    epsilon = 0.1 * (1 - 60 / 2400)
    expected = (1 - epsilon) * shares + epsilon / 3
    assert notes[4]["entropy"] == pytest.approx(maths.entropy(expected).mean())
    assert notes[4]["loss"] == pytest.approx(-maths.log_probabilities(shares, promising).sum() / 60)
    assert [note["update"] for note in notes] == [1, 2, 3, 4, 5, 6]
    ppo, cross_entropy = drawn_devices("ppo", 6), drawn_devices("cross-entropy", 6)
    assert [note["loss"] for note in ppo[1][:4]] == [note["loss"] for note in notes[:4]]
    assert np.array_equal(np.concatenate(ppo[0][:5]), drawn)
    assert ppo[1][4] != notes[4]
    assert [note.get("update") for note in cross_entropy[1]] == [None, None, None, None, 1, 1]


def test_the_policy_gradient_takes_the_step_of_reinforce() -> None:
    """From uniform probabilities the logits after one update are (1/K) sum A (1{d = j} - 1/3)."""
    batches, notes = drawn_devices("policy-gradient", 1, {"advantage": "raw", "rate": "0.5"})
    seconds = 1.0 + (batches[0] == 0).sum(axis=1)
    gained = seconds.mean() - seconds  # the baseline of the first batch is its mean
    gradient = np.stack([gained @ ((batches[0] == device) - 1 / 3) / 12 for device in range(3)], axis=1)
    assert notes[0]["entropy"] == pytest.approx(maths.entropy(maths.softmax(0.5 * gradient)).mean())


@pytest.mark.parametrize("name", NAMES)
def test_devices_that_a_group_cannot_run_on_are_never_drawn(name: str) -> None:
    problem = one_for_each_kind()
    seen = []

    def evaluator(placements: Ints, orders: Ints | None = None) -> Evaluation:
        seen.append(problem.check_placements(placements))
        return judged(np.random.default_rng(len(seen)).random(len(placements)))

    search(problem, make(name), evaluator, budget=Budget(600), seed=0)
    assert len(np.unique(np.concatenate(seen), axis=0)) == 2  # one group has a choice of two


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_start_is_where_the_samples_begin(name: str) -> None:
    problem = captured_problem()
    simulator = Simulator(problem)
    settings = {"start": "expert", "confidence": "0.95", "grouping": "colocated"}
    proposals = make(name, settings).search(problem, np.random.default_rng(0))
    known = next(proposals)
    batch = proposals.send(simulator(known.placements, known.orders))
    assert len(batch.placements) == 12
    assert (batch.placements == known.placements[0]).mean() == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_times_that_are_not_finite_end_the_search_with_an_error(name: str) -> None:
    for bad in (np.nan, np.inf):
        proposals = make(name).search(two_chains(4, 2), np.random.default_rng(0))
        batch = next(proposals)
        proposals.send(judged(np.ones(len(batch.placements))))
        with pytest.raises(StrategyError, match=f"strategy '{name}': numbers are not finite at update [012]"):
            proposals.send(judged(np.full(12, bad)))


@pytest.mark.parametrize(("name", "settings", "spent"), [("post", {"evaluations": "600"}, 612), ("ppo", {}, 12)])
def test_a_search_ends_when_there_is_nothing_more_to_draw(name: str, settings: dict[str, str], spent: int) -> None:
    """A rate of 1e12 saturates the table in one step; Post mixes up to 600. Then it proposes its placement once more."""
    problem = two_chains(4, 2)
    strategy = make(name, {"rate": "1e12", **settings})
    outcome = search(problem, strategy, Simulator(problem, threads=1), budget=Budget(BUDGET), seed=0)
    assert (outcome.status, outcome.evaluations) == ("finished", spent + 1)


def test_a_failing_placement_counts_what_is_asked_for() -> None:
    """With 100 s for those that do not fit, one of them lifts the average as the paper's would."""
    proposals = make("post", {"failing_seconds": "100"}).search(two_chains(4, 2), np.random.default_rng(0))
    next(proposals)
    overflow = np.array([9] + 11 * [0])
    proposal = proposals.send(Evaluation(np.ones(12), np.ones(12), overflow))
    assert proposal.notes["average_seconds"] == pytest.approx((100 + 11) / 12)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("post", "elite_batch", "61"),
        ("cross-entropy", "elite_share", "0"),
        ("cross-entropy", "mixing", "1.1"),
        ("ppo", "confidence", "1"),
        ("policy-gradient", "rate", "0"),
        ("policy-gradient", "baseline_decay", "1"),
    ],
)
def test_values_out_of_range_are_refused(name: str, key: str, value: str) -> None:
    with pytest.raises(StrategyError, match=f"strategy '{name}': {key} must be "):
        make(name, {key: value})
