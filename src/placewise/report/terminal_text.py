"""Text for a terminal: tables, bold words, wrapped lines; plain where standard output is not a terminal."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placewise.core.problem import Problem

LEAST_FOLDED = 6  # characters of a column whose text is folded


def printable(text: object) -> str:
    """Returns a text as one line that only shows characters: control characters, which a name may have, are escaped."""
    shown = str(text)
    return shown if shown.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1) -> str:
    """Returns rows in columns that line up: the first `left` columns to the left, the others to the right."""
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if sys.stdout.isatty():
        return _fit(cells, widths, left)
    lines = ("  ".join(f"{cell:{'<' if i < left else '>'}{widths[i]}}" for i, cell in enumerate(row)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def _fit(cells: list[list[str]], widths: list[int], left: int) -> str:
    """Returns a table that fits the terminal: columns move together, text on the left is folded, numbers stay whole."""
    from rich.console import Console
    from rich.table import Table

    is_styled = not os.environ.get("NO_COLOR")
    console = Console(highlight=False, markup=False, emoji=False, color_system="auto" if is_styled else None)
    num_gaps = len(widths) - 1
    gap = 2 if sum(widths) + 2 * num_gaps <= console.width else 1
    if sum(widths[left:]) + LEAST_FOLDED * left + num_gaps > console.width:
        console.width = sum(widths) + num_gaps  # too many numbers: the terminal has to break the lines
    drawn = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for i, name in enumerate(cells[0]):
        drawn.add_column(name, justify="left" if i < left else "right", overflow="fold", no_wrap=i >= left)
    for row in cells[1:]:
        drawn.add_row(*row)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def bold(text: str) -> str:
    """Returns text that is bold on a terminal, unless NO_COLOR is set."""
    return f"\x1b[1m{text}\x1b[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def problem_heading(problem: "Problem") -> str:
    """Returns 'GRAPH on CLUSTER', as the first line of what is said about a problem begins."""
    return f"{bold(printable(problem.graph.name))} on {printable(problem.cluster.name)}"


def wrapped(text: str) -> str:
    """Returns a line as lines that fit the terminal, all but the first indented."""
    text = printable(text)
    if not sys.stdout.isatty():
        return text
    return textwrap.fill(text, shutil.get_terminal_size().columns, subsequent_indent="  ", break_on_hyphens=False)
