"""Meta kernels of ours, for ops whose outputs PyTorch's describe wrongly, or not for all inputs that real devices take."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten


def _laid_out(out: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Returns a tensor like this one in a memory format, with its usual strides also where a batch has a single row."""
    return torch.empty_like(out, memory_format=memory_format)


def _convolution(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
    """Returns a result in channels_last if the input or the weights are, as oneDNN and cuDNN do; PyTorch's is contiguous."""
    out: Tensor = aten.convolution.default(x, weight, *args)
    formats = [suggest_memory_format(tensor) for tensor in (x, weight)]
    return _laid_out(out, next((f for f in formats if f != torch.contiguous_format), formats[0]))


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Returns the product of groups of rows with a matrix each; PyTorch's wants bfloat16, which only some GPUs need."""
    rows = a.size(-2)
    if a.dim() == b.dim():
        assert offs is not None or a.dim() == 3
        groups = a.size(0) if offs is None else offs.size(0)
        return a.new_empty(groups, rows, b.size(-1), dtype=out_dtype or a.dtype)
    return a.new_empty(rows, b.size(-1), dtype=out_dtype or a.dtype)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Returns as many counts as the caller expects; PyTorch's can't know whether there is a larger number in the input."""
    if not minlength:
        raise NotImplementedError("bincount without minlength")
    return x.new_empty(minlength, dtype=torch.int64 if weights is None else weights.dtype)


def _like(position: int, count: int = 1) -> Callable[..., Any]:
    """Returns the kernel of an op whose results are like one of its inputs, where PyTorch has none; the second is a mask."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        first = torch.empty_like(args[position])
        return first if count == 1 else (first, torch.empty_like(first, dtype=torch.bool))

    return kernel


def _in_format_of_input(op: Any, position: int = 0) -> Callable[..., Tensor]:
    """Returns the kernel of an op whose result is laid out like one of its inputs, where PyTorch's says otherwise."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = op(*args, **kwargs)
        return _laid_out(out, suggest_memory_format(args[position]))

    return kernel


def _contiguous(op: Any) -> Callable[..., Any]:
    """Returns the kernel of an op whose results are always contiguous, where PyTorch's says otherwise."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs)
        outs = out if isinstance(out, tuple) else (out,)
        made = [None if tensor is None else _laid_out(tensor, torch.contiguous_format) for tensor in outs]
        return tuple(made) if isinstance(out, tuple) else made[0]

    return kernel


def _first_in_format_of(op: Any, position: int) -> Callable[..., tuple[Tensor | None, ...]]:
    """Returns the kernel of an op whose first result is laid out like one of its inputs, where PyTorch's says otherwise."""

    def kernel(*args: Any) -> tuple[Tensor | None, ...]:
        out, *others = op(*args)
        return (None if out is None else _laid_out(out, suggest_memory_format(args[position])), *others)

    return kernel


OVERRIDES: dict[Any, Callable[..., Any]] = {
    **{
        op: _contiguous(op)
        for op in (
            aten.glu_backward.default, aten.huber_loss_backward.default, aten.log_sigmoid_forward.default,
            aten.mse_loss_backward.default, aten.native_layer_norm_backward.default, aten.rrelu_with_noise.default,
            aten.smooth_l1_loss_backward.default,
        )
    },
    **{
        op: _in_format_of_input(op)
        for op in (
            aten.channel_shuffle.default, aten.elu_backward.default, aten.hardsigmoid_backward.default,
            aten.max_unpool2d.default, aten.roll.default, aten.softplus_backward.default,
        )
    },
    aten._dirichlet_grad.default: _like(0),
    aten._sample_dirichlet.default: _like(0),
    aten._standard_gamma_grad.default: _like(0),
    aten.bincount.default: _bincount,
    aten.convolution.default: _convolution,
    aten.fake_quantize_per_channel_affine_cachemask.default: _like(0, count=2),
    aten.fake_quantize_per_tensor_affine_cachemask.default: _like(0, count=2),
    aten.hardtanh_backward.default: _in_format_of_input(aten.hardtanh_backward.default),
    aten.hardswish_backward.default: _in_format_of_input(aten.hardswish_backward.default),
    aten._batch_norm_with_update.default: _first_in_format_of(aten._batch_norm_with_update.default, 0),
    aten.batch_norm_backward.default: _first_in_format_of(aten.batch_norm_backward.default, 1),
    aten.multi_margin_loss_backward.default: _like(1),
    aten.native_batch_norm.default: _first_in_format_of(aten.native_batch_norm.default, 0),
    aten.native_batch_norm_backward.default: _first_in_format_of(aten.native_batch_norm_backward.default, 1),
    aten.native_group_norm.default: _first_in_format_of(aten.native_group_norm.default, 0),
    aten.native_group_norm_backward.default: _first_in_format_of(aten.native_group_norm_backward.default, 1),
    aten.pixel_shuffle.default: _in_format_of_input(aten.pixel_shuffle.default),
    aten.pixel_unshuffle.default: _in_format_of_input(aten.pixel_unshuffle.default),
    aten.reflection_pad2d.default: _in_format_of_input(aten.reflection_pad2d.default),
    aten.reflection_pad2d_backward.default: _in_format_of_input(aten.reflection_pad2d_backward.default, 1),
    aten.reflection_pad3d.default: _in_format_of_input(aten.reflection_pad3d.default),
    aten.reflection_pad3d_backward.default: _in_format_of_input(aten.reflection_pad3d_backward.default, 1),
    aten.replication_pad3d.default: _in_format_of_input(aten.replication_pad3d.default),
    aten.replication_pad3d_backward.default: _in_format_of_input(aten.replication_pad3d_backward.default, 1),
    aten.replication_pad2d.default: _in_format_of_input(aten.replication_pad2d.default),
    aten.replication_pad2d_backward.default: _in_format_of_input(aten.replication_pad2d_backward.default, 1),
}  # fmt: skip
if hasattr(aten, "_grouped_mm"):
    OVERRIDES[aten._grouped_mm.default] = _grouped_mm
