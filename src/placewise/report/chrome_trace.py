"""Chrome traces: a schedule is written as one, and a measured step is read from one.

Perfetto (ui.perfetto.dev) and chrome://tracing show them. Each device is a process with a lane for its ops and a lane for
each channel whose copies start there. Arrows lead from the op that produces a tensor through its copy to the op that waits
for it, and a counter shows the memory in use.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.errors import InputError, ProblemError
from placewise.core.graph import PHASES, Graph
from placewise.core.plan import digest_of_graph
from placewise.core.problem import Problem
from placewise.formats.files import describe, parse_json, read_bytes, write_bytes
from placewise.simulate.schedule import Schedule

MICROSECONDS = 1e6  # a trace's unit, per second

OPS_LANE = 0


@dataclass(frozen=True, eq=False)
class MeasuredTrace:
    """When ops and copies ran; the first one starts at 0."""

    source: str  # the file
    ops: Ints  # [slices]
    devices: Ints  # [slices]
    start: Floats  # [slices], seconds
    end: Floats  # [slices]
    copy_names: tuple[str, ...]  # [copies], the tensors'
    copy_source: Ints  # [copies], device
    copy_target: Ints  # [copies], device
    copy_start: Floats  # [copies]
    copy_end: Floats  # [copies]

    @property
    def step_seconds(self) -> float:
        """From the first start to the last end of an op."""
        return float(self.end.max(initial=0.0))

    def elsewhere(self, devices: Ints) -> Ints:
        """Returns the slices that ran on another device than their op's in `devices`: [ops] -> [slices]."""
        return np.flatnonzero(self.devices != devices[self.ops])


# --- writing ---


def write_trace(schedule: Schedule, path: str | Path, *, is_measured: bool = False) -> None:
    """Writes the trace into a file."""
    try:
        text = json.dumps(trace_data(schedule, is_measured), allow_nan=False, separators=(",", ":"))
    except ValueError:  # a trace has microseconds, and 1e303 s has too many of them
        raise ProblemError(f"{path}: can't be written: the step takes too long for a trace") from None
    write_bytes(path, text.encode())


def trace_data(schedule: Schedule, is_measured: bool = False) -> dict[str, Any]:
    """Returns the trace as plain data; for a measured schedule it is not known what ops waited for."""
    problem = schedule.problem
    facts = {
        "graph": problem.graph.name,
        "graph_digest": digest_of_graph(problem.graph),
        "cluster": problem.cluster.name,
        "step_seconds": schedule.step_seconds,
    }
    events = [*_lanes(schedule), *_ops(schedule, is_measured), *_copies(schedule), *_memory(schedule)]
    return {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}


def _channel_homes(schedule: Schedule) -> dict[int, int]:
    """Returns the device whose process shows each channel: the first one that sends on it."""
    homes: dict[int, int] = {}
    channels = schedule.problem.cluster.channels
    for source, target in np.argwhere(channels >= 0).tolist():
        homes.setdefault(int(channels[source, target]), source)
    return homes


