"""Steps with repeated, waiting and visiting tensors leave eager's bits behind."""

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compiled_steps import RandomNet, assert_runs_like_eager, capture_with_mse, cpu_cluster, one_thread_each, with_options
from simulated import leave_some_out, random_placements
from small_steps import signatures_of
from tiny_zoo import TINY_ZOO, randomized
from torch import nn

from placewise import zoo
from placewise.core.problem import NOWHERE, Problem
from placewise.graph_capture.capture import CapturedStep
from placewise.graph_capture.whole_passes import LeanForwardPass
from placewise.measure.steps import measure_steps
from placewise.rewrite.augmented_graph import REPEATED, add_options
from placewise.rewrite.augmented_program import AugmentedProgram, leave_out_calls
from placewise.rewrite.optional_tensors import OptionalTensors
from placewise.run.lower.check_instructions import check_instructions
from placewise.run.step.compiling import compile_placement
from placewise.simulate.simulator import Simulator

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


@pytest.mark.parametrize(("seed", "micro_batches"), [(0, 1), (1, 1), (2, 1), (3, 3), (4, 3), (5, 3)])
def test_random_networks(seed: int, micro_batches: int) -> None:
    def build() -> Any:
        torch.manual_seed(seed)
        net = RandomNet(seed, 12)
        return net, torch.optim.Adam(net.parameters(), 0.01)

    torch.manual_seed(0)
    batches = [(torch.randn(6 * micro_batches, 4), torch.randn(6 * micro_batches, 4)) for _ in range(5)]
    how: dict[str, Any] = {"devices": 3, "in_program_order": seed % 2 == 0, "options": True}
    assert_runs_like_eager(build, nn.MSELoss(), batches, micro_batches, seed=seed, **how)


@pytest.mark.parametrize("name", [name for name in TINY_ZOO if name != "inception-v3"])  # it takes as long as all others
def test_the_zoo(name: str) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        step = zoo.build_step(TINY_ZOO[name], "cpu")
        return step.model, step.optimizer

    step = zoo.build_step(TINY_ZOO[name], "cpu")
    batches = [randomized(step.batch, torch.Generator().manual_seed(n)) for n in range(2)]
    assert_runs_like_eager(build, step.loss_fn, batches, step.micro_batches, options=True)


class Layers(nn.Module):
    """Attention, dropout and batch norm, in blocks with sums around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2)])
        self.attend = nn.ModuleList([nn.Linear(8, 24) for _ in range(2)])
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, attend in zip(self.layers, self.attend, strict=True):
            query, key, value = attend(layer(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            x = x + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        normed: torch.Tensor = self.norm(x)
        return normed


def layers_step(micro_batches: int = 1) -> CapturedStep:
    """Returns the captured step of such a model."""
    torch.manual_seed(0)
    model = Layers()
    batch = (torch.randn(4 * micro_batches, 5, 8), torch.randn(4 * micro_batches, 5, 8))
    return capture_with_mse(model, torch.optim.Adam(model.parameters()), batch, micro_batches=micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_attention_dropout_and_batch_norm(micro_batches: int) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        model = Layers()
        return model, torch.optim.Adam(model.parameters(), 0.01)

    torch.manual_seed(1)
    batches = [(torch.randn(4 * micro_batches, 5, 8), torch.randn(4 * micro_batches, 5, 8)) for _ in range(5)]
    assert_runs_like_eager(build, nn.MSELoss(), batches, micro_batches, devices=3, options=True)
    kinds = {call.function.__class__ for call in leave_out(layers_step(), 1.0).program.calls}
    assert LeanForwardPass in kinds  # what attention reads can go between its passes


def leave_out(step: CapturedStep, share: float) -> CapturedStep:
    """Returns a step with this share of all options, on one device."""
    augmented, rng = with_options(step), np.random.default_rng(0)
    problem = Problem.of(augmented.graph, cpu_cluster(1))
    placement = np.where(problem.optional & (rng.random(problem.num_groups) >= share), NOWHERE, 0)
    assert isinstance(augmented.program, AugmentedProgram)
    present = problem.present(placement)
    return replace(step, graph=present.problem.graph, program=leave_out_calls(augmented.program, present))


def test_without_options_the_program_is_the_captured_one() -> None:
    step = layers_step()
    left = leave_out(step, 0.0)
    assert [call[:4] for call in left.program.calls] == [call[:4] for call in step.program.calls]
    assert [call.op for call in left.program.calls] == [call.op for call in step.program.calls]


def test_memory_is_as_predicted_and_all_of_it_is_given_back() -> None:
    """The sizes of real storages, counted at launches; and nothing more is alive after many steps than after a few."""
    step = with_options(layers_step(2))
    cluster = cpu_cluster(3)
    problem, rng = Problem.of(step.graph, cluster), np.random.default_rng(3)
    placement = leave_some_out(problem, random_placements(problem, rng, 1), rng)[0]
    predicted = Simulator(problem).schedule(placement)
    present = predicted.present
    assert present is not None
    order = present.restore_order(predicted.order)
    train_step = compile_placement(problem, placement, order, step, one_thread_each(cluster))
    usage = check_instructions(present.problem.graph, train_step.placed.tensor_devices, train_step.placed.instructions)
    assert usage.max(axis=0).tolist() == predicted.peak_bytes.tolist()
    measured = measure_steps(train_step, predicted, step.step.batch, 1)
    assert measured.schedule.peak_bytes.tolist() == predicted.peak_bytes.tolist()

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    before = alive()
    for _ in range(100):
        train_step(step.step.batch)
    assert alive() <= before
    train_step.close()


def test_a_thousand_steps_hold_no_more_than_ten() -> None:
    """Tensors are repeated, wait and visit on two devices; as many tensors and bytes are alive in the end as after 10."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    model[0].weight.requires_grad_(False)
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    step = with_options(capture_with_mse(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), batch))
    cluster = cpu_cluster(2)
    problem = Problem.of(step.graph, cluster)
    placement = np.where(problem.optional, np.arange(problem.num_groups) % 2, 0)
    train_step = compile_placement(problem, placement, None, step, one_thread_each(cluster))

    def alive() -> tuple[int, int]:
        gc.collect()
        found = [
            thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided
        ]
        return len(found), sum(tensor.untyped_storage().nbytes() for tensor in found if not tensor.is_meta)

    for _ in range(10):
        train_step(batch)
    before = alive()
    for _ in range(990):
        train_step(batch)
    assert alive() == before
    train_step.close()


def test_a_repeated_op_has_the_signature_of_its_original() -> None:
    """So measured times serve it too."""
    step = layers_step()
    augmented = add_options(step.graph, OptionalTensors(smallest_share=0))
    captured = signatures_of(step)
    for op, signature in enumerate(signatures_of(with_options(step))):
        if augmented.roles[op] == REPEATED:
            assert signature == captured[augmented.ops[op]]
