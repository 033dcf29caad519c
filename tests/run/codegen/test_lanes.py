"""The host's lane and the lanes of CPU threads together, on a stand-in accelerator."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compiled_steps import RandomNet, cpu_cluster, one_thread_each, plan_by_op, with_options
from eager_steps import bitwise, eager_step, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import random_placements
from stand_in_accelerator import InstantStreams, LateStreams, placed_at_random, stand_in_devices
from torch import Tensor, nn

from placewise.core.problem import NOWHERE, Problem
from placewise.graph_capture.capture import CapturedStep, capture_inference, capture_step
from placewise.graph_capture.resolved_program import ResolvedProgram
from placewise.graph_capture.training_step import TrainingStep
from placewise.measure.steps import measured_memory
from placewise.rewrite.augmented_graph import WAIT
from placewise.rewrite.augmented_program import AugmentedProgram, leave_out_calls
from placewise.run.codegen import lanes
from placewise.run.lower.instructions import CopyTensor, RunOp
from placewise.run.lower.lowering import lower, tensor_devices
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.step import train_step as train_steps
from placewise.run.step.compiling import compile_placement
from placewise.run.step.train_step import TrainStep
from placewise.simulate.simulator import Simulator

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_the_memory_of_a_traced_step_is_the_simulators() -> None:
    """Sizes of real storages, with copies from GPU to CPU and back, allocated and freed in launch order."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    captured = capture_step(TrainingStep(model, lambda out, target: (out * target).sum(), optimizer, batch))
    problem = Problem.of(captured.graph, cpu_cluster(3))
    placement, order = random_placements(problem, np.random.default_rng(0), 1)[0], np.arange(problem.num_ops)
    devices = stand_in_devices(problem.cluster, (True, True, False))
    placed = PlacedStep(ResolvedProgram.of(captured), lower(problem, placement), tensor_devices(problem, placement), devices)
    trace = TrainStep(captured, placed, InstantStreams([True, True, False])).trace(batch)
    predicted = Simulator(problem, "program").schedule(placement, order)
    assert len({(s.source < 2, s.target < 2) for s in placed.instructions.sequence if isinstance(s, CopyTensor)}) == 3
    assert np.array_equal(measured_memory(predicted, placed.instructions, trace), predicted.memory)


def test_the_hosts_time_is_taken_between_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that shows a second more whenever it is read, and 100 seconds more after each pause.

    Each time between two pauses is one second, and the pauses do not count.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    captured = capture_step(TrainingStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), batch))
    problem = Problem.of(captured.graph, cpu_cluster(1))
    devices = stand_in_devices(problem.cluster, (True,))
    everything = np.zeros(problem.num_groups, np.int64)
    placed = PlacedStep(
        ResolvedProgram.of(captured), lower(problem, everything), tensor_devices(problem, everything), devices
    )
    streams, seconds, pauses = InstantStreams([True]), [0.0], []

    def rest() -> None:
        pauses.append(seconds[-1])
        seconds.append(seconds[-1] + 100)

    def read_clock() -> float:
        seconds.append(seconds[-1] + 1)
        return seconds[-1]

    monkeypatch.setattr(lanes, "PAUSE_EVERY", 20)
    monkeypatch.setattr(train_steps, "perf_counter", read_clock)
    monkeypatch.setattr(streams, "synchronize_all", rest)
    train_step = TrainStep(captured, placed, streams)
    assert train_step.host_seconds(batch, 1) == [len(pauses) - 1]
    assert len(pauses) == -(-len(placed.instructions.sequence) // 20) + 1 > 2


def test_a_trace_ahead_has_rows_as_a_usual_step() -> None:
    """The updates of two layers go out together, and so does what the trace has of them."""
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(6, 4), torch.randn(6, 4))
    captured = capture_step(TrainingStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), batch))
    problem = Problem.of(captured.graph, cpu_cluster(1))
    everything = np.zeros(problem.num_groups, np.int64)
    placed = PlacedStep(
        ResolvedProgram.of(captured), lower(problem, everything), tensor_devices(problem, everything),
        stand_in_devices(problem.cluster, (True,)),
    )  # fmt: skip
    trace, again = TrainStep(captured, placed, InstantStreams([True])).trace_ahead(batch, 2)
    assert trace.nbytes.keys() == again.nbytes.keys()
    runs = {number for number, run in enumerate(placed.instructions.sequence) if isinstance(run, RunOp)}
    assert any(len(row) > 1 for row in trace.rows.values())
    assert set(trace.nbytes) == runs - {number for row in trace.rows.values() for number in row[1:]}


