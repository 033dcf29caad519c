"""Modes under which tensors are created on the meta device, and reading their values is refused."""

import operator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_any_only

from placewise.core.errors import CaptureError
from placewise.graph_capture.host_scalars import PLAIN, HostScalar
from placewise.graph_capture.known_values import OBSERVED
from placewise.graph_capture.recorder import Recorder, meta_like
from placewise.graph_capture.step_numbers import StepNumber

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

CONVERSIONS: dict[Any, Any] = {  # readers -> how their result comes from the one of tolist()
    Tensor.item: lambda value: _only(value),
    Tensor.tolist: lambda value: value,
    Tensor.__bool__: lambda value: bool(_only(value)),
    Tensor.__int__: lambda value: int(_only(value)),
    Tensor.__float__: lambda value: float(_only(value)),
    Tensor.__index__: lambda value: operator.index(_only(value)),
}

FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})

FACTORIES = frozenset(_device_constructors()) - FROM_DATA

NUMBERS = ("value", "alpha")  # arguments that torch reads as numbers, also from tensors

SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

HANDLERS = {  # functions of torch that MetaMode replaces -> the method that does
    **dict.fromkeys(VALUE_READERS, "_read_value"),
    **dict.fromkeys(FACTORIES, "_make"),
    **dict.fromkeys(OBSERVED, "_observe"),
    **dict.fromkeys(FROM_DATA, "_make_from_data"),
    Tensor.new_tensor: "_make_new_tensor",
    Tensor.cuda: "_move",
    Tensor.cpu: "_move",
    Tensor.to: "_convert",
    torch.masked_select: "_select",
    Tensor.masked_select: "_select",
    torch.repeat_interleave: "_repeat",
    Tensor.repeat_interleave: "_repeat",
    torch.histc: "_count",
    Tensor.histc: "_count",
    Tensor.__getitem__: "_index",
    Tensor.__setitem__: "_index",
    SET_DATA: "_set_data",
}


