"""The host's lane and the lanes of CPU devices together, with streams that run at once in the place of CUDA's.

GPUs are played by `executed.stand_ins`. The streams of this file check that an event is
recorded before anybody waits for it, and that each op starts in its own device's stream.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from eager_steps import bitwise, eager_step, snapshot
from executed import RandomNet, cpu_cluster, placed_at_random, stand_ins
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import random_placements
from torch import Tensor, nn

from placewise.core.problem import Problem
from placewise.graph_capture.capture import CapturedStep, capture_inference, capture_step
from placewise.graph_capture.training_step import TrainingStep
from placewise.measure.step_times import measured_memory
from placewise.run.codegen import lanes
from placewise.run.lower.instructions import Copy, Run
from placewise.run.lower.lowering import lower, tensor_devices
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.lower.slots import Slots
from placewise.run.lower.waits import Queue
from placewise.run.step.train_step import TrainStep
from placewise.run.step_notes import Notes
from placewise.run.whole_storages import copy_window, copy_window_into, copy_window_over
from placewise.simulate.simulator import Simulator

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class InstantStreams:
    """Streams whose work is done when it is launched."""

    def __init__(self, is_gpu: list[bool]) -> None:
        self.is_gpu = is_gpu
        self.recorded: set[int] = set()
        self.pinned: list[Tensor] = []
        self.current = -1
        self.waits = 0

    def enter(self, device: int) -> Callable[[], Any]:
        assert self.is_gpu[device]
        return partial(setattr, self, "current", device)

    def copy(self, source: int, target: int) -> Callable[..., Tensor]:
        def copy(window: Tensor, over: Tensor | None = None) -> Tensor:
            assert self.is_gpu[source] or self.is_pinned(window)
            self.current = -1
            return copy_window_into(window, torch.empty_strided) if over is None else copy_window_over(window, over)

        return copy

    def pin(self, window: Tensor) -> Tensor:
        pinned = copy_window(window)
        self.pinned.append(pinned)
        return pinned

    def is_pinned(self, window: Tensor) -> bool:
        return any(window.data_ptr() == pinned.data_ptr() for pinned in self.pinned)

    def record(self, instruction: int, queue: Queue) -> Callable[[], Any]:
        return partial(self.recorded.add, instruction)

    def wait(self, instruction: int, queue: Queue) -> Callable[[], Any]:
        return partial(self._check, instruction)

    def synchronize(self, instruction: int) -> Callable[[], Any]:
        return partial(self._check, instruction)

    def _check(self, instruction: int) -> None:
        assert instruction in self.recorded
        self.waits += 1

    def mark(self, instruction: int, is_end: bool, queue: Queue) -> Callable[[], Any]:
        def check() -> None:
            assert len(queue) == 2 or self.current == queue[0]

        return check

    @contextmanager
    def step(self, notes: Notes | None = None) -> Iterator[None]:
        self.recorded.clear()
        self.current = -1
        yield

    def synchronize_all(self) -> None: ...


class LateStreams(InstantStreams):
    """Streams whose copies are made as late as they may be: when someone waits for them, or when the next step begins."""

    def __init__(self, is_gpu: list[bool]) -> None:
        super().__init__(is_gpu)
        self.under_way: dict[Queue, list[Callable[[], Any]]] = {}  # by channel, in order
        self.behind: dict[int, tuple[Queue, int]] = {}  # instruction -> its channel, and how many copies it ends
        self.lock = Lock()

    def copy(self, source: int, target: int) -> Callable[..., Tensor]:
        def copy(window: Tensor, over: Tensor | None = None) -> Tensor:
            assert self.is_gpu[source] or self.is_pinned(window)
            self.current = -1
            made = copy_window(window) if over is None else over
            if over is None and made.is_floating_point():
                made.fill_(float("nan"))  # what is read too early shows
            with self.lock:
                self.under_way.setdefault((source, target), []).append(partial(copy_window_over, window.detach(), made))
            return made

        return copy

    def pin(self, window: Tensor) -> Tensor:
        time.sleep(0.0005)  # the lane that has made it is further on by then
        return super().pin(window)

    def record(self, instruction: int, queue: Queue) -> Callable[[], Any]:
        def record() -> None:
            self.recorded.add(instruction)
            self.behind[instruction] = (queue, len(self.under_way.get(queue, ())))

        return record

    def _check(self, instruction: int) -> None:
        super()._check(instruction)
        self._make(*self.behind[instruction])

    def _make(self, queue: Queue, count: int) -> None:
        with self.lock:
            copies = self.under_way.get(queue, [])
            for number in range(count):
                copies[number]()
                copies[number] = int  # it is made once

    @contextmanager
    def step(self, notes: Notes | None = None) -> Iterator[None]:
        for queue, copies in self.under_way.items():
            self._make(queue, len(copies))
        self.under_way.clear()
        with super().step(notes):
            yield


def test_the_memory_of_a_noted_step_is_the_simulators() -> None:
    """Sizes of real storages, copies from GPU to CPU and back among them, taken and freed in launch order."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    captured = capture_step(TrainingStep(model, lambda out, target: (out * target).sum(), optimizer, batch))
    problem = Problem.of(captured.graph, cpu_cluster(3))
    placement, order = random_placements(problem, np.random.default_rng(0), 1)[0], np.arange(problem.num_ops)
    devices = stand_ins(problem.cluster, (True, True, False))
    placed = PlacedStep(Slots.of(captured), lower(problem, placement), tensor_devices(problem, placement), devices)
    notes = TrainStep(captured, placed, InstantStreams([True, True, False])).note(batch)
    predicted = Simulator(problem, "program").schedule(placement, order)
    assert len({(s.source < 2, s.target < 2) for s in placed.instructions.steps if isinstance(s, Copy)}) == 3
    assert np.array_equal(measured_memory(predicted, placed.instructions, notes), predicted.memory)


