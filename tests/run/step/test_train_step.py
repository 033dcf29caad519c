"""What a compiled step does besides computing what eager code does: live state, refused batches, failures, no leaks."""

import copy
import gc
import re
import resource
import threading
from typing import Any

import pytest
import torch
from compiled_steps import assert_runs_like_eager, capture_with_mse, compiled, small_training
from eager_steps import Mixture, bitwise, eager_step, snapshot, token_batches
from torch import Tensor, nn

import placewise as pw
from placewise.core.errors import ExecutionError, StepChanged
from placewise.graph_capture.training_step import TrainingStep

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


def test_state_goes_to_another_model_and_back_between_steps() -> None:
    """Two compiled steps, one eager step, three more compiled ones from a checkpoint: all as eager code does it."""
    model, optimizer, batch = small_training()
    eager_model, eager_optimizer, _ = small_training()
    eager_model.load_state_dict(model.state_dict())
    train_step = compiled(capture_with_mse(model, optimizer, batch))
    eager = capture_with_mse(eager_model, eager_optimizer, batch).step
    for _ in range(2):
        assert torch.equal(train_step(batch), eager_step(eager)[0])
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    eager_step(capture_with_mse(model, optimizer, batch).step)
    assert torch.equal(train_step(batch), (eager_step(eager), eager_step(eager))[1][0])
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    eager_model.load_state_dict(checkpoint[0])
    eager_optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))
    for _ in range(3):
        assert torch.equal(train_step(batch), eager_step(eager)[0])
    assert all(
        bitwise(value, snapshot(model, optimizer)[key]) for key, value in snapshot(eager_model, eager_optimizer).items()
    )


def test_a_schedule_of_the_learning_rate_is_followed() -> None:
    model, optimizer, batch = small_training()
    eager_model, eager_optimizer, _ = small_training()
    eager_model.load_state_dict(model.state_dict())
    train_step, eager = (
        compiled(capture_with_mse(model, optimizer, batch)),
        capture_with_mse(eager_model, eager_optimizer, batch).step,
    )
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (optimizer, eager_optimizer)]
    for _ in range(6):
        assert torch.equal(train_step(batch), eager_step(eager)[0])
        for schedule in schedules:
            schedule.step()
    assert torch.equal(next(model.parameters()), next(eager_model.parameters()))