class Sums(nn.Module):
    """Sums of two parameters, which have one gradient: if both are trained, one of them gets a second tensor of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(3)]) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return sum(((a + b) * x.exp()).sum() for a, b in zip(self.first, self.second, strict=True))


@pytest.mark.parametrize("both", [False, True])
def test_a_row_does_not_write_over_what_another_device_copies(both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decayed gradients are made in a row, over the gradients; but a second device may copy these later than that."""
    model = Sums()
    model.first.requires_grad_(both)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1, weight_decay=0.5)
    captured = capture_step(TrainingStep(model, nn.MSELoss(), optimizer, (torch.randn(4), torch.ones([]))))
    plan = plan_by_op(captured, lambda name: "cpu:1" if name.startswith("first") else "cpu:0")
    problem, written_over = Problem.of(captured.graph, cpu_cluster(2)), list[Any]()
    monkeypatch.setattr(lanes, "_in_place", lambda function: written_over.append(function))
    devices = one_thread_each(problem.cluster)
    compile_placement(problem, problem.contract(plan.placement), None, captured, devices).close()
    assert len(written_over) == (0 if both else 1)


def test_the_host_launches_both_passes_before_it_computes_what_the_update_reads() -> None:
    """When it counts, batch norm has already written its statistics; with a second lane it has not."""
    for from_host, launched in (((True,), 1), ((True, False), 0)):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        batch = (torch.randn(6, 4), torch.randn(6, 4))
        captured = capture_step(TrainingStep(model, nn.MSELoss(), torch.optim.Adam(model.parameters()), batch))
        problem = Problem.of(captured.graph, cpu_cluster(len(from_host)))
        placement = np.arange(problem.num_groups) % len(from_host)
        resolved, devices = ResolvedProgram.of(captured), stand_in_devices(problem.cluster, from_host)
        placed = PlacedStep(resolved, lower(problem, placement), tensor_devices(problem, placement), devices)
        train_step = TrainStep(captured, placed, InstantStreams(list(from_host)))
        compute, found = train_step._compute_scalars, list[int]()

        def counting(residents: Any, compute: Any = compute, norm: Any = model[1], found: list[int] = found) -> Any:
            found.append(int(norm.num_batches_tracked))
            return compute(residents)

        train_step._compute_scalars = counting
        train_step(batch)
        assert found == [launched]


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ops=st.integers(0, 12),
    from_host=st.sampled_from([(True,), (True, True), (True, False), (False, True, True), (True, False, False, True)]),
)
@settings(max_examples=60)
def test_gpus_and_cpus_together(seed: int, num_ops: int, from_host: tuple[bool, ...]) -> None:
    torch.manual_seed(seed % 1000)
    model, compiled_model = RandomNet(seed, num_ops), RandomNet(seed, num_ops)
    compiled_model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    optimizer, compiled_optimizer = (torch.optim.Adam(m.parameters(), 0.01, foreach=False) for m in (model, compiled_model))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    captured = capture_step(TrainingStep(compiled_model, nn.MSELoss(), compiled_optimizer, batch))
    placed = placed_at_random(captured, seed, from_host)
    train_step = TrainStep(captured, placed, InstantStreams(list(from_host)))
    for number in range(3):
        (expected,) = eager_step(TrainingStep(model, nn.MSELoss(), optimizer, batch))
        if number < 2:
            assert bitwise(train_step(batch), expected)
        else:
            trace = train_step.trace(batch)
            wanted = {i for i, s in enumerate(placed.instructions.sequence) if isinstance(s, (RunOp, CopyTensor))}
            assert trace.nbytes.keys() == wanted
        found, values = snapshot(compiled_model, compiled_optimizer), snapshot(model, optimizer)
        assert [key for key in values if not bitwise(found[key], values[key])] == []
    train_step.close()


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ops=st.integers(0, 10),
    from_host=st.sampled_from([(True, False), (False, True, True), (True, True, False)]),
    micro_batches=st.integers(1, 2),
    options=st.booleans(),
)
@settings(max_examples=60)
def test_copies_may_be_late(seed: int, num_ops: int, from_host: tuple[bool, ...], micro_batches: int, options: bool) -> None:
    """Nothing reads a copy before it is made, or writes what is still copied, above all not pinned parameters.

    With `options` tensors are repeated and wait too, most of them where only the host's lane keeps them.
    """
    torch.manual_seed(seed % 1000)
    model, compiled_model = RandomNet(seed, num_ops), RandomNet(seed, num_ops)
    compiled_model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    optimizer, compiled_optimizer = (torch.optim.Adam(m.parameters(), 0.01, foreach=False) for m in (model, compiled_model))
    batch = (torch.randn(6 * micro_batches, 4), torch.randn(6 * micro_batches, 4))
    captured = capture_step(TrainingStep(compiled_model, nn.MSELoss(), compiled_optimizer, batch, micro_batches))
    placed = placed_at_random(with_options(captured) if options else captured, seed, from_host)
    train_step = TrainStep(captured, placed, LateStreams(list(from_host)))
    for number in range(4):
        first, *others = eager_step(TrainingStep(model, nn.MSELoss(), optimizer, batch, micro_batches))
        assert bitwise(train_step(batch), sum(others, start=first))
        found, values = snapshot(compiled_model, compiled_optimizer), snapshot(model, optimizer)
        assert [key for key in values if not bitwise(found[key], values[key])] == []
        if number == 1:
            for each in (model, compiled_model):
                each.load_state_dict({key: value * 1.01 for key, value in each.state_dict().items()})
    train_step.close()


