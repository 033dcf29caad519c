"""HDP: what its networks read, its equation, its two kinds of draws, its ablations, and a graph of 80,000 ops."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from builders import graph_of, mixed_cluster, op, tensor, tiny_cluster, wired
from captured import captured_problem
from exhaustive import finds_the_best, small_problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placewise.core.arrays import Ragged
from placewise.core.contracts import Evaluation
from placewise.core.errors import StrategyError
from placewise.core.graph import Graph, Ops, Tensors
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies.learned import training
from placewise.strategies.learned.hdp import MOST_UNGROUPED, Hdp, Hierarchy, Units, split_by_device


def five_ops() -> Problem:
    """Returns relu -> mm -> mm_1 -> add with relu -> add as well, and a sum that reads nothing.

    Op 0, relu, writes t0 (9 B) for ops 1 and 3; op 1, mm, writes t1 (99 B) and t2 (999 B) for op 2; op 2, mm, writes t3
    (9,999 B) for op 3; op 3, add, writes nothing; op 4, sum, writes t4 (0 B), which nobody reads. Each is its own group.
    """
    graph = graph_of(
        [tensor("t0", 9), tensor("t1", 99), tensor("t2", 999), tensor("t3", 9999), tensor("t4", 0)],
        [
            op("relu", 0, [], [0], kind="relu"),
            op("mm", 1, [0], [1, 2], kind="mm"),
            op("mm_1", 2, [1, 2], [3], kind="mm"),
            op("add", 3, [0, 3], [], kind="add"),
            op("sum", 4, [], [4], kind="sum"),
        ],
    )
    return Problem.of(graph, tiny_cluster())


def test_what_the_grouper_reads_of_five_ops() -> None:
    """Kinds are relu, mm, add, sum. A size is log10(1 + bytes) / 10; a neighbour is its number / 5; the rest is -1.

    mm has two outputs, the larger first: 0.3 and 0.2, and log10(1 + 2); it reads from relu (0 / 5), mm_1 reads it (2 / 5).
    add reads from relu and mm_1 and has no output. sum has an output of 0 bytes and no neighbours.
    """
    units = Units.of(five_ops())
    read = units.embedded()
    assert read.shape == (5, 4 + 25 + 12)
    kinds, shapes, neighbours = read[:, :4], read[:, 4:29], read[:, 29:]
    sizes = shapes[:, [0, 4, 8, 12, 16, 20, 24]]  # without shapes only the first of four places is used
    assert (np.delete(shapes, [0, 4, 8, 12, 16, 20, 24], axis=1) == -1).all()
    assert kinds.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    one, two = math.log10(2), math.log10(3)
    pads = [-1.0] * 6
    assert sizes[0].tolist() == pytest.approx([0.1, *pads[1:], one])
    assert sizes[1].tolist() == pytest.approx([0.3, 0.2, *pads[2:], two])
    assert sizes[2].tolist() == pytest.approx([0.4, *pads[1:], one])
    assert sizes[3].tolist() == pytest.approx([*pads, 0])
    assert sizes[4].tolist() == pytest.approx([0, *pads[1:], one])
    assert neighbours[0].tolist() == pytest.approx([*pads, 0.2, 0.6, *pads[2:]])
    assert neighbours[1].tolist() == pytest.approx([0, *pads[1:], 0.4, *pads[1:]])
    assert neighbours[2].tolist() == pytest.approx([0.2, *pads[1:], 0.6, *pads[1:]])
    assert neighbours[3].tolist() == pytest.approx([0, 0.4, *pads[2:], *pads])
    assert neighbours[4].tolist() == [*pads, *pads]


def test_what_the_placer_reads_of_three_groups_of_five_ops() -> None:
    """Group 0 is {relu, mm}, 2 is {mm_1, add, sum}, and 1 is empty.

    Group 0 has a relu and a mm, and writes 9 + 99 + 999 = 1,107 B; group 2 has a mm, an add and a sum, and writes 9,999 B.
    The only edges between groups are from 0 to 2.
    """
    read = Units.of(five_ops()).grouped(np.array([0, 0, 2, 2, 2]), 3)
    one = math.log10(2)
    assert read[0].tolist() == pytest.approx([one, one, 0, 0, math.log10(1108) / 10, 0, 0, 1, 0, 0, 0])
    assert read[1].tolist() == [0] * 11
    assert read[2].tolist() == pytest.approx([0, one, one, one, 0.4, 0, 0, 0, 1, 0, 0])


def hierarchy(problem: Problem, known: Any = None, seed: int = 0, **settings: Any) -> Hierarchy:
    """Returns the learner of a problem, with small networks."""
    return Hierarchy(Hdp(**{"units": 16, **settings}), problem, known, np.random.default_rng(seed))


def test_a_device_is_drawn_by_the_softmax_of_c_tanh_l_over_t() -> None:
    """With an output layer of weights 0 and biases (20, 0), C 5 and T 10: logits (5 tanh 2, 0), whatever is read.

    Half a decision of five is drawn evenly, so the chance of device 0 is 0.9 sigmoid(5 tanh 2) + 0.1 / 2.
    """
    learner = hierarchy(five_ops(), exploration=0.5, groups=5, placements=3)
    with torch.no_grad():
        learner.placer.output.weight.zero_()
        learner.placer.own_output.weight.zero_()
        learner.placer.output.bias.copy_(torch.tensor([20.0, 0.0]))
        learner.draw()
        logs = learner.placer_logs()
    expected = 0.9 / (1 + math.exp(-5 * math.tanh(2))) + 0.05
    used = np.bincount(learner.groups, minlength=5) > 0
    assert logs.shape == (3, 5, 2)
    assert logs.exp()[:, used, 0].numpy() == pytest.approx(expected, rel=1e-5)


def test_a_placement_is_a_device_for_each_group_of_one_grouping() -> None:
    problem = captured_problem()
    learner = hierarchy(problem, groups=9, group_confidence=0.5)
    placements = learner.draw()
    assert placements.shape == (4, problem.num_groups)
    free = problem.allowed.all(axis=1)
    for placement, devices in zip(placements, learner.placements.numpy(), strict=True):
        assert np.array_equal(placement[free], devices[learner.groups][free])
    assert 1 < len(np.unique(learner.groups)) <= 9
    first = learner.groups
    learner.draw()
    assert not np.array_equal(first, learner.groups)


def test_the_loss_is_that_of_both_networks() -> None:
    """One step along the gradient makes the better half of the placements likelier than the worse, and its grouping, too.

    All four placements share the grouping, so its probability rises if they are better than the baseline on average.
    """
    small = small_problem(5)
    learner = hierarchy(small.problem, advantage="raw", noise=0.0, output_rate=1e-3, placements=8)
    learner.baseline = 0.9
    learner.draw()
    cost = np.where(np.arange(8) < 4, 0.25, 1.0)  # signals 0.5 and 1, the baseline is 0.9
    before = likelihoods(learner)
    learner.learn(Evaluation(cost, cost, np.zeros(8, np.int64)))
    after = likelihoods(learner)
    assert after[0] > before[0]  # the grouping
    assert (after[1] - before[1])[:4].mean() > (after[1] - before[1])[4:].mean()
    assert learner.baseline != 0.9


def likelihoods(learner: Hierarchy) -> tuple[float, Any]:
    """Returns the logarithms of the probability of the last grouping, and of each of the last placements."""
    with torch.no_grad():
        grouping = training.chosen(
            torch.log_softmax(learner.grouper(learner.inputs) + learner.bias, dim=1), torch.tensor(learner.groups)
        )
        used = np.bincount(learner.groups, minlength=learner.num_groups) > 0
        placed = training.chosen(learner.placer_logs(), learner.placements)[:, used]
    return float(grouping.sum()), placed.sum(dim=1).numpy()


def test_a_group_without_units_has_no_part_in_the_loss() -> None:
    """All units in group 0 of five: with a gradient from groups 1 to 4 the loss would not be that of one decision."""
    learner = hierarchy(five_ops(), groups=5, grouping="fixed", noise=0.0, exploration=0.0, advantage="raw")
    learner.groups = np.zeros(5, np.int64)
    learner.baseline = 3.0
    learner.draw()
    with torch.no_grad():
        first = training.chosen(learner.placer_logs(), learner.placements)[:, 0]
    notes = learner.learn(Evaluation(np.ones(4), np.ones(4), np.zeros(4, np.int64)))
    assert notes["loss"] == pytest.approx(float(-2 * first.mean()), rel=1e-5)


def test_noise_and_failures_end_with_the_early_updates() -> None:
    learner = hierarchy(small_problem(0).problem, early_updates=2)
    failing = Evaluation(np.arange(1.0, 5), np.ones(4), np.ones(4, np.int64))
    noise, moved = [], []
    for _ in range(3):
        noise.append(float(learner.noise(torch.Size((1000,))).abs().max()))
        before = torch.nn.utils.parameters_to_vector(learner.learning.parameters()).detach().clone()
        learner.draw()
        learner.learn(failing)
        after = torch.nn.utils.parameters_to_vector(learner.learning.parameters()).detach()
        moved.append(not torch.equal(before, after))
    assert noise == pytest.approx([0.1, 0.1, 0])
    assert moved == [True, True, False]


def test_a_search_in_which_nothing_teaches_goes_on() -> None:
    learner = hierarchy(small_problem(0).problem, early_updates=0)
    learner.draw()
    notes = learner.learn(Evaluation(np.full(4, 4.0), np.ones(4), np.ones(4, np.int64)))
    assert (notes["baseline"], notes["loss"]) == (2, 0)


def test_units_of_a_group_that_share_no_device_go_where_they_can() -> None:
    """One op can run on the CPU alone, another on the GPU alone: a group of both is on either, each of them where it can."""
    problem = Problem.of(wired([], 3, devices=[["cpu"], ["gpu"], ["cpu", "gpu"]]), mixed_cluster())
    learner = hierarchy(problem, groups=1)
    placements = learner.draw()
    assert (placements[:, :2] == [1, 0]).all()
    problem.check_placements(placements)


@pytest.mark.parametrize("grouping", ["fixed", "none"])
def test_ablations_learn_the_placer_alone(grouping: Any) -> None:
    problem = small_problem(0).problem
    learner = hierarchy(problem, grouping=grouping)
    learner.draw()
    first = learner.groups
    if grouping == "none":
        assert first.tolist() == list(range(problem.num_groups))
    before = training.to_array(learner.grouper.output.weight.detach() * 1e6)
    learner.learn(Evaluation(np.arange(1.0, 5), np.ones(4), np.zeros(4, np.int64)))
    learner.draw()
    assert np.array_equal(first, learner.groups)
    assert np.array_equal(before, training.to_array(learner.grouper.output.weight.detach() * 1e6))


def test_no_grouping_refuses_a_large_graph() -> None:
    problem = chain(MOST_UNGROUPED + 1)
    with pytest.raises(StrategyError, match="grouping none takes at most 4096 groups, the problem has 4097"):
        next(Hdp(grouping="none").search(problem, np.random.default_rng(0)))


@pytest.mark.parametrize("first_groups", ["coarse", "stretches", "random"])
def test_the_grouper_begins_at_its_first_groups(first_groups: Any) -> None:
    """With a confidence of 0.999 nearly all units are drawn where they begin; a fixed grouping stays exactly there."""
    problem = captured_problem()
    learner = hierarchy(problem, groups=16, first_groups=first_groups)
    first = learner.groups
    assert 10 <= len(np.unique(first)) <= 16
    learner.draw()
    assert float((learner.groups == first).mean()) > 0.98
    if first_groups == "stretches":
        assert (np.diff(first) >= 0).all()
    fixed = hierarchy(problem, groups=16, first_groups=first_groups, grouping="fixed")
    fixed.draw()
    assert np.array_equal(fixed.groups, first)


def test_a_group_is_drawn_by_its_chance() -> None:
    """Of 6,000 units with the chances 0.1, 0 and 0.9 for groups 0, 1 and 2, a tenth is in group 0 and none in group 1."""
    learner = hierarchy(five_ops(), groups=3)
    drawn = learner._draw_groups(torch.tensor([[0.1, 0.0, 0.9]]).expand(6000, -1).contiguous())
    assert float((drawn == 0).float().mean()) == pytest.approx(0.1, abs=0.015)
    assert not (drawn == 1).any()


def test_a_known_placement_is_split_by_device() -> None:
    """Units 0, 2, 3 are on device 0, the others on 1: in that order, two to a group."""
    assert split_by_device(np.array([0, 1, 0, 0, 1, 1]), 3).tolist() == [0, 1, 0, 1, 2, 2]
    assert split_by_device(np.array([1, 0]), 2).tolist() == [1, 0]


def test_a_warm_start_is_where_the_samples_begin() -> None:
    """In nearly all groups the units agree on their device, so nearly all samples have the start's devices."""
    problem = captured_problem()
    known = np.where(problem.allowed[:, 0] & (np.arange(problem.num_groups) < 100), 0, problem.allowed.argmax(axis=1))
    learner = hierarchy(problem, known, confidence=0.99, groups=32)
    assert float((learner.draw() == known).mean()) > 0.9


