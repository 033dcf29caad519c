"""Pictures of searches as SVG: the best step so far against evaluations, a line and a band for each strategy."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from placewise.core.arrays import Floats
from placewise.core.errors import InputError
from placewise.experiments.recorded_searches import Found, Improvement, SampledCosts
from placewise.formats.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito, without yellow

STYLES = ("-", "-.")  # of the first and of the second line with a colour

LEVEL_COLOUR, LEVEL_STYLE = "#777777", "--"

FAR = 5.0  # times the best step: levels above it are named in the title, since they would squeeze everything else

FEW = 20  # evaluations up to which a strategy is a level, not a line: it answers at once

POINTS = 300  # of a line of samples; a picture needs no more

WIDTH, LEAST_HEIGHT, LABEL_HEIGHT = 650.0, 350.0, 12.0  # points

LEFT, RIGHT, TOP, BOTTOM = 55.0, 165.0, 40.0, 40.0  # margins in points; the labels are on the right

SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # texts stay texts
    "svg.hashsalt": "placewise",  # the same ids every time
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eeeeee",
}


@dataclass(frozen=True, eq=False)
class BestSoFar:
    """A strategy's best step seconds by evaluations spent, from where every seed has found something."""

    name: str
    spent: Floats  # [points]; each value holds until the next point
    middle: Floats  # [points], the median of the seeds
    low: Floats  # [points]
    high: Floats  # [points]
    is_level: bool = False

    @property
    def label(self) -> str:
        """The name with the last value."""
        return f"{self.name} {self.middle[-1]:.3g} s"


def write_figure(
    folder: str | Path,
    name: str,
    title: str,
    found: Mapping[str, Found],
    evaluations: int,
    bound_seconds: float | None = None,
) -> None:
    """Writes a picture of what was found into a folder, which is made if it is missing; nothing if nothing was found."""
    lines = lines_of(found, evaluations)
    if not lines:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{folder}: can't be written: {problem.strerror}") from None
    file_name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    write_bytes(Path(folder) / f"{file_name}.svg", draw_figure(title, lines, bound_seconds, evaluations))


def write_samples_figure(
    folder: str | Path, title: str, searched: Mapping[str, Sequence[SampledCosts]], control: str
) -> None:
    """Writes a picture into a folder: the means of what each strategy sampled, above its best steps; medians over the seeds.

    What a search sampled is left out if it is less than a hundred placements. The control is drawn in grey.
    """
    lines = {label: samples for label, samples in searched.items() if samples and len(samples[0].seconds) >= 100}
    if lines:
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_bytes(Path(folder) / f"samples-{name}.svg", draw_samples(title, lines, control))


def draw_samples(title: str, lines: Mapping[str, Sequence[SampledCosts]], control: str) -> bytes:
    """Returns the picture of `write_samples_figure` as SVG, the same bytes every time."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure((9.5, 6.5))
        means, bests = figure.subplots(2, 1, sharex=True)
        for number, (label, samples) in enumerate(lines.items()):
            colour = LEVEL_COLOUR if label == control else COLOURS[number % len(COLOURS)]
            style = STYLES[number // len(COLOURS) % len(STYLES)]
            length = min(len(one.seconds) for one in samples)
            window = length // 20
            smooth = [np.convolve(one.seconds[:length], np.ones(window) / window, "valid") for one in samples]
            name = f"{label} (learns nothing)" if label == control else label
            spent, every = np.arange(1, length + 1), max(length // POINTS, 1)
            mean = np.median(smooth, axis=0) * 1e3
            means.plot(spent[window - 1 :][::every], mean[::every], style, color=colour, linewidth=1.6, label=name)
            best = np.median([one.best[:length] for one in samples], axis=0) * 1e3
            bests.plot(spent[every - 1 :: every], best[every - 1 :: every], style, color=colour, linewidth=1.6)
        means.set(yscale="log", ylabel=f"mean of {window} samples, ms")
        bests.set(yscale="log", ylabel="best step so far, ms", xlabel="evaluations")
        for axes in (means, bests):
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_minor_formatter("{x:,.0f}")
            axes.tick_params(axis="y", which="both", labelsize=8)
        means.set_title(_plain(title), loc="left", weight="bold")
        figure.legend(*means.get_legend_handles_labels(), loc="center right", frameon=False)
        figure.subplots_adjust(left=0.09, right=0.74, top=0.94, bottom=0.08, hspace=0.1)
        output = io.BytesIO()
        figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    return output.getvalue()


def check_drawing() -> None:
    """Refuses to draw if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("--plots: needs matplotlib: pip install 'placewise[plots]'") from None


def lines_of(found: Mapping[str, Found], evaluations: int) -> list[BestSoFar]:
    """Returns a line for each strategy that found something."""
    return [_line(name, one, max(evaluations, 2)) for name, one in found.items() if one.times and one.histories]


def _line(name: str, found: Found, evaluations: int) -> BestSoFar:
    if is_level := found.evaluations <= FEW:
        spent = np.array([1.0, evaluations])
        best = np.repeat(np.array(found.times)[:, None], 2, axis=1)  # [seeds, points]
    else:
        histories = [history for history in found.histories if history]
        first = max(history[0][0] for history in histories)
        changes = {float(entry[0]) for history in histories for entry in history if entry[0] >= first}
        spent = np.array(sorted({*changes, float(evaluations)}))
        best = np.array([_best_at(history, spent) for history in histories])  # [seeds, points]
    return BestSoFar(name, spent, np.median(best, axis=0), best.min(axis=0), best.max(axis=0), is_level)


