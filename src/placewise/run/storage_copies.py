"""Copies of whole storages.

A tensor of the graph is a storage. So a copy moves all of its bytes, and the tensor that is returned is the same view
(type, size, strides, offset) of the copied storage; other views are made again on the copy.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Empty = Callable[..., Tensor]  # torch.empty_strided, with the device and the kind of memory given


def fills_storage(tensor: Tensor) -> bool:
    """Whether a tensor is its whole storage, from the first byte to the last."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def clone_storage(tensor: Tensor) -> Tensor:
    """Returns the same view of a clone of its storage, on the same device."""
    if fills_storage(tensor):
        return tensor.clone()
    return _view_of(tensor.untyped_storage().clone(), tensor)  # type: ignore[no-untyped-call]


def copy_storage_to(tensor: Tensor, empty: Empty) -> Tensor:
    """Returns the same view of a copy of its storage in new memory; the copy may still be running."""
    if fills_storage(tensor):
        return empty(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(tensor, non_blocking=True)
    source = storage_bytes(tensor)
    made = empty(source.size(), (1,), dtype=torch.uint8).copy_(source, non_blocking=True)
    return _view_of(made.untyped_storage(), tensor)


def copy_storage_over(tensor: Tensor, earlier: Tensor) -> Tensor:
    """Copies a tensor's storage over that of an earlier copy, which it returns; the copy may still be running."""
    if fills_storage(tensor):
        earlier.copy_(tensor, non_blocking=True)
    else:
        storage_bytes(earlier).copy_(storage_bytes(tensor), non_blocking=True)
    return earlier


def same_view(copy: Tensor, tensor: Tensor) -> Tensor:
    """Returns the view of a copy's storage that a tensor is of the original."""
    return _view_of(copy.untyped_storage(), tensor)


def storage_bytes(tensor: Tensor) -> Tensor:
    """Returns the whole storage of a tensor as uint8."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _view_of(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Returns the view of a storage that has another tensor's size, strides, offset and type."""
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())
