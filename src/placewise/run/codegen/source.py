"""Straight-line Python source with prepared functions and arguments, as fast for the host as a plain loop over the ops."""

import math
from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from placewise.graph_capture.own_ops import OwnOp
from placewise.graph_capture.program import HERE, Call, Slot
from placewise.graph_capture.random_draws import Draw, without_state
from placewise.rewrite.augmented_program import AloneBatchNorm
from placewise.rewrite.channels_last import ChannelsLast
from placewise.rewrite.piece import Piece
from placewise.run.codegen.direct_functions import direct, is_cast


class Source:
    """The text of one function while it is written, and the functions and constants that it uses, by name."""

    def __init__(self, name: str, parameters: tuple[str, ...]) -> None:
        self.name = name
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"tensors_of": tensors_of}
        self._parameters = parameters
        self._functions: dict[int, str] = {}  # id -> name
        self._constants: dict[Any, str] = {}

    def add(self, line: str) -> None:
        """Adds a line."""
        self.lines.append(line)

    def add_call(self, name: str, function: Callable[[], Any]) -> None:
        """Adds a call of a prepared function, without arguments."""
        self.names[name] = function
        self.add(f"{name}()")

    def branch(self) -> "Source":
        """Returns an empty text that shares the names of this one."""
        branch = copy(self)
        branch.lines = []
        return branch

    def build(self) -> Callable[..., Any]:
        """Returns the compiled function."""
        body = "\n ".join(self.lines or ["pass"])
        text = f"def {self.name}({', '.join(self._parameters)}):\n {body}\n"
        exec(compile(text, f"<placewise {self.name}>", "exec"), self.names)
        function: Callable[..., Any] = self.names.pop(self.name)  # as one of its own globals it would never be freed
        return function

    def function(self, function: Any) -> str:
        """Returns the name of a function; ATen's overloads are called without their Python layer."""
        name = self._functions.get(id(function))
        if name is None:
            name = self._functions[id(function)] = f"f{len(self._functions)}"
            self.names[name] = direct(function) if isinstance(function, OpOverload) else function
            self.names[f"{name}_kept"] = function  # so that its id is not reused
        return name

    def constant(self, value: Any) -> str:
        """Returns the name of a value that can't be written as a literal."""
        key = (type(value), id(value)) if isinstance(value, Tensor) else (type(value), repr(value))
        if key not in self._constants:
            self._constants[key] = f"k{len(self._constants)}"
            self.names[self._constants[key]] = value
        return self._constants[key]

    def literal(self, value: Any, name_of: Callable[[Slot], str]) -> str:
        """Returns an argument as source."""
        kind = type(value)
        if kind is Slot:
            return name_of(value)
        if value is None or kind in (int, bool, str) or (kind is float and math.isfinite(value)):
            return repr(value)
        if kind is list and value and all(type(entry) is int for entry in value):
            return repr(tuple(value))  # a tuple is a constant of the code, a list would be made again in every step
        if kind in (list, tuple):
            entries = ", ".join(self.literal(entry, name_of) for entry in value)
            return f"[{entries}]" if kind is list else f"({entries},)" if value else "()"
        return self.constant(value)

    def call(self, call: Call, name_of: Callable[[Slot], str], device: Any) -> str:
        """Returns a call as an expression; `device` is where the op runs."""
        given = [self.literal(value, name_of) for value in call.args]
        if is_cast(call):
            given += [self.constant(device), self.literal(call.kwargs["dtype"], name_of), "False", "True"]
            return f"{self.function(Tensor.to)}({', '.join(given)})"
        for key, value in call.kwargs.items():
            given.append(f"{key}={self.constant(device) if value is HERE else self.literal(value, name_of)}")
        return f"{self.function(call.function)}({', '.join(given)})"

    def assign(self, call: Call, targets: list[str], expression: str) -> None:
        """Adds a call that assigns the tensors that it returns to these names; "_" for one that is not needed."""
        if all(target == "_" for target in targets):
            self.add(expression)
            return
        function = without_state(call).function
        function = function.function if isinstance(function, AloneBatchNorm | ChannelsLast) else function
        returns = function._schema.returns if isinstance(function, OpOverload) else (None,)
        if isinstance(call.function, Draw):
            returns = (*returns, None)  # the generator's state
        is_list = isinstance(function, OwnOp | Piece)
        is_list = is_list or (len(returns) == 1 and returns[0] is not None and "List" in str(returns[0].type))
        if len(returns) == 1 and not is_list:
            self.add(f"{targets[0]} = {expression}")
        elif is_list or len(returns) == len(targets):
            self.add(f"{', '.join(targets)}, = {expression}")
        else:
            self.add(f"{', '.join(targets)}, = tensors_of({expression})")
        if "_" in targets:
            self.add("_ = None")  # so that it keeps no memory alive


def tensors_of(values: Any) -> list[Tensor]:
    """Returns the tensors among what a call has returned; the rest is None, or numbers."""
    return [value for value in values if isinstance(value, Tensor)]
