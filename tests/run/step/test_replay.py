"""Recorded and replayed steps, on a stand-in accelerator; real CUDA graphs are tested in run/backends/test_cuda.py."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import Optimizer, RandomNet
from eager_steps import OPTIMIZERS, bitwise, eager_step, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_accelerator import InstantStreams, StandInRecorder, placed_at_random
from torch import Tensor, nn

from placewise.graph_capture.capture import CapturedStep, capture_inference, capture_step
from placewise.graph_capture.training_step import TrainingStep
from placewise.run.codegen import recorded_segments
from placewise.run.codegen.recorded_lanes import RecordingWriter
from placewise.run.step.replay import MOST_RECORDINGS, WARM_UP
from placewise.run.step.train_step import TrainStep

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


def recorded(captured: CapturedStep, seed: int, from_host: tuple[bool, ...]) -> tuple[TrainStep, list[StandInRecorder]]:
    """Returns the step in a random placement on GPUs and CPUs, in a random order, and a list that its recorders go into."""
    made: list[StandInRecorder] = []
    placed = placed_at_random(captured, seed, from_host)

    def make() -> StandInRecorder:
        made.append(StandInRecorder())
        return made[-1]

    return TrainStep(captured, placed, InstantStreams(list(from_host)), make), made


class ModelPair:
    """Two equal models: one is trained by eager steps, the other by a compiled step."""

    def __init__(
        self, build: Callable[[], nn.Module], optimizer: Callable[[Any], Optimizer], micro_batches: int = 1
    ) -> None:
        self.eager_model, self.compiled_model = build(), build()
        self.compiled_model.load_state_dict(copy.deepcopy(self.eager_model.state_dict()))
        self.optimizers = [optimizer(model.parameters()) for model in (self.eager_model, self.compiled_model)]
        self.micro_batches = micro_batches

    def capture(self) -> CapturedStep:
        return capture_step(TrainingStep(self.compiled_model, nn.MSELoss(), self.optimizers[1], batch(), self.micro_batches))

    def assert_same_step(self, train_step: TrainStep) -> None:
        given = batch()
        losses = eager_step(TrainingStep(self.eager_model, nn.MSELoss(), self.optimizers[0], given, self.micro_batches))
        expected = sum(losses[1:], start=losses[0])
        assert bitwise(train_step(given), expected)
        found, wanted = snapshot(self.compiled_model, self.optimizers[1]), snapshot(self.eager_model, self.optimizers[0])
        assert [key for key in wanted if not bitwise(found[key], wanted[key])] == []


def recorded_pair(
    steps: int = WARM_UP + 2, from_host: tuple[bool, ...] = (True, True)
) -> tuple[ModelPair, TrainStep, list[StandInRecorder]]:
    """Returns a pair whose only host scalar is a constant rate, after some steps, of which the last one is replayed."""
    torch.manual_seed(0)
    pair = ModelPair(lambda: RandomNet(2, 8), lambda p: torch.optim.SGD(p, 0.01, foreach=False))
    train_step, made = recorded(pair.capture(), 2, from_host)
    for _ in range(steps):
        pair.assert_same_step(train_step)
    return pair, train_step, made


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 4), torch.randn(6, 4)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_segments, "FEWEST_OPS", 2)


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


FROM_HOST = st.sampled_from([(True,), (True, True), (True, False), (False, True, True), (True, False, False, True)])


@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(0, 12), from_host=FROM_HOST, changes=st.booleans())
@settings(max_examples=60)
def test_replayed_steps_are_eager_ones(seed: int, num_ops: int, from_host: tuple[bool, ...], changes: bool) -> None:
    """With another batch in every step, and with rates that change in every step, or in one."""
    torch.manual_seed(seed % 1000)
    pair = ModelPair(lambda: RandomNet(seed, num_ops), lambda p: torch.optim.SGD(p, 1e-4, momentum=0.9, foreach=False))
    train_step, made = recorded(pair.capture(), seed, from_host)
    for number in range(WARM_UP + 5):
        pair.assert_same_step(train_step)
        if changes or number == WARM_UP + 2:
            for group in (*pair.optimizers[0].param_groups, *pair.optimizers[1].param_groups):
                group["lr"] *= 0.9
    train_step.close()
    assert len(made) <= 2


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_all_optimizers(name: str, micro_batches: int) -> None:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    pair = ModelPair(lambda: copy.deepcopy(nn.Sequential(*layers)), OPTIMIZERS[name], micro_batches)
    train_step, made = recorded(pair.capture(), 1, (True,))
    for _ in range(WARM_UP + 3):  # RAdam takes another branch in its sixth step
        pair.assert_same_step(train_step)
    assert made
    assert made[-1].replays >= 1
    train_step.close()


def test_a_model_that_moved_is_recorded_again() -> None:
    pair, train_step, made = recorded_pair()
    assert len(made) == 1
    for parameter in pair.compiled_model.parameters():
        parameter.data = parameter.data.clone()
    for _ in range(3):
        pair.assert_same_step(train_step)
    assert len(made) == 2
    train_step.close()


def test_losses_that_were_returned_stay() -> None:
    _, train_step, _ = recorded_pair(0)
    losses = [train_step(batch()) for _ in range(WARM_UP + 4)]
    values = [float(loss) for loss in losses]
    train_step(batch())
    assert [float(loss) for loss in losses] == values
    assert len(set(values)) == len(values)


def test_a_whole_step_on_one_gpu_is_one_segment() -> None:
    """With plain SGD no scalar changes and there is no other device to wait for, so one segment has all ops."""
    _, _, made = recorded_pair(from_host=(True,))
    assert made[-1].replays == 1
    assert len(made[-1].segments) == 1


def test_another_layout_in_memory_is_recorded_again() -> None:
    pair, train_step, made = recorded_pair()
    for model in (pair.compiled_model, pair.eager_model):  # in both: the layout changes how kernels round
        for parameter in model.parameters():
            parameter.data = parameter.data.t().contiguous().t()
    for _ in range(3):
        pair.assert_same_step(train_step)
    assert len(made) == 2


def test_what_was_recorded_goes_with_the_step() -> None:
    """Without the garbage collector: recordings hold much memory."""
    _, train_step, made = recorded_pair()
    entries = [entry for calls in made[0].segments.values() for entry in calls.entries]
    kept = [weakref.ref(tensor) for *_, results in entries for tensor in results]
    del entries
    lane = weakref.ref(train_step._lanes.functions[-1])
    assert kept
    gc.disable()
    try:
        train_step.close()
        assert [ref for ref in kept if ref() is not None] == []
        del train_step
        assert lane() is None
    finally:
        gc.enable()


def test_a_step_that_never_stays_the_same_stays_plain() -> None:
    pair, train_step, made = recorded_pair()
    for _ in range(MOST_RECORDINGS + 3):
        for parameter in pair.compiled_model.parameters():
            parameter.data = parameter.data.clone()
        pair.assert_same_step(train_step)
    assert len(made) == MOST_RECORDINGS


def test_a_recording_that_fails_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, train_step, made = recorded_pair(WARM_UP, (True,))

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as patch:
        patch.setattr(StandInRecorder, "end", lambda recorder, segment: fail)
        with pytest.warns(UserWarning, match="not recorded from now on"), pytest.raises(RuntimeError, match="capturing"):
            train_step(batch())
    train_step(batch())
    assert len(made) == 1


def test_an_interrupt_while_lanes_are_written_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    _, train_step, made = recorded_pair(WARM_UP, (True,))

    def interrupt(writer: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RecordingWriter, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train_step(batch())
    for _ in range(3):
        train_step(batch())
    assert made[-1].replays


def test_a_plain_step_in_between() -> None:
    """A step is traced without the recording, whose memory is given back for that."""
    pair, train_step, made = recorded_pair()
    given = batch()
    train_step.trace(given)
    eager_step(TrainingStep(pair.eager_model, nn.MSELoss(), pair.optimizers[0], given))
    assert not made[0].segments
    for _ in range(2):
        pair.assert_same_step(train_step)


@pytest.mark.parametrize(("mask", "share"), [(True, 0.0), (False, 1.0)])
def test_masks_are_left_to_the_host(mask: bool, share: float) -> None:
    """An op that gets a mask has to count its entries on the host; indices are like any tensor."""

    class Chosen(nn.Module):
        def forward(self, x: Tensor, which: Tensor) -> Tensor:
            return torch.index_put(x, [which], torch.zeros(())) + 1

    which = torch.tensor([True, False, True]) if mask else torch.tensor([0, 2])
    step = capture_inference(Chosen(), (torch.randn(3), which))
    train_step, _ = recorded(step, 0, (True,))
    for _ in range(WARM_UP + 2):
        train_step(step.step.batch)
    assert train_step.num_recorded_ops == share * len(step.graph.ops)
