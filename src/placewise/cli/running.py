"""Runs one command: what it raises becomes a line on standard error and an exit code."""

import argparse
import atexit
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from placewise.cli.outputs import warn
from placewise.cli.parser import make_parser
from placewise.cli.standard_output import StandardOutput, StandardOutputFailed, open_missing_streams
from placewise.core.errors import InputError, NothingFits, PlacewiseError
from placewise.machines.hardware_queues import request_hardware_queues

BROKEN_PIPE = 128 + signal.SIGPIPE


def run(arguments: Sequence[str] | None) -> int:
    """Runs one command and returns its exit code."""
    open_missing_streams()
    try:
        with StandardOutput(), _ending_on_sigterm():
            return _carry_out(arguments)
    except StandardOutputFailed as problem:
        if problem.is_closed_pipe:  # `placewise ... | head` has read enough
            return BROKEN_PIPE
        warn(str(problem))
        return 1
    finally:
        atexit.unregister(_ignore_ctrl_c)
        atexit.register(_ignore_ctrl_c)  # the last one that is registered runs first


def _ignore_ctrl_c() -> None:
    """From here on only the interpreter ends: Ctrl-C would change nothing, but print a traceback of what it interrupts."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _carry_out(arguments: Sequence[str] | None) -> int:
    options = make_parser().parse_args(arguments)
    request_hardware_queues()  # before a command captures a step, which may start CUDA
    try:
        _check_not_empty(options)
        if getattr(options, "fuse", False):
            options.model = "fused:" + options.model.removeprefix("fused:")
        options.carry_out(options)
        return 0
    except PlacewiseError as problem:
        warn(str(problem))
        return 2 if isinstance(problem, InputError) else 3 if isinstance(problem, NothingFits) else 1
    except MemoryError as problem:  # an option can ask for more than there is
        warn(f"out of memory: {problem}")
        return 1


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the command as an exception does, so that it ends its workers and removes its temporary files."""
    is_ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    warn("ended by SIGTERM")
    raise SystemExit(128 + number)


def _check_not_empty(options: argparse.Namespace) -> None:
    """Refuses empty words, such as an unset variable of a script: they would mean the default, or no file."""
    for name, value in vars(options).items():
        if value == "" or (isinstance(value, list) and "" in value):
            raise InputError(f"{name.replace('_', '-')}: must not be empty")
