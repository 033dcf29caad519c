"""A training step to capture: a model, its loss, its optimizer and an example batch."""

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import nn

from placewise.core.errors import CaptureError


@dataclass(frozen=True)
class TrainingStep:
    """A model, its loss function, the optimizer of its parameters, and an example batch.

    The form of `batch` decides how the model is called:

    - a pair `(inputs, target)`: `loss_fn(model(inputs), target)`; if `inputs` is a tuple, they are positional
      arguments, if it is a dict, keyword arguments;
    - a dict (Hugging Face): `model(**batch)`, whose `.loss` is the loss, or `loss_fn(output)` if there is a `loss_fn`;
    - a single tensor: `loss_fn(model(batch))`.

    Without `loss_fn`, the output is the loss, or has it as `.loss`. Without an optimizer, the step is inference: only
    the forward pass, and no loss. With `micro_batches` = M, every tensor of the batch is split into M equal parts along
    its first dimension, and the gradients of loss / M accumulate before the update.
    """

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None
    batch: Any
    micro_batches: int = 1
    autocast: torch.dtype | None = None  # model and loss run with the casts of torch.autocast("cuda", autocast)

    def __post_init__(self) -> None:
        for name, kind, is_right in (
            ("model", "a torch.nn.Module", isinstance(self.model, nn.Module)),
            ("loss_fn", "a function or None", self.loss_fn is None or callable(self.loss_fn)),
            ("optimizer", "a torch.optim.Optimizer or None", isinstance(self.optimizer, (torch.optim.Optimizer, NoneType))),
        ):
            if not is_right:
                raise CaptureError(f"{name} must be {kind}, got a {type(getattr(self, name)).__name__}")
