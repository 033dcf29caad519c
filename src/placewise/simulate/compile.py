"""Four decorators that compile kernels, around numba's njit."""

from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

kernel = njit(cache=True, nogil=True, error_model="numpy")

Function = TypeVar("Function", bound=Callable[..., Any])


def borrowing(function: Function) -> Function:
    """Compiles a kernel that makes no arrays: counting references to its arguments would take half its time."""
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
    compiled: Function = njit(**options)(function)
    return compiled


def inner(function: Function) -> Function:
    """Compiles a kernel that makes no arrays and that only kernels call.

    Without an entry point for Python, which would unpack every array of every tuple, compiling takes half the time.
    """
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
    options |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    compiled: Function = njit(**options)(function)
    return compiled


def inlined(function: Function) -> Function:
    """Compiles a function whose code goes into every kernel that calls it: a call would cost a tight loop a few percent."""
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "inline": "always"}
    compiled: Function = njit(**options)(function)
    return compiled
