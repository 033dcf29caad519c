"""ColocRL: what it reads, how its controllers share a network, and what it finds."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from builders import graph_of, mixed_cluster, op, tensor, tiny_cluster, wired
from captured import captured_problem
from exhaustive import finds_the_best, small_problem

from placewise.core.contracts import Evaluation
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import search
from placewise.simulate.simulator import Simulator
from placewise.strategies.blocks import Blocks
from placewise.strategies.learned import training
from placewise.strategies.learned.colocrl import ColocRL, Controllers, read_blocks
from placewise.strategies.learned.maths import initial_probabilities


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_a_small_problem_is_found(seed: int) -> None:
    assert finds_the_best(ColocRL(grouping="colocated"), seed, evaluations=2400)


def test_what_is_read_of_three_blocks() -> None:
    """Ops mm and add are block 0 and write 99 bytes for mul, block 1; relu, block 2, stands alone and writes nothing.

    add's 9 bytes are read inside the block; mul's 0 bytes are read by nobody, so they leave it.
    """
    graph = graph_of(
        [tensor("inside", 9), tensor("between", 99), tensor("unread", 0)],
        [
            op("add", 0, [], [0], kind="add"),
            op("mm", 0, [0], [1], kind="mm"),
            op("mul", 1, [1], [2], kind="mul"),
            op("relu", 2, kind="relu"),
        ],
    )
    problem = Problem.of(graph, tiny_cluster())
    shares, others = read_blocks(problem, Blocks.of(problem, "colocated"))
    assert shares.tolist() == [[0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    shapes, readers, read = others[:, :24], others[:, 24:27], others[:, 27:]
    assert shapes[:, 0].tolist() == pytest.approx([0.2, 0, -1])
    assert (shapes[:, 1:] == -1).all()
    assert readers.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert read.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]


def controllers(problem: Problem, seed: int = 0, **settings: Any) -> Controllers:
    """Returns controllers of a problem, one decision for a group."""
    strategy = ColocRL(**{"grouping": "colocated", "units": 16, **settings})
    blocks = strategy.blocks(problem)
    return Controllers(strategy, problem, blocks, initial_probabilities(blocks.allowed), np.random.default_rng(seed))


def parameters(learner: Controllers) -> torch.Tensor:
    """Returns a copy of all weights in one vector."""
    return torch.nn.utils.parameters_to_vector(learner.policy.parameters()).detach().clone()


def test_all_controllers_are_in_one_proposal_and_each_moves_the_network() -> None:
    small = small_problem(0)
    learner = controllers(small.problem, controllers=3, samples=5)
    placements = learner.draw()
    assert placements.shape == (15, small.problem.num_groups)
    notes = learner.learn(small.simulator(placements))
    assert notes["update"] == 3
    assert set(notes) == {"update", "loss", "entropy", "baseline", "average_seconds", "best_seconds"}


def test_a_round_s_gradients_are_all_of_the_network_that_drew() -> None:
    """Plain gradient descent along gradients of one network is one step along their sum: in any order of the controllers."""
    small = small_problem(0)
    moved = []
    for order in ([0, 1, 2, 3], [2, 3, 0, 1]):
        learner = controllers(small.problem, controllers=2, samples=2, max_norm=1e9)
        learner.optimizer = torch.optim.SGD(learner.policy.parameters(), lr=0.1)
        learner.draw()
        learner.placements = learner.placements[order]
        before = parameters(learner)
        learner.learn(small.simulator(learner.blocks.expand(training.to_array(learner.placements))))
        moved.append(parameters(learner) - before)
    assert float(moved[0].norm()) > 1e-3
    assert torch.allclose(moved[0], moved[1], atol=1e-6)


def test_the_baseline_begins_at_the_failing_signal_and_follows_the_samples() -> None:
    """Ops of 10 flops take 1 s on the CPU and 0.6 s on the GPU: all in turn on the slower one are 3 s."""
    problem = Problem.of(wired([(0, 1), (1, 2)], 3, flops=[10] * 3), mixed_cluster())
    learner = controllers(problem, controllers=1, samples=2, baseline_decay=0.5, first_baseline="failing")
    assert learner.baseline == pytest.approx(3**0.5)
    learner.draw()
    learner.learn(Evaluation(np.array([4.0, 9.0]), np.array([4.0, 9.0]), np.zeros(2, np.int64)))
    assert learner.baseline == pytest.approx((3**0.5 / 2 + 2 / 2) / 2 + 3 / 2)


def test_without_a_failing_signal_the_baseline_begins_at_the_first_mean() -> None:
    learner = controllers(small_problem(0).problem, controllers=1, samples=2, baseline_decay=0.5)
    learner.draw()
    notes = learner.learn(Evaluation(np.array([4.0, 16.0]), np.ones(2), np.zeros(2, np.int64)))
    assert learner.baseline == notes["baseline"] == pytest.approx((3 / 2 + 2 / 2) / 2 + 4 / 2)


def test_later_only_placements_that_fit_teach() -> None:
    small = small_problem(1)
    for after, teaches in ((0, False), (1, True)):
        learner = controllers(small.problem, valid_only_after=after, first_baseline="failing")
        rows, before, baseline = len(learner.draw()), parameters(learner), learner.baseline
        learner.learn(Evaluation(np.arange(1.0, rows + 1), np.ones(rows), np.ones(rows, np.int64)))
        assert torch.equal(parameters(learner), before) is not teaches
        assert (learner.baseline == baseline) is not teaches


def test_faster_placements_become_more_likely() -> None:
    """Four ops on a fast and a slow device: after some rounds nearly all is on the fast one."""
    problem = Problem.of(wired([], 4, flops=[1000] * 4), mixed_cluster())
    simulator = Simulator(problem, threads=1)
    learner = controllers(problem, learning_rate=0.01, exploration=0.0)
    shares = []
    for _ in range(30):
        placements = learner.draw()
        shares.append(float((placements == 0).mean()))
        notes = learner.learn(simulator(placements))
    assert np.mean(shares[:3]) < 0.7
    assert np.mean(shares[-3:]) > 0.9
    assert notes["entropy"] < 0.4


def test_too_many_blocks_are_coarsened() -> None:
    problem = captured_problem()
    single = Blocks.of(problem, "single-consumer").num_blocks
    assert ColocRL(grouping="single-consumer").blocks(problem).num_blocks == single <= 256
    assert ColocRL(grouping="single-consumer", max_blocks=single - 1).blocks(problem).num_blocks <= single - 1
    few = ColocRL(grouping="single-consumer", max_blocks=20).blocks(problem)
    assert np.array_equal(few.of_group, Blocks.of(problem, "coarse:20").of_group)


def test_a_warm_start_is_where_the_samples_begin() -> None:
    """With a confidence of 0.99 nearly all decisions of the first samples are those of the start."""
    problem = captured_problem()
    simulator = Simulator(problem)
    proposals = ColocRL(start="gpu-only", confidence=0.99).search(problem, np.random.default_rng(0))
    first = next(proposals)
    assert len(first.placements) == 2  # one for each GPU
    best = first.placements[simulator(first.placements).cost.argmin()]
    samples = proposals.send(simulator(first.placements)).placements
    proposals.close()
    assert float((samples == best).mean()) > 0.97


def test_threads_of_torch_are_as_before_at_every_yield() -> None:
    small = small_problem(2)
    torch.set_num_threads(threads := 3)
    proposals = ColocRL(grouping="colocated", units=8).search(small.problem, np.random.default_rng(0))
    proposal = next(proposals)
    for _ in range(2):
        assert torch.get_num_threads() == threads
        proposal = proposals.send(small.simulator(proposal.placements))
    assert torch.get_num_threads() == threads


def test_updates_are_counted_in_the_notes() -> None:
    small = small_problem(3)
    seen: list[dict[str, Any]] = []
    strategy = ColocRL(grouping="colocated", units=8)
    search(
        small.problem,
        strategy,
        small.simulator,
        budget=Budget(evaluations=64),
        seed=0,
        on_batch=lambda p: seen.append(p.notes),
    )
    assert seen[0] == {}
    assert [b["update"] - a["update"] for a, b in pairwise(seen[1:])] == [4, 4]
