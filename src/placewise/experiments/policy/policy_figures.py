"""Pictures of the graph policy as SVG: against other strategies by family, and without what it reads."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewise.experiments.search_figures import COLOURS, LEVEL_COLOUR, SETTINGS
from placewise.formats.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = {  # column of the table -> marker and colour
    "best of all": ("D", COLOURS[1]),
    "graph-policy, greedy": ("o", "white"),
    "graph-policy, not refined": ("o", COLOURS[5]),
    "graph-policy": ("o", COLOURS[0]),
}

LABELS = {
    "best of all": "the best of all of them",
    "graph-policy, greedy": "one pass",
    "graph-policy, not refined": "the best of 96 candidates",
    "graph-policy": "graph-policy, refined",
}

NOT_DRAWN = ("family", *DRAWN)

FARTHEST = 4.0  # times auto's step; what takes longer is drawn there


def write_families(folder: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a picture into a folder: step times over auto's, a line for each row but the last."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_bytes(Path(folder) / "graph-policy-families.svg", draw_families(rows[:-1]))


def write_ablation(folder: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a picture into a folder: how much longer the best step is without each group of figures."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_bytes(Path(folder) / "graph-policy-ablation.svg", draw_ablation(rows))


def draw_families(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the picture of `write_families`, the same bytes every time."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        figure, axes = _begun(len(rows), "Step time relative to auto's (10 s), by family that the weights have not seen")
        label = "a one-shot strategy"
        for row, entry in enumerate(rows):
            others = [v for name, v in entry.items() if name not in NOT_DRAWN and isinstance(v, float)]
            axes.plot(
                [min(v, FARTHEST) for v in others], [row] * len(others), "|", color=LEVEL_COLOUR, markersize=9, label=label
            )
            label = "_"
        for name, (marker, fill) in DRAWN.items():
            found = [(entry[name], row) for row, entry in enumerate(rows) if isinstance(entry[name], float)]
            edge = COLOURS[0] if fill == "white" else fill
            steps, places = zip(*((min(step, FARTHEST), row) for step, row in found), strict=True)
            axes.plot(steps, places, marker, color=edge, markerfacecolor=fill, markersize=7, label=LABELS[name])
        axes.axvline(1.0, color="#333333", linestyle=":", linewidth=1.2)
        axes.set_yticks(range(len(rows)), [entry["family"] for entry in rows])
        axes.set(xscale="log", xlim=(0.97, FARTHEST * 1.04), xlabel="step time / auto's: geometric mean where a plan fits")
        axes.set_xticks([1, 1.25, 1.5, 2, 3, FARTHEST], ["1", "1.25", "1.5", "2", "3", f"{FARTHEST:g} or more"])
        axes.set_xticks([], minor=True)
        axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=5, frameon=False)
        return _svg(figure)


def draw_ablation(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns the picture of `write_ablation`, the same bytes every time."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        figure, axes = _begun(len(rows), "Step time of the greedy placement without what the network reads")
        longer = [row["all families"] - 1 for row in rows]
        axes.barh(range(len(rows)), longer, color=COLOURS[0], height=0.6)
        for place, share in enumerate(longer):
            axes.annotate(f" {share:+.1%}", (max(share, 0), place), va="center")
        axes.set_yticks(range(len(rows)), [row["without"] for row in rows])
        axes.set(
            xlabel="change of the step time: geometric mean over all families",
            xlim=(1.1 * min(*longer, 0.0), 1.15 * max(longer)),
        )
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:+.0%}" if share else "0")
        return _svg(figure)


def _begun(lines: int, title: str) -> "tuple[Figure, Axes]":
    """Returns a figure with room for so many lines, the first one on top."""
    from matplotlib.figure import Figure

    figure = Figure((9.0, 1.4 + 0.3 * lines), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", weight="bold")
    axes.set_ylim(lines - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    return figure, axes


def _svg(figure: "Figure") -> bytes:
    output = io.BytesIO()
    figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
    return output.getvalue()
