"""Numbers that Python computes in a step, recorded as arithmetic instead of constants.

Adam divides by 1 - beta ** step, and a scheduler changes the learning rate between steps. If such numbers were recorded as
constants, the recorded step would repeat one moment of training forever. So while a step is recorded they are HostScalars:
floats that also record their arithmetic in the program.

Adafactor also computes with numbers that it reads from tensors of the step. Such a number is *late*: it is not known before
the step has come that far, so no branch may depend on it.
"""

import builtins
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from placewise.core.errors import CaptureError
from placewise.graph_capture.program import Slot
from placewise.graph_capture.program_builder import ProgramBuilder

PLAIN = float.__float__  # of a HostScalar: its value alone, without a record

MATH = tuple(name for name, function in vars(math).items() if callable(function) and name not in ("floor", "ceil", "trunc"))


class HostScalar(float):
    """A float whose arithmetic is recorded."""

    __slots__ = ("program", "slot")
    program: ProgramBuilder
    slot: Slot

    @classmethod
    def of(cls, value: float, slot: Slot, program: ProgramBuilder) -> "HostScalar":
        """Returns a number with its slot in the program."""
        scalar = cls(value)
        scalar.slot, scalar.program = slot, program
        return scalar

    def record(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns what a function gives for numbers, and records the call."""
        plain = [PLAIN(arg) if isinstance(arg, HostScalar) else arg for arg in args]
        if not all(isinstance(arg, (int, float)) for arg in plain):
            return NotImplemented
        slots = tuple(arg.slot if isinstance(arg, HostScalar) else arg for arg in args)
        return HostScalar.of(function(*plain), self.program.host_arithmetic(function, slots), self.program)

    def __add__(self, other: Any) -> Any:
        return self.record(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self.record(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return self.record(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.record(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return self.record(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self.record(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return self.record(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self.record(operator.truediv, other, self)

    def __pow__(self, other: Any, modulo: None = None) -> Any:
        return self.record(operator.pow, self, other)

    def __rpow__(self, other: Any, modulo: None = None) -> Any:
        return self.record(operator.pow, other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self.record(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self.record(operator.floordiv, other, self)

    def __mod__(self, other: Any) -> Any:
        return self.record(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return self.record(operator.mod, other, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __abs__(self) -> Any:
        return self.record(abs, self)

    def __round__(self, digits: Any = None) -> Any:
        return self.record(round, self, *(() if digits is None else (digits,)))

    def __floor__(self) -> Any:
        return self.record(math.floor, self)

    def __ceil__(self) -> Any:
        return self.record(math.ceil, self)

    def __trunc__(self) -> Any:
        return self.record(math.trunc, self)

    def __int__(self) -> int:
        """Returns a whole number that Python wants to have as one: it must be the same in every step."""
        return int(PLAIN(self.record(int, self)._must_stay()))

    def __float__(self) -> float:
        """Returns a plain number, which must be the same in every step."""
        return PLAIN(self._must_stay())

    def __index__(self) -> int:
        """Returns a whole number that counts or chooses (range, slices): it must be the same in every step."""
        if not self.is_integer():
            raise TypeError("'float' object cannot be interpreted as an integer")
        return int(PLAIN(self._must_stay()))

    def __neg__(self) -> Any:
        return self.record(operator.neg, self)

    def __lt__(self, other: Any) -> Any:
        return self._compare(operator.lt, other)

    def __le__(self, other: Any) -> Any:
        return self._compare(operator.le, other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(operator.gt, other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(operator.ge, other)

    def __eq__(self, other: object) -> Any:
        return self._compare(operator.eq, other)

    def __ne__(self, other: object) -> Any:
        return self._compare(operator.ne, other)

    __hash__ = float.__hash__

    def __bool__(self) -> bool:
        return bool(self._compare(operator.ne, 0.0))

    def is_integer(self) -> bool:
        """Returns whether it is a whole number; it has to stay one."""
        return bool(self._compare(_is_whole, None))

    def _must_stay(self) -> "HostScalar":
        self._compare(operator.eq, PLAIN(self))
        return self

    def _compare(self, function: Callable[..., Any], other: Any) -> Any:
        if self.program.is_late(self.slot) or (isinstance(other, HostScalar) and self.program.is_late(other.slot)):
            raise CaptureError("the optimizer decides by a number that it reads from a tensor, which can't be recorded")
        outcome = function(PLAIN(self), PLAIN(other) if isinstance(other, HostScalar) else other)
        self.program.branch(function, self.slot, other.slot if isinstance(other, HostScalar) else other, outcome)
        return outcome


def _is_whole(value: float, _: None) -> bool:
    return float(value).is_integer()


@contextmanager
def recorded_functions() -> Iterator[None]:
    """Makes min, max and the math module record what they compute from HostScalars."""
    with ExitStack() as patches:
        for name in MATH:
            patches.enter_context(patch.object(math, name, _recording(getattr(math, name))))
        for name, limit in (("min", "max"), ("max", "min")):  # max(x, 1) has a lower limit
            patches.enter_context(patch.object(builtins, name, _recording(getattr(builtins, name), limit)))
        yield


def _recording(function: Callable[..., Any], limit: str = "") -> Callable[..., Any]:
    """Returns a function that records its calls with HostScalars; with `limit`, it is min or max, also of a tensor."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.is_meta] if limit else []
        if len(tensors) == 1 and len(args) == 2 and not tensors[0].dim():
            return torch.clamp(tensors[0], **{limit: next(arg for arg in args if arg is not tensors[0])})
        if not limit and (kwargs or any(isinstance(arg, (list, tuple)) for arg in args)):
            args, kwargs = tree_map_only(HostScalar, float, (args, kwargs))  # which have to stay as they are
        if scalars := [arg for arg in args if type(arg) is HostScalar]:
            return scalars[0].record(function, *args)
        return function(*args, **kwargs)

    return call
