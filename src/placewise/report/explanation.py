"""A schedule explained in a few lines: what runs where, what limits it, and how much can still be gained."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from placewise.bounds.limits import LIMITS
from placewise.core.arrays import Floats
from placewise.core.grouping import module_path
from placewise.core.problem import Problem
from placewise.core.quantities import format_bytes, format_percent_rounded_up, format_seconds
from placewise.search.advice import fastest_alone
from placewise.simulate.schedule import Schedule

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound

MOSTLY = 0.9  # the share of its time that a module must have on one device to be called "on" it

SMALL = 0.02  # the share of all time below which a part belongs to "the rest"

CLAUSES, NAMES = 6, 3  # how many are listed at most

NEARLY_FULL = 0.9  # the share of its memory from which a device is named

NEAR_THE_BOUND = 1.25  # times the bound up to which a single device is named

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})", re.DOTALL)


def explain(problem: Problem, schedule: Schedule, bound: "Bound | None") -> tuple[str, ...]:
    """Returns two or three lines: what runs where, what limits the step, and with a bound how much can still be gained."""
    if not schedule.step_seconds:
        return ("no op takes any time",)
    gain = [] if bound is None else [_possible_gain(problem, schedule.step_seconds, bound)]
    graphs = ["Launches are those with CUDA graphs."] if problem.cluster.cuda_graphs else []
    lines = (_where(schedule), _limits(schedule), *gain, *graphs)
    return tuple(" ".join(line.split()) for line in lines)  # names may have line breaks


# --- what runs where ---


@dataclass
class _Part:
    """A module with its submodules, or a micro-batch."""

    name: str
    seconds: Floats  # [devices], of all its ops
    inside: "dict[str, _Part]" = field(default_factory=dict)  # in program order; its own ops are under ""

    @property
    def is_on_one(self) -> bool:
        return float(self.seconds.max()) >= MOSTLY * self.total

    @property
    def total(self) -> float:
        return float(self.seconds.sum())

    @property
    def settled(self) -> float:
        """How many of its seconds are in parts that are on one device."""
        return self.total if self.is_on_one else sum(part.settled for part in self.inside.values())


def _where(schedule: Schedule) -> str:
    names = schedule.problem.cluster.device_names
    tree = _tree(schedule, _module_labels(schedule))
    if tree.settled < tree.total / 2:
        batches = _tree(schedule, _micro_batch_labels(schedule))
        tree = batches if batches.settled >= tree.total / 2 else tree
    used = np.flatnonzero(np.bincount(schedule.devices, minlength=len(names))).tolist()
    if len(used) == 1:
        clauses = [f"everything on {names[used[0]]}"]
    elif tree.is_on_one:
        first = int(tree.seconds.argmax())
        share = f"{tree.seconds[first] / tree.total:.0%} of the time"
        clauses = [
            f"nearly everything on {names[first]} ({share}), the rest on {_and(names[d] for d in used if d != first)}"
        ]
    else:
        clauses = _clauses(tree, names)
    moved = int(schedule.problem.graph.tensors.nbytes[schedule.copy_tensors].sum())
    count = len(schedule.copy_tensors)
    copies = f"{count:,} {'copy' if count == 1 else 'copies'}, {format_bytes(moved)}" if count else "no copies"
    return "; ".join([*clauses, copies])


def _module_labels(schedule: Schedule) -> list[tuple[str, ...]]:
    """Returns the path of each op's module, as the names on it."""
    graph = schedule.problem.graph
    paths = (module_path(graph, op) for op in range(len(graph.ops)))
    return [tuple(path.split(".")) if path else () for path in paths]


def _micro_batch_labels(schedule: Schedule) -> list[tuple[str, ...]]:
    numbers = schedule.problem.graph.ops.micro_batches.tolist()
    return [(f"micro-batch {number}",) if number >= 0 else ("what all micro-batches share",) for number in numbers]


def _tree(schedule: Schedule, labels: list[tuple[str, ...]]) -> _Part:
    """Returns the part with all ops; each op is in the part that its label leads to."""
    num_devices = schedule.problem.num_devices
    number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    cells = np.array([number[label] for label in labels]) * num_devices + schedule.devices
    times = schedule.problem.op_seconds[np.arange(len(labels)), schedule.devices]
    times = times if times.any() else np.ones(len(labels))  # if only copies and launches take time, ops are counted
    sums = np.bincount(cells, times, len(number) * num_devices).reshape(-1, num_devices)  # [labels, devices]
    root = _Part("", np.zeros(num_devices))
    for label, i in number.items():
        part = root
        for depth, word in enumerate((*label, "")):
            part.seconds += sums[i]
            name = ".".join(label[: depth + 1]) if word else f"{part.name} itself" if part.name else "ops in no module"
            part = part.inside.setdefault(word, _Part(name, np.zeros(num_devices)))
        part.seconds += sums[i]
    return root


