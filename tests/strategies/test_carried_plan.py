"""Plans of similar graphs and other machines as placements to start from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import graph_of, op, tensor
from captured import captured_problem
from simulated import gpus, random_placements

from placewise.core.carried_placements import names_of_groups
from placewise.core.cluster import Cluster
from placewise.core.errors import InputError, PlanError
from placewise.core.graph import Graph
from placewise.core.plan import Plan, digest_of_graph
from placewise.core.problem import NOWHERE, Problem
from placewise.formats.cluster_file import parse_cluster
from placewise.search.planner import place
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.carried_plan import carry_plan


def chain(names: list[str], memory: int = 1) -> Graph:
    """Returns a chain of ops with these names, each a group that takes 1 s; every tensor has 1 byte."""
    rows = [op(name, n, [n - 1] if n else [], [n], seconds={"gpu": 1.0}) for n, name in enumerate(names)]
    return graph_of([tensor(f"t{n}", memory) for n in range(len(names))], rows)


def on(graph: Graph, count: int, memory: int = 1000) -> Problem:
    return Problem.of(graph, parse_cluster(gpus(count, memory)))


def saved(problem: Problem, placement: list[int], path: Path, *, with_names: bool = True) -> str:
    names = names_of_groups(problem.graph) if with_names else ()
    devices = problem.expand(np.array(placement))
    Plan(devices, graph_digest=digest_of_graph(problem.graph), groups=names).save(path)
    return str(path)


def test_a_plan_of_the_graph_itself_keeps_its_placement_and_order(tmp_path: Path) -> None:
    problem = captured_problem()
    plan = place(problem.graph, problem.cluster, strategy="heft")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    carried = carry_plan(problem, str(tmp_path / "plan.json"))
    assert problem.expand(carried.placement) == plan.placement
    assert carried.order is not None
    assert tuple(carried.order.tolist()) == plan.order
    assert carried.in_words("plan.json").startswith("plan.json covers 100% of the graph: ")


def test_one_layer_more_by_hand(tmp_path: Path) -> None:
    """a.x is known by its name, a.z by its module, and c.x follows b.x: it goes where that goes."""
    path = saved(on(chain(["a.x", "a.y", "b.x"]), 2), [1, 1, 0], tmp_path / "old.json")
    carried = carry_plan(on(chain(["a.x", "a.z", "b.x", "c.x"]), 2), path)
    assert carried.placement.tolist() == [1, 1, 0, 0]
    assert (carried.by_name, carried.by_module, carried.order) == (2, 1, None)
    assert carried.in_words("old.json") == (
        "old.json covers 75.0% of the graph: 2 of 4 ops by name, 1 by module; 1 goes where the op before it goes"
    )


def test_a_missing_device_by_hand(tmp_path: Path) -> None:
    """gpu:2 had two of the four ops of a chain; the simulator gives them to gpu:1, where no copy is needed between them."""
    graph = chain(["a.x", "b.x", "c.x", "c.y"])
    path = saved(on(graph, 3), [0, 1, 2, 2], tmp_path / "old.json")
    carried = carry_plan(on(graph, 2), path)
    assert carried.placement.tolist() == [0, 1, 1, 1]
    assert carried.in_words("p") == "p covers 100% of the graph: 4 of 4 ops by name; what ran on gpu:2 goes to other devices"


def test_optional_ops_that_were_nowhere_stay_there(tmp_path: Path) -> None:
    """The plan of the graph itself, with its order; on a machine with another GPU only the GPU's name is missing."""
    rows = [
        op("a.x", 0, [], [0], seconds={"gpu": 1.0}),
        op("a.again", 1, [], [1], seconds={"gpu": 1.0}, optional=True),
        op("b.x", 2, [1], [], seconds={"gpu": 1.0}),
    ]
    graph = graph_of([tensor("t0"), tensor("t1", stands_for=0)], rows)
    problem = on(graph, 2)
    path = saved(problem, [1, 1, NOWHERE], tmp_path / "old.json")
    carried = carry_plan(problem, path)
    assert carried.placement.tolist() == [1, 1, NOWHERE]  # optional groups come last
    assert carried.replaced == ()
    assert carry_plan(on(graph, 1), path).replaced == ("gpu:1",)


