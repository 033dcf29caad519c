"""Gives a model on the meta device the values that this process needs: those of what lives on its own devices."""

import torch
from torch import Tensor, nn

from placewise.core.errors import ExecutionError
from placewise.run.deferred_weights import DeferredWeights
from placewise.run.lower.placed_step import Far

EMPTY = "empty"  # memory without values, for a checkpoint that is loaded into it


def fill_own(model: nn.Module, far: Far, weights: DeferredWeights | str) -> None:
    """Gives values to the parameters and buffers that are on the meta device and not far.

    They come from deferred weights. With EMPTY they are NaN (or zero, if they can't be), until a checkpoint is loaded.
    The tensors stay the same objects, so the optimizer keeps them.
    """
    if isinstance(weights, str) and weights != EMPTY:
        raise ExecutionError(
            f"weights must be placewise.DeferredWeights() that a model was built in, or 'empty', got {weights!r}"
        )
    own = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_meta and (name, "") not in far
    }
    if isinstance(weights, str):
        made = list(map(_without_values, own.values()))
    else:
        for name, tensor in own.items():
            if not weights.has(tensor):
                raise ExecutionError(
                    f"{name} is on the meta device and was not built in these deferred weights: build the whole model there"
                )
        made = weights.make(list(own.values()))
    for tensor, value in zip(own.values(), made, strict=True):
        new = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        torch._C._swap_tensor_impl(tensor, new)


def _without_values(tensor: Tensor) -> Tensor:
    has_nan = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return made.fill_(torch.nan if has_nan else 0)
