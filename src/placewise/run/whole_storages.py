"""A tensor of the graph is a whole storage: copying it moves all its bytes, and views are made again on the copy."""

from collections.abc import Callable

import torch
from torch import Tensor

Empty = Callable[..., Tensor]  # torch.empty_strided, with the device and the kind of memory given


def is_whole(window: Tensor) -> bool:
    """Whether a window is its storage, from the first to the last byte."""
    return window.is_contiguous() and window.untyped_storage().nbytes() == window.nbytes


def copy_window(window: Tensor) -> Tensor:
    """Returns the same window on a copy of its storage, in the same memory."""
    if is_whole(window):
        return window.clone()
    return same_window(window.untyped_storage().clone(), window)  # type: ignore[no-untyped-call]


def copy_window_into(window: Tensor, empty: Empty) -> Tensor:
    """Returns the same window on a copy of its storage in new memory; the copy may still be under way."""
    if is_whole(window):
        return empty(window.size(), window.stride(), dtype=window.dtype).copy_(window, non_blocking=True)
    source = _bytes(window)
    made = empty(source.size(), (1,), dtype=torch.uint8).copy_(source, non_blocking=True)
    return same_window(made.untyped_storage(), window)


def copy_window_over(window: Tensor, made: Tensor) -> Tensor:
    """Copies a window's storage over that of an earlier copy, which it returns; the copy may still be under way."""
    if is_whole(window):
        made.copy_(window, non_blocking=True)
    else:
        _bytes(made).copy_(_bytes(window), non_blocking=True)
    return made


def _bytes(window: Tensor) -> Tensor:
    """Returns the whole storage of a window."""
    storage = window.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def share_window(copy: Tensor, window: Tensor) -> Tensor:
    """Returns on the storage of a copy the window that another one is on the original."""
    return same_window(copy.untyped_storage(), window)


def same_window(storage: torch.UntypedStorage, window: Tensor) -> Tensor:
    """Returns the window on a storage that has the size, strides, offset and type of another."""
    empty = torch.empty(0, dtype=window.dtype, device=storage.device)
    return empty.set_(storage, window.storage_offset(), window.size(), window.stride())
