"""Functions that call one overload of an ATen op sooner than the overload itself.

`torch.ops.aten.mm.default` parses its arguments by the op's schema, for any op. For many ops PyTorch has a generated parser,
which takes about 0.3 µs less: `torch.mm`, `Tensor.view`. Only those are here that call this overload with these arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from placewise.graph_capture.program import HERE, Call

FUNCTIONS = {  # by the overload that the function calls with tensors and numbers as recorded
    "default": (
        "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data addmm bmm cat clone convolution cos mm "
        "native_layer_norm neg permute relu relu_ rsqrt sigmoid sigmoid_ sin sqrt stack t tanh tanh_ unsqueeze"
    ),
    "Tensor": "add div mul split sub unsafe_split",
    "Tensor_Scalar": "pow",
    "dim": "mean squeeze",
    "dim_IntList": "sum",
    "int": "select transpose unbind",
}

METHODS = {
    "default": "addcdiv_ addcmul_ expand view",
    "Scalar": "lerp_",
    "Tensor": "add_ mul_",
    "float": "bernoulli_",
}

LAYERS = {"default": "gelu silu"}


def _direct() -> dict[str, Callable[..., Any]]:
    spaces: list[tuple[dict[str, str], Any]] = [
        (FUNCTIONS, torch._C._VariableFunctions), (METHODS, torch._C.TensorBase), (LAYERS, torch._C._nn)
    ]  # fmt: skip
    found = {
        f"aten::{name}.{overload}": getattr(space, name)
        for table, space in spaces
        for overload, names in table.items()
        for name in names.split()
        if hasattr(space, name)
    }
    return found | {"aten::_unsafe_view.default": torch.Tensor.view}  # which differ for autograd alone


DIRECT = _direct()


def is_cast(call: Call) -> bool:
    """Whether a call only changes a tensor's type: `Tensor.to` then takes half of the time."""
    if call.function is not torch.ops.aten._to_copy.default or len(call.args) != 1 or "dtype" not in call.kwargs:
        return False
    others = call.kwargs.keys() - {"dtype", "device", "layout"}
    return not others and call.kwargs.get("device") is HERE and call.kwargs.get("layout", torch.strided) is torch.strided


def direct(function: OpOverload) -> Callable[..., Any]:
    """Returns the fastest way to call an overload."""
    return DIRECT.get(f"{function._schema.name}.{function._overloadname}") or function._op
