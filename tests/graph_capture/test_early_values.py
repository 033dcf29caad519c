"""What is known before a step runs may decide what it does; every step checks what comes from the batch or a buffer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import assert_runs_like_eager, compiled, cpu_cluster
from torch import Tensor, nn

import placewise as pw
from placewise.core.errors import CaptureError, OtherBranch

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


class Model(nn.Module):
    """A layer, and a function of its result and of a mask from the batch."""

    def __init__(self, function: Callable[["Model", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.function(self, self.layer(x), mask)


def chosen(module: Model, y: Tensor, mask: Tensor) -> Tensor:
    return y.relu() if mask.any() else -y


def shortened(module: Model, y: Tensor, mask: Tensor) -> Tensor:
    """Cuts to the longest sequence, as code for padded batches does."""
    length = int(mask.long().sum(1).max())
    return y * length + y[:, :length].mean()


def by_list(module: Model, y: Tensor, mask: Tensor) -> Tensor:
    lengths = mask.sum(1).tolist()
    return torch.stack([y[i, : 1 + n].sum() * y[i] for i, n in enumerate(lengths)])


def written_before(module: Model, y: Tensor, mask: Tensor) -> Tensor:
    """Decides by a tensor that was changed in place, as Longformer does with its global attention."""
    found = torch.zeros_like(mask)
    found[:, 0] = True
    found &= mask
    return y.tanh() if found.flatten().any().item() else y


def selected(module: Model, y: Tensor, mask: Tensor) -> Tensor:
    """Selects rows by a mask and by their numbers, whose count depends on the mask."""
    rows = mask[:, 0].nonzero().flatten()
    return y + y[mask].sum() + y[rows].mean(0) + torch.masked_select(y, mask).mean() + y[mask[:, 1], 1:3].sum()


def by_constant(module: Model, y: Tensor, mask: Tensor) -> Tensor:
    """Compares a mask made of constants, as nn.Transformer does."""
    causal = torch.triu(torch.full((4, 4), float("-inf")), diagonal=1)
    same = (causal == torch.triu(torch.full((4, 4), float("-inf")), diagonal=1)).all()
    factor = torch.tensor([2.0, 3.0]).sum().item()
    return (y + 1 if bool(same) else y) * factor


FUNCTIONS = [chosen, shortened, by_list, written_before, selected, by_constant]

MASK = torch.tensor([[True, True, False, False]] * 3 + [[True, False, False, False]] * 3)


def batch_with(mask: Tensor) -> Any:
    return (torch.randn(6, 4), mask), torch.randn(6, 4)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_batches_that_decide_alike_train_as_in_eager_code(function: Any, micro_batches: int) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model(function)
        return model, torch.optim.SGD(model.parameters(), 0.01)

    assert_runs_like_eager(build, nn.MSELoss(), [batch_with(MASK) for _ in range(3)], micro_batches)


@pytest.mark.parametrize("function", FUNCTIONS[:-1])
def test_a_batch_that_decides_otherwise_is_refused_before_anything_runs(function: Any) -> None:
    model = Model(function)
    step = pw.capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.01), batch_with(MASK))
    train_step = compiled(step)
    before = model.layer.weight.detach().clone()
    with pytest.raises(OtherBranch, match=r"decides what the step does.*when the step was captured and is .* now: capture"):
        train_step(batch_with(torch.zeros_like(MASK)))
    assert torch.equal(model.layer.weight, before)
    train_step(batch_with(MASK))
    train_step.close()


def test_constants_are_no_precondition() -> None:
    model = Model(by_constant)
    step = pw.capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.01), batch_with(MASK))
    assert step.program.preconditions == ()


def test_train_step_keeps_a_step_for_each_decision() -> None:
    model, lines = Model(chosen), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    train_step = pw.train_step(model, nn.MSELoss(), optimizer, cluster=cpu_cluster(), seconds=0, report=lines.append)
    for mask in (MASK, torch.zeros_like(MASK), MASK, torch.zeros_like(MASK)):
        batch = batch_with(mask)
        expected = nn.functional.mse_loss(model(*batch[0]), batch[1])
        torch.testing.assert_close(train_step(batch), expected.detach())
    assert len(lines) == len(train_step.plans) == 2
    train_step.close()


class FirstTime(nn.Module):
    """Sets its scale from the first batch, as ActNorm does; a buffer says whether it has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.is_set: Tensor
        self.scale: Tensor
        self.register_buffer("is_set", torch.tensor(False))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if not self.is_set:
            self.scale.copy_(1 / y.detach().std(0))
            self.is_set.fill_(True)
        return y * self.scale


def test_a_buffer_may_decide() -> None:
    model = FirstTime()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    train_step = pw.train_step(model, nn.MSELoss(), optimizer, cluster=cpu_cluster(), seconds=0, report=lambda line: None)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    scale = 1 / model.layer(x).detach().std(0)
    for _ in range(3):
        train_step((x, y))
    torch.testing.assert_close(model.scale, scale)
    assert len(train_step.plans) == 2
    train_step.close()


def test_what_the_parameters_decide_is_refused() -> None:
    model = Model(lambda module, y, mask: y if (y * mask).sum() > 0 else -y)
    with pytest.raises(CaptureError, match="the step depends on data"):
        pw.capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.01), batch_with(MASK))


def test_a_batch_without_values_can_not_decide() -> None:
    model = Model(chosen)
    batch = ((torch.randn(6, 4, device="meta"), MASK.to("meta")), torch.randn(6, 4, device="meta"))
    with pytest.raises(CaptureError, match="the step depends on data"):
        pw.capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.01), batch)


def scaled_size(x: Tensor, factor: int) -> Tensor:
    return torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * factor)


def test_scripted_functions_run_as_python() -> None:
    """DeBERTa of transformers has such ones."""
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(scaled_size)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Model(lambda module, y, mask: y / scripted(y, 3))
        return model, torch.optim.SGD(model.parameters(), 0.01)

    assert_runs_like_eager(build, nn.MSELoss(), [batch_with(MASK) for _ in range(2)])