class MetaMode(TorchFunctionMode):
    """Creates every tensor of the step on the meta device, whatever device the model asks for.

    With `track_scalars` (in the update), numbers that are read from host tensors become HostScalars, else constants.
    """

    def __init__(self, recorder: Recorder, track_scalars: bool = False) -> None:
        super().__init__()
        self.recorder, self.program, self.track_scalars = recorder, recorder.program, track_scalars

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.recorder.numbers:
            _refuse_step_numbers((args, kwargs))
        handler = HANDLERS.get(func)
        if handler is not None:
            return getattr(self, handler)(func, args, kwargs or {})
        return self._call(func, args, kwargs or {})

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.track_scalars:
            kwargs = {key: self._number(value) if key in NUMBERS else value for key, value in kwargs.items()}
            scalars = [arg for arg in (*args, *kwargs.values()) if type(arg) is HostScalar]
            self.program.scalars = {PLAIN(scalar): scalar.slot for scalar in scalars}
            if any(self.program.scalars[PLAIN(scalar)] != scalar.slot for scalar in scalars):
                raise CaptureError(
                    f"two hyper-parameters or counters that a call of the optimizer reads are both {PLAIN(scalars[0])} and "
                    "can't be told apart: make them differ"
                )
        try:
            return func(*args, **kwargs)
        finally:
            self.program.scalars = {}

    def _number(self, value: Any) -> Any:
        """Returns an argument that torch reads as a number; from a tensor it would take the present value as a constant."""
        return self._read_value(Tensor.item, (value,), {}) if isinstance(value, Tensor) else value

    def _read_value(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor: Tensor = args[0]
        if tensor.is_meta:
            return self._unknown_value(func, tensor)
        with _disable_current_modes():
            value = func(*args, **kwargs)
        if not self.track_scalars or not self.program.has_host_tensor(tensor):
            return value
        if func is Tensor.__bool__ or isinstance(value, bool):
            slot = self.program.host_call(torch.ops.aten._local_scalar_dense.default, (self.program.host_slot(tensor),))
            self.program.branch(operator.eq, slot, value, True)
            return value
        if func is not Tensor.item:
            raise CaptureError(
                f"the optimizer reads a number that changes from step to step with {VALUE_READERS[func]}, "
                "which can't be recorded: use item()"
            )
        slot = self.program.host_call(torch.ops.aten._local_scalar_dense.default, (self.program.host_slot(tensor),))
        return HostScalar.of(value, slot, self.program)

    def _unknown_value(self, func: Any, tensor: Tensor) -> Any:
        """Returns the value of a tensor of the step, if that is known or may leave the step."""
        if func in (Tensor.__bool__, Tensor.item) and (known := self.recorder.known_value(tensor)) is not None:
            return known
        if func in CONVERSIONS and (early := self.recorder.early_value(tensor, VALUE_READERS[func])) is not None:
            return CONVERSIONS[func](early)
        is_condition = func is Tensor.__bool__ or tensor.dtype is torch.bool
        if is_condition and (passing := self.recorder.passing_value(tensor)) is not None:
            return passing
        if func is Tensor.item and tensor.is_floating_point():
            late = self.track_scalars
            return self.recorder.late_number(tensor) if late else self.recorder.step_number(tensor, VALUE_READERS[func])
        raise self.recorder.needs_value(VALUE_READERS[func], tensor)

    def _observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function by whose result a step may decide, and notes what is known of it."""
        out = self._make(func, args, kwargs) if func in FACTORIES else self._call(func, args, kwargs)
        self.recorder.known.observe(func, args, out)
        return out

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(func, args, {**kwargs, "device": "meta"})

    def _make_from_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            return func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
        if args and type(args[0]) is HostScalar:
            with _disable_current_modes():
                return self.program.host_tensor(args[0], args[0].slot, kwargs.get("dtype"))
        if args and tree_any_only(Tensor, lambda tensor: tensor.is_meta, args[0]):
            raise self.recorder.needs_value("torch.tensor of a list of tensors")
        with _disable_current_modes():
            value: Tensor = func(*args, **{**kwargs, "device": "cpu"})
            if self.track_scalars and not value.dim():
                self.program.host_slot(value)
                return value
            meta = meta_like(value)
            self.recorder.add_constant(meta, value.detach())
            return meta.requires_grad_(value.requires_grad)

    def _make_new_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._make_from_data(torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs})

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0]

    def _convert(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(func, *_without_device(*args, **kwargs))

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Counts integers as floats: CPUs count no others, and models that ask for the device see that it is no CPU."""
        values: Tensor = args[0]
        if values.is_floating_point():
            return self._call(func, args, kwargs)
        return self._call(func, (values.float(), *args[1:]), kwargs).to(values.dtype)

    def _index(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Indexes with tensors instead of lists of numbers, which torch would convert to meta tensors without values.

        A mask that is known before the step runs becomes the numbers of its entries, whose count must stay.
        """

        def with_tensors(index: Any) -> Any:
            if isinstance(index, tuple):
                return tuple([with_tensors(entry) for entry in index])
            if isinstance(index, Tensor) and func is Tensor.__getitem__ and self._is_early_mask(index):
                return index.nonzero(as_tuple=True)
            if isinstance(index, np.ndarray) or (isinstance(index, list) and index and _all_numbers(index)):
                return self._make_from_data(torch.tensor, (index,), {})
            return index

        index = with_tensors(args[1])
        if isinstance(args[1], tuple):
            index = tuple(chain.from_iterable(i if isinstance(i, tuple) else (i,) for i in index))
        return self._call(func, (args[0], index, *args[2:]), kwargs)

    def _is_early_mask(self, index: Tensor) -> bool:
        return index.dtype in (torch.bool, torch.uint8) and index.is_meta and self.recorder.is_early(index)

    def _select(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Selects by a mask that is known before the step runs as an index does."""
        if not kwargs and self._is_early_mask(args[1]):
            return self._index(Tensor.__getitem__, torch.broadcast_tensors(*args), {})  # type: ignore[no-untyped-call]
        return self._call(func, args, kwargs)

    def _repeat(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Repeats rows as often as a tensor says that is known before the step runs; their number must stay."""
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
        if isinstance(repeats, Tensor) and repeats.is_meta and repeats.dim() and kwargs.get("output_size") is None:
            dim = kwargs.get("dim", args[2] if len(args) > 2 else None)  # None: of the flat tensor
            rows = 0 if repeats is args[0] else args[0].numel() if dim is None else args[0].shape[dim]
            total = repeats.expand(rows).sum() if len(repeats) == 1 and rows else repeats.sum()
            kwargs = {**kwargs, "output_size": self.recorder.early_value(total, "repeat_interleave")}
        return self._call(func, args, kwargs)

    def _set_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copies the new data into the tensor's memory; eager code would replace the memory."""
        tensor, value = args
        if tensor.size() != value.size() or tensor.dtype != value.dtype:
            raise CaptureError(f"the step changes the shape or dtype of a tensor's data{self.recorder.where()}")
        tensor.data.copy_(value)


def _refuse_step_numbers(value: Any) -> None:
    """Refuses a call that computes with a number which Python code has read from the step: it is not known."""
    if type(value) is StepNumber:
        raise value.problem
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        _refuse_step_numbers(entry)


class MetaStateMode(TorchFunctionMode):
    """Creates an optimizer's state on the meta device, but its scalars (step counters) on the host."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in VALUE_READERS and isinstance(args[0], Tensor) and args[0].is_meta:
            if func in (Tensor.item, Tensor.__bool__, Tensor.__float__):
                return func(torch.ones((), dtype=args[0].dtype))  # no state depends on it, only the step
            raise self.recorder.needs_value(VALUE_READERS[func])
        if func in FACTORIES or func in FROM_DATA:
            out = func(*args, **{**kwargs, "device": "meta"})
            return out if out.dim() else func(*args, **{**kwargs, "device": "cpu"})
        if func == SET_DATA:
            return None  # p.data = ... leaves the parameter unchanged
        for key in NUMBERS:
            if isinstance(kwargs.get(key), Tensor) and kwargs[key].is_meta:
                kwargs = {**kwargs, key: 1.0}
        return func(*args, **kwargs)


def _only(value: Any) -> Any:
    """Returns the number in nested lists of one entry."""
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value


def _all_numbers(index: list[Any]) -> bool:
    return all(_all_numbers(entry) if isinstance(entry, list) else isinstance(entry, int) for entry in index)


def _without_device(
    tensor: Tensor, *args: Any, copy: bool = False, memory_format: Any = None, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of Tensor.to without the device."""
    other = [arg for arg in (*args, kwargs.get("other")) if isinstance(arg, Tensor)]
    dtypes = [arg for arg in (*args, kwargs.get("dtype")) if isinstance(arg, torch.dtype)]
    dtype = other[0].dtype if other else dtypes[0] if dtypes else tensor.dtype
    copies = copy or [arg for arg in args if type(arg) is bool][1:] == [True]  # after non_blocking
    named = {} if memory_format is None else {"memory_format": memory_format}
    return (tensor, dtype), {"copy": copies, **named}
