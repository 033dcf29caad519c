"""Drawing and changing placements: what is drawn, what is kept, and that small problems are solved."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from builders import graph_of, op
from hypothesis import given
from simulated import Step, steps
from small_problems import one_for_each_kind, two_chains

from placewise.core.arrays import Floats, Ints
from placewise.core.cluster import Cluster
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import search
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.blocks import Blocks
from placewise.strategies.sampling import Annealing, Choices, Even, Genetic, HillClimb, Random, single_placements


def judged(*costs: float) -> Evaluation:
    """Returns an evaluation of placements that fit."""
    values: Floats = np.array(costs)
    return Evaluation(values, values, np.zeros(len(costs), np.int64))


def started(strategy: HillClimb | Annealing | Genetic, problem: Problem, seed: int = 0) -> tuple[Search, Proposal]:
    """Returns a search and its first proposal."""
    proposals = strategy.search(problem, np.random.default_rng(seed))
    return proposals, next(proposals)


def differences(changed: Ints, placement: Ints) -> list[int]:
    """Returns how many groups of each row are elsewhere."""
    counts: list[int] = (changed != placement).sum(axis=1).tolist()
    return counts


@given(steps())
def test_drawn_and_changed_placements_are_allowed(case: tuple[Step, np.random.Generator]) -> None:
    step, rng = case
    choices = Choices.of(step.problem)
    drawn = step.problem.check_placements(choices.draw(rng, 5))
    step.problem.check_placements(single_placements(step.problem))
    assert len(step.problem.check_placements(choices.mutate(drawn, rng, 0.5))) == 5
    everywhere = choices.mutate(drawn, rng, 1.0)
    assert np.array_equal(everywhere != drawn, np.broadcast_to(step.problem.allowed.sum(axis=1) > 1, drawn.shape))
    if len(choices.movable):
        changed = step.problem.check_placements(choices.change(drawn, rng))
        assert ((changed != drawn).sum(axis=1) == 1).all()


def test_devices_are_drawn_uniformly() -> None:
    """600 draws of 3 devices: each 200 times, give or take 4 standard deviations of 11.5."""
    drawn = Choices.of(two_chains(2, 3)).draw(np.random.default_rng(1), 600)
    for group in range(2):
        assert np.bincount(drawn[:, group]) == pytest.approx([200] * 3, abs=46)


def test_even_draws_each_block_on_each_gpu_and_never_on_the_cpu() -> None:
    """Two GPUs and a CPU, four ops in two pairs: 640 draws of each pair, each GPU 320 times, give or take 4 deviations."""
    rows = [op("a.x.mm", 0), op("a.y.mm", 1), op("b.x.mm", 2), op("b.y.mm", 3), op("c.x.mm", 4, devices=["cpu"])]
    problem = Problem.of(graph_of([], rows), Cluster.load("2xK80"))
    proposals = Even(grouping="name-prefix:1").search(problem, np.random.default_rng(0))
    drawn = np.concatenate([next(proposals).placements for _ in range(10)])
    assert np.array_equal(drawn[:, 0], drawn[:, 1])
    assert np.array_equal(drawn[:, 2], drawn[:, 3])
    assert [device.kind for device in problem.cluster.devices] == ["gpu", "gpu", "cpu"]
    assert (drawn[:, 4] == 2).all()
    for block in (0, 2):
        assert np.bincount(drawn[:, block], minlength=3) == pytest.approx([320, 320, 0], abs=51)
    assert 0.4 < float((drawn[:, 0] == drawn[:, 2]).mean()) < 0.6


def test_even_without_a_gpu_draws_all_devices_and_without_a_choice_once() -> None:
    everywhere = next(Even(grouping="colocated").search(two_chains(2, 3), np.random.default_rng(0))).placements
    assert sorted(np.unique(everywhere).tolist()) == [0, 1, 2]
    only = list(Even(grouping="colocated").search(one_for_each_kind(), np.random.default_rng(0)))
    assert [proposal.placements.tolist() for proposal in only] == [[[0, 1, 0]]]


def test_every_single_change_is_drawn() -> None:
    choices = Choices.of(two_chains(4, 3))
    changed = choices.change(np.zeros((400, 4), np.int64), np.random.default_rng(1))
    assert {tuple(row) for row in changed.tolist()} == {
        tuple(device if n == group else 0 for n in range(4)) for group in range(4) for device in (1, 2)
    }


def test_single_placements_have_a_row_for_each_device() -> None:
    """On the GPU: a and c; b only runs on the CPU. On the CPU: a and b; c only runs on the GPU."""
    assert single_placements(one_for_each_kind()).tolist() == [[0, 1, 0], [1, 1, 0]]


def test_where_only_one_group_has_a_choice_only_it_changes() -> None:
    proposals, _ = started(HillClimb(neighbours=3, start="random"), one_for_each_kind())
    changed = proposals.send(judged(1.0)).placements
    assert changed[:, 1:].tolist() == [[1, 0]] * 3


def test_hill_climbing_goes_to_the_best_change_that_is_not_worse() -> None:
    proposals, first = started(HillClimb(neighbours=3), two_chains())
    assert first.placements.tolist() == [[0] * 6, [1] * 6]
    changed = proposals.send(judged(5.0, 4.0)).placements
    assert differences(changed, first.placements[1]) == [1, 1, 1]
    again = proposals.send(judged(4.5, 6.0, 4.1)).placements  # all worse
    assert differences(again, first.placements[1]) == [1, 1, 1]
    best = proposals.send(judged(3.0, 2.0, 2.0)).placements  # the first of equals
    assert differences(best, again[1]) == [1, 1, 1]
    tied = proposals.send(judged(9.0, 2.0, 2.0)).placements  # as good as the incumbent
    assert differences(tied, best[1]) == [1, 1, 1]


def test_annealing_sets_its_temperature_from_what_it_sees_first() -> None:
    """Increases of 1 and 3 average 2: taken with probability 1/e at temperature 2; 1/16 of that after 16 evaluations."""
    strategy = Annealing(calibration=4, first_acceptance=float(np.exp(-1)), cooling=1 / 16, evaluations=16)
    proposals, first = started(strategy, two_chains())
    assert len(proposals.send(judged(5.0, 6.0)).placements) == 4
    proposal = proposals.send(judged(6.0, 8.0, 5.0, 5.0))
    for spent in range(6, 40):
        assert proposal.notes["temperature"] == pytest.approx(2 * (1 / 16) ** min(spent / 16, 1))
        proposal = proposals.send(judged(5.0))
    assert len(first.placements) == 2


def test_annealing_takes_worse_changes_while_it_is_hot_and_none_when_it_is_cold() -> None:
    for acceptance, is_taken in ((0.999999, True), (1e-300, False)):
        proposals, first = started(Annealing(calibration=2, first_acceptance=acceptance, evaluations=10**9), two_chains())
        proposals.send(judged(1.0, 2.0))
        changed = proposals.send(judged(2.0, 2.0)).placements
        later = proposals.send(judged(2.0)).placements
        assert differences(later, changed[0] if is_taken else first.placements[0]) == [1]


def test_annealing_chains_are_apart() -> None:
    proposals, _ = started(Annealing(chains=3, calibration=1), two_chains())
    proposals.send(judged(5.0, 6.0))
    before = proposals.send(judged(7.0)).placements
    after = proposals.send(judged(1.0, 1.0, 1.0)).placements
    assert [differences(row[None], other) for row, other in zip(after, before, strict=True)] == [[1]] * 3


def test_annealing_of_a_problem_without_any_cost_goes_on() -> None:
    proposals, _ = started(Annealing(calibration=2), two_chains())
    proposals.send(judged(0.0, 0.0))
    proposals.send(judged(0.0, 0.0))
    assert len(proposals.send(judged(0.0)).placements) == 1


def test_children_have_a_range_of_one_parent_and_the_rest_of_the_other() -> None:
    """Parents are all on GPU 0 or all on GPU 1, so a child changes its device at most twice along the groups."""
    strategy = Genetic(population=2, mutations=0)
    proposals, first = started(strategy, two_chains(12))
    assert first.placements.tolist() == [[0] * 12, [1] * 12]
    for _ in range(20):
        children = proposals.send(judged(*[1.0] * 2)).placements
        assert (np.count_nonzero(np.diff(children), axis=1) <= 2).all()


def test_the_best_of_parents_and_children_live_on() -> None:
    """A child that costs less than both parents drives the dearer one out; one that costs as much does not."""
    proposals, first = started(Genetic(population=2, mutations=0, start="random"), two_chains(12), seed=3)
    children = proposals.send(judged(1.0, 9.0)).placements
    grandchildren = proposals.send(judged(9.0, 9.0)).placements  # no better than the dearer parent, who is older
    allowed = {tuple(row) for row in first.placements.T.tolist()}  # of each group: the devices of both parents
    assert {tuple(row) for row in np.stack([first.placements[0], grandchildren[0]]).T.tolist()} <= {
        (a, c) for a, b in allowed for c in (a, b)
    }
    last = proposals.send(judged(0.5, 0.5)).placements  # now both are the parents
    for row in last:
        assert ((row == grandchildren[0]) | (row == grandchildren[1])).all()
    assert children.shape == last.shape


def test_about_as_many_groups_mutate_as_are_asked_for() -> None:
    """3 of 12 groups in 400 rows: 1,200 mutations, give or take 4 standard deviations of 30."""
    choices = Choices.of(two_chains(12))
    placements = np.zeros((400, 12), np.int64)
    mutated = choices.mutate(placements, np.random.default_rng(5), 3 / 12)
    assert np.count_nonzero(mutated) == pytest.approx(1200, abs=120)


@pytest.mark.parametrize("start", ["single", "random"])
@pytest.mark.parametrize("name", ["random", "hill-climb", "annealing", "genetic"])
def test_small_problems_are_solved(name: str, start: str) -> None:
    """Two chains of three ops: 3 s with a chain on each GPU, which no placement can beat."""
    problem = two_chains()
    simulator = Simulator(problem, threads=1)
    everything = np.array(list(product(range(2), repeat=6)))
    assert simulator(everything).cost.min() == 3
    strategy = make(name, {} if name == "random" else {"start": start})
    assert search(problem, strategy, simulator, budget=Budget(evaluations=1500), seed=2).step_seconds == 3


def test_a_start_on_one_device_costs_an_evaluation_for_each_device() -> None:
    assert len(started(HillClimb(), two_chains(6, 4))[1].placements) == 4
    assert len(started(HillClimb(start="random"), two_chains(6, 4))[1].placements) == 1
    assert (
        len(started(Genetic(population=3), two_chains(6, 4))[1].placements) == 4
    )  # all of them, even in a small population
    assert len(started(Genetic(population=9), two_chains(6, 4))[1].placements) == 9


def test_random_ends_where_there_is_no_choice() -> None:
    proposals = Random().search(two_chains(3, 1), np.random.default_rng(0))
    assert next(proposals).placements.tolist() == [[0, 0, 0]]
    with pytest.raises(StopIteration):
        proposals.send(judged(3.0))


@pytest.mark.parametrize(
    ("make_one", "rule"),
    [
        (lambda: Random(batch=0), "batch must be at least 1, it is 0"),
        (lambda: HillClimb(neighbours=0), "neighbours must be at least 1, it is 0"),
        (lambda: Annealing(cooling=1.0), "cooling must be above 0 and below 1, it is 1.0"),
        (lambda: Annealing(first_acceptance=0.0), "first_acceptance must be above 0 and below 1, it is 0.0"),
        (lambda: Annealing(evaluations=0), "evaluations must be at least 1, it is 0"),
        (lambda: Genetic(population=1), "population must be at least 2, it is 1"),
        (lambda: Genetic(mutations=-0.5), "mutations must be at least 0, it is -0.5"),
    ],
)
def test_parameters_out_of_range_are_refused(make_one: type, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make_one()


@pytest.mark.parametrize("strategy", [Random(), HillClimb(), Annealing(), Genetic()])
def test_blocks_of_a_grouping_stay_together(strategy: Random | HillClimb | Annealing | Genetic) -> None:
    """Of eight groups in two chains, `coarse:2` makes two blocks; all that is proposed has one device for each."""
    problem = two_chains(4, 3)
    strategy = replace(strategy, grouping="coarse:2")
    of_group = Blocks.of(problem, "coarse:2").of_group
    proposals, simulator = strategy.search(problem, np.random.default_rng(0)), Simulator(problem)
    proposal = next(proposals)
    for _ in range(5):
        for block in range(2):
            assert (np.ptp(proposal.placements[:, of_group == block], axis=1) == 0).all()
        proposal = proposals.send(simulator(proposal.placements))
    with pytest.raises(ValueError, match="unknown grouping"):
        replace(strategy, grouping="nothing")