@pytest.mark.parametrize(("seed", "grouping"), [*((n, "learned") for n in range(20)), (0, "none"), (1, "none")])
def test_the_best_of_a_small_problem_is_found(seed: int, grouping: Any) -> None:
    assert finds_the_best(Hdp(grouping=grouping), seed, evaluations=2400)


def chain(num_ops: int) -> Problem:
    """Returns a chain of ops of twenty kinds that each do some work and pass a byte on."""
    numbers = np.arange(num_ops)
    none = np.full(num_ops, -1)
    names = tuple(f"op{n}" for n in range(num_ops))
    ops = Ops(
        names,
        kinds=tuple(f"kind{n % 20}" for n in range(num_ops)),
        phases=np.zeros(num_ops, np.int64),
        groups=numbers,
        reads=Ragged(np.maximum(np.arange(-1, num_ops), 0), numbers[:-1]),
        writes=Ragged(np.arange(num_ops + 1), numbers),
        after=Ragged(np.zeros(num_ops + 1, np.int64), np.zeros(0, np.int64)),
        flops=np.ones(num_ops),
        bytes_moved=np.ones(num_ops),
        devices=(None,) * num_ops,
        micro_batches=none,
    )
    tensors = Tensors(names, np.ones(num_ops, np.int64), np.zeros(num_ops, np.int64), none, none)
    return Problem.of(Graph("chain", tensors, ops, np.zeros(0, np.int64)), tiny_cluster())


class Elements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements of all tensors that torch computes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def test_the_work_of_an_update_grows_no_faster_than_the_graph() -> None:
    work = {}
    for num_ops in (20_000, 80_000):
        problem = chain(num_ops)
        proposals = Hdp().search(problem, np.random.default_rng(0))
        evaluation = Simulator(problem, order="program")(next(proposals).placements)
        with Elements() as elements:  # type: ignore[no-untyped-call]
            second = proposals.send(evaluation)
        proposals.close()
        assert second.placements.shape == (4, num_ops)
        assert second.notes["update"] == 1
        work[num_ops] = elements.count
    assert 20_000 * 256 < work[20_000] < work[80_000] < 4 * work[20_000]  # 256 groups
