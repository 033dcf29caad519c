"""Checks of hyper-parameters, which are the fields of a strategy."""

from collections.abc import Callable
from typing import Any


def check_fields(strategy: Any, names: str, rule: Callable[[Any], bool], words: str) -> None:
    """Raises ValueError if one of the named fields breaks a rule, which the words tell: "must be at least 1"."""
    for name in names.split():
        if not rule(getattr(strategy, name)):
            raise ValueError(f"{name} {words}, it is {getattr(strategy, name)}")
