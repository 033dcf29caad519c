"""Tables and numbers for a terminal."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


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


def count(number: float) -> str:
    """Returns a number with a decimal prefix: 1.09 T."""
    for size, prefix in PREFIXES:
        if abs(number) >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g}"


def nbytes(number: float) -> str:
    """Returns a size with a binary unit: 10.9 GiB."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(number) >= size:
            return f"{_three(number / size)} {unit}"
    return f"{number:.0f} B"


def seconds(number: float) -> str:
    """Returns a time in the unit that reads best: 12.3 ms."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(number) >= size:
            return f"{_three(number / size)} {unit}"
    return f"{number * 1e9:.3g} ns" if number else "0 s"


def _three(number: float) -> str:
    """Returns a number with three digits, or with more where it has more before the point."""
    return f"{number:.3g}" if abs(number) < 999.5 else f"{number:.0f}"
