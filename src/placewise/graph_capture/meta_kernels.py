"""Runs ops on the meta device with a cache of their outputs.

Many of torch's meta kernels are written in Python and take hundreds of microseconds. A training step repeats a few hundred
signatures (operator, shapes, strides, dtypes, attributes) thousands of times, so each signature runs once; after that, new
outputs are made from the cached sizes, strides and dtypes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from placewise.graph_capture.meta_overrides import OVERRIDES
from placewise.graph_capture.op_costs import OpFacts

FIRST_ARGUMENT = object()  # cached for an op that returns its first argument, which it changes in place


class MetaKernels:
    """Calls ops on meta tensors; from the second call on, a signature takes a few microseconds."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def run(self, func: Any, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        """Returns what `func(*args, **kwargs)` returns."""
        if facts.is_view or facts.changes_shape:
            return func(*args, **kwargs)
        try:
            key = (func, signature(args), tuple([(name, _sign(value)) for name, value in kwargs.items()]))
            known = self._known.get(key)
        except TypeError:  # an argument that can't be hashed
            return func(*args, **kwargs)
        if known is None:
            out = OVERRIDES.get(func, func)(*args, **kwargs)
            self._known[key] = _recipe(out, args, facts)
            return out
        if known is FIRST_ARGUMENT:
            return args[0]
        kind, entries = known
        if kind is None:
            return func(*args, **kwargs)
        made = [None if e is None else torch.empty_strided(e[0], e[1], dtype=e[2], device="meta") for e in entries]
        return made[0] if kind is Tensor else kind(made)


class CachedMetaMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the ops in a block on the meta device with cached outputs, recording nothing."""

    def __init__(self, kernels: MetaKernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = kernels
        self._facts: dict[Any, OpFacts] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = self._facts.get(func)
        if facts is None:
            facts = self._facts[func] = OpFacts(func)
        if not any(isinstance(arg, Tensor) and arg.is_meta for arg in args):
            return func(*args, **(kwargs or {}))
        return self.kernels.run(func, facts, args, kwargs or {})


def signature(args: Any) -> tuple[Any, ...]:
    """Returns the arguments as a dict key: sizes, strides and dtypes of tensors, and the values of all others but floats."""
    return tuple([_sign(arg) for arg in args])


def _sign(value: Any) -> Any:
    """Returns what the outputs' shapes can depend on; for a float, only that it is one."""
    if isinstance(value, Tensor):
        return (value.dtype, value.size(), value.stride(), value.device)
    kind = type(value)
    if kind is float:
        return float
    if kind is list or kind is tuple:
        return signature(value)
    return (kind, value)  # because True == 1


def _recipe(out: Any, args: Any, facts: OpFacts) -> Any:
    """Returns how to make the outputs: (container, [(size, stride, dtype)...]), or (None, ...) to run the op each time."""
    if facts.mutated:
        return FIRST_ARGUMENT if facts.mutated == {0} and out is args[0] else (None, ())
    container = Tensor if isinstance(out, Tensor) else type(out)
    outputs = [out] if container is Tensor else out
    if container not in (Tensor, tuple, list) or any(not _is_plain(entry) for entry in outputs):
        return (None, ())
    made = [entry.untyped_storage()._cdata for entry in outputs if entry is not None]
    given = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
    if len(set(made)) < len(made) or not given.isdisjoint(made):
        return (None, ())
    return (container, [None if e is None else (e.size(), e.stride(), e.dtype) for e in outputs])


def _is_plain(entry: Any) -> bool:
    """Returns whether an output is None, or a tensor that owns exactly the memory that its sizes and strides span."""
    if entry is None:
        return True
    if not isinstance(entry, Tensor) or not entry.is_meta or entry.storage_offset():
        return False
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(entry.size(), entry.stride(), strict=True))
    return entry.untyped_storage().nbytes() == (spanned if entry.numel() else 0) * entry.itemsize
