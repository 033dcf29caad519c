"""Values that a step decides by and that are known although nothing is computed.

Guards such as `if not torch.isfinite(x).all()` are recorded as if all numbers were finite, and every step checks that they
are. A random number between 0 and 1 that is compared with 0 or less, or with 1 or more, has a known outcome: layerdrop and
stochastic depth that are switched off.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Functions = tuple[Callable[..., Any], ...]

IF_FINITE: dict[Callable[..., Any], bool] = {  # tests of numbers -> what they give for finite ones
    torch.isfinite: True, Tensor.isfinite: True, torch.isnan: False, Tensor.isnan: False, torch.isinf: False,
    Tensor.isinf: False, torch.isposinf: False, torch.isneginf: False,
}  # fmt: skip

SAME: Functions = (torch.all, Tensor.all, torch.any, Tensor.any, Tensor.max, torch.max, Tensor.min, torch.min)

NEGATED: Functions = (torch.logical_not, Tensor.logical_not, Tensor.__invert__, torch.bitwise_not, Tensor.bitwise_not)

COMBINED: dict[Callable[..., Any], Callable[[Any, Any], Any]] = {
    **dict.fromkeys((torch.logical_and, Tensor.logical_and, Tensor.__and__, torch.bitwise_and), operator.and_),
    **dict.fromkeys((torch.logical_or, Tensor.logical_or, Tensor.__or__, torch.bitwise_or), operator.or_),
}

COMPARED: dict[Callable[..., Any], Callable[[Any, Any], Any]] = {
    **dict.fromkeys((torch.lt, Tensor.lt, Tensor.__lt__), operator.lt),
    **dict.fromkeys((torch.le, Tensor.le, Tensor.__le__), operator.le),
    **dict.fromkeys((torch.gt, Tensor.gt, Tensor.__gt__), operator.gt),
    **dict.fromkeys((torch.ge, Tensor.ge, Tensor.__ge__), operator.ge),
}

OBSERVED: Functions = (torch.rand, *IF_FINITE, *SAME, *NEGATED, *COMBINED, *COMPARED)

BELOW_ONE = 1 - 2**-53  # the largest that torch.rand can give

ABOVE_ZERO = 2**-24  # the smallest but 0, which it gives once in 16 million times

FINITE = "a number is not finite where the captured step found only finite ones"

NOT_ZERO = "a random number that decides what runs is exactly 0"


@dataclass(frozen=True)
class Known:
    """What is known of all elements of a tensor."""

    lowest: Any
    highest: Any
    unless: str = ""  # when it is not so, which every step has to check; "": never

    @property
    def is_certain(self) -> bool:
        """Whether there is only one possible value."""
        return bool(self.lowest == self.highest)


class KnownValues:
    """What is known of the tensors of a step, by storage."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}

    def find(self, tensor: Tensor) -> Known | None:
        """Returns what is known of a tensor."""
        return self._known.get(tensor.untyped_storage()._cdata)

    def observe(self, function: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """Notes what is known of the result of a call."""
        if isinstance(result, Tensor) and (known := self._result(function, args)) is not None:
            self._known[result.untyped_storage()._cdata] = known

    def _result(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Known | None:
        if function is torch.rand:
            return Known(0.0, BELOW_ONE)
        if function in IF_FINITE:
            return Known(IF_FINITE[function], IF_FINITE[function], FINITE)
        known = [self.find(arg) if isinstance(arg, Tensor) else None for arg in args[:2]]
        if not known or known[0] is None:
            return None
        first = known[0]
        if function in SAME and len(args) == 1:
            return first
        if function in NEGATED:
            return Known(not first.lowest, not first.highest, first.unless)
        if function in COMBINED and known[-1] is not None and first.is_certain and known[-1].is_certain:
            outcome = COMBINED[function](first.lowest, known[-1].lowest)
            return Known(outcome, outcome, first.unless or known[-1].unless)
        if function in COMPARED and isinstance(args[1], (int, float)):
            compare = COMPARED[function]
            lowest, highest = compare(first.lowest, args[1]), compare(first.highest, args[1])
            if first.lowest == 0 != first.highest and lowest != highest == compare(ABOVE_ZERO, args[1]) and args[1] == 0:
                return Known(highest, highest, NOT_ZERO)
            return Known(lowest, highest, first.unless)
        return None
