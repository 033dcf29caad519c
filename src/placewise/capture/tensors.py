"""Small things about tensors that the recorder needs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def without_data(tensor: Tensor) -> Tensor:
    """Returns a tensor that has the shape, strides and type of another, and nothing else."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def collect(values: Any, into: list[Tensor]) -> None:
    """Appends every tensor in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            into.append(value)
        elif type(value) in (list, tuple):
            collect(value, into)


def with_tensors(value: Any, found: Callable[[Tensor], Tensor]) -> Any:
    """Returns nested lists, tuples and dicts with what is found for each tensor in its place."""
    if isinstance(value, Tensor):
        return found(value)
    if type(value) in (list, tuple):
        return type(value)([with_tensors(entry, found) for entry in value])
    if type(value) is dict:
        return {key: with_tensors(entry, found) for key, entry in value.items()}
    return value
