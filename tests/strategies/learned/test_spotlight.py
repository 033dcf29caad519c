"""Spotlight: its decision process, its objective and the bound that it improves, and what it finds."""

import itertools
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from builders import graph_of, mixed_cluster, tiny_cluster, wired
from exhaustive import Enumerated, finds_the_best, small_problem
from gymnasium.utils.env_checker import check_env
from torch import Tensor

from placewise.core.arrays import Floats
from placewise.core.contracts import Evaluation
from placewise.core.errors import ProblemError
from placewise.core.problem import Problem
from placewise.strategies.blocks import Blocks
from placewise.strategies.learned.environment import Placing
from placewise.strategies.learned.maths import initial_probabilities
from placewise.strategies.learned.spotlight import Spotlight, Stages, Trials, ascend, proximal_objective


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_a_small_problem_is_found(seed: int) -> None:
    assert finds_the_best(Spotlight(grouping="colocated"), seed, evaluations=2400)


def test_the_objective_of_one_trial_by_hand() -> None:
    """Two stages, two devices; q is (1/2, 1/2) at both, q' is (3/4, 1/4) and (1/2, 1/2); the trial chose 0 and 1, for 2.

    Ratios 3/2 and 1. KL at the first stage: 1/2 log(2/3) + 1/2 log 2 = log(4/3) / 2; at the second 0. With beta 4 it is
    (3/2 · 2 - 4 · log(4/3) / 2 + 1 · 2) / 2.
    """
    old, new = torch.full((1, 2, 2), 0.5), torch.tensor([[[0.75, 0.25], [0.5, 0.5]]])
    trials = Trials(torch.tensor([[0, 1]]), torch.tensor([2.0]), torch.ones(1))
    found = float(proximal_objective(new.log(), old.log(), trials, 4.0))
    assert found == pytest.approx((3 - 2 * np.log(4 / 3) + 2) / 2, rel=1e-5)


class Table(torch.nn.Module):
    """A policy with a softmax of its own for each state, a state being the devices of the blocks so far."""

    def __init__(self, num_blocks: int, num_devices: int) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(sum(num_devices**n for n in range(num_blocks)), num_devices))
        self.num_devices = num_devices

    def forward(self, placements: Tensor) -> Tensor:
        """Returns the logarithms of the probabilities at every stage: [batch, blocks, devices]."""
        states, code = [], torch.zeros(len(placements), dtype=torch.int64)
        first = 0  # of the stage's states
        for block in range(placements.shape[1]):
            states.append(first + code)
            first += self.num_devices**block
            code = code * self.num_devices + placements[:, block]
        return torch.log_softmax(self.logits[torch.stack(states, dim=1)], dim=2)


def enumerable(seed: int) -> Enumerated:
    """Returns a small problem whose groups can all run on all devices."""
    return next(small for small in map(small_problem, itertools.count(100 * seed)) if small.problem.allowed.all())


def divergences(old: Tensor, new: Tensor) -> Tensor:
    """Returns KL(q ‖ q') at every stage: [batch, blocks]."""
    return (old.exp() * (old - new)).sum(dim=2)


@pytest.mark.parametrize("seed", range(3))
def test_each_update_improves_its_lower_bound(seed: int) -> None:
    """All placements, each with its exact probability, in place of samples: nothing is left to chance.

    With N stages, rewards R within a range r, and advantages A of the old policy q, the expected reward of a new one q' is
        eta(q') >= eta(q) + sum_n E_q[A of q' at stage n] - C max_s KL(q ‖ q'),   C = r N (N - 1) / 2,
    because the states of stage n differ by at most n TV, the advantages there by at most 2 TV r, and TV² <= KL / 2. The mean
    of ratio · R over the stages is eta(q) + 1/N of that sum. The bound at q' = q is eta(q), so an update that raises the
    bound raises the expected reward too.
    """
    small = enumerable(seed)
    num_blocks, num_devices = small.problem.allowed.shape
    seconds = small.evaluation.cost
    rewards = torch.tensor((seconds.mean() - seconds) / np.ptp(seconds), dtype=torch.float64)  # a range of 1
    placements = torch.tensor(small.placements)
    policy = Table(num_blocks, num_devices).double()
    weight = num_blocks * (num_blocks - 1) / 2  # C
    settings = Spotlight(kl_weight=num_blocks * weight, ascent_steps=10)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    values = []
    for update in range(20):
        with torch.no_grad():
            old = policy(placements)
            chances = old.gather(2, placements[:, :, None])[:, :, 0].sum(dim=1).exp()  # [all], which add up to 1
            values.append(float(chances @ rewards))
        trials = Trials(placements, rewards, chances)
        ascend(policy, optimizer, trials, settings, update)
        with torch.no_grad():
            new = policy(placements)
            objective = float(proximal_objective(new, old, trials, settings.kl_weight))
            gain = num_blocks * (float(proximal_objective(new, old, trials, 0.0)) - values[-1])
            bound = values[-1] + gain - weight * float(divergences(old, new).max())
            value = float(new.gather(2, placements[:, :, None])[:, :, 0].sum(dim=1).exp() @ rewards)
        assert float(chances.sum()) == pytest.approx(1)
        assert objective > values[-1]  # the objective at q' = q is eta(q)
        assert bound > values[-1]
        assert value >= bound - 1e-12
    assert values[-1] > values[0] + 0.02
    assert all(b > a for a, b in itertools.pairwise(values))


