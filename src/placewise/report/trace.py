"""A schedule as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A process for each device, in it a lane for its ops and one for each channel whose copies start there; arrows lead from the
op that makes a tensor through its copy to the op that waits for it; a counter shows the memory in use.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from placewise.core.graph import PHASES, Graph
from placewise.core.plan import digest_of_graph
from placewise.formats.files import write_bytes
from placewise.simulate.schedule import Schedule

MICROSECONDS = 1e6  # the unit of a trace's times

OPS_LANE = 0


def write_trace(schedule: Schedule, path: str | Path, *, is_measured: bool = False) -> None:
    """Writes the trace's file."""
    write_bytes(path, json.dumps(trace(schedule, is_measured), allow_nan=False, separators=(",", ":")).encode())


def trace(schedule: Schedule, is_measured: bool = False) -> dict[str, Any]:
    """Returns the trace as plain data; a measured one does not say what the ops waited for."""
    problem = schedule.problem
    said = {
        "graph": problem.graph.name,
        "graph_digest": digest_of_graph(problem.graph),
        "cluster": problem.cluster.name,
        "step_seconds": schedule.step_seconds,
    }
    events = [*_lanes(schedule), *_ops(schedule, is_measured), *_copies(schedule), *_memory(schedule)]
    return {"displayTimeUnit": "ms", "otherData": said, "traceEvents": events}


def _channel_homes(schedule: Schedule) -> dict[int, int]:
    """Returns the device in whose process each channel is shown: the first one that sends on it."""
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
    """Returns the shape of a tensor, the first that an op writes or a copy's, where there is one and it is known."""
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
    """Memory is taken at launches; each op's launch is shown where the op starts."""
    for position, n in enumerate(schedule.order.tolist()):
        device = int(schedule.devices[n])
        used = {"MiB": round(int(schedule.memory[position, device]) / 2**20, 3)}
        at = {"pid": device, "ts": float(schedule.timeline.start[n]) * MICROSECONDS}
        yield {"ph": "C", "name": "memory in use", **at, "args": used}
