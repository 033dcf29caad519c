"""A schedule on a terminal: a table of the devices, and a picture of the timeline in letters."""

import os
import shutil
import sys

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.graph import PHASES
from placewise.core.quantities import format_bytes, format_seconds
from placewise.report.terminal_text import printable, table
from placewise.simulate.schedule import Schedule

BLOCKS, PLAIN = " ▁▂▃▄▅▆▇█", " .:-=+*#%"  # a column's busy share in eighths, rounded up

COLOURS = (34, 33, 32)  # the terminal's codes for the phases: blue, yellow, green

LEAST_COLUMNS, MOST_COLUMNS = 10, 200

MOST_IDLE = 4  # idle devices of which each has a line; more have one together

TICK_COLUMNS = 12  # about this many columns between the times on the axis


def device_table(schedule: Schedule) -> str:
    """Returns a line for each device: its ops, how long it is busy and sends, and its memory; many idle ones share one."""
    problem, step, shown = schedule.problem, schedule.step_seconds, _shown_devices(schedule)
    counts = np.bincount(schedule.devices, minlength=problem.num_devices).tolist()
    rows = [
        (
            device.name,
            f"{counts[d]:,}",
            format_seconds(schedule.busy_seconds[d]),
            f"{schedule.busy_seconds[d] / step:.0%}" if step else "-",
            format_seconds(schedule.copy_seconds[d].sum()),
            format_bytes(schedule.peak_bytes[d]),
            format_bytes(device.memory_bytes),
            "" if schedule.peak_bytes[d] <= device.memory_bytes else "does not fit",
        )
        for d, device in enumerate(problem.cluster.devices)
        if d in shown
    ]
    if idle := problem.num_devices - len(shown):
        rows.append((f"{idle} others", "0", format_seconds(0.0), "0%" if step else "-", format_seconds(0.0), "0 B", "", ""))
    return table(("device", "ops", "busy", "of step", "sending", "peak memory", "of", ""), rows)


def _shown_devices(schedule: Schedule) -> list[int]:
    """Returns the devices that have a line: all, unless many of them do nothing and hold nothing."""
    counts = np.bincount(schedule.devices, minlength=schedule.problem.num_devices)
    is_used = (counts > 0) | (np.asarray(schedule.peak_bytes) > 0)
    has_few_idle = bool((~is_used).sum() <= MOST_IDLE)
    shown: list[int] = np.flatnonzero(is_used | has_few_idle).tolist()
    return shown


def terminal_picture(schedule: Schedule) -> str:
    """Returns the picture in the width, letters and colours of the terminal."""
    width = shutil.get_terminal_size((100, 24)).columns
    return picture(
        schedule, width, in_blocks=_shows(BLOCKS), in_colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )


def picture(schedule: Schedule, width: int, *, in_blocks: bool = True, in_colour: bool = False) -> str:
    """Returns a line for each device with its busy share over the step, and a time axis; '' if the step takes no time."""
    if not schedule.step_seconds:
        return ""
    shown = _shown_devices(schedule)
    names = [printable(schedule.problem.cluster.device_names[device]) for device in shown]
    label = max(map(len, names))
    columns = min(max(width - label - 2, LEAST_COLUMNS), MOST_COLUMNS)
    letters, lines = BLOCKS if in_blocks else PLAIN, []
    for device, name in zip(shown, names, strict=True):
        shares = busy_shares(schedule, device, columns)  # [phases, columns]
        levels = np.ceil(np.clip(shares.sum(axis=0) - 1e-9, 0, 1) * 8).astype(np.int64)
        text = [letters[level] for level in levels.tolist()]
        lines.append(f"{name:<{label}}  {_coloured(text, shares.argmax(axis=0)) if in_colour else ''.join(text)}".rstrip())
    lines.append(f"{'':<{label}}  {axis(schedule.step_seconds, columns)}".rstrip())
    if in_colour:
        lines.append(f"{'':<{label}}  {'  '.join(_paint(name, phase) for phase, name in enumerate(PHASES))}")
    return "\n".join(lines)


def busy_shares(schedule: Schedule, device: int, columns: int) -> Floats:
    """Returns the share of each column's time in which a device runs ops of each phase: [phases, columns]."""
    t, phases = schedule.timeline, schedule.problem.graph.ops.phases
    edges = np.linspace(0.0, schedule.step_seconds, columns + 1)
    shares = np.zeros((len(PHASES), columns))
    for phase in range(len(PHASES)):
        ops = schedule.order[(schedule.devices[schedule.order] == device) & (phases[schedule.order] == phase)]
        if len(ops):
            moments = np.stack([t.start[ops], t.end[ops]], axis=1).ravel()  # one op ends before the next one starts
            spent = np.repeat(np.cumsum(t.end[ops] - t.start[ops]), 2)
            spent[2::2] = spent[1:-1:2]
            spent[0] = 0.0
            shares[phase] = np.diff(np.interp(edges, moments, spent)) / (edges[1] - edges[0])
    return shares


def axis(whole_seconds: float, columns: int) -> str:
    """Returns round times, each in its column."""
    rough = whole_seconds * TICK_COLUMNS / columns
    power = 10.0 ** np.floor(np.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    text = "0"
    for i in range(1, int(whole_seconds / step) + 1):
        mark = format_seconds(float(f"{i * step:.12g}"))
        at = round(i * step / whole_seconds * columns)
        if at > len(text) and at + len(mark) <= columns:
            text = text.ljust(at) + mark
    return text


def _coloured(letters: list[str], phases: Ints) -> str:
    """Returns the letters, each in the colour of its most frequent phase."""
    ends = [*(np.flatnonzero(np.diff(phases)) + 1).tolist(), len(letters)]
    starts = [0, *ends[:-1]]
    return "".join(_paint("".join(letters[a:b]), int(phases[a])) for a, b in zip(starts, ends, strict=True))


def _paint(text: str, phase: int) -> str:
    return f"\x1b[{COLOURS[phase]}m{text}\x1b[0m"


def _shows(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