def stages(problem: Problem, **settings: Any) -> Stages:
    """Returns the learner of a problem, a stage for each group."""
    strategy = Spotlight(**{"grouping": "colocated", "units": 8, "batch": 2, **settings})
    blocks = Blocks.of(problem, "colocated")
    return Stages(strategy, blocks, initial_probabilities(blocks.allowed), np.random.default_rng(0))


def judged(seconds: Floats) -> Evaluation:
    """Returns the evaluation of placements that fit and take these times."""
    return Evaluation(seconds, seconds, np.zeros(len(seconds), np.int64))


def test_the_baseline_can_be_a_moving_average() -> None:
    """It begins at the first batch's mean, 2; with a decay of 0.5 times 5 and 1 then give (2 / 2 + 5 / 2) / 2 + 1 / 2."""
    learner = stages(small_problem(0).problem, advantage="raw", baseline_decay=0.5)
    learner.draw()
    assert learner.learn(judged(np.array([1.0, 3.0])))["baseline"] == 2
    learner.draw()
    assert learner.learn(judged(np.array([5.0, 1.0])))["baseline"] == 2.25


def test_rewards_are_against_the_mean_of_all_earlier_trials() -> None:
    """Times 1 and 3, then 5 and 1: the second batch is against 2, the baseline after it is 10 / 4."""
    learner = stages(small_problem(0).problem, advantage="raw", reward_scale=10.0, baseline_decay=1.0)
    assert learner.rewards(np.array([1.0, 3.0])).tolist() == pytest.approx([10, -10])
    learner.draw()
    assert learner.learn(judged(np.array([1.0, 3.0])))["baseline"] == 2
    assert learner.rewards(np.array([5.0, 1.0])).tolist() == pytest.approx([-30, 10])
    learner.draw()
    notes = learner.learn(judged(np.array([5.0, 1.0])))
    assert (notes["update"], notes["baseline"], notes["average_seconds"], notes["best_seconds"]) == (2, 2.5, 3, 1)


@pytest.mark.parametrize("seed", range(4))
def test_the_environment_is_one_of_gymnasium(seed: int) -> None:
    small = small_problem(seed)
    check_env(Placing(small.problem, small.simulator, "colocated"), skip_render_check=True)


def test_an_episode_places_block_after_block_and_is_judged_at_the_end() -> None:
    """On a GPU of 100 flop/s (0.5 s more for each op) and a CPU of 10, two ops of 100 flops take 3 s or 20 s in turn.

    The episodes are GPU, GPU (3 s), then CPU, CPU (20 s), then GPU, GPU: rewards 0, 3 - 20 and 23 / 2 - 3.
    """
    problem = Problem.of(wired([], 2, flops=[100, 100]), mixed_cluster())
    calls: list[list[int]] = []

    def evaluator(placements: Any, orders: Any = None) -> Evaluation:
        calls.append(placements[0].tolist())
        return judged(np.where(placements[:, 0] == 0, 3.0, 20.0))

    environment = Placing(problem, evaluator, "colocated")
    rewards = []
    for device in (0, 1, 0):
        seen, information = environment.reset()
        assert seen.tolist() == [0, 0]
        assert information["action_mask"].tolist() == [1, 1]
        seen, reward, ended, _, _ = environment.step(np.int64(device))
        assert (seen.tolist(), reward, ended) == ([device + 1, 0], 0, False)
        seen, reward, ended, _, information = environment.step(np.int64(device))
        assert (seen.tolist(), ended, information["fits"]) == ([device + 1] * 2, True, True)
        assert information["placement"].tolist() == [device] * 2
        rewards.append(reward)
    assert rewards == pytest.approx([0, 3 - 20, 23 / 2 - 3])
    assert calls == [[0, 0], [1, 1], [0, 0]]


def test_the_environment_never_places_where_a_block_cannot_run() -> None:
    problem = Problem.of(wired([], 2, devices=[["cpu"], ["gpu"]]), mixed_cluster())
    environment = Placing(problem, judge_all_alike, "colocated")
    _, information = environment.reset()
    assert information["action_mask"].tolist() == [0, 1]
    _, _, _, _, information = environment.step(np.int64(0))
    assert information["action_mask"].tolist() == [1, 0]
    assert environment.step(np.int64(1))[4]["placement"].tolist() == [1, 0]


def judge_all_alike(placements: Any, orders: Any = None) -> Evaluation:
    """Returns 1 s for every placement."""
    return judged(np.ones(len(placements)))


def test_nothing_to_place_is_no_decision_process() -> None:
    with pytest.raises(ProblemError, match="nothing to place"):
        Placing(Problem.of(graph_of([], []), tiny_cluster()), judge_all_alike)


def test_an_agent_of_gymnasium_s_kind_can_play() -> None:
    small = small_problem(1)
    environment: gymnasium.Env[Any, Any] = gymnasium.wrappers.RecordEpisodeStatistics(
        Placing(small.problem, small.simulator, "colocated")
    )
    environment.action_space.seed(0)
    costs = []
    for _ in range(200):
        _, information = environment.reset()
        ended = False
        while not ended:
            action = environment.action_space.sample(information["action_mask"])
            _, _, ended, _, information = environment.step(action)
        costs.append(information["cost"])
    assert min(costs) == pytest.approx(float(small.evaluation.cost.min()))


def test_the_strategy_needs_no_gymnasium() -> None:
    code = "import sys; sys.modules['gymnasium'] = None\nfrom placewise.strategies import make; make('spotlight')"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
