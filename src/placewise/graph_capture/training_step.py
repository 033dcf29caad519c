"""A training step to capture: a model, its loss, its optimizer and an example batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from placewise.core.errors import CaptureError


class StepModules:
    """The model, and its loss if that is a module of its own: whose parameters and buffers a step has.

    They have the names that the model gives them; those of the loss begin with "loss:".
    """

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        owner: Any = loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn
        is_own = isinstance(owner, nn.Module) and not any(owner is module for module in model.modules())
        self.modules: dict[str, nn.Module] = {"": model, "loss:": owner} if is_own else {"": model}

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters as nn.Module does."""
        return self._named("named_parameters", remove_duplicate)

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields names and buffers as nn.Module does."""
        return self._named("named_buffers", remove_duplicate)

    def named_modules(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        """Yields names and modules as nn.Module does."""
        return self._named("named_modules", remove_duplicate)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the modules by name."""
        return {f"{prefix}{name}": value for prefix, m in self.modules.items() for name, value in m.state_dict().items()}

    def _named(self, method: str, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for prefix, module in self.modules.items():
            for name, entry in getattr(module, method)(remove_duplicate=remove_duplicate):
                if not (remove_duplicate and id(entry) in seen):
                    seen.add(id(entry))
                    yield prefix + name, entry


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

    With an enabled `grad_scaler` the step scales the loss, unscales the gradients, skips the update if one of them is not
    finite, and updates the scale. Gradients are clipped after that, by value and then by the norm of all of them, with
    PyTorch's own `clip_grad_value_` and `clip_grad_norm_`.
    """

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None
    batch: Any
    micro_batches: int = 1
    autocast: torch.dtype | torch.autocast | None = None  # of model and loss; a type is torch.autocast("cuda", type)
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    grad_scaler: torch.amp.GradScaler | None = None
    outputs: bool = False  # the step returns what the model returned, beside the loss
    fuse: bool = False  # chains of small ops become one op each, compiled to a kernel
    whole_layers: bool = False  # nn.LSTM, nn.GRU and nn.RNN are one op each way, not their cells

    def __post_init__(self) -> None:
        for name, kind, is_right in (
            ("model", "a torch.nn.Module", isinstance(self.model, nn.Module)),
            ("loss_fn", "a function or None", self.loss_fn is None or callable(self.loss_fn)),
            ("optimizer", "a torch.optim.Optimizer or None", isinstance(self.optimizer, (torch.optim.Optimizer, NoneType))),
            (
                "grad_scaler",
                "a torch.amp.GradScaler or None",
                isinstance(self.grad_scaler, (torch.amp.GradScaler, NoneType)),
            ),
        ):
            if not is_right:
                raise CaptureError(f"{name} must be {kind}, got a {type(getattr(self, name)).__name__}")
        if not isinstance(self.autocast, (torch.dtype, torch.autocast, NoneType)):
            raise CaptureError(f"autocast must be a type as torch.bfloat16, a torch.autocast or None, got {self.autocast!r}")
        for name in ("clip_grad_norm", "clip_grad_value"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise CaptureError(f"{name} must be a number above 0 or None, got {value!r}")

    @property
    def modules(self) -> StepModules:
        """The owners of the step's parameters and buffers."""
        return StepModules(self.model, self.loss_fn)

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled: a GradScaler for a kind of device that this machine lacks is disabled."""
        return self.grad_scaler is not None and self.grad_scaler.is_enabled()
