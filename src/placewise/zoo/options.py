"""The options of a model: parameters of its function, parsed from text and checked before the call."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from placewise.core.errors import ModelError
from placewise.core.suggestions import did_you_mean

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}

Value = int | float | str | bool


@dataclass(frozen=True)
class Range:
    """The values from `low` to `high`, both included."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"from {self.low:.12g} to {self.high:.12g}"


COUNT = Range(1, 1_000_000)  # The range of an int without an annotated one.

Pixels = Annotated[int, Range(1, 10_000)]

Probability = Annotated[float, Range(0, 1)]

Override = Annotated[int, Range(0, 1_000_000)]  # 0: the value of the model's size.


@dataclass(frozen=True)
class Option:
    """An option; its annotation is int, float, str, bool, a Literal of choices, or Annotated with a Range."""

    name: str
    annotation: Any
    default: Value

    def read(self, model: str, text: str) -> Value:
        """Returns the value of `text`; a ModelError if it breaks the option's rule."""
        if get_origin(self.annotation) is Literal:
            choices: dict[str, Value] = {str(choice): choice for choice in get_args(self.annotation)}
            if text not in choices:
                raise violation(model, self.name, f"be one of {', '.join(choices)}", text)
            return choices[text]
        kind, *limits = get_args(self.annotation) or (self.annotation,)
        try:
            value = _convert(kind, text)
        except ValueError:
            raise violation(model, self.name, f"be {TYPE_NAMES[kind]}", text) from None
        limits = limits or ([COUNT] if kind is int else [])
        for limit in limits:
            # Written so that nan, for which every comparison is false, is refused.
            if not limit.low <= value <= limit.high:
                raise violation(model, self.name, f"be {limit}", text)
        return value


def signature_options(function: Callable[..., object]) -> list[Option]:
    """Returns the options of a model's function: its parameters, which all have annotations and defaults."""
    hints = get_type_hints(function, include_extras=True)
    return [Option(p.name, hints[p.name], p.default) for p in inspect.signature(function).parameters.values()]


def read_options(model: str, options: Iterable[Option], given: Mapping[str, str]) -> dict[str, Any]:
    """Returns the value of every option, from its given text or its default; a ModelError names what is wrong."""
    known = {option.name: option for option in options}
    for name in given:
        if name not in known:
            raise ModelError(f"model {model!r}: unknown option {name!r}: {did_you_mean(name, known)}")
    return {name: option.read(model, given[name]) if name in given else option.default for name, option in known.items()}


def violation(model: str, option: str, rule: str, got: object) -> ModelError:
    """Returns the error for an option that breaks a rule; `rule` continues 'must', as in 'be one of 50, 101'."""
    shown = got if str(got).isprintable() and str(got).strip() else repr(got)
    return ModelError(f"model {model!r}: option {option!r} must {rule}, got {shown}")


def _convert(kind: type, text: str) -> Value:
    if kind is bool:
        words = {"true": True, "false": False}
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]
    value: Value = kind(text)
    return value
