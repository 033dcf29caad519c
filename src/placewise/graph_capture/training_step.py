"""What to capture: a training step before it is recorded."""

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import nn

from placewise.core.errors import CaptureError


@dataclass(frozen=True)
class TrainingStep:
    """A model, how its loss is made, the optimizer over its parameters, and one batch of examples.

    `batch` says how the model is called:

    - a pair `(inputs, target)`: `loss_fn(model(inputs), target)`; inputs that are a tuple become positional
      arguments, inputs that are a dict keyword arguments;
    - a dict (Hugging Face): `model(**batch)`, whose `.loss` is the loss, or `loss_fn(output)` where one is given;
    - a single tensor: `loss_fn(model(batch))`.

    Without `loss_fn` the output is the loss itself, or has it as `.loss`. Without an optimizer the step is inference:
    the forward pass alone, and no loss. With `micro_batches` = M every tensor of the batch is cut into M equal parts
    along its first dimension; the gradients of loss / M accumulate before the one update.
    """

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None
    batch: Any
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name, kind, is_right in (
            ("model", "a torch.nn.Module", isinstance(self.model, nn.Module)),
            ("loss_fn", "a function or None", self.loss_fn is None or callable(self.loss_fn)),
            ("optimizer", "a torch.optim.Optimizer or None", isinstance(self.optimizer, (torch.optim.Optimizer, NoneType))),
        ):
            if not is_right:
                raise CaptureError(f"{name} must be {kind}, got a {type(getattr(self, name)).__name__}")
