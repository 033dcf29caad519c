"""What the time of each op depends on: its function, the shapes, strides and types of its tensors, its plain arguments.

A graph has no arguments, so the recorded program is walked through once on the meta device.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placewise.graph_capture.meta_kernels import MetaKernels
from placewise.graph_capture.op_costs import OpFacts
from placewise.graph_capture.program import HERE, Call, Program, Resident, Slot


@dataclass(frozen=True, eq=False)
class OpCall:
    """One call with all that is needed to make it again: tensors stand on the meta device, the host's numbers are real."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]  # HERE where a device is wanted
    signature: str


def op_calls(program: Program, num_ops: int) -> list[OpCall]:
    """Returns the call of each op: [ops]."""
    values: list[Any] = [None] * program.num_slots
    for resident in program.residents:
        values[resident.slot] = _stand_in(resident)
    kernels, facts = MetaKernels(), dict[Any, OpFacts]()
    found: dict[int, OpCall] = {}
    with torch.no_grad():
        for call in program.calls:
            args, kwargs = fill(call.args, values), {key: fill(value, values) for key, value in call.kwargs.items()}
            if call.op >= 0:
                found[call.op] = OpCall(call.function, args, kwargs, _signature(call, args, kwargs))
            result = _run(call, args, kwargs, kernels, facts)
            made = [r for r in result if isinstance(r, Tensor)] if isinstance(result, (tuple, list)) else [result]
            for slot, value in zip(call.results, made, strict=True):
                values[slot] = value
    return [found[op] for op in range(num_ops)]


def _run(call: Call, args: Any, kwargs: dict[str, Any], kernels: MetaKernels, facts: dict[Any, OpFacts]) -> Any:
    kwargs = {key: "meta" if value is HERE else value for key, value in kwargs.items()}
    if not isinstance(call.function, torch._ops.OpOverload) or not _has_meta(args, kwargs):
        return call.function(*args, **kwargs)  # the host's own arithmetic
    if call.function not in facts:
        facts[call.function] = OpFacts(call.function)
    return kernels.run(call.function, facts[call.function], args, kwargs)


def _has_meta(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and value.is_meta for value in (*args, *kwargs.values()))


def _stand_in(resident: Resident) -> Any:
    """Returns a resident on the meta device; what the host keeps gets a value that arithmetic can be done with."""
    if resident.tensor >= 0:
        assert resident.like is not None
        return resident.like
    if resident.value is not None:
        return resident.value.clone()
    return 1.0 if resident.like is None else torch.ones(resident.like.shape, dtype=resident.like.dtype)


def fill(argument: Any, values: list[Any]) -> Any:
    """Returns an argument with values in the place of slots."""
    if type(argument) is Slot:
        return values[argument]
    return type(argument)([fill(entry, values) for entry in argument]) if type(argument) in (list, tuple) else argument


# --- as text ---


def _signature(call: Call, args: Any, kwargs: dict[str, Any]) -> str:
    words = [_word(arg) for arg in args] + [f"{key}={_word(value)}" for key, value in sorted(kwargs.items())]
    return f"{_name(call.function)}({', '.join(words)})"


def _name(function: Any) -> str:
    return str(function) if isinstance(function, torch._ops.OpOverload) else f"{operator.__name__}.{function.__name__}"


def _word(value: Any) -> str:
    """Returns an argument as a signature has it; of a float, and of a tensor that the host keeps, only what it is."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if not value.is_meta:
            return f"host {kind}"
        return f"{kind}{list(value.size())}" + ("" if value.is_contiguous() else f" by {list(value.stride())}")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_word, value))}]"
    return "float" if isinstance(value, float) else str(value)