def _lanes(schedule: Schedule) -> Iterator[dict[str, Any]]:
    cluster = schedule.problem.cluster
    for device, name in enumerate(cluster.device_names):
        yield {"ph": "M", "name": "process_name", "pid": device, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": device, "args": {"sort_index": device}}
        yield {"ph": "M", "name": "thread_name", "pid": device, "tid": OPS_LANE, "args": {"name": "ops"}}
    for channel, device in _channel_homes(schedule).items():
        lane = {"pid": device, "tid": channel + 1}
        yield {"ph": "M", "name": "thread_name", **lane, "args": {"name": f"copies: {cluster.channel_names[channel]}"}}


def _slice(name: str, category: str, lane: dict[str, int], start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": start * MICROSECONDS, "dur": (end - start) * MICROSECONDS}
    return {"ph": "X", "name": name, "cat": category, **lane, **times, "args": args}


def _ops(schedule: Schedule, is_measured: bool) -> Iterator[dict[str, Any]]:
    graph, t = schedule.problem.graph, schedule.timeline
    ops, writes = graph.ops, graph.ops.writes.lists()
    path = () if is_measured else schedule.critical_path
    critical = {link.number for link in path if link.kind == "op"}
    for n in schedule.order.tolist():
        args = {"op": n, "kind": ops.kinds[n], "group": int(ops.groups[n]), **_shape(graph, *writes[n][:1])}
        if not is_measured:
            args["waited for"] = _waited_for(schedule, n)
        if ops.micro_batches[n] >= 0:
            args["micro-batch"] = int(ops.micro_batches[n])
        if n in critical:
            args["critical"] = True
        lane = {"pid": int(schedule.devices[n]), "tid": OPS_LANE}
        yield _slice(ops.names[n], PHASES[ops.phases[n]], lane, float(t.start[n]), float(t.end[n]), args)


def _shape(graph: Graph, tensor: int = -1) -> dict[str, str]:
    """Returns the shape of a tensor, if there is one and its shape is known."""
    shape = graph.tensors.shape_of(tensor) if tensor >= 0 else None
    return {} if shape is None else {"shape": str(shape)}


def _waited_for(schedule: Schedule, n: int) -> str:
    """Returns in words what an op waited for last."""
    graph = schedule.problem.graph
    why, what = schedule.wait(n)
    if why == "copy":
        return f"copy of {graph.tensors.names[schedule.copy_tensors[what]]}"
    return f"{why}: {graph.ops.names[what]}" if what >= 0 else why


def _copies(schedule: Schedule) -> Iterator[dict[str, Any]]:
    graph, cluster, t = schedule.problem.graph, schedule.problem.cluster, schedule.timeline
    homes = _channel_homes(schedule)
    for c, tensor in enumerate(schedule.copy_tensors.tolist()):
        source, target, reader = int(t.copy_source[c]), int(t.copy_target[c]), int(t.copy_reader[c])
        channel = int(cluster.channels[source, target])
        lane = {"pid": homes[channel], "tid": channel + 1}
        start, end = float(t.copy_start[c]), float(t.copy_end[c])
        args = {"bytes": int(graph.tensors.nbytes[tensor]), **_shape(graph, tensor), "for": graph.ops.names[reader]}
        args |= {"from": cluster.device_names[source], "to": cluster.device_names[target]}
        yield _slice(graph.tensors.names[tensor], "copy", lane, start, end, args)
        arrow = {"name": "copy", "cat": "copy", "id": c}
        maker = int(graph.producer[tensor])
        if maker >= 0:
            made = {"pid": int(schedule.devices[maker]), "tid": OPS_LANE, "ts": float(t.end[maker]) * MICROSECONDS}
            yield {"ph": "s", **arrow, **made}
        yield {"ph": "t" if maker >= 0 else "s", **arrow, **lane, "ts": start * MICROSECONDS}
        read = {"pid": target, "tid": OPS_LANE, "ts": float(t.start[reader]) * MICROSECONDS}
        yield {"ph": "f", "bp": "e", **arrow, **read}


def _memory(schedule: Schedule) -> Iterator[dict[str, Any]]:
    """Yields the memory in use after each launch, at the time when the op starts."""
    for position, n in enumerate(schedule.order.tolist()):
        device = int(schedule.devices[n])
        used = {"MiB": round(int(schedule.memory[position, device]) / 2**20, 3)}
        at = {"pid": device, "ts": float(schedule.timeline.start[n]) * MICROSECONDS}
        yield {"ph": "C", "name": "memory in use", **at, "args": used}


# --- reading ---


def read_measured(path: str | Path, problem: Problem) -> MeasuredTrace:
    """Returns the timeline in a trace's file: slices with args.op are ops, slices of category copy are copies.

    A trace of another graph is refused: by its digest if it has one, otherwise by the names of its ops.
    """
    data = parse_json(path, read_bytes(path, InputError), InputError)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise InputError(f"{path}: traceEvents must be a list, got {describe(events)}")
    if isinstance(data, dict):
        _check_digest(data.get("otherData"), problem, str(path))
    slices = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    reader = _Reader(str(path), problem, _processes(events))
    ops = [reader.op(event) for event in slices if "op" in _args(event)]
    copies = [reader.copy(event) for event in slices if event.get("cat") == "copy"]
    if not ops:
        raise InputError(f"{path}: no slice of traceEvents has args.op: this is not a trace of ops")
    rows = np.array([row[:4] for row in ops], np.float64)  # [slices, (op, device, start, end)]
    others = np.array([row[:4] for row in copies], np.float64).reshape(-1, 4)
    begin = min(float(rows[:, 2].min()), float(others[:, 2].min(initial=np.inf)))
    return MeasuredTrace(
        str(path),
        ops=rows[:, 0].astype(np.int64),
        devices=rows[:, 1].astype(np.int64),
        start=rows[:, 2] - begin,
        end=rows[:, 3] - begin,
        copy_names=tuple(row[4] for row in copies),
        copy_source=others[:, 0].astype(np.int64),
        copy_target=others[:, 1].astype(np.int64),
        copy_start=others[:, 2] - begin,
        copy_end=others[:, 3] - begin,
    )


def _check_digest(facts: Any, problem: Problem, source: str) -> None:
    """Refuses the digest of another graph; older traces and traces of other tools have none."""
    found = facts.get("graph_digest") if isinstance(facts, dict) else None
    expected = digest_of_graph(problem.graph)
    if found is not None and found != expected:
        raise InputError(
            f"{source}: is a trace of another graph: its otherData.graph_digest is {str(found)[:12]}..., "
            f"the digest of {problem.graph.name!r} is {expected[:12]}..."
        )


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _processes(events: list[Any]) -> dict[int | str, str]:
    """Returns the name of each process that has one."""
    named = [event for event in events if isinstance(event, dict) and event.get("name") == "process_name"]
    return {pid: str(_args(event).get("name")) for event in named if isinstance(pid := event.get("pid"), (int, str))}


@dataclass(frozen=True)
class _Reader:
    source: str
    problem: Problem
    processes: dict[int | str, str]

    def op(self, event: dict[str, Any]) -> tuple[int, int, float, float]:
        """Returns op, device, start and end of a slice."""
        op = _args(event)["op"]
        if type(op) is not int or not 0 <= op < self.problem.num_ops:
            raise self.wrong(event, f"args.op must be a whole number below {self.problem.num_ops}, got {describe(op)}")
        if event.get("name") != (name := self.problem.graph.ops.names[op]):
            raise self.wrong(event, f"is of another graph: op {op} of {self.problem.graph.name!r} is {name!r}")
        pid = event.get("pid")
        process = self.processes.get(pid) if isinstance(pid, (int, str)) else None
        return (op, self.device(event, "pid", pid if process is None else process), *self.times(event))

    def copy(self, event: dict[str, Any]) -> tuple[int, int, float, float, str]:
        """Returns source, target, start, end and name of a copy's slice."""
        source, target = (self.device(event, f"args.{key}", _args(event).get(key)) for key in ("from", "to"))
        return (source, target, *self.times(event), str(event.get("name")))

    def device(self, event: dict[str, Any], field: str, name: Any) -> int:
        names = self.problem.cluster.device_names
        if name not in names:
            raise self.wrong(event, f"{field} must name a device, one of {', '.join(names)}, got {describe(name)}")
        return names.index(name)

    def times(self, event: dict[str, Any]) -> tuple[float, float]:
        start, length = self.microseconds(event, "ts", None), self.microseconds(event, "dur", 0)
        if length < 0:
            raise self.wrong(event, f"dur must be at least 0, got {length}")
        return start / MICROSECONDS, (start + length) / MICROSECONDS

    def microseconds(self, event: dict[str, Any], field: str, default: int | None) -> float:
        value: Any = event.get(field, default)
        if type(value) not in (int, float) or not abs(value) < 1e18:
            raise self.wrong(event, f"{field} must be microseconds, got {describe(value)}")
        return float(value)

    def wrong(self, event: dict[str, Any], rule: str) -> InputError:
        return InputError(f"{self.source}: slice {describe(event.get('name'))}: {rule}")
