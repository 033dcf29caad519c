"""Numbers that Python computes in a step, recorded as arithmetic instead of constants.

Adam divides by 1 - beta ** step, and a scheduler changes the learning rate between steps. If such numbers were recorded as
constants, the recorded step would repeat one moment of training forever. So while a step is recorded they are HostScalars:
floats that also record their arithmetic in the program.
"""

import operator
from collections.abc import Callable
from typing import Any

from placewise.graph_capture.program import Slot
from placewise.graph_capture.program_builder import ProgramBuilder


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

    def _record(self, function: Callable[..., Any], *args: Any) -> Any:
        plain = [float(arg) if isinstance(arg, HostScalar) else arg for arg in args]
        if not all(isinstance(arg, (int, float)) for arg in plain):
            return NotImplemented
        slots = tuple(arg.slot if isinstance(arg, HostScalar) else arg for arg in args)
        return HostScalar.of(function(*plain), self.program.host_arithmetic(function, slots), self.program)

    def __add__(self, other: Any) -> Any:
        return self._record(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._record(operator.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return self._record(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._record(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return self._record(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._record(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._record(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._record(operator.truediv, other, self)

    def __pow__(self, other: Any, modulo: None = None) -> Any:
        return self._record(operator.pow, self, other)

    def __rpow__(self, other: Any, modulo: None = None) -> Any:
        return self._record(operator.pow, other, self)

    def __neg__(self) -> Any:
        return self._record(operator.neg, self)

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

    def _compare(self, function: Callable[..., Any], other: Any) -> Any:
        outcome = function(float(self), float(other) if isinstance(other, HostScalar) else other)
        self.program.branch(function, self.slot, other.slot if isinstance(other, HostScalar) else other, outcome)
        return outcome
