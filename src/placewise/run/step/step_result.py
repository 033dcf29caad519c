"""What a call of a compiled step returns: the loss, or the loss with what the model returned."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from placewise.graph_capture.returned import Returned, ReturnedOutput
from placewise.graph_capture.structures import Structure


class StepResult(NamedTuple):
    """What a step returns that was captured with `outputs=True`."""

    loss: Tensor
    output: Any  # what the model returned, in its own structure; micro-batches are joined
    grad_norm: Tensor | None = None  # of all gradients, before they are clipped; None without clip_grad_norm


def loss_of(returned: Returned, outputs: Sequence[Tensor]) -> Tensor:
    """Returns the loss of a step: the sum over its micro-batches, because each one has its part of the whole."""
    loss, *others = [outputs[position] for position in returned.losses]
    for other in others:
        loss = loss + other.to(loss.device)
    return loss


def model_output(output: ReturnedOutput, outputs: Sequence[Tensor]) -> Any:
    """Returns what the model returned; rows of micro-batches are joined, and numbers are averaged."""
    return fill(output.structure, [_joined([outputs[p] for p in positions]) for positions in output.positions])


def fill(structure: Structure, values: Sequence[Tensor]) -> Any:
    """Returns a structure with these values; those that were numbers become numbers."""
    leaves = zip(structure.leaves, values, strict=True)
    return structure.fill([value if isinstance(leaf, Tensor) else value.item() for leaf, value in leaves])


def _joined(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    on_one_device = [part.to(parts[0].device) for part in parts]
    return torch.cat(on_one_device) if parts[0].dim() else torch.stack(on_one_device).mean()