def _best_at(history: Sequence[Improvement], spent: Floats) -> Floats:
    """Returns the best step seconds after each number of evaluations: [points]."""
    best = np.array([entry[2] for entry in history])
    found: Floats = best[np.searchsorted([entry[0] for entry in history], spent, side="right") - 1]
    return found


def draw_figure(title: str, lines: Sequence[BestSoFar], bound_seconds: float | None, evaluations: int) -> bytes:
    """Returns a picture with logarithmic axes as SVG, the same bytes every time."""
    import matplotlib
    from matplotlib.figure import Figure

    lines, far = _near(lines)
    height = max(LEAST_HEIGHT, TOP + BOTTOM + LABEL_HEIGHT * len(lines))
    place = (LEFT / WIDTH, BOTTOM / height, 1 - (LEFT + RIGHT) / WIDTH, 1 - (TOP + BOTTOM) / height)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure((WIDTH / 72, height / 72))  # inches
        axes = figure.add_axes(place)
        axes.set_title(_plain(title), loc="left", weight="bold", pad=20)
        if far:
            above = f"above: {', '.join(line.label for line in far)}"
            axes.annotate(_plain(above), (0, 1), (0, 6), "axes fraction", "offset points", color="#555555")
        _set_axes(axes, lines, bound_seconds, evaluations)
        looks = _looks(lines)
        for line, (colour, style) in sorted(zip(lines, looks, strict=True), key=lambda pair: not pair[0].is_level):
            axes.fill_between(line.spent, line.low, line.high, step="post", color=colour, alpha=0.18, linewidth=0)
            axes.step(line.spent, line.middle, style, where="post", color=colour, linewidth=1.8)
        if bound_seconds:
            axes.axhline(bound_seconds, color="#333333", linestyle=":", linewidth=1.2)
            axes.annotate("bound: no placement is faster", (1, bound_seconds), (4, 3), textcoords="offset points")
        _add_labels(axes, lines, looks, LABEL_HEIGHT / (height - TOP - BOTTOM))
        output = io.BytesIO()
        figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    return output.getvalue()


def _near(lines: Sequence[BestSoFar]) -> tuple[list[BestSoFar], list[BestSoFar]]:
    """Returns the lines to draw, and the levels that are too far above the best."""
    best = min((float(line.middle[-1]) for line in lines), default=0.0)
    far = [line for line in lines if line.is_level and line.middle[-1] > FAR * best]
    return [line for line in lines if line not in far], far


def _looks(lines: Sequence[BestSoFar]) -> list[tuple[str, str]]:
    """Returns a colour and a style for each line."""
    numbers = np.cumsum([not line.is_level for line in lines]) - 1
    return [
        (LEVEL_COLOUR, LEVEL_STYLE)
        if line.is_level
        else (COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS) % len(STYLES)])
        for line, number in zip(lines, numbers.tolist(), strict=True)
    ]


def _set_axes(axes: "Axes", lines: Sequence[BestSoFar], bound_seconds: float | None, evaluations: int) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    values = [*(value for line in lines for value in (*line.low, *line.high)), *([bound_seconds] if bound_seconds else [])]
    low, high = min(values, default=1.0) * 0.93, max(values, default=1.0) * 1.07
    axes.set(xscale="log", xlim=(1, max(evaluations, 2)), xlabel="evaluations")
    axes.set(yscale="log", ylim=(low, high), ylabel="best step so far, seconds")
    digits = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
    for axis, subs, form in ((axes.xaxis, (1, 2, 5), "{x:,.0f}"), (axes.yaxis, digits, "{x:g}")):
        axis.set_major_locator(LogLocator(subs=subs, numticks=99))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter(form))


def _add_labels(axes: "Axes", lines: Sequence[BestSoFar], looks: Sequence[tuple[str, str]], spacing: float) -> None:
    """Writes the lines' names next to their ends, at least `spacing` apart, as a share of the axes' height."""
    low, high = axes.get_ylim()
    ends = sorted((math.log(line.middle[-1] / low) / math.log(high / low), i) for i, line in enumerate(lines))
    at_least = 0.0
    for position, (wanted, i) in enumerate(ends):
        height = max(min(wanted, 1 - spacing * (len(ends) - 1 - position)), at_least)
        at_least = height + spacing
        colour, style = looks[i]
        arrow: dict[str, Any] = {
            "arrowstyle": "-",
            "color": colour,
            "shrinkA": 0,
            "shrinkB": 0,
            "relpos": (0, 0.5),
            "lw": 1.4,
        }
        arrow["ls"] = "-" if lines[i].is_level else style
        place: dict[str, Any] = {"xycoords": "axes fraction", "va": "center", "arrowprops": arrow}
        axes.annotate(f" {_plain(lines[i].label)}", (1, wanted), (1.035, height), **place)


def _plain(text: str) -> str:
    """Returns a text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")
