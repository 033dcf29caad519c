"""A step that fails: what was not updated stays as it was, and the error says what was."""

import copy
from typing import Any

import pytest
import torch
from compiled_steps import capture_with_mse, compiled, small_training
from eager_steps import bitwise, eager_step, snapshot
from torch import Tensor, nn

import placewise as pw
from placewise.core.errors import ExecutionError
from placewise.graph_capture.training_step import TrainingStep
from placewise.run.step.failed_steps import FailedSteps

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


class Lookup(nn.Module):
    """Fails in the forward pass if a token is outside of the vocabulary, after batch norm has changed its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.embed, self.out = nn.BatchNorm1d(4), nn.Embedding(11, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = self.norm(x)
        out: Tensor = self.out(x + self.embed(tokens + (x.sum() * 0).long()))
        return out


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in before if not bitwise(after[key], before[key])]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.RAdam, torch.optim.ASGD])
def test_a_step_that_fails_before_its_update_can_be_repeated(make: Any, devices: int) -> None:
    """The host counts before the first launch: the counters go back, and the step after that is eager's."""
    (x, tokens), target = (torch.randn(6, 4), torch.randint(11, (6,))), torch.randint(3, (6,))
    model, loss_fn = Lookup(), nn.CrossEntropyLoss()
    eager_model = copy.deepcopy(model)
    optimizer, eager_optimizer = make(model.parameters(), 0.01), make(eager_model.parameters(), 0.01)
    train_step = compiled(pw.capture(model, loss_fn, optimizer, ((x, tokens), target)), devices=devices)
    train_step(((x, tokens), target))
    before = copy.deepcopy(snapshot(model, optimizer))
    for _ in range(2):
        with pytest.raises(IndexError) as caught:
            train_step(((x, tokens + 100), target))
    statistics = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert {key.partition(".")[2] for key in changed(before, snapshot(model, optimizer))} == set(statistics)
    (note,) = caught.value.__notes__
    assert note.startswith("Before it failed, the step had changed 3 buffers (")
    assert all(name in note for name in statistics)
    train_step(((x, tokens), target))
    for given in (tokens, tokens + 100, tokens + 100, tokens):
        if given is tokens:
            eager_step(TrainingStep(eager_model, loss_fn, eager_optimizer, ((x, given), target)))
        else:
            eager_model.norm(x)
    assert changed(snapshot(eager_model, eager_optimizer), snapshot(model, optimizer)) == []


def test_a_refused_step_leaves_the_counters() -> None:
    """RAdam takes another branch from its sixth step on: each refused step would come nearer to it."""
    model, _, batch = small_training()
    optimizer = torch.optim.RAdam(model.parameters(), 0.01)
    train_step = compiled(capture_with_mse(model, optimizer, batch))
    for _ in range(5):
        train_step(batch)
    before = copy.deepcopy(snapshot(model, optimizer))
    for _ in range(2):
        with pytest.raises(ExecutionError, match="capture and compile the step again") as caught:
            train_step(batch)
        assert not hasattr(caught.value, "__notes__")
    assert changed(before, snapshot(model, optimizer)) == []


class FailsAtLargeGradients(torch.optim.Optimizer):
    """Counts its steps in Python numbers, or in tensors on the host."""

    def __init__(self, params: Any, in_tensors: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.in_tensors = in_tensors

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["count"] = torch.zeros(()) if self.in_tensors else 0
                state["sum"] = torch.zeros_like(parameter)
            state["count"] += 1
            row = parameter.grad.abs().amax().gt(10).long().view(1)
            factor = parameter.new_ones(1).index_select(0, row)  # out of range if a gradient is above 10
            state["sum"].add_(parameter.grad)
            parameter.sub_(state["sum"] * factor / state["count"])


@pytest.mark.parametrize("in_tensors", [False, True])
def test_a_step_that_fails_within_its_update_says_what_it_has_changed(in_tensors: bool) -> None:
    """The gradient of the weight is -0.2, that of the bias -200: the weight is updated and counted, the bias is not."""
    model = nn.Linear(1, 1)
    optimizer = FailsAtLargeGradients(model.parameters(), in_tensors)
    batch = (torch.full((2, 1), 0.001), torch.ones(2, 1))
    train_step = compiled(capture_with_mse(model, optimizer, batch), devices=1)
    train_step(batch)
    before = copy.deepcopy(snapshot(model, optimizer))
    with pytest.raises(IndexError) as caught:
        train_step((batch[0], torch.full((2, 1), 100.0)))
    after = snapshot(model, optimizer)
    assert changed(before, after) == ["model.weight", "state.weight.count", "state.weight.sum"]
    assert [int(after[f"state.{name}.count"]) for name in ("weight", "bias")] == [2, 1]
    assert caught.value.__notes__ == [
        "Before it failed, the step had changed 1 parameter (weight) and 2 values of optimizer state "
        "(sum of weight, count of weight): go back to a checkpoint."
    ]


def test_writes_of_a_recording_are_not_counted_so_all_may_have_changed() -> None:
    """PyTorch counts no writes when recorded launches are replayed: no counter goes back, and the error says why."""
    model, _, batch = small_training()
    step = capture_with_mse(model, torch.optim.Adam(model.parameters(), 0.01), batch)
    train_step = compiled(step)
    train_step(batch)
    residents = train_step._residents.gather(batch)
    failed = FailedSteps(train_step.placed.resolved)
    for is_replayed, updated in ((False, []), (True, [name for name, _ in model.named_parameters()])):
        failure = RuntimeError("a kernel failed")
        assert sorted(failed.recover(residents, failed.look(residents), failure, is_replayed)) == sorted(updated)
        notes = getattr(failure, "__notes__", [])
        assert [note.partition(" (")[0] for note in notes] == (
            ["Before it failed, the step may have changed 4 parameters"] if is_replayed else []
        )
    train_step.close()
