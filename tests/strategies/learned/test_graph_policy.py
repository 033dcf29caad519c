"""The graph policy: what it reads does not depend on names or units, and what the network scores, compiled code scores."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import graph_data, replaced, tensor
from captured import captured_problem
from simulated import Step, gpus, random_step, takes

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.experiments.policy.teaching import canonical, new_network
from placewise.formats.safetensors_file import read_safetensors, write_safetensors
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.blocks import Blocks
from placewise.strategies.learned.graph_policy.block_graph import BlockGraph, merge_blocks, read_block_graph
from placewise.strategies.learned.graph_policy.drawing import fitting, greedy, next_room, place_greedily, samples
from placewise.strategies.learned.graph_policy.graph_policy import GraphPolicy, read_network
from placewise.strategies.learned.graph_policy.placing import place_blocks
from placewise.strategies.learned.graph_policy.policy_network import GraphTensors

NETWORK = new_network(8, 2, seed=3)  # not taught: it puts blocks where they end first, mostly


def block_graph(problem: Problem, num_blocks: int = 1000) -> BlockGraph:
    grouping = f"coarse:{num_blocks}"
    return read_block_graph(merge_blocks(problem, Blocks.of(problem, grouping), grouping))


def placed(problem: Problem, num_blocks: int = 1000) -> Ints:
    graph = block_graph(problem, num_blocks)
    return greedy(graph, NETWORK.scorer(GraphTensors.of(graph)))


def two_chains(copy_bytes: int = 1) -> Problem:
    """Two independent chains of three ops that take 100 s each."""
    tensors = [tensor(f"t{n}", copy_bytes) for n in range(6)]
    rows = [takes(100.0, n, reads=[n - 2] if n >= 2 else [], writes=[n]) for n in range(6)]
    return Step.of(graph_data(tensors, rows), gpus(2)).problem


def test_before_it_learns_it_puts_blocks_where_they_end_first() -> None:
    """Two chains on two GPUs: each chain stays on its own, and the first op is on the first of two equal GPUs."""
    assert placed(two_chains()).tolist() == [0, 1, 0, 1, 0, 1]


def test_features_by_hand() -> None:
    """Op 2 reads 1 byte from op 0 on gpu:0: elsewhere it starts 2 s later, 1 s of latency and 1 s for the byte."""
    graph = block_graph(two_chains())
    found = place_blocks(
        graph.placing,
        NETWORK.scorer(GraphTensors.of(graph)),
        np.zeros((6, 2)),
        np.array([0, 1, 0, 1, 0, 1]),
        1.0,
        np.ones(2, bool),
    )
    third = found.features[graph.placing.sequence.tolist().index(2)]  # [devices, FEATURES]
    late = 2.0 / 100.0  # relative to the op's own time
    assert third[:, 0].tolist() == [0.0, pytest.approx(late / (1 + late))]
    assert third[:, 8].tolist() == [1.0, 0.0]  # its input is on gpu:0
    assert third[:, 3].tolist() == [pytest.approx(1 / 6), pytest.approx(1 / 6)]  # each is busy for one op of six
    assert found.is_open[0].tolist() == [True, False]  # of two unused equal GPUs only the first


@pytest.mark.parametrize("seed", range(6))
def test_the_compiled_score_is_that_of_the_network(seed: int) -> None:
    problem = random_step(seed, 14, 1 + seed % 4, 60, "colocated")[0].problem
    graph = block_graph(problem)
    tensors = GraphTensors.of(graph)
    shape = graph.placing.block_seconds.shape
    noise = np.random.default_rng(seed).normal(size=shape)
    found = place_blocks(graph.placing, NETWORK.scorer(tensors), noise, np.full(shape[0], -1), 1.0, np.ones(shape[1], bool))
    of_block, of_device = NETWORK.read(tensors)
    sequence = graph.placing.sequence
    logits = NETWORK.score(
        of_block[torch.tensor(sequence)],
        of_device,
        torch.tensor(found.features, dtype=torch.float32),
        torch.tensor(found.is_open),
    )
    scores = logits.detach().numpy() + noise[sequence]
    chosen = scores[np.arange(shape[0]), found.placement[sequence]]
    assert (chosen >= scores.max(axis=1) - 1e-4).all()
    assert found.is_open[np.arange(shape[0]), found.placement[sequence]].all()
    problem.check_placements(found.placement[None])


def test_names_do_not_matter() -> None:
    problem = captured_problem()
    names = tuple(f"x{n}" for n in range(problem.num_ops))
    other = Problem.of(replaced(problem.graph, ops={"names": names}), problem.cluster)
    assert np.array_equal(placed(problem, 60), placed(other, 60))


@pytest.mark.parametrize("factor", [2.0**-10, 2.0**12])
def test_units_of_time_do_not_matter(factor: float) -> None:
    """Everything that takes time takes `factor` times as long: the same placement."""
    problem = captured_problem()
    cluster = problem.cluster
    devices = [
        replace(
            device,
            flops=device.flops / factor,
            bytes_per_second=device.bytes_per_second / factor,
            overhead_seconds=device.overhead_seconds * factor,
            flops_by_type=tuple((name, flops / factor) for name, flops in device.flops_by_type),
        )
        for device in cluster.devices
    ]
    links = [
        replace(link, bytes_per_second=link.bytes_per_second / factor, latency_seconds=link.latency_seconds * factor)
        for link in cluster.links
    ]
    slower = replace(cluster, devices=tuple(devices), links=tuple(links), dispatch_seconds=cluster.dispatch_seconds * factor)
    assert np.array_equal(placed(problem, 60), placed(Problem.of(problem.graph, slower), 60))


def test_the_order_of_equal_devices_does_not_matter() -> None:
    """The network gives equal devices equal scores before anything is placed, wherever they stand."""
    problem = captured_problem()
    graph = block_graph(problem, 40)
    _, of_device = NETWORK.read(GraphTensors.of(graph))
    assert graph.placing.classes.tolist() == [0, 0, 1]
    assert torch.equal(of_device[0], of_device[1])
    swapped = Cluster(
        problem.cluster.name, (problem.cluster.devices[2], *problem.cluster.devices[:2]), problem.cluster.links,
        problem.cluster.dispatch_seconds,
    )  # fmt: skip
    other = placed(Problem.of(problem.graph, swapped), 40)
    assert np.array_equal((other + 2) % 3, placed(problem, 40))


def test_canonical_labels_rename_equal_devices_in_order_of_use() -> None:
    graph = block_graph(two_chains())
    assert canonical(np.array([1, 0, 1, 0, 1, 0]), graph).tolist() == [0, 1, 0, 1, 0, 1]


def test_with_little_memory_it_uses_more_devices() -> None:
    """Four parameters of 10 bytes: 25 bytes hold two of them."""
    parameters = [tensor(f"w{n}", 10, "parameter", home=n) for n in range(4)]
    rows = [takes(1.0, n, reads=[n]) for n in range(4)]
    problem = Step.of(graph_data(parameters, rows), gpus(2, memory=25)).problem
    graph = block_graph(problem)
    scorer, model = NETWORK.scorer(GraphTensors.of(graph)), Simulator(graph.problem)
    found = fitting(graph, model, scorer)
    assert model(found.placement[None]).overflow_bytes[0] == 0
    one = greedy(graph, scorer, 1.0, np.array([True, False]))
    assert set(one.tolist()) == {0}  # where only one device may be used, memory does not count
    assert len(place_greedily(graph, model, scorer, 1)) == 1


def test_less_room_after_samples_that_do_not_fit() -> None:
    assert next_room(1.0, 0.6) == pytest.approx(0.85)
    assert next_room(0.41, 1.0) == 0.4
    assert next_room(0.5, 0.3) == 0.5
    assert next_room(0.5, 0.0) == pytest.approx(0.5 / 0.95)
    assert next_room(0.99, 0.0) == 1.0


def test_samples_differ_and_are_the_same_for_a_seed() -> None:
    graph = block_graph(captured_problem(), 40)
    scorer = NETWORK.scorer(GraphTensors.of(graph))
    one, two = (samples(graph, scorer, 3, 1.0, 1.0, np.random.default_rng(5)) for _ in range(2))
    assert all(np.array_equal(a.placement, b.placement) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(one[0].placement, one[1].placement)


def test_one_candidate_is_one_pass() -> None:
    problem = captured_problem()
    settings = {"candidates": "1", "refinements": "0"}
    first = next(make("graph-policy", settings).search(problem, np.random.default_rng(0)))
    again = next(make("graph-policy", settings).search(problem, np.random.default_rng(9)))
    assert np.array_equal(first.placements, again.placements)  # nothing is drawn
    assert len(first.placements) == 1


def test_refinements_keep_the_best_and_are_counted() -> None:
    """600 placements are 50 generations of 12; each of the placements of the draft is different, the best one first."""
    problem, policy = captured_problem(), GraphPolicy()
    draft = policy.answer(read_network("shipped"), problem, 64, np.random.default_rng(0))
    refined = policy.refined(draft, np.random.default_rng(0))
    assert refined.cost[0] <= draft.cost[0]
    assert (np.diff(refined.cost) >= 0).all()
    assert policy.population <= len(refined.placements) == len(np.unique(refined.placements, axis=0)) <= policy.refinements
    assert np.array_equal(draft.model(refined.placements).cost, refined.cost)
    assert GraphPolicy(refinements=0).refined(draft, np.random.default_rng(0)) is draft


def test_after_the_answer_no_placement_is_judged_twice_and_blocks_become_finer() -> None:
    problem = captured_problem()
    simulator = Simulator(problem)
    proposals = GraphPolicy(blocks=4, refinements=60).search(problem, np.random.default_rng(0))
    proposal, seen, best = next(proposals), list[bytes](), list[float]()
    for _ in range(30):
        evaluation = simulator(proposal.placements)
        best.append(float(evaluation.cost.min()))
        proposal = proposals.send(evaluation)
        assert len(proposal.placements) <= GraphPolicy.population
        if proposal.notes["stage"] != "tuning":
            break
        seen += [placement.tobytes() for placement in proposal.placements]
    assert len(seen) == len(dict.fromkeys(seen)) > 100
    assert min(best) < best[0]
    assert proposal.notes["stage"] in ("tuning", "evolution")


def test_the_first_placement_fits_where_something_fits() -> None:
    """With a fifth of the memory that one GPU needs, only plans over several devices fit."""
    problem = captured_problem()
    need = int(Simulator(problem).simulate(np.zeros((1, problem.num_groups), np.int64)).peak_bytes.max())
    names = problem.cluster.device_names
    tight = Problem.of(problem.graph, problem.cluster.limited({names[0]: need // 3, names[1]: need // 3}))
    simulator = Simulator(tight)
    proposals = make("graph-policy").search(tight, np.random.default_rng(0))
    proposal = next(proposals)
    while True:
        evaluation = simulator(proposal.placements)
        if not evaluation.overflow_bytes[0]:
            break
        proposal = proposals.send(evaluation)
        assert proposal.notes["stage"] == "repair"


def test_the_shipped_weights_are_small_and_say_how_they_were_made() -> None:
    path = Path(str(files("placewise.strategies.learned.graph_policy") / "weights.safetensors"))
    assert path.stat().st_size <= 2 * 2**20
    _, made = read_safetensors(path, StrategyError)
    assert made["format"] == "placewise-graph-policy"
    assert made["hold_out"] == "()"


def test_other_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.safetensors")
    arrays = {name: value.numpy() for name, value in NETWORK.state_dict().items()}
    write_safetensors(arrays, path, {"width": "8", "rounds": "2"})
    assert read_network(path).state_dict().keys() == NETWORK.state_dict().keys()
    problem = captured_problem()
    found = next(GraphPolicy(weights=path, candidates=1).search(problem, np.random.default_rng(0)))
    problem.check_placements(found.placements)
    wrong: list[tuple[dict[str, np.ndarray], dict[str, str], str]] = [
        (arrays, {}, "its metadata lack width and rounds"),
        (arrays, {"width": "9", "rounds": "2"}, "must have the shape"),
        (arrays, {"width": "8", "rounds": "999"}, "rounds from 0 to 16"),
        ({**arrays, "more": np.zeros(1, np.float32)}, {"width": "8", "rounds": "2"}, "'more' must have the shape None"),
        ({**arrays, "second.bias": np.full(8, np.nan, np.float32)}, {"width": "8", "rounds": "2"}, "is not finite"),
        ({**arrays, "second.bias": np.full(8, 1e300)}, {"width": "8", "rounds": "2"}, "is not finite"),  # as a float32
    ]
    for broken, metadata, rule in wrong:
        write_safetensors(broken, path, metadata)
        with pytest.raises(StrategyError, match=rule):
            read_network(path)
    huge = {name: np.full_like(array, 1e30) for name, array in arrays.items()}
    write_safetensors(huge, path, {"width": "8", "rounds": "2"})
    with pytest.raises(StrategyError, match="their scores are not finite"):
        next(GraphPolicy(weights=path, candidates=1).search(problem, np.random.default_rng(0)))
    with pytest.raises(StrategyError, match="weights must be shipped or the path of a file"):
        make("graph-policy", {"weights": "no-such-file"})


def test_a_score_that_is_no_number_leaves_no_block_without_a_device() -> None:
    graph = block_graph(captured_problem())
    scorer = NETWORK.scorer(GraphTensors.of(graph))
    nothing = scorer._replace(direct=np.full_like(scorer.direct, np.nan))
    assert (greedy(graph, nothing) >= 0).all()


def test_an_old_plan_is_among_the_parents(tmp_path: Path) -> None:
    from placewise.core.plan import Plan

    problem = captured_problem()
    placement = np.zeros(problem.num_groups, np.int64)
    Plan(problem.expand(placement)).save(tmp_path / "old.json")
    first = next(make("graph-policy", {"start": str(tmp_path / "old.json")}).search(problem, np.random.default_rng(0)))
    assert np.array_equal(first.placements[0], placement)