def test_what_no_longer_fits_is_repaired(tmp_path: Path) -> None:
    """Four tensors of 10 bytes, all alive to the end of the chain's next op: at most 25 bytes fit on a GPU."""
    parameters = [tensor(f"w{n}", 10, "parameter", home=n) for n in range(4)]
    rows = [op(f"m{n}.x", n, [n], seconds={"gpu": 1.0}) for n in range(4)]
    graph = graph_of(parameters, rows)
    path = saved(on(graph, 3), [0, 0, 1, 2], tmp_path / "old.json")
    problem = on(graph, 2, memory=25)
    carried = carry_plan(problem, path)
    assert Simulator(problem)(carried.placement[None]).overflow_bytes[0] == 0


def test_a_grouping_splits_no_group(tmp_path: Path) -> None:
    graph = chain(["a.x", "a.y", "a.z", "b.x"])
    path = saved(on(graph, 2), [0, 1, 1, 0], tmp_path / "old.json")
    grouped = Problem.of(graph, parse_cluster(gpus(2)), "module")
    assert carry_plan(grouped, path).placement.tolist() == [1, 0]


def test_other_graphs_are_refused_with_the_reason(tmp_path: Path) -> None:
    known = on(chain(["a.x", "a.y"]), 2)
    named, bare = (
        saved(known, [0, 1], tmp_path / "named.json"),
        saved(known, [0, 1], tmp_path / "bare.json", with_names=False),
    )
    other = on(chain(["c.x", "d.y", "e.z"]), 2)
    with pytest.raises(PlanError, match=r"named\.json: is for another graph than .*no op and no module in common"):
        carry_plan(other, named)
    with pytest.raises(PlanError, match=r"bare\.json: is for another graph than .*no names of its groups"):
        carry_plan(other, bare)


def test_auto_begins_there_and_other_strategies_say_if_they_can_not(tmp_path: Path) -> None:
    problem = captured_problem()
    placement = random_placements(problem, np.random.default_rng(3), 1)[0]
    smaller = Problem.of(replace(problem.graph, name="another"), problem.cluster)
    path = saved(smaller, placement.tolist(), tmp_path / "old.json")
    first = next(make("auto", {"start": path}).search(problem, np.random.default_rng(0)))
    assert np.array_equal(first.placements[0], placement)
    begun = place(problem.graph, problem.cluster, evaluations=1, simple=0, start=path)
    assert begun.placement == problem.expand(placement)
    post = place(problem.graph, problem.cluster, strategy="post", evaluations=1, start=tmp_path / "old.json")
    assert post.placement == begun.placement
    with pytest.raises(InputError, match="strategy 'heft' can't begin at a plan"):
        place(problem.graph, problem.cluster, strategy="heft", start=path)
    with pytest.raises(InputError, match="there is no such file"):
        place(problem.graph, problem.cluster, start="no-such.json")
    with pytest.raises(InputError, match="two starts"):
        place(problem.graph, problem.cluster, strategy="post", settings={"start": "heft"}, start=path)
    with pytest.raises(InputError, match="a step and its plan as start are for the strategy auto"):
        place(problem.graph, problem.cluster, strategy="post", start=(problem.graph, begun))


@pytest.mark.parametrize("cluster", ["1xK40", "4090+3060", "8xK80"])
def test_other_machines(cluster: str, tmp_path: Path) -> None:
    problem = captured_problem()
    path = saved(problem, random_placements(problem, np.random.default_rng(5), 1)[0].tolist(), tmp_path / "old.json")
    other = Problem.of(problem.graph, Cluster.load(cluster))
    carried = carry_plan(other, path)
    other.check_placements(carried.placement[None])
    assert Simulator(other)(carried.placement[None]).overflow_bytes[0] == 0


def test_empty_graphs(tmp_path: Path) -> None:
    empty = on(graph_of([], []), 2)
    assert carry_plan(empty, saved(empty, [], tmp_path / "empty.json")).placement.tolist() == []
    path = saved(on(chain(["a.x"]), 2), [1], tmp_path / "one.json")
    assert carry_plan(empty, path).placement.tolist() == []
