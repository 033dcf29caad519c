"""Compiled steps on a real GPU: in several streams, in slices, with CPU devices; skipped if there is no GPU.

It needs only pytest: python -m pytest tests/run/backends/test_cuda.py -q
"""

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from placewise import zoo
from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, Device, Link
from placewise.core.problem import Problem
from placewise.experiments.bench.bench_execute import launches
from placewise.graph_capture.capture import CapturedStep, capture_step
from placewise.graph_capture.resolved_program import ResolvedProgram
from placewise.graph_capture.training_step import TrainingStep
from placewise.measure.random_batch import random_batch
from placewise.measure.steps import measure_steps
from placewise.run.backends.cuda import CudaStreams
from placewise.run.backends.cuda_graphs import CudaGraphs
from placewise.run.codegen import recorded_segments
from placewise.run.devices import RealDevice, real_devices
from placewise.run.lower.instructions import CopyTensor, RunOp
from placewise.run.lower.lowering import lower, tensor_devices
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.step.compiling import compile_placement
from placewise.run.step.train_step import TrainStep
from placewise.simulate.simulator import Simulator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
ZOO = (
    "nmt:layers=2,hidden=64,length=4,batch=16,vocab=100",
    "resnet:depth=50,image=64,batch=4,classes=10",
    "inception-v3:batch=8,classes=4",
    "gpt:layers=2,hidden=64,heads=2,length=16,batch=4,vocab=50,micro_batches=2",
    "bert:layers=2,hidden=64,heads=2,length=16,batch=4,vocab=50",
)


