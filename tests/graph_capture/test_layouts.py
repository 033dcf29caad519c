"""Ops are recorded with the layouts that their kernels give on a CPU, whatever the layout of their inputs.

Another layout costs no accuracy, because results are copied into it, but a sum over it has other last bits.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from placewise.graph_capture.meta_overrides import OVERRIDES
from placewise.graph_capture.recorder import meta_like

pytestmark = pytest.mark.filterwarnings("ignore")

Function = Callable[[Tensor], Any]


class Comparison(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the ops whose results have other strides than those that are recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.different: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, named = tree_map_only(Tensor, meta_like, (args, kwargs or {}))
        named |= {"device": "meta"} if "device" in named else {}
        out = func(*args, **(kwargs or {}))
        recorded = OVERRIDES.get(func, func)(*given, **named)
        for real, meta in zip(tree_leaves(out), tree_leaves(recorded), strict=True):
            if isinstance(real, Tensor) and real.numel() > 1 and strides(real) != strides(meta):
                self.different.append(f"{func}: {real.stride()}, recorded {meta.stride()}")
        return out


def strides(tensor: Tensor) -> list[tuple[int, int]]:
    """Returns sizes and strides where they count."""
    return [(size, stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1]


def target_like(x: Tensor) -> Tensor:
    return torch.rand(x.shape)


LOSSES: dict[str, Function] = {
    "mse": lambda x: F.mse_loss(x, target_like(x)),
    "l1": lambda x: F.l1_loss(x, target_like(x)),
    "smooth l1": lambda x: F.smooth_l1_loss(x, target_like(x)),
    "huber": lambda x: F.huber_loss(x, target_like(x)),
    "binary": lambda x: F.binary_cross_entropy_with_logits(x, target_like(x)),
    "classes": lambda x: F.cross_entropy(x, target_like(x).softmax(1)),
    "divergence": lambda x: F.kl_div(x, target_like(x), reduction="batchmean"),
}
ANY: dict[str, Function] = {
    "elu": F.elu,
    "gelu": F.gelu,
    "silu": F.silu,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "relu6": F.relu6,
    "leaky": F.leaky_relu,
    "glu": lambda x: F.glu(x, 1),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "softmax": lambda x: x.softmax(1),
    "log softmax": lambda x: x.log_softmax(1),
    "group norm": nn.GroupNorm(2, 8),
    "dropout": lambda x: F.dropout(x, 0.3),
    "roll": lambda x: x.roll(1, 2),
    "flip": lambda x: x.flip(1),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "sort": lambda x: x.sort(1)[0],
    "cumsum": lambda x: x.cumsum(1),
    "chosen": lambda x: x[:, [0, 2]],
    "layer norm": lambda x: F.layer_norm(x.movedim(1, -1), (8,)).movedim(-1, 1),
    "normalized": lambda x: F.normalize(x, dim=1),
    "product": lambda x: x @ x.mT,
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "where": lambda x: torch.where(x > 0, x, -x),
}
IMAGES: dict[str, Function] = {
    "batch norm": nn.BatchNorm2d(8),
    "instance norm": nn.InstanceNorm2d(8, affine=True),
    "max": nn.MaxPool2d(2),
    "mean": nn.AvgPool2d(2),
    "adaptive": nn.AdaptiveAvgPool2d(3),
    "whole": nn.AdaptiveAvgPool2d(1),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "bicubic": nn.Upsample(scale_factor=2, mode="bicubic"),
    "convolution": nn.Conv2d(8, 8, 3),
    "depthwise": nn.Conv2d(8, 8, 3, groups=8),
    "transposed": nn.ConvTranspose2d(8, 8, 3),
    "reflected": nn.ReflectionPad2d(1),
    "replicated": nn.ReplicationPad2d(1),
    "shuffled": nn.PixelShuffle(2),
    "channels": nn.ChannelShuffle(2),
    "unpooled": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), [2, 2]),
    "dropped": nn.Dropout2d(0.3),
}
VOLUMES: dict[str, Function] = {
    "batch norm": nn.BatchNorm3d(8),
    "max": nn.MaxPool3d(2),
    "trilinear": nn.Upsample(scale_factor=2, mode="trilinear"),
    "reflected": nn.ReflectionPad3d(1),
    "replicated": nn.ReplicationPad3d(1),
    "convolution": nn.Conv3d(8, 8, 3),
}


def in_order(*order: int) -> Function:
    """Returns the function that lays out a tensor with its dimensions in this order, the outermost first."""
    back = [order.index(dim) for dim in range(len(order))]
    return lambda x: x.permute(order).contiguous().permute(back)


LAYOUTS: dict[str, tuple[Function, tuple[int, ...], dict[str, Function]]] = {
    "channels_last": (in_order(0, 2, 3, 1), (2, 8, 6, 6), {**LOSSES, **ANY, **IMAGES}),
    "turned images": (in_order(0, 1, 3, 2), (2, 8, 6, 6), {**LOSSES, **ANY, **IMAGES}),
    "batch inside": (in_order(2, 3, 0, 1), (2, 8, 6, 6), {**LOSSES, **ANY, **IMAGES}),
    "turned rows": (in_order(0, 2, 1), (2, 8, 6), {**LOSSES, **ANY}),
    "length first": (in_order(1, 0, 2), (2, 8, 6), {**LOSSES, **ANY}),
    "channels_last_3d": (in_order(0, 2, 3, 4, 1), (2, 8, 4, 4, 4), {**LOSSES, **VOLUMES}),
}

ENDS: tuple[Function, ...] = (  # a contiguous gradient, one like the result, and one of another op
    lambda y: (y * torch.arange(float(y.numel())).view(y.shape)).sum(),
    lambda y: (y * y).mean(),
    lambda y: y.flatten().tanh().sum(),
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_results_are_recorded_with_the_strides_that_kernels_give(name: str) -> None:
    laid_out, shape, functions = LAYOUTS[name]
    for function in functions.values():
        for end in ENDS:
            x = laid_out(torch.randn(shape)).requires_grad_()
            with Comparison() as comparison:
                end(function(x)).backward()
            assert comparison.different == []
