"""Small training steps, and what eager PyTorch makes of them: what captured and placed steps must equal bit for bit."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from placewise.graph_capture.training_step import TrainingStep

# --- one step in eager PyTorch ---


def cut(batch: Any, number: int, count: int) -> Any:
    """Returns micro-batch `number` of `count`."""
    return tree_map(lambda t: t.chunk(count)[number] if isinstance(t, Tensor) and t.dim() else t, batch)


def call(model: nn.Module, inputs: Any) -> Any:
    """Returns the model's output for inputs that are a dict, a tuple or a tensor."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def eager_step(step: TrainingStep) -> list[Tensor]:
    """Runs one step of the usual training loop with gradient accumulation; returns the loss of each micro-batch."""
    assert step.optimizer is not None
    scaler = step.grad_scaler or torch.amp.GradScaler("cpu", enabled=False)
    step.optimizer.zero_grad()
    losses = []
    for number in range(step.micro_batches):
        part = cut(step.batch, number, step.micro_batches)
        if isinstance(part, tuple):
            assert step.loss_fn is not None
            loss = step.loss_fn(call(step.model, part[0]), part[1])
        else:
            loss = call(step.model, part).loss
        if step.micro_batches > 1:
            loss = loss / step.micro_batches
        torch.autograd.backward(scaler.scale(loss))
        losses.append(loss.detach())
    if scaler.is_enabled():
        scaler.unscale_(step.optimizer)
    if step.clip_grad_value is not None:
        nn.utils.clip_grad_value_(step.model.parameters(), step.clip_grad_value)
    if step.clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(step.model.parameters(), step.clip_grad_norm)
    scaler.step(step.optimizer)
    scaler.update()
    return losses


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the model's parameters and buffers and the optimizer's state, by name."""
    values: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    values |= {f"buffer.{name}": value for name, value in model.named_buffers()}
    for name, parameter in model.named_parameters():
        values |= {f"state.{name}.{key}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return values


def bitwise(found: Any, expected: Any) -> bool:
    """Returns whether two values are the same bits, with NaN equal to NaN."""
    if isinstance(found, Tensor):
        return bool(torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num()))
    return bool(type(found) is type(expected) and found == expected)


def close(found: Any, expected: Any) -> bool:
    """Asserts that two values are equal up to rounding."""
    torch.testing.assert_close(found, expected)
    return True


# --- a model of everything, and every optimizer ---


def token_batches(rows: int = 8, vocab: int = 11, length: int = 5, count: int = 4) -> list[Any]:
    """Returns random batches for `Mixture`."""
    return [(torch.randint(vocab, (rows, length)), torch.randint(vocab, (rows,))) for _ in range(count)]


class Mixture(nn.Module):
    """A model with a little of everything that a training step can contain."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.cells = nn.ModuleList([nn.LSTMCell(6, 5), nn.LSTMCell(5, 6)])
        self.convolution = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.norms = nn.ModuleList([nn.BatchNorm1d(6), nn.LayerNorm(6)])
        self.dropout = nn.Dropout(0.3)
        self.output = nn.Linear(6, 11, bias=False)
        self.output.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(6))
        self.plain = torch.arange(6) * 0.1
        self.number = torch.tensor(0.7)
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        embedded = embedded + self.convolution(embedded.transpose(1, 2)).transpose(1, 2)
        state = None
        for step in range(tokens.shape[1]):
            state = self.cells[0](embedded[:, step], state)
        assert state is not None
        hidden = self.norms[0](self.cells[1](state[0])[0])
        hidden = hidden + F.dropout(self.plain, 0.5, self.training) * (self.number * 2) + self.frozen
        hidden = hidden * torch.arange(1, 7) / torch.tensor([1.0, 2, 3, 4, 5, 6]) + hidden.new_tensor([0.25])
        hidden = hidden.masked_fill(hidden > 3, 0.5)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        parts = torch.zeros(hidden.shape)
        parts[:, :4] = hidden[:, 2:]
        parts[:, [5, 4]] += hidden[:, [0, 1]] * self.mean[:2]
        parts[parts > 2] = 1.0
        parts.unsqueeze_(1).squeeze_(1).mul_(self.temperature)
        return self.output(self.dropout(self.norms[1](parts).relu_()))  # type: ignore[no-any-return]


def adam_by_hand(bias: Callable[[float], float]) -> type[torch.optim.Optimizer]:
    """Returns an optimizer as users write them: its step counter is a Python number."""

    class ByHand(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})
            self.beta = 0.9

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["count"], state["mean"] = 0, torch.zeros_like(p)
                    state["count"] += 1
                    state["mean"].lerp_(p.grad, 1 - self.beta)
                    p.data = p.data - group["lr"] / bias(1 - self.beta ** state["count"]) * state["mean"]

    return ByHand


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adam-fused": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True, fused=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), fused=True),
    "momentum-fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1, fused=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01, lr_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1, weight_decay=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "by-hand": lambda p: adam_by_hand(lambda x: x**0.5)(p, lr=0.01),  # type: ignore[call-arg]
}
