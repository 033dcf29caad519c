"""What a step changes in a model besides its parameters and buffers: the plain attributes of modules.

A tensor or a number of the step that a module keeps (`self.aux_loss = ...`) is an output: compiled steps set it too. Any
other attribute that changes in every step (`self.calls += 1`) can't be followed.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from functools import cache
from types import CodeType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from placewise.graph_capture.structures import OPAQUE, tensors_in

INTERNAL = frozenset(vars(nn.Module()))  # PyTorch's own: parameters, buffers, hooks, ...

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of a module

MISSING = object()


class Attribute(NamedTuple):
    """An attribute of a module."""

    module: Any  # or another object that computes the loss
    path: str  # of the module, as `modules_by_path` has it
    name: str

    @property
    def value(self) -> Any:
        """What the module has there now."""
        return vars(self.module).get(self.name, MISSING)

    def __str__(self) -> str:
        return f"{self.path.rstrip(':')}.{self.name}" if self.path else self.name


class _Inside(NamedTuple):
    """An object of a class that is none of torch's, with what it has inside."""

    number: int  # its id
    content: Any


class ModuleAttributes:
    """The attributes of all modules of a model and its loss as they are now."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._modules = modules_by_path(model, loss_fn)
        self._kept: list[Any] = []  # what is known by its id
        self._before = self._present()

    def changed(self) -> list[Attribute]:
        """Returns the attributes that have other values now, but for objects that have only changed inside."""
        present = self._present()
        changed = [key for key in present if self._before.get(key) != present[key] and not self._is_mutated(key, present)]
        return [Attribute(self._modules[path], path, name) for path, name in changed]

    def mutated(self) -> list[Attribute]:
        """Returns the attributes that are the same objects as before, but have changed inside."""
        present = self._present()
        return [
            Attribute(self._modules[path], path, name) for path, name in present if self._is_mutated((path, name), present)
        ]

    def _is_mutated(self, key: tuple[str, str], present: dict[tuple[str, str], Any]) -> bool:
        before, after = self._before.get(key), present[key]
        return type(before) is type(after) is _Inside and before.number == after.number and before != after

    def _present(self) -> dict[tuple[str, str], Any]:
        known: dict[int, Any] = {}
        return {
            (path, name): self._describe(value, known)
            for path, module in self._modules.items()
            for name, value in vars(module).items()
            if name not in INTERNAL
        }

    def _describe(self, value: Any, known: dict[int, Any]) -> Any:
        """Returns what tells a value from another one: plain values, containers and simple objects by content.

        All others are told by identity. `known` has what was described already, by identity.
        """
        if value is None or isinstance(value, (bool, int, float, str)):
            return type(value), repr(value)
        if isinstance(value, Mapping) and not isinstance(value, nn.Module):
            return type(value), tuple((repr(key), self._describe(entry, known)) for key, entry in value.items())
        if isinstance(value, (list, tuple, set, frozenset, deque)):
            return type(value), tuple([self._describe(entry, known) for entry in value])
        self._kept.append(value)
        inside = getattr(value, "__dict__", None)
        if isinstance(value, (Tensor, *OPAQUE)) or type(inside) is not dict:
            return id(value)
        if id(value) not in known:
            known[id(value)] = id(value)  # it may refer to itself
            content = tuple([(name, self._describe(entry, known)) for name, entry in inside.items()])
            known[id(value)] = _Inside(id(value), content)
        return known[id(value)]


def modules_by_path(model: nn.Module, loss_fn: Any) -> dict[str, Any]:
    """Returns the modules of a model by path, and those of its loss, or another object that computes it, by "loss:path"."""
    found: dict[str, Any] = dict(model.named_modules())
    owner = loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn
    if isinstance(owner, nn.Module) and owner is not model:
        found |= {f"loss:{path}": module for path, module in owner.named_modules()}
    elif not isinstance(owner, OPAQUE) and type(getattr(owner, "__dict__", None)) is dict:
        found["loss:"] = owner
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
                found.update(names_in(code) if code is not None else ())
    return frozenset(found)


@cache
def names_in(code: CodeType) -> tuple[str, ...]:
    """Returns the names that code mentions, with those in its comprehensions and in `getattr(self, "name")`."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in names_in(constant)]
    return tuple(dict.fromkeys([*code.co_names, *strings_in(code), *inner]))


def strings_in(code: CodeType) -> list[str]:
    """Returns the strings in code that may be names."""
    return [constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()]
