"""The host's side of a step: numbers that Python computes, and where tensors are made.

Adam divides by 1 - beta ** step, and a schedule changes the learning rate between steps. If such numbers were recorded
as they are, the recorded step would repeat one moment of training for ever. So while a step is recorded they are
HostScalars: floats that also write their arithmetic into the program.
"""

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from placewise.capture.program import Slot


class HostProgram(Protocol):
    """What HostScalars and the Redirect need from the recorder."""

    def host_call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Slot:
        """Records a call of the host and returns the slot of its result."""
        ...

    def host_tensor(self, scalar: float, slot: Slot, dtype: torch.dtype | None) -> Tensor:
        """Returns a host's number as a tensor that the host keeps."""
        ...

    def host_slot(self, tensor: Tensor) -> Slot:
        """Returns the slot of a tensor that the host keeps."""
        ...

    def constant(self, value: Tensor) -> Tensor:
        """Returns the stand-in on the meta device of a tensor whose value is known."""
        ...

    def needs_value(self, what: str) -> Exception:
        """Returns the error of a step that looks into a tensor."""
        ...


class HostScalar(float):
    """A float whose arithmetic is recorded."""

    __slots__ = ("program", "slot")
    program: HostProgram
    slot: Slot

    @classmethod
    def of(cls, value: float, program: HostProgram, slot: Slot) -> "HostScalar":
        """Returns the number, bound to its slot."""
        scalar = cls(value)
        scalar.program, scalar.slot = program, slot
        return scalar

    def _record(self, function: Callable[..., Any], *args: Any) -> Any:
        plain = [float(arg) if isinstance(arg, HostScalar) else arg for arg in args]
        if not all(isinstance(arg, (int, float)) for arg in plain):
            return NotImplemented
        slots = tuple(arg.slot if isinstance(arg, HostScalar) else arg for arg in args)
        return HostScalar.of(function(*plain), self.program, self.program.host_call(function, slots))

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


VALUE_READERS = {
    Tensor.item: "item()",
    Tensor.tolist: "tolist()",
    Tensor.numpy: "numpy()",
    Tensor.__bool__: "a condition (bool)",
    Tensor.__int__: "int()",
    Tensor.__float__: "float()",
    Tensor.__index__: "an index",
    Tensor.__array__: "numpy",
}
FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
FACTORIES = frozenset(_device_constructors()) - frozenset(FROM_DATA)
MOVES = (Tensor.cuda, Tensor.cpu)


class Redirect(TorchFunctionMode):
    """Makes every tensor of the step on the meta device, wherever the model wanted it, and keeps the host's scalars."""

    def __init__(self, program: HostProgram) -> None:
        super().__init__()
        self.program = program
        self.scalars: dict[float, Slot] = {}  # those among the arguments of the call under way, by value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in VALUE_READERS and args and isinstance(args[0], Tensor):
            return self._read_value(func, args, kwargs)
        if func in FACTORIES:
            return func(*args, **{**kwargs, "device": "meta"})
        if func in FROM_DATA:
            return self._from_data(func, args, kwargs)
        if func in MOVES:
            return args[0]
        if func is Tensor.to:
            args, kwargs = _without_device(args, kwargs)
        self.scalars = {float(arg): arg.slot for arg in (*args, *kwargs.values()) if type(arg) is HostScalar}
        try:
            return func(*args, **kwargs)
        finally:
            self.scalars = {}

    def _read_value(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor: Tensor = args[0]
        if tensor.is_meta:
            raise self.program.needs_value(VALUE_READERS[func])
        value = func(*args, **kwargs)
        if func is not Tensor.item or not isinstance(value, float):
            return value
        slot = self.program.host_call(torch.ops.aten._local_scalar_dense.default, (self.program.host_slot(tensor),))
        return HostScalar.of(value, self.program, slot)

    def _from_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            return func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
        with _disable_current_modes():
            if args and type(args[0]) is HostScalar:
                return self.program.host_tensor(args[0], args[0].slot, kwargs.get("dtype"))
            return self.program.constant(func(*args, **{**kwargs, "device": "cpu"}))


def _without_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of Tensor.to without those that name a device, and never none at all."""
    kept = tuple(arg for arg in args if type(arg) not in (str, int, torch.device))
    kept = tuple(arg.dtype if isinstance(arg, Tensor) and arg is not args[0] else arg for arg in kept)
    named = {key: value for key, value in kwargs.items() if key not in ("device", "other")}
    if "other" in kwargs:
        named["dtype"] = kwargs["other"].dtype
    if len(kept) == 1 and "dtype" not in named:
        named["dtype"] = args[0].dtype
    return kept, named
