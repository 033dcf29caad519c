"""Gradients are clipped and scaled as PyTorch's own functions do it, wherever their parameters are."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import compiled, small_training
from eager_steps import Mixture, bitwise, eager_step, snapshot, token_batches
from torch import Tensor, nn

import placewise as pw
from placewise.core.errors import CaptureError
from placewise.graph_capture.capture import capture_step
from placewise.graph_capture.training_step import TrainingStep

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return 100 * F.cross_entropy(output, target)


def trained_like_eager(model: nn.Module, batches: list[Any], in_program_order: bool = True, **options: Any) -> list[bool]:
    """Asserts equal bits after each step of AdamW; returns for each step whether the parameters were updated."""
    eager_model, scaling = copy.deepcopy(model), options.pop("scaling", None)
    eager_optimizer, optimizer = (torch.optim.AdamW(m.parameters(), 0.01) for m in (eager_model, model))
    eager_scaler, scaler = (torch.amp.GradScaler("cpu", enabled=scaling is not None, **scaling or {}) for _ in range(2))
    step = capture_step(TrainingStep(model, cross_entropy, optimizer, batches[0], grad_scaler=scaler, **options))
    train_step = compiled(step, seed=len(options), in_program_order=in_program_order)
    updated = []
    for number, batch in enumerate(batches):
        before = snapshot(eager_model, eager_optimizer)["model.output.weight"].clone()
        torch.manual_seed(number)
        losses = eager_step(
            TrainingStep(eager_model, cross_entropy, eager_optimizer, batch, grad_scaler=eager_scaler, **options)
        )
        torch.manual_seed(number)
        assert bitwise(train_step(batch), sum(losses[1:], start=losses[0])), number
        wanted, found = snapshot(eager_model, eager_optimizer), snapshot(model, optimizer)
        assert wanted.keys() <= found.keys()
        assert not any(found[key].any() for key in found.keys() - wanted.keys())  # state that eager has not created yet
        assert [key for key in wanted if not bitwise(found[key], wanted[key])] == [], number
        assert scaler.state_dict() == eager_scaler.state_dict()
        updated.append(not bitwise(before, wanted["model.output.weight"]))
    train_step.close()
    return updated


class Tower(nn.Module):
    """A model without random numbers: its ops may be launched in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.output = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.hidden(self.embedding(tokens).mean(1))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 0.5},
        {"clip_grad_norm": 1e6},
        {"clip_grad_value": 0.01},
        {"clip_grad_value": 0.1, "clip_grad_norm": 0.2},
    ],
)
def test_clipping_is_eager_clipping(options: dict[str, Any], micro_batches: int) -> None:
    trained_like_eager(Mixture(), token_batches(count=3), micro_batches=micro_batches, **options)


def test_the_norm_is_that_of_all_gradients_before_they_are_clipped() -> None:
    model, optimizer, batch = small_training()
    loss_fn = nn.MSELoss()
    loss_fn(model(batch[0]), batch[1]).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.zero_grad()
    train_step = compiled(pw.capture(model, loss_fn, optimizer, batch, clip_grad_norm=0.1))
    assert train_step.grad_norm is None
    assert isinstance(train_step(batch), Tensor)
    assert train_step.grad_norm == pytest.approx(norm)
    assert norm > 0.1
    train_step.close()


def test_clipping_is_part_of_the_graph() -> None:
    """Each parameter has a norm, which one op of no parameter combines: it may be on any device."""
    model, optimizer, batch = small_training("meta")
    graph = pw.capture(model, nn.MSELoss(), optimizer, batch, clip_grad_norm=0.1).graph
    assert "0.weight.linalg_vector_norm.update" in graph.ops.names
    assert "clip_grad_norm.stack.update" in graph.ops.names


@pytest.mark.parametrize("model", [Mixture, Tower])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_whose_gradients_overflow_is_skipped(model: type[nn.Module], micro_batches: int) -> None:
    """The scale shrinks until no gradient overflows, and grows again after two good steps, as eager PyTorch's does."""
    scaling = {"init_scale": 2.0**127, "backoff_factor": 2.0**-20, "growth_factor": 2.0**20, "growth_interval": 2}
    updated = trained_like_eager(
        model(), token_batches(count=6), model is Mixture, scaling=scaling, micro_batches=micro_batches
    )
    assert updated == [False, True, True, False, True, True]


def test_scaling_with_clipping() -> None:
    assert all(trained_like_eager(Mixture(), token_batches(count=3), scaling={"init_scale": 2.0**10}, clip_grad_norm=0.3))


def test_float16_gradients_cannot_be_unscaled() -> None:
    model, optimizer, batch = small_training("meta")
    model.half()
    batch = (batch[0].half(), batch[1].half())
    with pytest.raises(CaptureError, match="can't unscale float16 gradients"):
        pw.capture(model, nn.MSELoss(), optimizer, batch, grad_scaler=torch.amp.GradScaler("cpu"))


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    model, optimizer, batch = small_training("meta")
    plain = pw.capture(model, nn.MSELoss(), optimizer, batch)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    assert pw.capture(model, nn.MSELoss(), optimizer, batch, grad_scaler=scaler).graph.digest == plain.graph.digest


@pytest.mark.parametrize(("name", "value"), [("clip_grad_norm", 0.0), ("clip_grad_norm", "1"), ("clip_grad_value", -1.0)])
def test_wrong_limits_are_refused(name: str, value: Any) -> None:
    model, optimizer, batch = small_training("meta")
    with pytest.raises(CaptureError, match=f"{name} must be a number above 0"):
        pw.capture(model, nn.MSELoss(), optimizer, batch, **{name: value})
