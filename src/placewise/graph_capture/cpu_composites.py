"""Ops that PyTorch takes apart in another way on a CPU than on all other devices, the meta device among them.

A step of a model on a CPU is recorded as the CPU takes it apart: `group_norm` keeps channels_last there and makes its input
contiguous elsewhere. The layouts of all that follows depend on it, and so does what dropout draws.
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
    is_cpu = False


_state = _State()


@contextmanager
def composites_of(device: str) -> Iterator[None]:
    """Takes ops on the meta device apart as this kind of device does."""
    _register()
    before, _state.is_cpu = _state.is_cpu, device == "cpu"
    try:
        yield
    finally:
        _state.is_cpu = before


@cache
def _register() -> "torch.library.Library":
    """Registers the kernels, once for the process; outside of a recording they do what PyTorch's do."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("group_norm", _group_norm, "AutogradMeta")  # type: ignore[no-untyped-call]
    return library


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
