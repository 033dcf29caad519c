"""What a step changes in a model besides its parameters and buffers: the plain attributes of modules.

A tensor or a number of the step that a module keeps (`self.aux_loss = ...`) is an output: compiled steps set it too. Any
other attribute that changes in every step (`self.calls += 1`) can't be followed.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from placewise.graph_capture.structures import tensors_in

INTERNAL = frozenset(vars(nn.Module()))  # PyTorch's own: parameters, buffers, hooks, ...

MISSING = object()


class Attribute(NamedTuple):
    """An attribute of a module."""

    module: nn.Module
    path: str  # of the module, as `modules_by_path` has it
    name: str

    @property
    def value(self) -> Any:
        """What the module has there now."""
        return vars(self.module).get(self.name, MISSING)

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


class ModuleAttributes:
    """The attributes of all modules of a model and its loss as they are now."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._modules = modules_by_path(model, loss_fn)
        self._kept: list[Any] = []  # what is known by its id
        self._before = self._present()

    def changed(self) -> list[Attribute]:
        """Returns the attributes that are not what they were."""
        present = self._present()
        changed = [key for key in present if self._before.get(key) != present[key]]
        return [Attribute(self._modules[path], path, name) for path, name in changed]

    def _present(self) -> dict[tuple[str, str], Any]:
        return {
            (path, name): self._describe(value)
            for path, module in self._modules.items()
            for name, value in vars(module).items()
            if name not in INTERNAL
        }

    def _describe(self, value: Any) -> Any:
        """Returns what tells a value from another one: plain values and containers by content, all others by identity."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return type(value), repr(value)
        if isinstance(value, Mapping) and not isinstance(value, nn.Module):
            return type(value), tuple((repr(key), self._describe(entry)) for key, entry in value.items())
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return type(value), tuple(map(self._describe, value))
        self._kept.append(value)
        return id(value)


def modules_by_path(model: nn.Module, loss_fn: Any) -> dict[str, nn.Module]:
    """Returns the modules of a model by path, and those of its loss, if it is one, by "loss:path"."""
    found = dict(model.named_modules())
    if isinstance(loss_fn, nn.Module):
        found |= {f"loss:{path}": module for path, module in loss_fn.named_modules()}
    return found


def has_tensors(attribute: Attribute) -> bool:
    """Returns whether an attribute holds tensors or numbers of the step."""
    return next(tensors_in(attribute.value), None) is not None


def read_names(modules: Iterable[nn.Module]) -> frozenset[str]:
    """Returns the names that the code of these modules mentions, and so may read as attributes."""
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    found: set[str] = set()
    for kind in kinds:
        if kind not in (nn.Module, object, Tensor):
            for function in vars(kind).values():
                code = getattr(getattr(function, "__func__", function), "__code__", None)
                found.update(code.co_names if code is not None else ())
    return frozenset(found)
