"""auto: calls of modules are dealt out to the GPUs."""

import numpy as np
import pytest

from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.models import load_graph
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.auto import DEAL_PATIENCE, DEAL_TURNS, Auto
from placewise.strategies.auto.candidates import Candidate
from placewise.strategies.auto.dealing import Deal, anneal, gradient_work, most_calls

UNROLLED = "rnnlm:layers=1,hidden=8,steps=6,batch=2,vocab=9"


@pytest.fixture(scope="module")
def unrolled() -> Problem:
    return Problem.of(load_graph(UNROLLED), Cluster.load("2xK80"))


def test_a_gradient_that_goes_on_is_no_gradient_work(unrolled: Problem) -> None:
    """The gradients of the projection's weight only go to its update; those of its input go to the layer before."""
    graph = unrolled.graph
    found = gradient_work(graph)
    products = [n for n, name in enumerate(graph.ops.names) if name.startswith("projection.mm.backward")]
    assert len(products) == 12
    assert found[products].sum() == 6


def test_a_call_is_dealt_with_its_gradient(unrolled: Problem) -> None:
    """The projection's calls alternate between both GPUs, the gradient of a call's input is where the call is."""
    deal = Deal.of(unrolled)
    graph, op_groups = unrolled.graph, unrolled.op_groups
    choice = np.where(deal.can_deal, deal.dealt, 0)
    placement = deal.expand(choice)
    unrolled.check_placements(placement[None])
    devices = placement[op_groups]
    forward = [n for n, name in enumerate(graph.ops.names) if name.startswith("projection.addmm")]
    assert devices[forward].tolist() == [0, 1, 0, 1, 0, 1]
    makes_gradients = gradient_work(graph)
    backward = [
        n for n, name in enumerate(graph.ops.names) if name.startswith("projection.mm.backward") and not makes_gradients[n]
    ]
    assert devices[backward].tolist() == [1, 0, 1, 0, 1, 0]  # the last call's gradient comes first
    assert (deal.expand(np.zeros_like(choice)) == 0).all()


def test_micro_batches_are_calls() -> None:
    problem = Problem.of(
        load_graph("gpt:layers=1,hidden=8,heads=2,length=4,batch=4,vocab=9,micro_batches=4"), Cluster.load("2xK80")
    )
    deal = Deal.of(problem)
    first = np.unique(problem.op_groups, return_index=True)[1]  # the first op of each group
    batches = problem.graph.ops.micro_batches[first]
    groups = problem.op_groups[first]
    placement = deal.expand(np.where(deal.can_deal, deal.dealt, 0))
    is_dealt = deal.can_deal[deal.blocks.of_group[groups]] & (batches >= 0)
    assert is_dealt.sum() > 100
    assert (placement[groups[is_dealt]] == batches[is_dealt] % 2).all()


def test_modules_that_are_called_once_are_not_dealt() -> None:
    problem = Problem.of(load_graph("cifar-cnn"), Cluster.load("2xK80"))
    assert most_calls(problem.graph) == 1
    assert not Deal.of(problem).can_deal.any()


def test_one_gpu_gets_no_hands() -> None:
    assert not Deal.of(Problem.of(load_graph(UNROLLED), Cluster.load("laptop"))).can_deal.any()


def test_changes_are_allowed(unrolled: Problem) -> None:
    deal, rng = Deal.of(unrolled), np.random.default_rng(0)
    weights = np.cumsum(np.ones(deal.blocks.num_blocks))
    choice = np.zeros(deal.blocks.num_blocks, np.int64)
    for _ in range(300):
        choice = deal.change(choice, weights, rng)
        assert deal.can_deal[choice == deal.dealt].all()
        unrolled.check_placements(deal.expand(choice)[None])
    assert len(set(choice.tolist())) > 2


def test_what_is_found_is_what_the_simulator_says(unrolled: Problem) -> None:
    model = Simulator(unrolled, threads=1)
    start = Candidate.of(model, np.zeros(unrolled.num_groups, np.int64))
    deal = Deal.of(unrolled)
    found = list(anneal(model, deal, start, 60, 20, (3e-2, 3e-4), seed=1))
    assert len(found) == 3
    costs = [start.cost, *(candidate.cost for candidate in found)]
    assert costs == sorted(costs, reverse=True)
    again = model(found[-1].placement[None], found[-1].order.astype(np.int64)[None])
    assert again.cost[0] == found[-1].cost
    repeated = list(anneal(model, deal, start, 60, 20, (3e-2, 3e-4), seed=1))
    assert [candidate.cost for candidate in repeated] == [candidate.cost for candidate in found]


def test_auto_deals_after_the_starts_while_that_helps(unrolled: Problem) -> None:
    """A step of small products is fastest on one device; one of large products is not."""
    large = Problem.of(load_graph("rnnlm:layers=1,hidden=512,steps=6,batch=32,vocab=5000"), Cluster.load("2xK80"))
    for problem, turns, then in ((unrolled, DEAL_PATIENCE + 1, "coarse"), (large, DEAL_TURNS, "walk")):
        model, auto = Simulator(problem), Auto(chains=2, deal=200 * problem.num_ops)
        search = auto.search(problem, np.random.default_rng(0))
        evaluation, stages = None, []
        for _ in range(turns + 2):
            proposal = search.send(evaluation)  # type: ignore[arg-type]  # None starts it
            stages.append(proposal.notes["stage"])
            evaluation = model(proposal.placements, proposal.orders)
        assert stages == ["start", *["deal"] * turns, then]
