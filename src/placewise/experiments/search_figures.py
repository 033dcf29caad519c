"""Pictures of searches: the best step so far against evaluations, a line and a band for each strategy, as SVG."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.errors import InputError
from placewise.experiments.papers.reproduction import Reproduction
from placewise.experiments.recorded_searches import Found
from placewise.formats.files import write_bytes

COLOURS = (  # of lines; Okabe and Ito's first
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6a3d9a", "#8c564b", "#000000", "#7f7f00"),
)

LEVEL_COLOUR = "#888888"

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 460, 70, 210, 44, 54  # pixels, at least this high; margins

NUM_POINTS = 240  # of a line

LABEL_PIXELS = 15  # from one label to the next

FAR = 5.0  # times the best: a level that is further is named below the picture, for it would press all else together

FEW = 20  # evaluations up to which a strategy has answered at once: a level, not a line


@dataclass(frozen=True, eq=False)
class Line:
    """A strategy in a picture: its best step seconds so far by evaluations spent; NaN before it has any."""

    name: str
    middle: Floats  # [points], the median of the seeds
    low: Floats  # [points]
    high: Floats  # [points]
    is_level: bool = False


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis: from a value to pixels."""

    first: float
    last: float
    start: float  # pixels
    end: float

    def __call__(self, value: float) -> float:
        """Returns where a value stands."""
        share = math.log(value / self.first) / math.log(self.last / self.first)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Returns round numbers within the axis: 1, 2 and 5 times powers of ten, or more of them on a short one."""
        digits = (1, 2, 5) if self.last > 10 * self.first else (1, 1.5, 2, 3, 4, 5, 6, 8)
        powers = range(math.floor(math.log10(self.first)), math.ceil(math.log10(self.last)) + 1)
        return [d * 10.0**p for p in powers for d in digits if self.first <= d * 10.0**p <= self.last]


def write_figures(reproduction: Reproduction, folder: str | Path) -> None:
    """Writes a picture of each row into a folder, named after the paper and the row."""
    for result in reproduction.results:
        title = f"{result.row.label} ({result.row.model} on {result.row.cluster})"
        name = f"{reproduction.paper.name} {result.row.label}"
        write_figure(folder, name, title, result.found, reproduction.effort.evaluations, result.bound_seconds)


def write_figure(
    folder: str | Path,
    name: str,
    title: str,
    found: Mapping[str, Found],
    evaluations: int,
    bound_seconds: float | None = None,
) -> None:
    """Writes a picture of what was found into a folder, which is made; nothing where nothing was found."""
    lines = lines_of(found, evaluations)
    if not lines:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder}: can't be written: {problem.strerror}") from None
    file_name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    write_bytes(Path(folder) / f"{file_name}.svg", draw(title, lines, bound_seconds, evaluations).encode())


def lines_of(found: Mapping[str, Found], evaluations: int) -> list[Line]:
    """Returns a line for each search that found something."""
    at = grid(evaluations)
    return [_line(name, one, at) for name, one in found.items() if one.times and one.histories]


def grid(evaluations: int) -> Floats:
    """Returns the numbers of evaluations at which lines have a point."""
    return np.geomspace(1, max(evaluations, 2), NUM_POINTS)


def _line(name: str, found: Found, at: Floats) -> Line:
    if found.evaluations <= FEW:
        best = np.array([[seconds] for seconds in found.times])  # [seeds, 1]
        best = np.repeat(best, len(at), axis=1)
    else:
        best = np.array([_best_so_far(history, at) for history in found.histories])  # [seeds, points]
    known = ~np.isnan(best).any(axis=0)
    middle = np.where(known, np.median(best, axis=0), np.nan)
    return Line(name, middle, best.min(axis=0), best.max(axis=0), found.evaluations <= FEW)


def _best_so_far(history: Sequence[tuple[int, float, float]], at: Floats) -> Floats:
    """Returns the best step seconds after each number of evaluations, NaN before the first: [points]."""
    spent = np.array([entry[0] for entry in history], np.float64)
    best = np.array([np.nan, *(entry[2] for entry in history)])
    found: Floats = best[np.searchsorted(spent, at + 1e-9, side="right")]
    return found


def draw(title: str, lines: Sequence[Line], bound_seconds: float | None, evaluations: int) -> str:
    """Returns a picture with logarithmic axes; names from outside are escaped."""
    lines, far = _near(lines)
    values = [value for line in lines for value in (*line.low, *line.high) if not math.isnan(value)]
    values += [bound_seconds] if bound_seconds else []
    if not values:
        values = [1.0]
    x = Axis(1.0, max(evaluations, 2), LEFT, WIDTH - RIGHT)
    height = max(HEIGHT, TOP + BOTTOM + LABEL_PIXELS * len(lines))
    y = Axis(min(values) * 0.93, max(values) * 1.07, height - BOTTOM, TOP)
    parts = [*_frame(title, x, y), *_levels(bound_seconds, y)]
    colours = _colours(lines)
    for line, colour in sorted(zip(lines, colours, strict=True), key=lambda pair: not pair[0].is_level):
        parts += _drawn(line, colour, grid(evaluations), x, y)
    parts += _labels(lines, colours, y)
    if far:
        names = ", ".join(f"{escape(line.name)} {line.middle[-1]:.3g} s" for line in far)
        parts.append(f'<text x="{LEFT}" y="38" fill="#555" font-size="11">above: {names}</text>')
    style = "font-family:sans-serif;font-size:12px;background:#fff"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" style="{style}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>', *parts, "</svg>\n"])


def _near(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Returns the lines to draw, and the levels that are too far from the best."""
    best = min((float(line.middle[-1]) for line in lines if not math.isnan(line.middle[-1])), default=0.0)
    far = [line for line in lines if line.is_level and line.middle[-1] > FAR * best]
    return [line for line in lines if line not in far], far