def machine(*kinds: str) -> Cluster:
    names = [f"{kind}:{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]
    devices = tuple(Device(name, kind, 2**40, 1e13, 1e12) for name, kind in zip(names, kinds, strict=True))
    return Cluster("test", devices, tuple(Link(a, b, 1e10, 1e-5) for a in names for b in names if a != b), 1e-5)


class Layers(nn.Module):
    """Layers of products, with a sum of all of them so that each is read twice; no op whose order of additions varies."""

    def __init__(self, width: int = 256, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for layer in self.layers:
            x = torch.tanh(layer(x))
            total = total + x.t().contiguous().t()
        return total


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Unlike F.mse_loss, whose result keeps the storage of all squares, which the graph does not know."""
    return (output - target).square().mean()


def captured(seed: int = 0, width: int = 256, rows: int = 512) -> CapturedStep:
    torch.manual_seed(seed)
    model = Layers(width)
    batch = (torch.randn(rows, width), torch.randn(rows, width))
    return capture_step(TrainingStep(model, squared_error, torch.optim.Adam(model.parameters(), 1e-3), batch))


def placements(problem: Problem, seed: int) -> Ints:
    return np.random.default_rng(seed).integers(0, problem.num_devices, problem.num_groups)


def on_plain_streams(step: CapturedStep, problem: Problem, placement: Ints, cuda_graphs: bool = False) -> TrainStep:
    """Returns the step on several devices that are all of cuda:0, each with a stream of its own."""
    devices = tuple(
        RealDevice(device.name, "gpu", "cuda:0", launches_from_host=True, slice=(i, problem.num_devices))
        for i, device in enumerate(problem.cluster.devices)
    )
    placed = PlacedStep(ResolvedProgram.of(step), lower(problem, placement), tensor_devices(problem, placement), devices)
    streams = {device.name: torch.cuda.Stream("cuda:0") for device in devices}  # type: ignore[no-untyped-call]
    make_recorder = partial(CudaGraphs, devices) if cuda_graphs else None
    return TrainStep(step, placed, CudaStreams(devices, lambda device: streams[device.name]), make_recorder)


def train(train_step: TrainStep, batch: Any, steps: int) -> list[float]:
    losses = [train_step(batch) for _ in range(steps)]
    train_step.synchronize()
    return [float(loss) for loss in losses]


def values_of(step: CapturedStep) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in step.step.model.state_dict().items()}


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def test_one_gpu_trains_as_the_cpu_does() -> None:
    step, other = captured(), captured()
    problem = Problem.of(step.graph, machine("gpu"))
    everything = np.zeros(problem.num_groups, np.int64)
    found = train(compile_placement(problem, everything, None, step, real_devices(problem.cluster)), step.step.batch, 5)
    cpu = Problem.of(other.graph, machine("cpu"))
    expected = train(compile_placement(cpu, everything, None, other, real_devices(cpu.cluster)), other.step.batch, 5)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert all(parameter.is_cuda for parameter in step.step.model.parameters())
    for name, value in values_of(other).items():
        torch.testing.assert_close(values_of(step)[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_four_streams_give_the_bits_of_one(seed: int, cuda_graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random placements of large tensors: memory that is reused too early, or a missing wait, changes bits."""
    monkeypatch.setattr(recorded_segments, "FEWEST_OPS", 2)  # a random placement has only short ones
    results = []
    for number in (1, 4):
        step = captured(width=1024, rows=2048)
        problem = Problem.of(step.graph, machine(*["gpu"] * number))
        train_step = on_plain_streams(step, problem, placements(problem, seed), cuda_graphs and number == 4)
        losses = train(train_step, step.step.batch, 12)
        results.append((losses, values_of(step)))
        if number == 4:
            assert sum(isinstance(s, CopyTensor) for s in train_step.placed.instructions.sequence) > 50
            assert (train_step.num_recorded_ops > 10) == cuda_graphs
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


@pytest.mark.parametrize("kinds", [("gpu", "cpu"), ("gpu", "gpu", "cpu", "cpu")])
def test_gpus_and_cpus_together(kinds: tuple[str, ...]) -> None:
    step, other = captured(), captured()
    problem = Problem.of(step.graph, machine(*kinds))
    virtual = {"cuda:0": kinds.count("gpu")} if kinds.count("gpu") > 1 else {}
    placement = placements(problem, 1)
    train_step = compile_placement(problem, placement, None, step, real_devices(problem.cluster, virtual))
    alone = Problem.of(other.graph, machine("gpu"))
    whole = np.zeros(alone.num_groups, np.int64)
    expected = train(compile_placement(alone, whole, None, other, real_devices(alone.cluster)), other.step.batch, 5)
    np.testing.assert_allclose(train(train_step, step.step.batch, 5), expected, rtol=1e-4)
    trace = train_step.trace(step.step.batch)
    launched = [i for i, s in enumerate(train_step.placed.instructions.sequence) if isinstance(s, (RunOp, CopyTensor))]
    assert sorted(trace.times) == launched
    assert all(start <= end for start, end in trace.times.values())
    train_step.close()


def test_what_a_cpu_updates_and_a_gpu_reads_stays_pinned() -> None:
    """Twenty steps in which copies of large parameters take long have the losses of one GPU."""
    step, other = captured(width=1024), captured(width=1024)
    problem = Problem.of(step.graph, machine("gpu", "cpu"))
    placement = placements(problem, 2)
    train_step = compile_placement(problem, placement, None, step, real_devices(problem.cluster))
    assert train_step.placed.pinned
    found = train(train_step, step.step.batch, 20)
    assert sum(p.device.type == "cpu" and p.is_pinned() for p in step.step.model.parameters()) == len(
        train_step.placed.pinned
    )
    train_step.close()
    alone = Problem.of(other.graph, machine("gpu"))
    whole = np.zeros(alone.num_groups, np.int64)
    expected = train(compile_placement(alone, whole, None, other, real_devices(alone.cluster)), other.step.batch, 20)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_in_slices(name: str) -> None:
    torch.manual_seed(0)
    step = capture_step(zoo.build_step(name, device="cpu"))
    batch = random_batch(step)
    start = copy.deepcopy(step.step.model.state_dict())
    problem = Problem.of(step.graph, machine(*["gpu"] * 4))
    sliced = compile_placement(problem, placements(problem, 0), None, step, real_devices(problem.cluster, {"cuda:0": 4}))
    torch.cuda.manual_seed(0)  # for dropout
    first = train(sliced, batch, 3)
    step.step.model.load_state_dict(start)
    assert step.step.optimizer is not None
    step.step.optimizer.state.clear()
    alone = Problem.of(step.graph, machine("gpu"))
    whole = compile_placement(alone, np.zeros(alone.num_groups, np.int64), None, step, real_devices(alone.cluster))
    torch.cuda.manual_seed(0)
    expected = train(whole, batch, 3)
    np.testing.assert_allclose(first, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("slices", [1, 4])
def test_the_zoo_with_cuda_graphs(name: str, slices: int) -> None:
    """Against the same plan without graphs, with another batch in every step."""
    losses = []
    for cuda_graphs in (False, True):
        torch.manual_seed(0)
        step = capture_step(zoo.build_step(name, device="cpu"))
        problem = Problem.of(step.graph, machine(*["gpu"] * slices))
        chosen = np.sort(placements(problem, 0))  # few cuts, so that segments are long
        devices = real_devices(problem.cluster, {"cuda:0": slices} if slices > 1 else {})
        train_step = compile_placement(problem, chosen, None, step, devices, cuda_graphs)
        torch.cuda.manual_seed(0)
        losses.append([float(train_step(random_batch(step, seed))) for seed in range(7)])
        share = train_step.num_recorded_ops / problem.num_ops
        print(f"{name} in {slices}: {share:.0%} of {problem.num_ops} ops in graphs")
        assert share > (0.3 if slices == 1 else 0.02) if cuda_graphs else share == 0
    print(losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


def test_graphs_of_a_gpu_and_a_cpu() -> None:
    results = []
    for cuda_graphs in (False, True):
        step = captured()
        problem = Problem.of(step.graph, machine("gpu", "gpu", "cpu"))
        chosen = np.sort(placements(problem, 1))
        train_step = compile_placement(
            problem, chosen, None, step, real_devices(problem.cluster, {"cuda:0": 2}), cuda_graphs
        )
        results.append(train(train_step, step.step.batch, 7))
        train_step.close()
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


def test_peak_memory_is_as_predicted() -> None:
    """The allocator's peak of a whole GPU, without what it had before, within 5%; our own count exactly."""
    step = captured(width=2048, rows=16384)  # large against the workspaces of cuBLAS
    problem = Problem.of(step.graph, machine("gpu"))
    everything = np.zeros(problem.num_groups, np.int64)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    train_step = compile_placement(problem, everything, None, step, real_devices(problem.cluster))
    predicted = Simulator(problem, "program").schedule(everything)
    batch = tuple(tensor.cuda() for tensor in step.step.batch)
    found = measure_steps(train_step, predicted, batch, 3)
    assert found.schedule.peak_bytes.tolist() == predicted.peak_bytes.tolist()
    assert found.allocated_bytes["gpu:0"] - before == pytest.approx(int(predicted.peak_bytes[0]), rel=0.05)
    assert (found.schedule.timeline.end >= found.schedule.timeline.start).all()


def test_a_peak_holds_nothing_that_another_placement_has_left() -> None:
    """What the GPU had of the model and its state moves to the CPU before anything is counted."""
    step = captured(width=2048, rows=64)
    problem = Problem.of(step.graph, machine("gpu", "cpu"))
    devices = real_devices(problem.cluster)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for device in (0, 1):
        placement = np.full(problem.num_groups, device)
        train_step = compile_placement(problem, placement, None, step, devices)
        found = measure_steps(train_step, Simulator(problem, "program").schedule(placement), step.step.batch, 2)
        train_step.close()
    assert found.allocated_bytes["gpu:0"] - before < 2**27  # workspaces of cuBLAS; the model and its state have 288 MiB


def test_a_model_that_was_moved_away_comes_home() -> None:
    step = captured()
    problem = Problem.of(step.graph, machine("gpu"))
    everything = np.zeros(problem.num_groups, np.int64)
    train_step = compile_placement(problem, everything, None, step, real_devices(problem.cluster))
    first = train(train_step, step.step.batch, 2)
    checkpoint = copy.deepcopy(step.step.model.cpu().state_dict())
    assert train(train_step, step.step.batch, 1)[0] < first[-1]
    step.step.model.load_state_dict(checkpoint)
    assert all(parameter.is_cuda for parameter in step.step.model.parameters())


def test_the_hosts_time_for_a_launch_is_near_a_plain_loops() -> None:
    assert launches("gpu", rounds=20)["ratio"] < 1.5
    assert launches("gpu", rounds=20, cuda_graphs=True)["ratio"] < 0.3
