"""Which Python values the code of a model and its loss can read: globals, closures, and attributes of other objects.

A recorded step has them as they were; `self.beta = 0.5` in an object that computes the loss makes another step of it. Which
values count is read from the code: a global that a function names, a variable of its closure, and attributes of objects
whose names are mentioned by the code that is found this way. Attributes of the model's own modules that are plain values
are `ModelGuard`'s, parameters and buffers are the program's.
"""

import dis
import sys
from argparse import Namespace
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from operator import is_
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

from torch import Tensor, nn

from placewise.graph_capture.module_attributes import HOOKS, INTERNAL, MISSING, names_in, strings_in
from placewise.graph_capture.step_numbers import StepNumber

ATOMS = (bool, int, float, complex, str, bytes)

CONTAINERS = (list, tuple, dict, set, frozenset)

CODE = (ModuleType, type, property, staticmethod, classmethod, BuiltinFunctionType)  # hardly ever replaced

ALWAYS_CALLED = frozenset({"forward", "backward", "setup_context"})  # by torch

NEVER_CALLED = frozenset({  # by a step
    "__init__", "__new__", "__init_subclass__", "__del__", "__repr__", "__str__", "__reduce__", "__reduce_ex__",
    "__getstate__", "__setstate__", "__deepcopy__", "__copy__", "__doc__", "__module__", "__dict__", "__weakref__",
    "__annotations__", "__qualname__",
})  # fmt: skip

LIBRARIES = ("torch", "placewise", "numpy")

ATTRIBUTE_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD")


class Place(NamedTuple):
    """Where code can find a value."""

    owner: Any  # a dict, the dict of a class, a list, a cell of a closure, or an object with slots
    key: Any
    name: str  # in words

    def reader(self) -> Callable[[], Any]:
        """Returns the fastest function that does what `read` does."""
        if isinstance(self.owner, (dict, MappingProxyType)):
            return partial(self.owner.get, self.key, MISSING)
        if type(self.owner) is CellType or isinstance(self.owner, list):
            return self.read
        return partial(getattr, self.owner, self.key, MISSING)

    def read(self) -> Any:
        """Returns what is there now."""
        if type(self.owner) is CellType:
            try:
                return self.owner.cell_contents
            except ValueError:  # nothing yet
                return MISSING
        if isinstance(self.owner, list):
            return self.owner[self.key] if self.key < len(self.owner) else MISSING
        if isinstance(self.owner, (dict, MappingProxyType)):
            return self.owner.get(self.key, MISSING)
        return getattr(self.owner, self.key, MISSING)


class PythonValues:
    """The values that the code of a step can read, as they are now."""

    def __init__(self, model: nn.Module, loss_fn: Any, *, changing: Collection[tuple[Any, str]] = ()) -> None:
        """Looks at a model and its loss; `changing` are attributes of their modules that steps change themselves."""
        self.modules: dict[str, nn.Module] = {}  # other modules that the code can call, by name
        walk = _Walk(model, loss_fn, self.modules, {(id(module), name) for module, name in changing})
        self.names = walk.names  # of attributes, which that code mentions
        self._plain: list[Place] = []
        self._known: list[Any] = []
        self._others: list[Place] = []
        self._found: list[Any] = []
        for place, value in walk.places():
            if is_plain(value):
                self._plain.append(place)
                self._known.append(_snapshot(value))
            else:
                self._others.append(place)
                self._found.append(value)
        self._read_plain, self._read_others = ([p.reader() for p in places] for places in (self._plain, self._others))

    def change(self) -> str:
        """Returns which value is another one now, in words, or ''."""
        present = [read() for read in self._read_plain]
        if present != self._known:
            for place, now, known in zip(self._plain, present, self._known, strict=True):
                if now is not known and now != known:
                    return f"{place.name} {_in_words(now)} now and was {known!r:.60}"
        others = [read() for read in self._read_others]
        if not all(map(is_, others, self._found)):
            changed = next(i for i, value in enumerate(others) if value is not self._found[i])
            return f"{self._others[changed].name} is another {type(self._found[changed]).__name__} now"
        return ""

    def changed_plainly(self) -> str:
        """Returns the name of a place that had a plain value and has another plain one now, or ''."""
        for place, known in zip(self._plain, self._known, strict=True):
            now = place.read()
            if now is not known and is_plain(now) and now != known:
                return place.name
        return ""