def _colours(lines: Sequence[Line]) -> list[str]:
    """Returns a colour for each line; what was answered at once is grey."""
    numbers = np.cumsum([not line.is_level for line in lines]) - 1
    return [
        LEVEL_COLOUR if line.is_level else COLOURS[number % len(COLOURS)]
        for line, number in zip(lines, numbers.tolist(), strict=True)
    ]


def _frame(title: str, x: Axis, y: Axis) -> list[str]:
    parts = [f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>']
    for value in x.ticks():
        parts.append(f'<path d="M{x(value):.1f} {TOP}V{y.start}" stroke="#eee"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{y.start + 18}" text-anchor="middle">{value:,.0f}</text>')
    for value in y.ticks():
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#eee"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (y.end + y.start) / 2
    parts.append(f'<text x="{middle_x:.0f}" y="{y.start + 40}" text-anchor="middle">evaluations spent</text>')
    turned = f'transform="rotate(-90 18 {middle_y:.0f})"'
    parts.append(f'<text x="18" y="{middle_y:.0f}" text-anchor="middle" {turned}>best step so far, seconds</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{y.start}H{WIDTH - RIGHT}" fill="none" stroke="#333"/>')
    return parts


def _levels(bound_seconds: float | None, y: Axis) -> list[str]:
    """Returns the bound, below which no placement is."""
    if not bound_seconds:
        return []
    level = y(bound_seconds)
    return [
        f'<path d="M{LEFT} {level:.1f}H{WIDTH - RIGHT}" stroke="#333" stroke-dasharray="2 3"/>',
        f'<text x="{LEFT + 6}" y="{level - 4:.1f}" fill="#333">no placement is below this</text>',
    ]


def _drawn(line: Line, colour: str, at: Floats, x: Axis, y: Axis) -> list[str]:
    known = np.flatnonzero(~np.isnan(line.middle))
    if not len(known):
        return []

    def points(column: Floats, *, is_back: bool = False) -> str:
        corners = known[_corners(column[known])]
        return " ".join(f"{x(float(at[i])):.1f},{y(float(column[i])):.1f}" for i in (corners[::-1] if is_back else corners))

    band = f"{points(line.high)} {points(line.low, is_back=True)}"
    dashes = ' stroke-dasharray="7 4"' if line.is_level else ""
    return [
        f'<polygon points="{band}" fill="{colour}" opacity="0.18"/>',
        f'<polyline points="{points(line.middle)}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>',
    ]


def _corners(column: Floats) -> Ints:
    """Returns the points that a line needs: those that differ from a neighbour, and both ends."""
    changes = np.append(True, column[1:] != column[:-1])  # from the one before
    return np.flatnonzero(changes | np.append(changes[1:], True))


def _labels(lines: Sequence[Line], colours: Sequence[str], y: Axis) -> list[str]:
    """Returns the lines' names beside their ends, apart from each other, with their last values."""
    ends = sorted((y(float(line.middle[-1])), i) for i, line in enumerate(lines) if not math.isnan(line.middle[-1]))
    parts, at_least = [], TOP + 0.0
    room = y.start - LABEL_PIXELS * (len(ends) - 1)
    for position, (wanted, i) in enumerate(ends):
        height = max(min(wanted, room + LABEL_PIXELS * position), at_least)
        at_least = height + LABEL_PIXELS
        colour, edge, line = colours[i], WIDTH - RIGHT, lines[i]
        parts.append(f'<path d="M{edge} {wanted:.1f}L{edge + 12} {height:.1f}" fill="none" stroke="{colour}"/>')
        parts.append(f'<path d="M{edge + 12} {height:.1f}h11" stroke="{colour}" stroke-width="3"/>')
        text = f"{escape(line.name)} {line.middle[-1]:.3g} s"
        parts.append(f'<text x="{edge + 27}" y="{height + 4:.1f}">{text}</text>')
    return parts
