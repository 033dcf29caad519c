"""Steps that are run for real: clusters of CPU devices, random networks, and eager steps to compare with."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from eager_steps import bitwise, eager_step, snapshot
from simulated import leave_some_out, random_order, random_placements
from torch import Tensor, nn

import placewise as pw
from placewise.core.cluster import Cluster, Device, Link
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.graph_capture.capture import CapturedStep, capture_step
from placewise.graph_capture.training_step import TrainingStep
from placewise.rewrite.augmented_program import augment
from placewise.rewrite.optional_tensors import OptionalTensors
from placewise.run.devices import RealDevice, real_devices
from placewise.run.step.compiling import compile_placement
from placewise.run.step.train_step import TrainStep

Optimizer = torch.optim.Optimizer


def cpu_cluster(count: int = 2) -> Cluster:
    """Returns CPU devices cpu:0, cpu:1, ... with a link between any two."""
    names = [f"cpu:{i}" for i in range(count)]
    devices = tuple(Device(name, "cpu", 2**40, 1e10, 1e10) for name in names)
    return Cluster("cpus", devices, tuple(Link(a, b, 1e9, 1e-6) for a in names for b in names if a != b))


def one_thread_each(cluster: Cluster) -> tuple[RealDevice, ...]:
    """Returns this machine's pieces, with one thread for each op, because results may depend on the number of threads."""
    return tuple(replace(device, threads=1) for device in real_devices(cluster))


def small_training(device: str = "cpu") -> tuple[nn.Sequential, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """Returns a model of two layers, its optimizer and a batch."""
    with torch.device(device):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        return model, torch.optim.Adam(model.parameters(), 0.01), (torch.randn(6, 4), torch.randn(6, 3))


def capture_with_mse(model: nn.Module, optimizer: Any, batch: Any, **how: Any) -> CapturedStep:
    """Returns the captured step of a model that is trained with squared errors."""
    return pw.capture(model, nn.MSELoss(), optimizer, batch, **how)


def plan_by_op(step: CapturedStep, device_of: Callable[[str], str]) -> Plan:
    """Returns the plan that puts each group on the device for the name of its first op."""
    graph = step.graph
    names: list[str] = ["cpu:0"] * graph.num_groups
    for op in reversed(range(len(graph.ops))):
        names[graph.ops.groups[op]] = device_of(graph.ops.names[op])
    return Plan(tuple(names))


def with_options(step: CapturedStep) -> CapturedStep:
    """Returns a step in which every tensor has options."""
    graph, program = augment(step.graph, step.program, OptionalTensors(smallest_share=0))
    return replace(step, graph=graph, program=program)


def compiled(
    step: CapturedStep, seed: int = 0, *, devices: int = 2, in_program_order: bool = True, options: bool = False
) -> TrainStep:
    """Returns the step with a random placement, launched in program order or in a random one.

    With `options` all its tensors have some, and half of these are used.
    """
    cluster, rng = cpu_cluster(devices), np.random.default_rng(seed)
    step = with_options(step) if options else step
    problem = Problem.of(step.graph, cluster)
    placement = leave_some_out(problem, random_placements(problem, rng, 1), rng)[0]
    order = None
    if not in_program_order:
        present = problem.present(placement)
        order = present.restore_order(random_order(present.problem, rng))
    return compile_placement(problem, placement, order, step, one_thread_each(cluster))


def assert_runs_like_eager(
    build: Callable[[], tuple[nn.Module, Optimizer]],
    loss_fn: Callable[..., Tensor] | None,
    batches: list[Any],
    micro_batches: int = 1,
    whole_layers: bool = False,
    **how: Any,
) -> None:
    """Asserts that losses, parameters, buffers and state are eager's, bit for bit, after each step from the first one on."""
    (model, optimizer), (compiled_model, compiled_optimizer) = build(), build()
    compiled_model.load_state_dict(copy.deepcopy(model.state_dict()))
    step = TrainingStep(compiled_model, loss_fn, compiled_optimizer, batches[0], micro_batches, whole_layers=whole_layers)
    train_step = compiled(capture_step(step), **how)
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        parts = eager_step(TrainingStep(model, loss_fn, optimizer, batch, micro_batches))
        torch.manual_seed(number)
        loss = train_step(batch)
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        assert bitwise(loss, expected), f"loss of step {number}: {loss} for {expected}"
        found, wanted = snapshot(compiled_model, compiled_optimizer), snapshot(model, optimizer)
        assert found.keys() == wanted.keys()
        assert [key for key in wanted if not bitwise(found[key], wanted[key])] == [], f"step {number}"
        for group in (*optimizer.param_groups, *compiled_optimizer.param_groups):
            group["lr"] = group["lr"] and group["lr"] * 0.9
    train_step.close()


class RandomNet(nn.Module):
    """A network of random ops on a pool of tensors [6, 4]: products, views, writes in place, shared weights, buffers."""

    def __init__(self, seed: int, num_ops: int) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)])
        self.norm = nn.BatchNorm1d(4)
        self.total: Tensor
        self.register_buffer("total", torch.zeros(4))
        self.plan = [(int(rng.integers(len(OPS))), *rng.integers(0, 99, 2).tolist()) for _ in range(num_ops)]

    def forward(self, x: Tensor) -> Tensor:
        pool = [x, x @ self.weights[0]]
        for kind, first, second in self.plan:
            pool.append(OPS[kind](self, pool[first % len(pool)], pool[second % len(pool)]))
            assert pool[-1].shape == x.shape
        return torch.stack(pool[1:]).sum(0)


def _count(net: RandomNet, a: Tensor, b: Tensor) -> Tensor:
    net.total.add_(a.detach().sum(0))
    return a + net.total.tanh()


def _halves(net: RandomNet, a: Tensor, b: Tensor) -> Tensor:
    left, right = a.chunk(2, 1)
    return torch.cat([right, left * b[:, :2]], 1)


def _overwrite(net: RandomNet, a: Tensor, b: Tensor) -> Tensor:
    made = torch.zeros_like(a)
    made[:, 1:3] = b[:, :2]
    made[0].add_(a[1])
    return made.mul_(0.5)


OPS: tuple[Callable[[RandomNet, Tensor, Tensor], Tensor], ...] = (
    lambda net, a, b: a @ net.weights[1],
    lambda net, a, b: b @ net.weights[2].t() + a,
    lambda net, a, b: torch.tanh(a) * b,
    lambda net, a, b: F.relu((a - b).clone(), inplace=True),
    lambda net, a, b: a.t().reshape(2, 12).view(4, 6).t() + b,
    lambda net, a, b: net.norm(a),
    lambda net, a, b: F.softmax(a, 1) + b[[3, 0, 5, 1, 2, 4]],
    lambda net, a, b: a.sigmoid().expand(2, 6, 4).sum(0),
    lambda net, a, b: a / (1 + b.abs().max()) + torch.arange(4),
    _count,
    _halves,
    _overwrite,
)
