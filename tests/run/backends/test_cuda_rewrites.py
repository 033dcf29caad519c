"""Steps that are rewritten, or launched in other ways than eager's, on a real GPU; skipped if there is no GPU."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from compiled_steps import with_options
from eager_steps import eager_step
from simulated import leave_some_out, random_placements
from torch import Tensor, nn

import placewise as pw
from placewise.core.cluster import Cluster, Device, Link
from placewise.core.problem import Problem
from placewise.graph_capture.capture import CapturedStep
from placewise.measure.steps import measure_steps
from placewise.run.devices import real_devices
from placewise.run.lower.neighbours import find_rows
from placewise.run.step.compiling import compile_placement
from placewise.run.step.train_step import TrainStep
from placewise.simulate.simulator import Simulator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Blocks(nn.Module):
    """Chains of small ops with batch norm, layer norm and attention."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
        )
        self.attend = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block, attend in zip(self.blocks, self.attend, strict=True):
            query, key, value = attend(x).unflatten(-1, (3, 4, -1)).unflatten(0, (8, -1)).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + block(x) + mixed.transpose(1, 2).flatten(2).flatten(0, 1)
        return x


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Unlike F.mse_loss, whose result keeps the storage of all squares, which the graph does not know."""
    return (output - target).square().mean()


def captured(fused_optimizer: bool = False, **how: Any) -> CapturedStep:
    torch.manual_seed(0)
    model = Blocks().cuda()
    batch = (torch.randn(512, 256, device="cuda"), torch.randn(512, 256, device="cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused_optimizer)
    return pw.capture(model, squared_error, optimizer, batch, **how)


def machine(*kinds: str) -> Cluster:
    names = [f"{kind}:{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]
    devices = tuple(Device(name, kind, 2**40, 1e13, 1e12) for name, kind in zip(names, kinds, strict=True))
    return Cluster("test", devices, tuple(Link(a, b, 1e10, 1e-5) for a in names for b in names if a != b), 1e-5)


def on_one_gpu(step: CapturedStep) -> TrainStep:
    problem = Problem.of(step.graph, machine("gpu"))
    return compile_placement(problem, np.zeros(problem.num_groups, np.int64), None, step, real_devices(problem.cluster))


def eager_losses(steps: int, fused_optimizer: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the losses of so many eager steps, and what they leave in the model."""
    step = captured(fused_optimizer)
    losses = [eager_step(step.step)[0] for _ in range(steps)]
    return losses, copy.deepcopy(step.step.model.state_dict())


def losses_of(train_step: TrainStep, step: CapturedStep, steps: int) -> list[Tensor]:
    found = [train_step(step.step.batch) for _ in range(steps)]
    train_step.synchronize()
    return found


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


@pytest.mark.parametrize(("fused_optimizer", "longest"), [(False, 8), (True, 26)])
def test_updates_of_many_parameters_are_few_launches(fused_optimizer: bool, longest: int) -> None:
    step = captured(fused_optimizer)
    train_step = on_one_gpu(step)
    rows = set(find_rows(train_step.placed, lambda number, op: None).values())
    assert max(map(len, rows)) >= longest
    expected, values = eager_losses(4, fused_optimizer)
    torch.testing.assert_close(losses_of(train_step, step, 4), expected)
    for name, value in step.step.model.state_dict().items():
        torch.testing.assert_close(value, values[name], rtol=1e-4, atol=4e-3)  # Adam takes whole steps along tiny gradients
    train_step.close()


@pytest.mark.parametrize("slices", [1, 2])
def test_compiled_kernels_train_like_eager_code(slices: int) -> None:
    step = captured(fuse=True)
    problem = Problem.of(step.graph, machine(*["gpu"] * slices))
    placement = np.sort(np.random.default_rng(0).integers(0, slices, problem.num_groups))
    devices = real_devices(problem.cluster, {"cuda:0": slices} if slices > 1 else {})
    train_step = compile_placement(problem, placement, None, step, devices)
    torch.testing.assert_close(losses_of(train_step, step, 4), eager_losses(4)[0], rtol=1e-4, atol=1e-5)
    train_step.close()


class Images(nn.Module):
    """Convolutions with batch norm and a shortcut, wide enough for channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 96, 3, padding=1, bias=False)
        self.second = nn.Conv2d(96, 96, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(96), nn.BatchNorm2d(96)])
        self.last = nn.Linear(96, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norms[0](self.first(images)).relu()
        x = (self.norms[1](self.second(x)) + x).relu()
        return self.last(nn.functional.max_pool2d(x, 2).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("with_cpu", [False, True])
def test_compiled_convolutions_and_batch_norm_train_like_eager_code(with_cpu: bool) -> None:
    torch.backends.cudnn.allow_tf32 = False

    def captured_images(fuse: bool) -> CapturedStep:
        torch.manual_seed(0)
        model = Images().cuda()
        batch = (torch.randn(16, 3, 32, 32, device="cuda"), torch.randn(16, 10, device="cuda"))
        return pw.capture(model, squared_error, torch.optim.SGD(model.parameters(), 0.05), batch, fuse=fuse)

    step, eager = captured_images(True), captured_images(False)
    problem = Problem.of(step.graph, machine("gpu", *["cpu"] * with_cpu))
    placement = np.random.default_rng(0).integers(0, 1 + with_cpu, problem.num_groups)
    train_step = compile_placement(problem, placement, None, step, real_devices(problem.cluster))
    expected = [eager_step(eager.step)[0] for _ in range(4)]
    torch.testing.assert_close(losses_of(train_step, step, 4), expected, rtol=1e-4, atol=1e-5, check_device=False)
    wanted = eager.step.model.state_dict()
    for name, value in step.step.model.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4, check_device=False)
    train_step.close()


@pytest.mark.parametrize("seed", range(3))
def test_repeated_and_waiting_tensors_change_nothing(seed: int) -> None:
    """Half of all options are taken at random, on the GPU; parameters and what waits are in the CPU's memory too."""
    step = with_options(captured())
    problem, rng = Problem.of(step.graph, machine("gpu", "cpu")), np.random.default_rng(seed)
    placement = leave_some_out(problem, random_placements(problem, rng, 1), rng)[0]
    must_run = ~problem.optional
    placement[must_run] = np.where(rng.random(int(must_run.sum())) < 0.9, 0, placement[must_run])
    predicted = Simulator(problem, "program").schedule(placement)
    assert predicted.present is not None
    order = predicted.present.restore_order(predicted.order)
    train_step = compile_placement(problem, placement, order, step, real_devices(problem.cluster))
    torch.testing.assert_close(losses_of(train_step, step, 5), eager_losses(5)[0], rtol=1e-4, atol=1e-5, check_device=False)
    found = measure_steps(train_step, predicted, step.step.batch, 1)
    # Attention's lean passes keep a seed and an offset each, which are some bytes more than the graph knows.
    np.testing.assert_allclose(found.schedule.peak_bytes, predicted.peak_bytes, rtol=0, atol=1024)
    held = []
    for _ in range(3):
        losses_of(train_step, step, 30)
        held.append(torch.cuda.memory_allocated())
    assert held[0] == held[1] == held[2]
    train_step.close()
