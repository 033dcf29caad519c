"""Numbers that an optimizer reads from tensors in the middle of its step."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import assert_runs_like_eager, small_training
from torch import Tensor, nn

import placewise as pw
from placewise.core.errors import CaptureError
from placewise.measure.ops import op_calls

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


class Reading(torch.optim.Optimizer):
    """Moves each parameter against its gradient, as far as a function of the gradient's norm and the step's number says."""

    def __init__(self, parameters: Any, function: Callable[[float, float], Any], lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("count", 0)
                state["count"] += 1
                norm = p.grad.norm()
                length = self.function(norm.item(), state["count"])
                p.mul_(1 - group["lr"] * length)
                p.add_(p.grad, alpha=-group["lr"] * length)
                state["largest"] = p.abs().max()


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "norm": lambda norm, count: norm,
    "clipped": lambda norm, count: max(0.1, norm / 3) / count,
    "root": lambda norm, count: min(math.sqrt(count) * norm, 2.0, norm + 1),
    "power": lambda norm, count: 1 - math.pow(count + norm, -0.8),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_number_is_read_where_the_step_has_it(name: str, micro_batches: int) -> None:
    """A state that the step replaces by a new tensor is copied into the old one."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        return model, Reading(model.parameters(), FUNCTIONS[name])

    batches = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(4)]
    for seed in range(3):
        assert_runs_like_eager(build, nn.MSELoss(), batches, micro_batches, seed=seed)


def test_ops_that_share_a_number_share_a_device() -> None:
    model, _, batch = small_training("meta")
    step = pw.capture(model, nn.MSELoss(), Reading(model.parameters(), FUNCTIONS["norm"]), batch)
    groups = dict(zip(step.graph.ops.names, step.graph.ops.groups.tolist(), strict=True))
    assert groups["0.weight.linalg_vector_norm.update"] == groups["0.weight.add_.update"] == groups["0.weight.mul_.update"]
    assert len(op_calls(step.program, len(step.graph.ops))) == len(step.graph.ops)


def test_a_branch_on_such_a_number_is_refused() -> None:
    model, _, batch = small_training("meta")
    with pytest.raises(CaptureError, match="decides by a number that it reads from a tensor"):
        pw.capture(model, nn.MSELoss(), Reading(model.parameters(), lambda norm, count: 1 if norm > 1 else norm), batch)


class Keeping(Reading):
    """Keeps a number in its state that it has read from a tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = p.sum().item()


def test_keeping_such_a_number_is_refused() -> None:
    model, _, batch = small_training("meta")
    with pytest.raises(CaptureError, match="keeps a number that it reads from a tensor: its state 'count'"):
        pw.capture(model, nn.MSELoss(), Keeping(model.parameters(), FUNCTIONS["norm"]), batch)


SETTINGS: dict[str, dict[str, Any]] = {
    "relative steps": {},
    "warm-up": {"warmup_init": True, "weight_decay": 0.1},
    "scaled": {"lr": 0.01, "relative_step": False, "beta1": 0.9},
    "plain": {"lr": 0.01, "relative_step": False, "scale_parameter": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_adafactor_of_transformers(name: str) -> None:
    """All parameters are large enough for their own scale to count, so that even the last bits are the same."""
    transformers = pytest.importorskip("transformers")

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        norm = nn.LayerNorm(5)
        nn.init.normal_(norm.bias)
        model = nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 3))
        return model, transformers.Adafactor(model.parameters(), **SETTINGS[name])

    batches: list[tuple[Tensor, Tensor]] = [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(4)]
    assert_runs_like_eager(build, nn.MSELoss(), batches, seed=1)
