"""Advice, on machines and steps small enough to work out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from builders import graph_data, tensor, tiny_cluster
from simulated import Step, gpus, takes

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.problem import Problem
from placewise.machines.variants import (
    with_cuda_graphs,
    with_faster_links,
    with_half_the_memory,
    with_one_less,
    with_one_more,
)
from placewise.search.advice import Advice, Change, LimitingPart, advice_in_words, find_limiting_parts, path_share
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator


def schedule_of(placement: list[int], dispatch: float = 0) -> Schedule:
    """Two ops of 8 s that read what a first one of 2 s makes (1 byte: a copy takes 2 s)."""
    ops = [takes(2, 0, (), (0,)), takes(8, 1, (0,)), takes(8, 2, (0,))]
    step = Step.of(graph_data([tensor("t", 1)], ops), gpus(2, dispatch=dispatch))
    return Simulator(step.problem).schedule(np.array(placement))


def test_limits_by_hand() -> None:
    """On one GPU, 18 s are its work: twice as fast, 9 s. On two: 2 + 2 + 8 = 12 s.

    There, gpu:1 twice as fast leaves 10 s, which gpu:0 also needs; gpu:0 twice as fast gives 1 + 2 + 8 = 11 s, and the links
    2 + 1 + 8 = 11 s.
    """
    assert find_limiting_parts(schedule_of([0, 0, 0])) == (LimitingPart("the work of gpu:0", 0.5),)
    found = dict(find_limiting_parts(schedule_of([0, 0, 1])))
    assert found["the work of gpu:1"] == pytest.approx(2 / 12)
    assert found["the work of gpu:0"] == pytest.approx(1 / 12)
    assert found["the links"] == pytest.approx(1 / 12)


def test_launches_limit() -> None:
    """Three launches of 100 s each: the last op of 8 s begins at 300 s; launched twice as fast, at 150 s.

    With CUDA graphs an op's launch takes 2 s: the first op ends at 4 s, the others at 12 and 20 s, which saves 94%.
    """
    schedule = schedule_of([0, 0, 0], dispatch=100)
    assert find_limiting_parts(schedule)[0].what == "launches"
    assert find_limiting_parts(schedule)[0].saved == pytest.approx(150 / 308)
    saved = "CUDA graphs (--cuda-graphs) would save 94% (20 s)"
    assert f"what limits: launches: the host needs 300 s of the step for them; {saved}" in advice_in_words(schedule)
    graphed = replace(schedule.problem, cluster=with_cuda_graphs(schedule.problem.cluster))
    assert "CUDA graphs" not in " ".join(advice_in_words(Simulator(graphed).schedule(schedule.placement)))


def test_the_path_of_the_model() -> None:
    """The longest path is 2 + 8 = 10 s of 18 s, or of 12 s."""
    assert path_share(schedule_of([0, 0, 0])) == pytest.approx(10 / 18)
    assert path_share(schedule_of([0, 0, 1])) == pytest.approx(10 / 12)


def test_three_lines_under_a_plan() -> None:
    one, limits, helps = advice_in_words(schedule_of([0, 0, 1]))
    assert one == "one device: gpu:0 alone takes 18 s: this plan on 2 devices saves 33%"
    assert limits == "what limits: the work of gpu:1: at twice the speed the step would be 17% shorter"
    assert helps.startswith(
        "what would help: the work of gpu:1 twice as fast (saves 17%), the work of gpu:0 twice as fast (saves 8%), the "
    )
    assert advice_in_words(schedule_of([0, 0, 0]))[0] == "one device: this plan needs only one"


@pytest.mark.parametrize(
    ("alone", "bound", "changes", "recommended"),
    [
        (18.3, None, [], "buy nothing: gpu:0 alone is within 3% of any plan found"),
        (18.3, 18.0, [], "buy nothing: gpu:0 alone is within 3% of any plan"),
        (
            18.3, 18.0, [Change("bfloat16", "software", 9.0)],
            "buy nothing: gpu:0 alone is within 3% of any plan; bfloat16 would save 50% (9 s)",
        ),
        (
            18.3, 18.0, [Change("bfloat16", "software", 9.0), Change("one more", "machine", 12.0)],
            "use one device: gpu:0 alone is within 3% of any plan; bfloat16 would save 50% (9 s); "
            "one more would save 33% (12 s)",
        ),
        (
            18.3, None, [Change("4 micro-batches", "free", 9.0, "use micro_batches=4")],
            "use micro_batches=4: 4 micro-batches would save 50% (9 s)",
        ),
        (
            40.0, None, [Change("4 micro-batches", "free", 9.0, "use micro_batches=4"), Change("bfloat16", "software", 6.0)],
            "use micro_batches=4: 4 micro-batches would save 50% (9 s); bfloat16 would save 67% (6 s)",
        ),
        (
            40.0, None, [Change("without gpu:1", "less", 18.1), Change("bfloat16", "software", 9.0)],
            "use this plan; without gpu:1 it takes 18.1 s, hardly more; bfloat16 would save 50% (9 s)",
        ),
        (40.0, None, [Change("without gpu:1", "less", 19.0)], "use this plan: nothing that was tried saves more than 5%"),
        (40.0, None, [Change("one more", "machine", 9.0)], "use this plan; one more would save 50% (9 s)"),
        (40.0, None, [Change("one more", "machine", 17.9)], "use this plan: nothing that was tried saves more than 5%"),
    ],
)  # fmt: skip
def test_one_recommendation(alone: float, bound: float | None, changes: list[Change], recommended: str) -> None:
    advice = Advice(schedule_of([0, 0, 0]), bound, ("gpu:0", alone), (), tuple(changes))
    assert advice.recommendation == recommended


def test_variants_of_a_machine() -> None:
    cluster = Cluster.load("4090+3060")
    more = with_one_more(cluster)
    assert more is not None
    assert more.device_names == (*cluster.device_names, "gpu:2")
    assert more.devices[-1].flops == cluster.devices[0].flops
    assert len(more.links) == 4 * 3
    assert len(set(more.channel_names)) > len(cluster.channel_names)
    less = with_one_less(cluster)
    assert less is not None
    assert less[1] == "gpu:1"
    assert less[0].device_names == ("gpu:0", "cpu:0")
    assert with_half_the_memory(cluster).memory_bytes[0] == cluster.memory_bytes[0] // 2
    assert (with_faster_links(cluster, 2).bytes_per_second[0, 1]) == 2 * cluster.bytes_per_second[0, 1]
    assert with_one_less(less[0]) is None
    Problem.of(schedule_of([0, 0, 0]).problem.graph, more)
    assert with_one_more(tiny_cluster()) is not None


def test_one_gpu_more_is_on_the_host_of_the_first() -> None:
    """It is linked to the others of its host as the first is, and by the cards to the other host; each way has its own."""
    more = with_one_more(Cluster.load("2x(4090+3060)@10GbE"))
    assert more is not None
    assert (more.devices[-1].name, more.devices[-1].host) == ("a/gpu:2", "a")
    links = {(link.source, link.target): link for link in more.links}
    assert links["a/gpu:2", "a/gpu:0"] == replace(links["a/gpu:2", "a/gpu:1"], target="a/gpu:0")
    assert links["a/gpu:0", "a/gpu:2"] == replace(links["a/gpu:0", "a/gpu:1"], target="a/gpu:2")
    assert links["a/gpu:2", "b/gpu:0"] == replace(links["a/gpu:0", "b/gpu:0"], source="a/gpu:2")
    ways = [
        Link("gpu:0", "gpu:1", 1, 0, ("gpu:0 up", "gpu:1 down")),
        Link("gpu:1", "gpu:0", 2, 0, ("gpu:1 up", "gpu:0 down")),
        Link("gpu:0", "gpu:10", 3, 0, ("gpu:0 up", "gpu:10 down")),
        Link("gpu:10", "gpu:0", 3, 0, ("gpu:10 up", "gpu:0 down")),
        Link("gpu:1", "gpu:10", 3, 0, ("gpu:1 up", "gpu:10 down")),
        Link("gpu:10", "gpu:1", 3, 0, ("gpu:10 up", "gpu:1 down")),
    ]
    gpus = tuple(Device(f"gpu:{n}", "gpu", 1, 1.0, 1.0) for n in (0, 1, 10))
    more = with_one_more(Cluster("three", gpus, tuple(ways), 0.0))
    assert more is not None
    links = {(link.source, link.target): link for link in more.links}
    assert links["gpu:0", "gpu:2"] == Link("gpu:0", "gpu:2", 1, 0, ("gpu:0 up", "gpu:2 down"))
    assert links["gpu:2", "gpu:0"] == Link("gpu:2", "gpu:0", 2, 0, ("gpu:2 up", "gpu:0 down"))
    assert links["gpu:2", "gpu:10"] == Link("gpu:2", "gpu:10", 3, 0, ("gpu:2 up", "gpu:10 down"))


def test_micro_batches_of_a_model_with_batch_norm_have_other_numbers() -> None:
    """Each micro-batch is normalised by itself, so more of them are not free."""
    import torch

    from placewise.graph_capture.capture import capture_step
    from placewise.graph_capture.training_step import TrainingStep
    from placewise.search.advice import Adviser

    def step(layer: torch.nn.Module) -> TrainingStep:
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), layer, torch.nn.Linear(4, 2))
        batch = (torch.zeros(8, 8), torch.zeros(8, dtype=torch.long))
        return TrainingStep(model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), batch)

    for layer, kind in ((torch.nn.BatchNorm1d(4), "software"), (torch.nn.ReLU(), "free")):
        graph = capture_step(step(layer), "small").graph
        advice = Adviser(seconds=0.02).advise(graph, Cluster.load("2xK80"), lambda layer=layer: step(layer))  # type: ignore[misc]
        assert advice is not None
        kinds = {change.kind for change in advice.changes if "micro-batches" in change.what}
        assert kinds == {kind}
