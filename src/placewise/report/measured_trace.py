"""A measured timeline, read from a Chrome trace as `report/trace.py` writes it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.errors import InputError
from placewise.core.plan import digest_of_graph
from placewise.core.problem import Problem
from placewise.formats.files import describe, parse_json, read_bytes

SECONDS = 1e-6  # a trace's unit


@dataclass(frozen=True, eq=False)
class MeasuredTrace:
    """When ops and copies really ran; the first one starts at 0."""

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
        """Returns the slices that are not on their op's device; `devices` has one for each op: [ops]."""
        return np.flatnonzero(self.devices != devices[self.ops])


def read_measured(path: str | Path, problem: Problem) -> MeasuredTrace:
    """Returns the timeline of a trace's file: its slices with args.op are ops, those of category copy are copies.

    A trace of another graph is refused: by its digest where it holds one, else by the names of its ops.
    """
    data = parse_json(path, read_bytes(path, InputError), InputError)
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise InputError(f"{path}: traceEvents must be a list, it is {describe(events)}")
    if isinstance(data, dict):
        _check_digest(data.get("otherData"), problem, str(path))
    slices = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    reader = _Reader(str(path), problem, _processes(events))
    ops = [reader.op(event) for event in slices if "op" in _args(event)]
    copies = [reader.copy(event) for event in slices if event.get("cat") == "copy"]
    if not ops:
        raise InputError(f"{path}: no slice of traceEvents has args.op: this is no trace of ops")
    rows = np.array([row[:4] for row in ops], np.float64)  # [slices, (op, device, start, end)]
    others = np.array([row[:4] for row in copies], np.float64).reshape(-1, 4)
    begin = min(float(rows[:, 2].min()), float(others[:, 2].min(initial=np.inf)))
    return MeasuredTrace(
        str(path),
        *(rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64), rows[:, 2] - begin, rows[:, 3] - begin),
        tuple(row[4] for row in copies),
        *(others[:, 0].astype(np.int64), others[:, 1].astype(np.int64), others[:, 2] - begin, others[:, 3] - begin),
    )


def _check_digest(said: Any, problem: Problem, source: str) -> None:
    """Refuses the digest of another graph; older traces, and those of other tools, have none."""
    found = said.get("graph_digest") if isinstance(said, dict) else None
    expected = digest_of_graph(problem.graph)
    if found is not None and found != expected:
        raise InputError(
            f"{source}: is a trace of another graph: otherData.graph_digest is {str(found)[:12]}..., "
            f"that of {problem.graph.name!r} is {expected[:12]}..."
        )


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _processes(events: list[Any]) -> dict[Any, str]:
    """Returns the name of each process that has one."""
    named = [event for event in events if isinstance(event, dict) and event.get("name") == "process_name"]
    return {event.get("pid"): str(_args(event).get("name")) for event in named}


@dataclass(frozen=True)
class _Reader:
    source: str
    problem: Problem
    processes: dict[Any, str]

    def op(self, event: dict[str, Any]) -> tuple[int, int, float, float]:
        """Returns op, device, start and end of a slice."""
        op = _args(event)["op"]
        if type(op) is not int or not 0 <= op < self.problem.num_ops:
            raise self.wrong(event, f"args.op must be a whole number below {self.problem.num_ops}, it is {describe(op)}")
        if event.get("name") != (name := self.problem.graph.ops.names[op]):
            raise self.wrong(event, f"is of another graph: in {self.problem.graph.name!r} the name of op {op} is {name!r}")
        pid = event.get("pid")
        return (op, self.device(event, "pid", self.processes.get(pid, pid)), *self.times(event))

    def copy(self, event: dict[str, Any]) -> tuple[int, int, float, float, str]:
        """Returns source, target, start, end and name of a copy's slice."""
        source, target = (self.device(event, f"args.{key}", _args(event).get(key)) for key in ("from", "to"))
        return (source, target, *self.times(event), str(event.get("name")))

    def device(self, event: dict[str, Any], field: str, name: Any) -> int:
        names = self.problem.cluster.device_names
        if name not in names:
            raise self.wrong(event, f"{field} must name a device, one of {', '.join(names)}, it is {describe(name)}")
        return names.index(name)

    def times(self, event: dict[str, Any]) -> tuple[float, float]:
        start, length = self.microseconds(event, "ts", None), self.microseconds(event, "dur", 0)
        if length < 0:
            raise self.wrong(event, f"dur must be at least 0, it is {length}")
        return start * SECONDS, (start + length) * SECONDS

    def microseconds(self, event: dict[str, Any], field: str, default: int | None) -> float:
        value: Any = event.get(field, default)
        if type(value) not in (int, float) or not abs(value) < 1e18:
            raise self.wrong(event, f"{field} must be microseconds, it is {describe(value)}")
        return float(value)

    def wrong(self, event: dict[str, Any], rule: str) -> InputError:
        return InputError(f"{self.source}: slice {event.get('name')!r}: {rule}")
