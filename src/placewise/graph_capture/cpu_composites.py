"""Ops that PyTorch takes apart by device, and that would be recorded as only the meta device takes them apart.

A step of a model on a CPU is recorded as the CPU takes it apart: `group_norm` keeps channels_last there and makes its input
contiguous elsewhere. The layouts of all that follows depend on it, and so does what dropout draws. `batch_norm` becomes the
op that chooses its kernel where it runs: cuDNN's on a GPU if eager code takes that, PyTorch's own on a CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


class _State(local):
    is_recording = is_cpu = False


_state = _State()


@contextmanager
def composites_of(device: str) -> Iterator[None]:
    """Takes ops on the meta device apart as this kind of device does."""
    _register()
    before = _state.is_recording, _state.is_cpu
    _state.is_recording, _state.is_cpu = True, device == "cpu"
    try:
        yield
    finally:
        _state.is_recording, _state.is_cpu = before


@cache
def _register() -> "torch.library.Library":
    """Registers the kernels, once for the process; outside of a recording they do what PyTorch's do."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("group_norm", _group_norm, "AutogradMeta")  # type: ignore[no-untyped-call]
    library.impl("batch_norm", _batch_norm, "AutogradMeta")  # type: ignore[no-untyped-call]
    return library


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, training: bool,
    momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    """Normalizes by the op that keeps what cuDNN reserves; there is one only for training with everything given."""
    given = (weight, bias, mean, variance)
    is_whole = all(tensor is not None and tensor.shape == x.shape[1:2] for tensor in given) and x.numel() > 0
    if not _state.is_recording or not training or not is_whole:
        return aten.batch_norm.default.decompose(x, *given, training, momentum, eps, cudnn_enabled)  # type: ignore[no-any-return]
    return aten._batch_norm_with_update.default(x, *given, momentum, eps)[0]  # type: ignore[no-any-return]


def _group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    if not _state.is_cpu or suggest_memory_format(x) == torch.contiguous_format:
        return aten.group_norm.default.decompose(x, num_groups, weight, bias, eps, cudnn_enabled)  # type: ignore[no-any-return]
    x = x.contiguous(memory_format=suggest_memory_format(x))
    weight, bias = (None if tensor is None else tensor.contiguous() for tensor in (weight, bias))
    return _GroupNorm.apply(x, weight, bias, num_groups, eps)  # type: ignore[no-any-return, no-untyped-call]


class _GroupNorm(torch.autograd.Function):
    """PyTorch's own one, whose backward pass makes its inputs contiguous on all devices but the CPU, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float) -> Tensor:
        rows, channels = x.shape[:2]
        ctx.sizes = (rows, channels, x.shape[2:].numel(), num_groups)
        out, mean, rstd = aten.native_group_norm.default(x, weight, bias, *ctx.sizes, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        grad = grad.contiguous(memory_format=suggest_memory_format(x))
        needed = list(ctx.needs_input_grad[:3])
        return *aten.native_group_norm_backward.default(grad, x, mean, rstd, weight, *ctx.sizes, needed), None, None
