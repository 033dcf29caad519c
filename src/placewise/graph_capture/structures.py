"""Values with tensors in them, such as what a model returns: taken apart, and made again with other tensors.

Numbers that were read from tensors of the step count as tensors.
"""

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from placewise.core.errors import CaptureError
from placewise.graph_capture.step_numbers import StepNumber

Leaf = Tensor | StepNumber

OPAQUE = (str, bytes, int, float, type, nn.Module, FunctionType, MethodType, ModuleType)  # nothing is looked for in these


@dataclass(frozen=True, eq=False)
class Structure:
    """A value of any class whose tensors are on the meta device."""

    template: Any
    leaves: tuple[Leaf, ...]  # the tensors in it, each once
    devices: tuple[torch.device, ...] = ()  # that it names, all of them the meta device

    @classmethod
    def of(cls, value: Any) -> "Structure":
        """Returns the structure of a value; its tensors are detached, and what is not a tensor is copied."""
        entries = list(entries_in(value))
        leaves = [entry for entry in entries if isinstance(entry, Leaf)]
        devices = {id(entry): entry for entry in entries if isinstance(entry, torch.device) and entry.type == "meta"}
        detached = {id(leaf): leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves}
        try:
            template = copy.deepcopy(value, {**detached, **devices})
        except Exception as problem:
            raise CaptureError(f"the step returns a {type(value).__name__} that can't be copied: {problem}") from None
        return cls(template, tuple(detached.values()), tuple(devices.values()))

    def fill(self, values: Sequence[Any]) -> Any:
        """Returns the value with these in the place of its tensors."""
        if isinstance(self.template, Leaf):
            return values[0]
        memo = {id(leaf): value for leaf, value in zip(self.leaves, values, strict=True)}
        device = next((value.device for value in values if isinstance(value, Tensor)), None)
        return copy.deepcopy(self.template, memo if device is None else {**memo, **{id(d): device for d in self.devices}})


def tensors_in(value: Any) -> Iterator[Leaf]:
    """Yields the tensors in a value, each once: in lists, tuples, dicts, and in the attributes of other objects.

    pytree would overlook those in classes that are not registered with it.
    """
    return (entry for entry in entries_in(value) if isinstance(entry, Leaf))


def entries_in(value: Any) -> Iterator[Any]:
    """Yields all that a value consists of, each object once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if id(entry) in seen or entry is None:
            continue
        seen.add(id(entry))
        yield entry
        if isinstance(entry, (Leaf, *OPAQUE)):
            continue
        if isinstance(entry, Mapping):
            waiting += reversed(list(entry.values()))
        elif isinstance(entry, (list, tuple, deque, set, frozenset)):
            waiting += reversed(list(entry))
        else:
            waiting += reversed(list(getattr(entry, "__dict__", {}).values()))