class CountsLate(torch.optim.Optimizer):
    """Reads its counter on the host, and only then changes it in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["count"] = torch.ones(())
            parameter.sub_(parameter.grad * state["count"])
            state["count"].mul_(0.5)


def test_an_op_reads_a_host_scalar_before_it_is_changed_in_place() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 3)
        return model, CountsLate(model.parameters())

    assert_runs_like_eager(build, nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(3)])


@pytest.mark.parametrize(
    ("batch", "rule"),
    [
        (
            ((torch.zeros(5, 4)), torch.zeros(6, 3)),
            r"batch\[0\]: .* float32 of shape \[6, 4\], got float32 of shape \[5, 4\]",
        ),
        ((torch.zeros(6, 4).double(), torch.zeros(6, 3)), r"batch\[0\]: .* float32 of shape .*, got float64 of shape"),
        ((torch.zeros(6, 4),), r"batch: the step was captured with 2 entries, got 1 entries"),
        ((torch.zeros(6, 4), 3), r"batch\[1\]: .* got 3"),
        ((torch.zeros(6, 4), torch.zeros(6, 3, device="meta")), r"batch\[1\]: is on the meta device and has no values"),
        ((torch.zeros(6, 4).to_sparse(), torch.zeros(6, 3)), r"batch\[0\]: .* got sparse_coo float32 of shape \[6, 4\]"),
    ],
)
def test_another_batch_is_refused(batch: Any, rule: str) -> None:
    model, optimizer, example = small_training()
    train_step = compiled(capture_with_mse(model, optimizer, example))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ExecutionError, match=rule):
        train_step(batch)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_words_and_numbers_of_a_batch_must_be_the_same() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: int, *, words: dict[str, Any] | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    model = Scaled(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train_step = compiled(capture_with_mse(model, optimizer, ((torch.randn(6, 4), 2), torch.randn(6, 3))))
    with pytest.raises(ExecutionError, match=r"batch\[0\]\[1\]: the step was captured with 2, got 3"):
        train_step(((torch.randn(6, 4), 3), torch.randn(6, 3)))


def test_batches_of_other_strides_give_the_same() -> None:
    """A transposed view of a larger storage, and rows of another tensor."""
    model, optimizer, example = small_training()
    eager_model, eager_optimizer, _ = small_training()
    eager_model.load_state_dict(model.state_dict())
    train_step = compiled(capture_with_mse(model, optimizer, example))
    for _ in range(2):
        batch = (torch.randn(4, 60).t()[::10], torch.randn(12, 3)[6:])
        plain = TrainingStep(eager_model, nn.MSELoss(), eager_optimizer, tuple(t.contiguous() for t in batch))
        assert torch.equal(train_step(batch), eager_step(plain)[0])


def test_rows_that_were_one_row_at_capture_must_be_one_row() -> None:
    """An expanded example has one row in memory, and the step reads only that."""
    model, optimizer, (_, target) = small_training()
    train_step = compiled(capture_with_mse(model, optimizer, (torch.randn(1, 4).expand(6, 4), target)))
    train_step((torch.randn(1, 4).repeat(6, 1), target))
    with pytest.raises(ExecutionError, match=r"batch\[0\]: .* all the same along dimension 0"):
        train_step((torch.randn(6, 4), target))


def test_a_model_on_the_meta_device_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"0\.weight is on the meta device and has no values"):
        compiled(capture_with_mse(*small_training("meta")))


@pytest.mark.parametrize(("change", "now"), [(nn.Module.double, "float64"), (nn.Module.half, "float16")])
def test_a_model_of_another_type_is_refused(change: Any, now: str) -> None:
    model, optimizer, batch = small_training()
    step = capture_with_mse(model, optimizer, batch)
    train_step = compiled(step)
    change(model[2])
    rule = f"2.weight is {now} now, the step was captured with float32: make it float32 again"
    with pytest.raises(ExecutionError, match=re.escape(rule)):
        train_step(batch)
    with pytest.raises(ExecutionError, match=re.escape(rule)):
        compiled(step)
    model.float()
    assert train_step(batch).dtype == torch.float32


def test_a_model_that_is_laid_out_otherwise_is_refused_before_it_changes() -> None:
    """The weights [4, 3, 2, 2] of a convolution have strides 12, 4, 2, 1, and 12, 1, 6, 3 with their channels last."""
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten())
    batch = (torch.randn(2, 3, 3, 3), torch.randn(2, 16))
    train_step = compiled(capture_with_mse(model, torch.optim.SGD(model.parameters(), 0.1), batch))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    rule = "0.weight has strides (12, 1, 6, 3) now, the step was captured with (12, 4, 2, 1) (memory_format): capture and"
    with pytest.raises(StepChanged, match=re.escape(rule)):
        train_step(batch)
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    train_step(batch)
    train_step.close()


def test_a_model_that_has_lost_its_values_is_refused() -> None:
    model, optimizer, batch = small_training()
    step = capture_with_mse(model, optimizer, batch)
    train_step = compiled(step)
    model[0].to("meta")
    with pytest.raises(ExecutionError, match=r"0\.weight is on the meta device and has no values"):
        train_step(batch)
    model[0].to_empty(device="cpu")
    nn.utils.parametrizations.weight_norm(model[2])
    rule = "the model has other modules now, and the captured step was another one"
    with pytest.raises(ExecutionError, match=re.escape(rule)):
        train_step(batch)
    with pytest.raises(ExecutionError, match=re.escape(rule)):
        compiled(step)


def test_state_that_the_optimizer_has_lost_is_created_again() -> None:
    """A checkpoint of an optimizer that has taken no step has no state; eager code continues from it, too."""
    model, optimizer, batch = small_training()
    eager_model, eager_optimizer, _ = small_training()
    eager_model.load_state_dict(model.state_dict())
    fresh = copy.deepcopy(optimizer.state_dict())
    train_step, eager = (
        compiled(capture_with_mse(model, optimizer, batch)),
        capture_with_mse(eager_model, eager_optimizer, batch).step,
    )
    for number in range(4):
        if number == 2:
            optimizer.load_state_dict(fresh)
            eager_optimizer.load_state_dict(fresh)
        assert torch.equal(train_step(batch), eager_step(eager)[0])
    assert all(
        bitwise(value, snapshot(model, optimizer)[key]) for key, value in snapshot(eager_model, eager_optimizer).items()
    )


def test_dampening_is_refused_before_the_first_step() -> None:
    model, _, batch = small_training()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ExecutionError, match="take it in eager code"):
        compiled(capture_with_mse(model, optimizer, batch))
    eager_step(capture_with_mse(model, optimizer, batch).step)
    assert compiled(capture_with_mse(model, optimizer, batch))(batch).isfinite()


@pytest.mark.parametrize("seed", range(4))
def test_a_failing_op_ends_the_step_and_the_next_one_runs(seed: int) -> None:
    """A token outside of the vocabulary raises IndexError, whichever thread it is on, and no thread is left waiting."""
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens, target = token_batches()[0]
    train_step = compiled(pw.capture(model, nn.CrossEntropyLoss(), optimizer, (tokens, target)), seed, devices=3)
    for _ in range(3):
        with pytest.raises(IndexError):
            train_step((tokens + 100, target))
        assert train_step((tokens, target)).isfinite()


def test_inference_returns_what_the_model_returns() -> None:
    model = Mixture().eval()
    tokens = torch.randint(11, (8, 5))
    expected = copy.deepcopy(model)(tokens)
    assert torch.equal(compiled(pw.capture_inference(model, tokens))(tokens), expected)


def test_nothing_leaks_over_a_thousand_steps() -> None:
    model, optimizer, batch = small_training()
    train_step = compiled(capture_with_mse(model, optimizer, batch), devices=2)

    def usage() -> tuple[int, int]:
        gc.collect()
        return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for _ in range(100):
        train_step(batch)
    objects, kilobytes = usage()
    for _ in range(1000):
        train_step(batch)
    more_objects, more_kilobytes = usage()
    assert more_objects - objects < 50
    assert more_kilobytes - kilobytes < 2000  # 100 floats that each step kept would be 400 KB


def test_closing_ends_the_threads() -> None:
    train_step = compiled(capture_with_mse(*small_training()))
    names = {thread.name for thread in threading.enumerate()}
    assert any(name.startswith("placewise cpu:") for name in names)
    before = threading.active_count()
    del train_step
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("placewise cpu:"):
            thread.join(timeout=10)
    assert threading.active_count() < before


def test_a_closed_step_is_refused() -> None:
    """Its threads have ended, so it would wait for them for ever."""
    model, optimizer, batch = small_training()
    train_step = compiled(capture_with_mse(model, optimizer, batch))
    train_step(batch)
    train_step.close()
    for _ in range(2):
        with pytest.raises(ExecutionError, match="is closed"):
            train_step(batch)