def is_plain(value: Any) -> bool:
    """Returns whether a value is a number, a string or the like, or a container of such values alone."""
    if value is None or type(value) in ATOMS:
        return True
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, CONTAINERS) and all(map(is_plain, value))


def _snapshot(value: Any) -> Any:
    """Returns a copy of a plain value that stays as it is and compares equal."""
    if isinstance(value, dict):
        return {key: _snapshot(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_snapshot(entry) for entry in value]
    if type(value) is tuple:
        return tuple([_snapshot(entry) for entry in value])
    return set(value) if isinstance(value, set) else value


def _in_words(value: Any) -> str:
    return "is missing" if value is MISSING else f"is {value!r:.60}"


class _Walk:
    """Follows code to the values that it can read."""

    def __init__(
        self, model: nn.Module, loss_fn: Any, modules: dict[str, nn.Module], changing: set[tuple[int, str]]
    ) -> None:
        self._modules, self._changing = modules, changing
        self._own = {id(module): name for name, module in model.named_modules()}
        self.names: set[str] = set()  # of attributes that code mentions
        self._waiting: defaultdict[str, list[Place]] = defaultdict(list)  # places with a name that no code mentions yet
        self._queue: deque[Place] = deque()
        self._seen: set[tuple[int, Any]] = set()  # (owner, key) of places
        self._visited: dict[int, Any] = {}  # what was looked into, by id
        for name, module in model.named_modules():
            self._look_into_object(module, name)
        self._look_into(loss_fn, "the loss", type(loss_fn).__name__)

    def places(self) -> Iterator[tuple[Place, Any]]:
        """Yields the places whose values count, with these values."""
        while self._queue:
            place = self._queue.popleft()
            value = place.read()
            if not is_plain(value):
                self._look_into(value, place.name, place.name)
            is_left = isinstance(value, StepNumber) or (isinstance(value, Tensor) and value.is_meta)  # by the recorded step
            if value is not MISSING and not isinstance(value, CODE) and not is_left:
                yield place, value

    # --- names ---

    def _mention(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self._queue.extend(self._waiting.pop(name, ()))

    def _offer(self, place: Place, name: str) -> None:
        """Visits a place if code mentions its name, now or later."""
        if (id(place.owner), place.key) not in self._seen:
            self._seen.add((id(place.owner), place.key))
            if name in self.names:
                self._queue.append(place)
            else:
                self._waiting[name].append(place)

    def _visit(self, place: Place) -> None:
        if (id(place.owner), place.key) not in self._seen:
            self._seen.add((id(place.owner), place.key))
            self._queue.append(place)

    # --- what is inside of a value ---

    def _look_into(self, value: Any, name: str, prefix: str) -> None:
        """Finds the places that code reaches through a value."""
        if id(value) in self._visited or isinstance(value, (Tensor, str, bytes)) or value is None:
            return
        if isinstance(value, nn.Module):
            self._look_into_module(value, name)
            return
        if isinstance(value, type):
            self._look_into_class(value)
            return
        self._visited[id(value)] = value
        if isinstance(value, FunctionType):
            self._look_into_function(value)
        elif isinstance(value, MethodType):
            self._look_into(value.__func__, name, prefix)
            self._look_into(value.__self__, f"{type(value.__self__).__name__}", type(value.__self__).__name__)
        elif isinstance(value, partial):
            self._look_into(value.func, name, prefix)
            self._look_into(value.args, f"{name}.args", f"{name}.args")
            for key in value.keywords:
                self._visit(Place(value.keywords, key, f"{key} of {name}"))
        elif isinstance(value, (staticmethod, classmethod)):
            self._look_into(value.__func__, name, prefix)
        elif isinstance(value, property):
            self._look_into(value.fget, name, prefix)
        elif isinstance(value, dict):
            for key in list(value):
                self._visit(Place(value, key, f"{name}[{key!r}]"))
        elif isinstance(value, list):
            for index in range(len(value)):
                self._visit(Place(value, index, f"{name}[{index}]"))
        elif isinstance(value, CONTAINERS):
            for number, entry in enumerate(value):
                self._look_into(entry, f"{name}[{number}]", prefix)
        elif not isinstance(value, ModuleType):
            self._look_into_object(value, prefix)

    def _look_into_module(self, module: nn.Module, name: str) -> None:
        """Looks into a module outside of the model: a teacher in the loss's closure."""
        if id(module) in self._own:
            return
        self._modules[name] = module
        for path, part in module.named_modules():
            if id(part) not in self._own:
                self._own[id(part)] = path
                self._look_into_object(part, f"{name}.{path}" if path else name)

    def _look_into_object(self, value: Any, prefix: str) -> None:
        """Offers the attributes of an object and of its class."""
        is_module = isinstance(value, nn.Module)
        self._visited[id(value)] = value
        wrapped = getattr(value, "__wrapped__", None)
        if isinstance(wrapped, FunctionType):
            self._look_into(wrapped, prefix, prefix)
        if not is_module and not _has_data(type(value)):
            return
        self._look_into_class(type(value))
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                self._offer(Place(value, key, f"{prefix}.{key}"), key)
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is not dict:
            return
        for hook in chain.from_iterable(attributes.get(kind, {}).values() for kind in HOOKS) if is_module else ():
            self._look_into(hook, "a hook", "a hook")
        for parameter in value.parameters(recurse=False) if is_module else ():
            for hook in (parameter._backward_hooks or {}).values():
                self._look_into(hook, "a hook", "a hook")
        self._look_into(attributes.get("forward"), "forward", "forward")
        for key, entry in attributes.items():
            is_guarded = is_module and (key in INTERNAL or key == "forward" or entry is None or type(entry) in ATOMS)
            if isinstance(key, str) and not is_guarded and (id(value), key) not in self._changing:
                self._offer(Place(attributes, key, f"{prefix}.{key}" if prefix else key), key)

    def _look_into_class(self, kind: type) -> None:
        """Offers what is in a class, and finds what its methods read."""
        for base in kind.__mro__:
            if id(base) in self._visited or base in (object, nn.Module):
                continue
            self._visited[id(base)] = base
            for key, entry in list(vars(base).items()):
                is_code = isinstance(entry, (FunctionType, staticmethod, classmethod, property))
                if is_code and (key in ALWAYS_CALLED or (key.startswith("__") and key not in NEVER_CALLED)):
                    self._look_into(entry, f"{base.__name__}.{key}", base.__name__)
                elif not key.startswith("__") and (is_code or not is_library(base.__module__)):
                    self._offer(Place(vars(base), key, f"{base.__name__}.{key}"), key)

    def _look_into_function(self, function: FunctionType) -> None:
        """Finds the globals and the variables of its closure that a function reads."""
        code, module = function.__code__, function.__globals__.get("__name__", "")
        if is_library(module):
            self._mention(names_in(code))
            return
        chains, attributes = _reads(code)
        self._mention(attributes)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._visit(Place(cell, "", variable))
        for path in chains:
            self._follow(function.__globals__, path)

    def _follow(self, namespace: dict[str, Any], path: tuple[str, ...]) -> None:
        """Visits a global; of a module, the attributes that are read: `config.BETA`."""
        for depth, key in enumerate(path):
            value = namespace.get(key, MISSING)
            if not isinstance(value, ModuleType):
                self._visit(Place(namespace, key, ".".join(path[: depth + 1])))
                return
            if is_library(value.__name__):
                return
            namespace = vars(value)


@cache
def is_library(module: str) -> bool:
    """Returns whether a module is Python's own or was installed: its globals and classes stay as they are."""
    package = module.partition(".")[0]
    if package == "__main__":
        return False
    if package in LIBRARIES or package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _has_data(kind: type) -> bool:
    """Returns whether the attributes of such objects are looked at: not those of torch, and few of Python's own classes."""
    package = kind.__module__.partition(".")[0]
    if issubclass(kind, (SimpleNamespace, Namespace, UserDict)):
        return True
    return package not in LIBRARIES and (package == "__main__" or package not in sys.stdlib_module_names)


@cache
def _reads(code: CodeType) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Returns the globals that code reads, with the attributes read of them, and the names of all attributes it mentions."""
    chains: list[tuple[str, ...]] = []
    attributes: list[str] = []
    is_chain = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chains.append((str(instruction.argval),))
            is_chain = True
        elif instruction.opname in ATTRIBUTE_READS:
            attributes.append(str(instruction.argval))
            if is_chain:
                chains[-1] += (str(instruction.argval),)
        elif instruction.opname not in ("CACHE", "PRECALL", "PUSH_NULL"):
            is_chain = False
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner_chains, inner_attributes = _reads(constant)
            chains += inner_chains
            attributes += inner_attributes
    return tuple(dict.fromkeys(chains)), tuple(dict.fromkeys([*attributes, *strings_in(code)]))
