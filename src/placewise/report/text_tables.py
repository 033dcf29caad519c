"""Tables and numbers for a terminal."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> str:
    """Returns rows in columns that line up: the first `left` columns to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join([bold(lines[0].rstrip()), *(line.rstrip() for line in lines[1:])])


def bold(text: str) -> str:
    """Returns text that stands out on a terminal, and as it is elsewhere or with NO_COLOR."""
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def wrapped(text: str) -> str:
    """Returns a line as lines that fit the terminal, all but the first indented; elsewhere as it is."""
    if not sys.stdout.isatty():
        return text
    return textwrap.fill(text, shutil.get_terminal_size().columns, subsequent_indent="  ", break_on_hyphens=False)
