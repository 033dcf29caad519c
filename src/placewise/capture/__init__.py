"""Records a PyTorch training step as a graph; the zoo of models; importers of graphs that others measured.

The package can be called: `placewise.capture(model, loss_fn, optimizer, example_batch)` is `capture` below.
"""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from placewise.capture.training import CapturedStep

__all__ = ["capture", "capture_inference"]


def capture(
    model: "torch.nn.Module",
    loss_fn: "Callable[..., torch.Tensor] | None",
    optimizer: "torch.optim.Optimizer",
    example_batch: Any,
    *,
    micro_batches: int = 1,
    name: str = "",
) -> "CapturedStep":
    """Returns the whole training step as recorded on the meta device: forward, backward and update.

    Nothing is allocated or computed, and nothing that is given is changed. `TrainingStep` says how the model is called
    with a batch. With `micro_batches` = M the batch is cut into M parts whose gradients accumulate before the update.
    """
    from placewise.capture.step import TrainingStep
    from placewise.capture.training import capture_step

    return capture_step(TrainingStep(model, loss_fn, optimizer, example_batch, micro_batches), name)


def capture_inference(
    model: "torch.nn.Module", example_batch: Any, *, micro_batches: int = 1, name: str = ""
) -> "CapturedStep":
    """Returns the forward pass as recorded on the meta device; a batch that is a tuple is the model's arguments."""
    from placewise.capture.step import TrainingStep
    from placewise.capture.training import capture_step

    return capture_step(TrainingStep(model, None, None, example_batch, micro_batches), name)


class _Callable(ModuleType):
    """A module that can be called, since `placewise.capture` names this package and the function alike."""

    def __call__(self, *args: Any, **kwargs: Any) -> "CapturedStep":
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
