"""The state that an optimizer does not have yet is one from which its first step is like all others."""

import copy
from typing import Any

import pytest
import torch
from compiled_steps import assert_runs_like_eager, compiled
from torch import nn

import placewise as pw
from placewise.core.errors import CaptureError, ExecutionError

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]

BATCHES = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(4)]


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Written(torch.optim.Optimizer):
    """An optimizer whose step is given as a function of it."""

    def __init__(self, parameters: Any, update: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **defaults})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(group, p, p.grad, self.state[p])


def first_gradient(group: dict[str, Any], p: Any, gradient: Any, state: dict[str, Any]) -> None:
    """Momentum that starts from the first gradient with decay, as in SGD and LARS: the same as from zero."""
    gradient = gradient + 0.1 * p
    if "momentum" not in state:
        state["momentum"] = gradient.clone()
    else:
        state["momentum"].mul_(0.9).add_(gradient)
    p.sub_(group["lr"] * state["momentum"])


def dampened(group: dict[str, Any], p: Any, gradient: Any, state: dict[str, Any]) -> None:
    """Momentum that takes only half of a gradient, but all of the first one."""
    if "momentum" not in state:
        state["momentum"] = gradient.clone()
    else:
        state["momentum"].mul_(0.9).add_(gradient, alpha=0.5)
    p.sub_(group["lr"] * state["momentum"])


def from_parameter(group: dict[str, Any], p: Any, gradient: Any, state: dict[str, Any]) -> None:
    """Averages that start from the parameter itself."""
    if "average" not in state:
        state["average"] = p.clone()
    p.sub_(group["lr"] * gradient)
    state["average"].lerp_(p, 0.5)


def out_argument(group: dict[str, Any], p: Any, gradient: Any, state: dict[str, Any]) -> None:
    """Writes its state through `out`, as Adamax does."""
    if "largest" not in state:
        state["largest"] = torch.zeros_like(p)
    torch.maximum(state["largest"].mul_(0.9), (gradient + p).abs(), out=state["largest"])
    p.sub_(group["lr"] * gradient / (state["largest"] + 1e-3))


@pytest.mark.parametrize("update", [first_gradient, from_parameter, out_argument])
def test_state_that_the_first_step_creates(update: Any) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small()
        return model, Written(model.parameters(), update)

    assert_runs_like_eager(build, nn.MSELoss(), BATCHES)


def test_a_first_step_unlike_all_others_is_refused() -> None:
    model = small()
    step = pw.capture(model, nn.MSELoss(), Written(model.parameters(), dampened), BATCHES[0])
    with pytest.raises(ExecutionError, match="the first step of Written differs from all others: take it in eager code"):
        compiled(step)


def test_after_an_eager_first_step_the_others_are_captured() -> None:
    model = small()
    eager = copy.deepcopy(model)
    optimizers = [Written(m.parameters(), dampened) for m in (model, eager)]
    train_step: Any = None
    for number, batch in enumerate(BATCHES):
        for m, optimizer in zip((model, eager), optimizers, strict=True):
            if m is eager or number == 0:
                optimizer.zero_grad()
                nn.functional.mse_loss(m(batch[0]), batch[1]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        if number == 0:
            train_step = compiled(pw.capture(model, nn.MSELoss(), optimizers[0], batch))
        else:
            train_step(batch)
        assert all(map(torch.equal, model.parameters(), eager.parameters())), number
    train_step.close()


class CountingInGroup(torch.optim.Optimizer):
    """Keeps its step counter in the parameter group, which its first step makes, as LAMB and Adan of timm do."""

    def __init__(self, parameters: Any, first: float, is_tensor: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.first, self.is_tensor = first, is_tensor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = torch.tensor(self.first) if self.is_tensor else self.first
            group["step"] += 1
            count = group["step"].item() if self.is_tensor else group["step"]
            for p in group["params"]:
                p.sub_(group["lr"] / count * p.grad)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_counter_in_the_parameter_group(is_tensor: bool) -> None:
    optimizers: list[CountingInGroup] = []

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small()
        optimizers.append(CountingInGroup(model.parameters(), 0.0 if is_tensor else 0, is_tensor))
        return model, optimizers[-1]

    assert_runs_like_eager(build, nn.MSELoss(), BATCHES)
    assert [optimizer.param_groups[0]["step"] for optimizer in optimizers] == [4, 4]


def test_other_entries_that_a_first_step_makes_are_refused() -> None:
    model = small()
    with pytest.raises(CaptureError, match="first step makes 'step' of its parameter group 0: take it eagerly"):
        pw.capture(model, nn.MSELoss(), CountingInGroup(model.parameters(), 6), BATCHES[0])
