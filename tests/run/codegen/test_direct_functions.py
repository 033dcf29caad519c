"""Functions that call one overload of an ATen op."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from placewise.graph_capture.program import HERE, Call, Slot
from placewise.run.codegen.direct_functions import DIRECT, direct, is_cast
from placewise.run.codegen.source import Source

MATRIX, ROW = (3, 3), (3,)

GIVEN: dict[str, list[Any]] = {  # the arguments of each; a tuple at the front of a list stands for a tensor
    "_log_softmax": [MATRIX, 1, False],
    "_log_softmax_backward_data": [MATRIX, MATRIX, 1, torch.float32],
    "_softmax": [MATRIX, 1, False],
    "_softmax_backward_data": [MATRIX, MATRIX, 1, torch.float32],
    "addmm": [ROW, MATRIX, MATRIX],
    "addcmul_": [MATRIX, MATRIX, MATRIX],
    "addcdiv_": [MATRIX, MATRIX, MATRIX],
    "bernoulli_": [MATRIX, 0.9],
    "bmm": [(2, 3, 3), (2, 3, 3)],
    "cat": [[MATRIX, MATRIX], 1],
    "convolution": [(1, 3, 5, 5), (4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1],
    "expand": [(1, 3), [3, -1]],
    "lerp_": [MATRIX, MATRIX, 0.1],
    "mean": [MATRIX, [1], True],
    "native_layer_norm": [MATRIX, [3], ROW, ROW, 1e-5],
    "permute": [MATRIX, [1, 0]],
    "pow": [MATRIX, 2],
    "select": [MATRIX, 0, 1],
    "split": [MATRIX, 1, 1],
    "squeeze": [(1, 3), 0],
    "stack": [[MATRIX, MATRIX], 1],
    "sum": [MATRIX, [0], True],
    "transpose": [MATRIX, 0, 1],
    "unbind": [MATRIX, 1],
    "unsafe_split": [MATRIX, 1, 1],
    "unsqueeze": [MATRIX, 0],
    "view": [MATRIX, [9]],
    "_unsafe_view": [MATRIX, [9]],
}

TWO = ("add", "add_", "div", "mm", "mul", "mul_", "sub")


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which overloads are called, with which arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def real(value: Any) -> Any:
    """Returns a tensor of ones for a shape, also in a list of shapes."""
    if isinstance(value, tuple):
        return torch.ones(value)
    return [real(entry) for entry in value] if isinstance(value, list) and isinstance(value[0], tuple) else value


@pytest.mark.parametrize("name", DIRECT)
def test_a_direct_function_calls_this_overload_and_no_other(name: str) -> None:
    packet, _, overload = name.removeprefix("aten::").rpartition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload)
    given = [real(value) for value in GIVEN.get(packet, [MATRIX, MATRIX] if packet in TWO else [MATRIX])]
    keywords: dict[str, Any] = {"memory_format": torch.contiguous_format} if packet == "clone" else {}
    keywords |= {"value": 0.5} if packet in ("addcmul_", "addcdiv_") else {}
    torch.manual_seed(0)
    expected = function(*[value.clone() if isinstance(value, Tensor) else value for value in given], **keywords)
    torch.manual_seed(0)
    with torch.no_grad(), Calls() as calls:
        found = direct(function)(*given, **keywords)
    ((called, args, kwargs),) = calls.found
    assert str(called) == str(function).replace("_unsafe_view", "view")
    assert all(one is other or one == other for one, other in zip(args, given, strict=True))
    assert kwargs == keywords
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_other_overloads_are_called_themselves() -> None:
    assert direct(torch.ops.aten.mul.Scalar) is torch.ops.aten.mul.Scalar._op


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"dtype": torch.bfloat16, "device": HERE}, True),
        ({"dtype": torch.float32, "device": HERE, "layout": torch.strided}, True),
        ({"dtype": torch.bfloat16, "device": HERE, "memory_format": torch.preserve_format}, False),
        ({"device": HERE}, False),
        ({"dtype": torch.bfloat16}, False),
    ],
)
def test_a_cast_is_a_copy_of_the_same_strides(kwargs: dict[str, Any], expected: bool) -> None:
    """Also to the type that the tensor has."""
    call = Call(torch.ops.aten._to_copy.default, (Slot(0),), kwargs, (Slot(1),), 0)
    assert is_cast(call) is expected
    source = Source("cast", ("s0",))
    source.add(f"return {source.call(call, lambda slot: f's{slot:d}', torch.device('cpu'))}")
    tensor = torch.arange(6.0).reshape(2, 3).t()
    made = source.build()(tensor)
    assert made.dtype == kwargs.get("dtype", torch.float32)
    assert made.data_ptr() != tensor.data_ptr()
    assert made.stride() == tensor.stride()
    assert torch.equal(made.float(), tensor)
