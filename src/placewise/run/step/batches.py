"""Batches: one that is like the example is taken apart into tensors, any other is refused."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from placewise.core.errors import ExecutionError


def batch_tensors(example: Any, given: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yields the path and the tensor of every entry of a batch; its structure must be the example's."""
    if isinstance(example, Tensor):
        if not isinstance(given, Tensor) or _kind(given) != _kind(example):
            raise ExecutionError(f"{path}: the step was captured with {_describe(example)}, got {_describe(given)}")
        _check_repeats(example, given, path)
        yield path, given
    elif isinstance(example, Mapping):
        if not isinstance(given, Mapping) or given.keys() != example.keys():
            raise ExecutionError(f"{path}: the step was captured with {_describe(example)}, got {_describe(given)}")
        for key, entry in example.items():
            yield from batch_tensors(entry, given[key], f"{path}[{key!r}]")
    elif isinstance(example, (list, tuple)):
        if not isinstance(given, (list, tuple)) or len(given) != len(example):
            raise ExecutionError(f"{path}: the step was captured with {_describe(example)}, got {_describe(given)}")
        for i, entry in enumerate(example):
            yield from batch_tensors(entry, given[i], f"{path}[{i}]")
    elif type(given) is not type(example) or given != example:
        raise ExecutionError(f"{path}: the step was captured with {_describe(example)}, got {_describe(given)}")


def signature_of(value: Any) -> Hashable:
    """Returns what two batches have in common that the same step can take: structure, shapes and types."""
    if isinstance(value, Tensor):
        repeats = tuple(stride == 0 and size > 1 for stride, size in zip(value.stride(), value.shape, strict=True))
        return (*_kind(value), repeats if any(repeats) else ())
    if isinstance(value, Mapping):
        return ("dict", *[(key, signature_of(entry)) for key, entry in value.items()])
    if isinstance(value, (list, tuple)):
        return ("list", *map(signature_of, value))
    return (type(value), value)


def describe_batch(batch: Any) -> str:
    """Returns the shapes and types of a batch, for people."""
    return " and ".join(_describe(tensor) for _, tensor in batch_tensors(batch, batch)) or "a batch without tensors"


def real_batch(example: Any, given: Any) -> dict[str, Tensor]:
    """Returns the tensors of a batch by path; they must have values."""
    found = dict(batch_tensors(example, given))
    for path, tensor in found.items():
        if tensor.is_meta:
            raise ExecutionError(f"{path}: is on the meta device and has no values: pass a batch on a real device")
    return found


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.layout


def _check_repeats(example: Tensor, given: Tensor, path: str) -> None:
    """Refuses values that differ where the example repeats one by expand(): the step reads only the first of them."""
    for dim, (stride, now) in enumerate(zip(example.stride(), given.stride(), strict=True)):
        if not stride and now and given.shape[dim] > 1 and not bool((given == given.narrow(dim, 0, 1)).all()):
            raise ExecutionError(
                f"{path}: the step was captured with values that are all the same along dimension {dim}, got others"
            )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f"{str(value.layout).removeprefix('torch.')} "
        return f"{layout}{str(value.dtype).removeprefix('torch.')} of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"the keys {', '.join(map(repr, value))}"
    if isinstance(value, (list, tuple)):
        return f"{len(value)} entries"
    return repr(value) if isinstance(value, (bool, int, float, str)) or value is None else f"a {type(value).__name__}"


def cut_part(tensor: Tensor, number: int, count: int) -> Tensor:
    """Returns the rows of a micro-batch; a tensor without rows belongs to every micro-batch."""
    if count == 1 or not tensor.dim():
        return tensor
    rows = tensor.shape[0] // count
    return tensor.narrow(0, number * rows, rows)


def to_layout(tensor: Tensor, strides: tuple[int, ...], device: torch.device, nbytes: int) -> Tensor:
    """Returns a tensor on a device, with these strides, alone in a storage of `nbytes`; itself if it is already like that.

    With `nbytes` = -1 it is always a new one.
    """
    storage = tensor.untyped_storage()
    if tensor.device == device and tensor.stride() == strides and storage.nbytes() == nbytes:
        return tensor.detach()
    tensor = tensor.detach()
    for dim, stride in enumerate(strides):
        if not stride and tensor.shape[dim] > 1:  # an expanded dimension is one element in memory
            return to_layout(tensor.narrow(dim, 0, 1), strides, device, nbytes).expand(tensor.shape)
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)
    return made.copy_(tensor, non_blocking=True)