def _clauses(tree: _Part, names: Sequence[str]) -> list[str]:
    """Returns the modules on one device, by device, and those that are split, longest first; small ones are "the rest"."""
    parts = [part for inside in tree.inside.values() for part in _parts(inside)]
    by_device: dict[int, list[_Part]] = {}
    found: list[tuple[Floats, str]] = []
    for part in parts:
        if part.is_on_one:
            by_device.setdefault(int(part.seconds.argmax()), []).append(part)
        else:
            found.append((part.seconds, f"{part.name} split over {_split(part.seconds, names)}"))
    for device, there in by_device.items():
        sums = np.sum([part.seconds for part in there], axis=0)
        mostly = "" if sums[device] >= 0.995 * sums.sum() else "mostly "
        found.append((sums, f"{_listed(there)} {mostly}on {names[device]}"))
    found.sort(key=lambda clause: -round(clause[0].sum() / tree.total, 3))
    count = min(CLAUSES, sum(sums.sum() >= SMALL * tree.total for sums, _ in found))
    clauses = [text for _, text in found[:count]]
    rest = np.sum([sums for sums, _ in found[count:]], axis=0)
    if rest.sum() >= 0.005 * tree.total:
        clauses.append(f"the rest ({rest.sum() / tree.total:.0%} of the time) on {_and(_above(rest, names))}")
    return clauses


def _parts(part: _Part) -> list[_Part]:
    """Returns the largest parts that are on one device; a part stays whole if most of its submodules are split too."""
    if not part.total:
        return []
    if part.is_on_one or part.settled < part.total / 2:
        return [part]
    return [inner for inside in part.inside.values() for inner in _parts(inside)]


def _split(times: Floats, names: Sequence[str]) -> str:
    shares = [f"{share:.0%}".rstrip("%") for share in (times / times.sum()).tolist() if share >= 0.005]
    devices = _above(times, names)
    return f"{_and(devices) if len(devices) <= 4 else f'{len(devices)} devices'} ({'/'.join(shares)} by time)"


def _above(times: Floats, names: Sequence[str]) -> list[str]:
    """Returns the devices whose share is not rounded to 0%."""
    return [name for name, share in zip(names, (times / times.sum()).tolist(), strict=True) if share >= 0.005]


def _listed(parts: list[_Part]) -> str:
    """Returns the parts' names, longest first; consecutive numbers are joined: 'blocks.0 to blocks.5'."""
    runs: list[list[_Part]] = []
    for part in parts:
        if runs and _follows(runs[-1][-1].name, part.name):
            runs[-1].append(part)
        else:
            runs.append([part])
    whole = sum(part.total for part in parts)
    runs.sort(key=lambda run: -round(sum(part.total for part in run) / whole, 3))  # equal ones in program order
    names = [run[0].name if len(run) == 1 else f"{run[0].name} to {run[-1].name}" for run in runs]
    return _and(names if len(names) <= NAMES else [*names[: NAMES - 1], f"{len(names) - NAMES + 1} more"])


def _follows(name: str, other: str) -> bool:
    """Returns whether the other name is this one with the next number."""
    a, b = _NUMBERED.fullmatch(name), _NUMBERED.fullmatch(other)
    return a is not None and b is not None and a[1] == b[1] and int(b[2]) == int(a[2]) + 1


def _and(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


# --- what limits it ---


def _limits(schedule: Schedule) -> str:
    """Returns what the critical path consists of, the busiest device and channel, and devices short of memory."""
    step, cluster = schedule.step_seconds, schedule.problem.cluster
    shares = dict.fromkeys(("op", "copy", "host"), 0.0)
    for link in schedule.critical_path:
        shares[link.kind] += (link.end - link.start) / step
    words = {"op": "ops", "copy": "copies", "host": "launching"}
    path = ", ".join(f"{share:.0%} {words[kind]}" for kind, share in shares.items() if share >= 0.005)
    busiest = int(schedule.busy_seconds.argmax())
    busy = f"{cluster.device_names[busiest]} is busy {schedule.busy_seconds[busiest] / step:.0%} of the step"
    if len(schedule.copy_tensors):
        t = schedule.timeline
        on_channel = t.copy_end - t.copy_start - cluster.delay_seconds[t.copy_source, t.copy_target]
        times = np.zeros(len(cluster.channel_names))
        for channel in range(len(times)):
            uses = (cluster.channels == channel) | (cluster.second_channels == channel)  # [devices, devices]
            times[channel] = on_channel[uses[t.copy_source, t.copy_target]].sum()
        busy += f", channel {cluster.channel_names[int(times.argmax())]} {times.max() / step:.0%}"
    parts = [f"critical path: {path}", busy]
    for device, peak in zip(cluster.devices, schedule.peak_bytes.tolist(), strict=True):
        if peak > device.memory_bytes:
            parts.append(f"{device.name} lacks {format_bytes(peak - device.memory_bytes)} of memory")
        elif peak >= NEARLY_FULL * device.memory_bytes > 0:
            parts.append(f"{device.name} has {1 - peak / device.memory_bytes:.0%} of its memory left")
    return "; ".join(parts)


# --- what can still be gained ---


def _possible_gain(problem: Problem, step_seconds: float, bound: "Bound") -> str:
    if bound.seconds <= 0:
        return "no useful bound is known"
    gap = _at_most(step_seconds / bound.seconds - 1)
    faster = f"no placement can be more than {gap} faster" if gap else "no placement is faster"
    text = f"{faster}: {LIMITS[bound.name].what} takes at least {format_seconds(bound.seconds)}"
    single = fastest_alone(problem)
    if single is None or single[1] > bound.seconds * NEAR_THE_BOUND:
        return text
    name, alone = single
    saving = _at_most(1 - bound.seconds / alone)
    more = f"more devices can save at most {saving}" if saving else "more devices can't help"
    return f"{text}; {name} alone takes {format_seconds(alone)}: {more}"


def _at_most(share: float) -> str:
    """Returns a share rounded up to a tenth of a percent, '' if it is 0 apart from rounding errors."""
    return "" if (text := format_percent_rounded_up(share)) == format_percent_rounded_up(0.0) else text
