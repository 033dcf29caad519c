"""Progress on a terminal."""

import argparse
import math
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.search.driver import Progress
    from placewise.search.planner import Planner
    from placewise.search.request import Request


class Line:
    """One line on a terminal's standard error, which is written over and in the end taken away; elsewhere nothing."""

    def __init__(self, options: argparse.Namespace | None = None) -> None:
        is_silent = options is not None and (options.json or getattr(options, "quiet", False))
        self.is_shown = sys.stderr.isatty() and not is_silent
        self._last = -math.inf

    def __enter__(self) -> "Line":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the line away."""
        self.clear()

    @property
    def is_due(self) -> bool:
        """Whether the last text has been there for a tenth of a second."""
        return self.is_shown and time.monotonic() - self._last >= 0.1

    def show(self, text: str) -> None:
        """Shows a text in the place of the last one."""
        if self.is_shown:
            self._last = time.monotonic()
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes the line away."""
        if self.is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Ticker:
    """Shows the progress of a search."""

    def __init__(self, request: "Request", limit: "Bound | None" = None, place: Line | None = None) -> None:
        self.label, self.limit = request.strategy, limit
        self.evaluations, self.seconds = request.budget.evaluations, request.budget.seconds
        self._place = place or Line()

    @classmethod
    def of(cls, planner: "Planner", options: argparse.Namespace) -> "Ticker":
        """Returns the ticker of a search; with --json or --quiet it shows nothing."""
        return cls(planner.request, None if planner.request.measure else planner.bound, Line(options))

    def __call__(self, progress: "Progress") -> None:
        """Shows how far a search is, at most ten times a second."""
        if self._place.is_due:
            self._place.show(self.line(progress))

    def line(self, progress: "Progress") -> str:
        """Returns what it shows: the best so far and how far it is from the bound, the speed, the time left."""
        from placewise.core.quantities import format_count, format_percent_rounded_up, format_seconds
        from placewise.search.planner import gap_of

        rate = progress.evaluations / max(progress.seconds, 1e-9)
        best = format_seconds(progress.step_seconds) if progress.step_seconds < float("inf") else "nothing fits yet"
        gap = None if self.limit is None else gap_of(progress.step_seconds, self.limit.seconds)
        if gap is not None and gap < float("inf"):
            best += f", at most {format_percent_rounded_up(gap)} above the best possible"
        parts = [f"{self.label}: best {best}", f"{format_count(progress.evaluations, 'evaluation')}, {rate:,.0f} a second"]
        left = [self.seconds - progress.seconds] if self.seconds is not None else []
        left += [(self.evaluations - progress.evaluations) / rate] if self.evaluations is not None and rate else []
        parts += [f"{max(min(left), 0):.0f} s left"] if left else []
        return "; ".join(parts)

    def __enter__(self) -> "Ticker":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the line away."""
        self._place.clear()
