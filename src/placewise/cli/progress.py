"""Progress: one line on a terminal's standard error while a command works; nothing elsewhere."""

import argparse
import math
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from placewise.search.driver import Progress
    from placewise.search.planner import Planner

BARS = (30, 10)  # columns: the longest for which there is room is drawn


class Shown(NamedTuple):
    """What the line shows."""

    text: str
    share: float | None = None  # of the work that is done; None: unknown


class Line:
    """The line of progress: each text replaces the last one, and the end of the block removes it.

    It is drawn only when it is shown, by no thread of its own: nothing disturbs what is measured.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._is_shown = sys.stderr.isatty() and not options.json and not getattr(options, "quiet", False)
        self._last = -math.inf
        self._opened = ExitStack()
        self._live: Any = None

    def __enter__(self) -> Self:
        if self._is_shown:
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False, markup=False, emoji=False)
            self._live = self._opened.enter_context(
                Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def is_due(self) -> bool:
        """Whether it is shown, and has not changed for a tenth of a second."""
        return self._is_shown and time.monotonic() - self._last >= 0.1

    def show(self, shown: Shown) -> None:
        """Replaces what is shown."""
        if self._live is not None:
            self._last = time.monotonic()
            self._live.update(draw_line(shown, self._live.console.width), refresh=True)


def draw_line(shown: Shown, width: int) -> Any:
    """Returns a line for rich: a bar if there is room, and the text, cut at the end of the line."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from placewise.report.terminal_text import printable

    text = Text(printable(shown.text))
    text.truncate(width, overflow="ellipsis")
    columns = next((bar for bar in BARS if bar + 1 + len(text) < width), 0)
    if shown.share is None or not columns:
        return text
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_row(ProgressBar(total=1.0, completed=shown.share, width=columns), text)
    return line


def describe_search(planner: "Planner", progress: "Progress") -> Shown:
    """Returns how far a search has come: the best so far and its gap, the speed, the time left."""
    from placewise.core.quantities import format_count, format_percent_rounded_up, format_seconds
    from placewise.search.planner import gap_of

    budget, bound = planner.request.budget, None if planner.request.measure else planner.bound
    best = "nothing fits yet"
    if progress.step_seconds < math.inf:
        gap = None if bound is None else gap_of(progress.step_seconds, bound.seconds)
        best = f"best {format_seconds(progress.step_seconds)}"
        best += "" if gap is None else f", gap {format_percent_rounded_up(gap)}"
    rate = progress.evaluations / max(progress.seconds, 1e-9)
    parts, shares, left = [best, f"{format_count(progress.evaluations, 'evaluation')}, {rate:,.0f}/s"], [], []
    if budget.seconds:
        shares.append(progress.seconds / budget.seconds)
        left.append(budget.seconds - progress.seconds)
    if budget.evaluations and rate:
        shares.append(progress.evaluations / budget.evaluations)
        left.append((budget.evaluations - progress.evaluations) / rate)
    parts += [f"{max(min(left), 0):.0f} s left"] if left else []
    return Shown(f"{planner.request.strategy}: {'; '.join(parts)}", min(max(shares), 1.0) if shares else None)
