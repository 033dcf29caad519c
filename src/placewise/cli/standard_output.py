"""Standard output that names can't command, and whose failures are one line.

A name in a file may have control characters, with which it could clear the screen, change its title or fake other lines.
"""

import errno
import io
import os
import re
import sys
from contextlib import suppress
from typing import Any, Self, TextIO

from placewise.report.terminal_text import printable

STYLE = re.compile(r"(\x1b\[[0-9;]*m|\n)")  # what our own text has: colours, bold, line breaks


class StandardOutputFailed(Exception):
    """Standard output can't be written: its disk is full, or nobody reads it any more."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(f"standard output can't be written: {problem.strerror or problem}")
        self.is_closed_pipe = problem.errno == errno.EPIPE


class StandardOutput:
    """Stands for sys.stdout within a block: shows control characters as escapes, and raises StandardOutputFailed."""

    def __init__(self) -> None:
        self._stream: TextIO = sys.stdout
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="backslashreplace")  # names may have characters that the terminal can't show

    def __enter__(self) -> Self:
        sys.stdout = self
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout = self._stream
        self.flush()

    def write(self, text: str) -> int:
        """Writes text."""
        pieces = STYLE.split(text)
        pieces[::2] = map(printable, pieces[::2])
        try:
            return self._stream.write("".join(pieces))
        except OSError as problem:
            raise self._failed(problem) from None

    def flush(self) -> None:
        """Writes what is still in memory."""
        try:
            self._stream.flush()
        except OSError as problem:
            raise self._failed(problem) from None

    def _failed(self, problem: OSError) -> StandardOutputFailed:
        """Returns the error; what is still in memory goes nowhere, or Python would try to write it at its end."""
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        return StandardOutputFailed(problem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Closed(io.StringIO):
    """A standard output that is closed: printing fails, as it does for other tools."""

    def write(self, text: str) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def open_missing_streams() -> None:
    """Opens /dev/null for each standard stream that is closed (`placewise ... >&-`).

    Otherwise a file that is opened later would get its number, and what others print would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(nowhere := os.open(os.devnull, os.O_RDWR), number)
            if nowhere != number:
                os.close(nowhere)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = _Closed()