def step_with_pinned_parameters() -> tuple[CapturedStep, PlacedStep]:
    """Returns a step on a GPU and a CPU that updates several parameters which the GPU reads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    captured = capture_step(TrainingStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), batch))
    every = (placed_at_random(captured, seed, (True, False)) for seed in range(100))
    return captured, next(placed for placed in every if len(placed.pinned) > 1)


def test_what_the_step_writes_on_a_cpu_stays_in_pinned_memory() -> None:
    """Once a parameter is there, copying it to a GPU pins nothing; the next step pins it again if the model gets another."""
    captured, placed = step_with_pinned_parameters()
    model, batch = captured.step.model, captured.step.batch
    streams = InstantStreams([True, False])
    train_step = TrainStep(captured, placed, streams)
    counts = []
    for number in range(5):
        if number == 3:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        train_step(batch)
        counts.append(len(streams.pinned))
        addresses = {parameter.data_ptr() for parameter in model.parameters()}
        assert len(addresses & {pinned.data_ptr() for pinned in streams.pinned}) == len(placed.pinned)
    usual, moved = counts[1] - counts[0], len(placed.pinned)
    assert np.diff([0, *counts]).tolist() == [usual + moved, usual, usual, usual + moved, usual]
    train_step.close()


def test_steps_in_turn_do_not_pin_what_is_pinned() -> None:
    """Two steps of one model, as for batches of two sizes: what one has pinned the other leaves where it is."""
    captured, placed = step_with_pinned_parameters()
    streams = InstantStreams([True, False])
    first, second = (TrainStep(captured, placed, streams) for _ in range(2))
    counts = []
    for train_step in (first, first, second, first, second):
        train_step(captured.step.batch)
        counts.append(len(streams.pinned))
    usual = counts[1] - counts[0]
    assert np.diff(counts).tolist() == [usual] * 4
    first.close()
    second.close()


def test_the_caller_may_write_what_the_step_only_reads() -> None:
    """A CPU's tensor that the step does not write is pinned for each copy."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    captured = capture_inference(model, torch.randn(6, 4))
    for seed in range(20):
        placed = placed_at_random(captured, seed, (True, False))
        assert not placed.pinned


def test_parameters_of_a_gpu_stay_there_though_they_wait_elsewhere_too() -> None:
    """A parameter whose home is the GPU may wait in the CPU's memory: what is pinned is that copy, not the model's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    step = with_options(capture_step(TrainingStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), batch)))
    waiting = 0
    for seed in range(20):
        placed = placed_at_random(step, seed, (True, False))
        homes, producer = placed.tensor_devices, placed.resolved.graph.producer
        waiting += sum(producer[read] < 0 and homes[read] == 0 for read in placed.held_ops.values())
        assert [tensor for tensor in placed.pinned if homes[tensor] == 0] == []
    assert waiting > 0


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_waits_for_gpus_needs_no_thread(is_frozen: bool) -> None:
    """Everything runs on a GPU, and waits in the host's memory: in the host's lane, by one copy there and one back.

    Frozen weights live there, pinned, and visit. The host waits for the last of these copies.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    model[2].requires_grad_(not is_frozen)
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.01, momentum=0.9, foreach=False) for m in (model, twin)]
    step = with_options(capture_step(TrainingStep(twin, nn.MSELoss(), optimizers[1], batch)))
    problem = Problem.of(step.graph, cpu_cluster(2))
    is_waiting = np.isin(np.arange(problem.num_groups), problem.op_groups[[kind == WAIT for kind in step.graph.ops.kinds]])
    placement = np.where(is_waiting, 1, np.where(problem.optional, NOWHERE, 0))
    homes = np.setdiff1d(step.graph.tensors.home[step.graph.tensors.home >= 0], step.graph.ops.groups)
    placement[homes] = 1
    assert len(homes) == 2 * is_frozen  # weight and bias
    present = problem.present(placement)
    assert isinstance(step.program, AugmentedProgram)
    left = replace(step, graph=present.problem.graph, program=leave_out_calls(step.program, present))
    where = present.problem, placement[present.groups]
    devices = stand_in_devices(problem.cluster, (True, False))
    placed = PlacedStep(ResolvedProgram.of(left), lower(*where), tensor_devices(*where), devices)
    assert len(placed.held_ops) == present.problem.graph.ops.kinds.count(WAIT)
    train_step = TrainStep(left, placed, LateStreams([True, False]))
    assert train_step._lanes.functions.keys() == {lanes.HOST_LANE}
    assert len(placed.last_reads) == is_frozen
    for _ in range(3):
        (expected,) = eager_step(TrainingStep(model, nn.MSELoss(), optimizers[0], batch))
        assert bitwise(train_step(batch), expected)
        assert all(bitwise(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    trace = train_step.trace(batch)
    assert sum(isinstance(s, RunOp) for s in placed.instructions.sequence) <= len(trace.nbytes)
    train_step.close()
