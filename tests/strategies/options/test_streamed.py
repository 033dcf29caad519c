"""Placements that need as little memory as options allow, and take back what has room."""

import numpy as np
import pytest
import torch
from compiled_steps import capture_with_mse
from tiny_zoo import TINY_ZOO
from torch import nn

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, Device, Link
from placewise.core.problem import NOWHERE, Problem
from placewise.models import load_graph
from placewise.search.tight_memory import add_memory_options
from placewise.strategies.options.choice_walk import ChoiceModel
from placewise.strategies.options.streamed import _residents, _stores, streamed, updates_early

ROOMY = 2**40

GPU_TO_CPU = ("gpu:0", "cpu:0")

GPT = "gpt:layers=3,hidden=64,heads=2,length=32,batch=4,vocab=100"


def machine(memory: int) -> Cluster:
    """Returns a GPU with so much memory, and a slower CPU with more than any step needs."""
    gpu, cpu = Device("gpu:0", "gpu", memory, 1e12, 1e11), Device("cpu:0", "cpu", ROOMY, 1e11, 1e10)
    return Cluster("machine", (gpu, cpu), (Link("gpu:0", "cpu:0", 1e10, 1e-5), Link("cpu:0", "gpu:0", 1e10, 1e-5)), 1e-5)


def on_gpu(model: str, memory: int) -> tuple[ChoiceModel, Ints]:
    """Returns a model's step with options, and the placement with everything on the GPU."""
    problem = add_memory_options(Problem.of(load_graph(model), machine(memory)))
    return ChoiceModel(problem), np.where(problem.optional, NOWHERE, 0)


def need(model: str) -> int:
    """Returns the peak of the GPU if everything is there."""
    choices, placement = on_gpu(model, ROOMY)
    choices.judge(placement, np.arange(choices.problem.num_ops))
    return int(choices.scratch.peak[0])


@pytest.mark.parametrize("model", [GPT, GPT + ",micro_batches=4", TINY_ZOO["resnet"], TINY_ZOO["nmt"]])
@pytest.mark.parametrize("share", [0.7, 0.4])
def test_a_share_of_the_memory_is_enough_for_all_ops_on_the_gpu(model: str, share: float) -> None:
    """Forward and backward ops stay on the GPU, and the step fits, though only options and homes were chosen."""
    choices, placement = on_gpu(model, int(share * need(model)))
    found = streamed(choices, placement)
    assert found.result.overflow_bytes == 0
    assert choices.judge(found.placement, found.order) == found.result
    problem = choices.problem
    problem.check_placements(found.placement[None])
    problem.check_plan(found.placement, found.order)


def test_what_has_room_comes_back() -> None:
    """With all the memory that the step needs, nothing is repeated, waits or visits."""
    choices, placement = on_gpu(GPT, need(GPT))
    found = streamed(choices, placement)
    np.testing.assert_array_equal(found.placement, placement)


def test_what_is_faster_elsewhere_stays_there() -> None:
    """There is room for all on the GPU, but the updates are faster on this CPU, to which copies take no time."""
    gpu, cpu = Device("gpu:0", "gpu", ROOMY, 1e12, 1e8), Device("cpu:0", "cpu", ROOMY, 1e12, 1e12)
    cluster = Cluster("machine", (gpu, cpu), tuple(Link(a, b, 1e15, 0.0) for a, b in (GPU_TO_CPU, GPU_TO_CPU[::-1])))
    problem = add_memory_options(Problem.of(load_graph(GPT.replace("3", "1", 1)), cluster))
    choices, placement = ChoiceModel(problem), np.where(problem.optional, NOWHERE, 0)
    found = streamed(choices, placement)
    updates = problem.op_groups[problem.graph.ops.phases == 2]
    assert np.mean(found.placement[updates] == 1) > 0.9
    assert found.result.seconds < 0.8 * choices.judge(placement, found.order).seconds


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_visit_spares_all_copies_but_one(micro_batches: int) -> None:
    """A weight of 16 KiB is read in two passes of each micro-batch: 10 us to launch, 10 us and 1.6384 us for each copy."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
    batch = (torch.zeros(4, 64), torch.zeros(4, 64))
    step = capture_with_mse(model, torch.optim.SGD(model.parameters()), batch, micro_batches=micro_batches)
    problem = add_memory_options(Problem.of(step.graph, machine(ROOMY)))
    _, visits = _residents(problem, np.where(problem.optional, NOWHERE, 0), _stores(problem))
    assert max(visit.worth for visit in visits) == pytest.approx((2 * micro_batches - 1) * 21.6384e-6 / 16384)


def test_frozen_weights_visit_layer_by_layer() -> None:
    """Ten frozen layers that hold 60 times what passes through them fit into the room of two; all ops stay on the GPU."""
    layers = [nn.Linear(64, 64, bias=False).requires_grad_(False) for _ in range(10)]
    model = nn.Sequential(nn.Linear(64, 64, bias=False), *layers)
    step = capture_with_mse(model, torch.optim.SGD(model[:1].parameters()), (torch.zeros(1, 64), torch.zeros(1, 64)))
    problem = add_memory_options(Problem.of(step.graph, machine(5 * 64 * 64 * 4)))
    found = streamed(ChoiceModel(problem), np.where(problem.optional, NOWHERE, 0))
    assert found.result.overflow_bytes == 0
    assert set(found.placement[problem.op_groups[~problem.graph.ops.optional]]) == {0}


def test_updates_run_as_soon_as_they_can() -> None:
    """The order is valid, keeps forward and backward ops as they are, and no update waits for the end."""
    choices, placement = on_gpu(GPT, ROOMY)
    problem = choices.problem
    order = updates_early(problem)
    problem.check_plan(placement, order)
    phases = problem.graph.ops.phases[order]
    assert (np.diff(order[phases < 2]) > 0).all()
    assert np.flatnonzero(phases == 2)[0] < np.flatnonzero(phases == 1)[-1]