def test_the_hosts_time_is_taken_between_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of a tenth of a second in every 20 instructions does not count."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    captured = capture_step(TrainingStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), batch))
    problem = Problem.of(captured.graph, cpu_cluster(1))
    devices = stand_ins(problem.cluster, (True,))
    everything = np.zeros(problem.num_groups, np.int64)
    placed = PlacedStep(Slots.of(captured), lower(problem, everything), tensor_devices(problem, everything), devices)
    streams, pauses = InstantStreams([True]), [0.1]

    def rest() -> None:
        time.sleep(pauses[0])
        pauses.append(0.1)

    monkeypatch.setattr(lanes, "PAUSE_EVERY", 20)
    monkeypatch.setattr(streams, "synchronize_all", rest)
    train_step = TrainStep(captured, placed, streams)
    assert 0 < train_step.host_seconds(batch) < 0.1
    assert len(pauses) - 1 == -(-len(placed.instructions.steps) // 20) + 1 > 2


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ops=st.integers(0, 12),
    kinds=st.sampled_from([(True,), (True, True), (True, False), (False, True, True), (True, False, False, True)]),
)
@settings(max_examples=60)
def test_gpus_and_cpus_together(seed: int, num_ops: int, kinds: tuple[bool, ...]) -> None:
    torch.manual_seed(seed % 1000)
    model, twin = RandomNet(seed, num_ops), RandomNet(seed, num_ops)
    twin.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    optimizer, twin_optimizer = (torch.optim.Adam(m.parameters(), 0.01, foreach=False) for m in (model, twin))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    captured = capture_step(TrainingStep(twin, nn.MSELoss(), twin_optimizer, batch))
    placed = placed_at_random(captured, seed, kinds)
    train_step = TrainStep(captured, placed, InstantStreams(list(kinds)))
    for number in range(3):
        (expected,) = eager_step(TrainingStep(model, nn.MSELoss(), optimizer, batch))
        if number < 2:
            assert bitwise(train_step(batch), expected)
        else:
            notes = train_step.note(batch)
            wanted = {i for i, s in enumerate(placed.instructions.steps) if isinstance(s, (Run, Copy))}
            assert notes.nbytes.keys() == wanted
        found, values = snapshot(twin, twin_optimizer), snapshot(model, optimizer)
        assert [key for key in values if not bitwise(found[key], values[key])] == []
    train_step.close()


@given(
    seed=st.integers(0, 2**32 - 1),
    num_ops=st.integers(0, 10),
    kinds=st.sampled_from([(True, False), (False, True, True)]),
    micro_batches=st.integers(1, 2),
)
@settings(max_examples=40)
def test_copies_may_be_late(seed: int, num_ops: int, kinds: tuple[bool, ...], micro_batches: int) -> None:
    """Nobody reads a copy before it is made, or writes what is copied: pinned parameters above all."""
    torch.manual_seed(seed % 1000)
    model, twin = RandomNet(seed, num_ops), RandomNet(seed, num_ops)
    twin.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
    optimizer, twin_optimizer = (torch.optim.Adam(m.parameters(), 0.01, foreach=False) for m in (model, twin))
    batch = (torch.randn(6 * micro_batches, 4), torch.randn(6 * micro_batches, 4))
    captured = capture_step(TrainingStep(twin, nn.MSELoss(), twin_optimizer, batch, micro_batches))
    train_step = TrainStep(captured, placed_at_random(captured, seed, kinds), LateStreams(list(kinds)))
    for number in range(4):
        first, *others = eager_step(TrainingStep(model, nn.MSELoss(), optimizer, batch, micro_batches))
        assert bitwise(train_step(batch), sum(others, start=first))
        found, values = snapshot(twin, twin_optimizer), snapshot(model, optimizer)
        assert [key for key in values if not bitwise(found[key], values[key])] == []
        if number == 1:
            for each in (model, twin):
                each.load_state_dict({key: value * 1.01 for key, value in each.state_dict().items()})
    train_step.close()


def step_with_pinned_parameters() -> tuple[CapturedStep, PlacedStep]:
    """Returns a step on a GPU and a CPU, which updates several parameters that the GPU reads."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    captured = capture_step(TrainingStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), batch))
    every = (placed_at_random(captured, seed, (True, False)) for seed in range(100))
    return captured, next(placed for placed in every if len(placed.pinned) > 1)


def test_what_the_step_writes_on_a_cpu_stays_in_pinned_memory() -> None:
    """Once it is there, its copies to GPUs pin nothing; other values that the model is given go there in the next step."""
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
    """Two of one model, as for batches of two sizes: what one has pinned stays where it is in the other's step."""
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
    """Such a tensor of a CPU device is pinned for each copy."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    captured = capture_inference(model, torch.randn(6, 4))
    for seed in range(20):
        placed = placed_at_random(captured, seed, (True, False))
        assert not placed.pinned
