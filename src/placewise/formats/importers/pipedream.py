"""Profiles of msr-fiddle/pipedream (Narayanan et al., SOSP 2019): the layers of a network, timed on one GPU.

A line `node7 -- Conv2d(...) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=4096.0,
parameter_size=512.0` is a layer, in milliseconds and bytes; a size can be a list `[a; b]`, which is summed. A line that
starts with a tab, `node7 -- node8`, is an edge. The profile has no times for updates, so there are no update ops. All
times are a GPU's, so every op has devices = ('gpu',).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import GraphError
from placewise.core.graph import MAX_BYTES, Graph
from placewise.formats.files import Table, read_bytes
from placewise.formats.graph_file import FORMAT, VERSION, parse_graph
from placewise.formats.importers.program_order import topological_order

FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class _Layer:
    name: str
    kind: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class _Profile:
    layers: list[_Layer]  # in topological order, ties by their place in the file
    before: list[list[int]]  # [layers] -> layers whose output it reads, in the order of the file's edges
    behind: list[list[int]]  # [layers] -> layers that read its output

    def is_input(self, i: int) -> bool:
        """Whether a layer only brings data in: nothing to learn and nothing before it, so no gradient is for it."""
        layer = self.layers[i]
        return not self.before[i] and layer.parameter_bytes == 0 and layer.backward_seconds == 0


def recognises(data: bytes) -> bool:
    """Returns whether a file's bytes begin like a profile, broken or not."""
    first = next((line for line in data.split(b"\n") if line.strip()), b"")
    return b" -- " in first


def read(path: str | Path, *, merged: bool = False) -> Graph:
    """Returns the graph of a profile; a GraphError names the file, the line and the rule that does not hold.

    merged: a layer's forward and backward are one op, as in the comparison of docs/importers.md.
    """
    return parse(read_bytes(path, GraphError), str(path), merged=merged)


def parse(data: bytes, source: str = "graph", *, merged: bool = False) -> Graph:
    """Returns the graph that a profile's bytes say; `source` is named in errors, and names the graph.

    A layer is a group: its parameters, forward op and backward op are placed together, as PipeDream does.
    """
    profile = _profile(data, source)
    tensors, ops, outputs = _merged_rows(profile) if merged else _rows(profile)
    name = Path(source).name.split(".")[0]
    graph = {"format": FORMAT, "version": VERSION, "name": name, "tensors": tensors, "ops": ops, "outputs": outputs}
    return parse_graph(graph, source)


_Rows = tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]  # tensors, ops, outputs as a graph's file has them


def _merged_rows(profile: _Profile) -> _Rows:
    """One op for each layer: it reads its parameters and the layers before it, and writes its activation."""
    layers = profile.layers
    tensors = [_tensor(layer.name, layer.activation_bytes, "activation") for layer in layers]
    ops = []
    for i, layer in enumerate(layers):
        reads = profile.before[i] + _add_parameters(tensors, layer, i)
        ops.append(_op(layer.name, layer.kind, "forward", i, reads, [i], layer.forward_seconds + layer.backward_seconds))
    return tensors, ops, []


def _rows(profile: _Profile) -> _Rows:
    """Forward ops in order, then backward ops in reverse; what the step leaves behind are the parameters' gradients.

    A backward op reads the activations that its forward op has read, the parameters, and the gradient that each layer
    behind it has written for it (its own activation, where no layer is behind: the loss starts there). It writes a
    gradient for each layer before it that is no input, as large as that layer's activation, and one for its parameters.
    """
    layers, before, behind = profile.layers, profile.before, profile.behind
    tensors = [_tensor(layer.name, layer.activation_bytes, "activation") for layer in layers]
    parameters = [_add_parameters(tensors, layer, i) for i, layer in enumerate(layers)]
    ops = [
        _op(layer.name, layer.kind, "forward", i, before[i] + parameters[i], [i], layer.forward_seconds)
        for i, layer in enumerate(layers)
    ]
    gradient: dict[tuple[int, int], int] = {}  # (layer, layer behind it that writes this) -> tensor
    outputs = []
    for i, layer in reversed(list(enumerate(layers))):
        if profile.is_input(i):
            continue
        reads = [gradient[i, j] for j in behind[i]] or [i]
        writes = []
        for j in before[i]:
            if not profile.is_input(j):
                gradient[j, i] = len(tensors)
                writes.append(len(tensors))
                tensors.append(_tensor(f"{layers[j].name}.grad.{layer.name}", layers[j].activation_bytes, "gradient"))
        if parameters[i]:
            outputs.append(len(tensors))
            writes.append(len(tensors))
            tensors.append(_tensor(f"{layer.name}.parameters.grad", layer.parameter_bytes, "gradient"))
        reads += before[i] + parameters[i]
        name, kind = f"{layer.name}.backward", f"{layer.kind}.backward"
        ops.append(_op(name, kind, "backward", i, reads, writes, layer.backward_seconds))
    return tensors, ops, outputs


def _tensor(name: str, nbytes: int, kind: str) -> dict[str, Any]:
    return {"name": name, "nbytes": nbytes, "kind": kind}


def _add_parameters(tensors: list[dict[str, Any]], layer: _Layer, group: int) -> list[int]:
    """Adds the layer's parameters as a resident tensor; returns its number, or nothing for a layer without any."""
    if layer.parameter_bytes == 0:
        return []
    tensors.append({**_tensor(f"{layer.name}.parameters", layer.parameter_bytes, "parameter"), "home": group})
    return [len(tensors) - 1]


def _op(name: str, kind: str, phase: str, group: int, reads: list[int], writes: list[int], seconds: float) -> dict[str, Any]:
    row = {"name": name, "kind": kind, "phase": phase, "group": group, "reads": reads, "writes": writes}
    return {**row, "devices": ["gpu"], "seconds": {"gpu": seconds}}


def _profile(data: bytes, source: str) -> _Profile:
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as problem:
        raise GraphError(f"{source}: is not text: {problem.reason} at byte {problem.start}") from None
    layers: list[_Layer] = []
    line_of: dict[str, int] = {}  # a layer's name -> its line
    ends: list[tuple[str, str, str]] = []  # element, tail, head
    for number, line in enumerate(lines, 1):
        element = f"{source}: line {number}"
        parts = line.strip().split(" -- ")
        if parts == [""]:
            continue
        if line.startswith("\t"):
            if len(parts) != 2:
                raise GraphError(f"{element}: a line that starts with a tab must be an edge, `node1 -- node2`")
            ends.append((element, parts[0], parts[1]))
            continue
        layer = _layer(parts, element)
        if layer.name in line_of:
            raise GraphError(f"{element}: {layer.name!r} is already the layer of line {line_of[layer.name]}")
        line_of[layer.name] = number
        layers.append(layer)
    if not layers:
        raise GraphError(f"{source}: must have a line for at least one layer")
    position = {layer.name: i for i, layer in enumerate(layers)}
    for element, *names in ends:
        for name in names:
            if name not in position:
                raise GraphError(f"{element}: the edge names {name!r}, there is no such layer")
    edges = list(dict.fromkeys((position[tail], position[head]) for _, tail, head in ends))
    return _in_order(layers, edges, source)


def _in_order(layers: list[_Layer], edges: list[tuple[int, int]], source: str) -> _Profile:
    order = topological_order([f"layer {layer.name!r}" for layer in layers], edges, source)
    place = {old: new for new, old in enumerate(order)}
    before: list[list[int]] = [[] for _ in layers]
    behind: list[list[int]] = [[] for _ in layers]
    for tail, head in edges:
        before[place[head]].append(place[tail])
        behind[place[tail]].append(place[head])
    return _Profile([layers[old] for old in order], before, behind)


def _layer(parts: list[str], element: str) -> _Layer:
    if parts[-1].startswith("stage_id="):  # a profile that PipeDream has already partitioned
        parts = parts[:-1]
    if len(parts) < 3:
        raise GraphError(f"{element}: must be `node -- layer -- times and sizes`, or an edge that starts with a tab")
    name, description = parts[0], " -- ".join(parts[1:-1])
    fields: dict[str, list[float | str]] = {}
    for field in parts[-1].split(", "):
        key, _, value = field.partition("=")
        if key in fields:
            raise GraphError(f"{element}: {name!r}: {key} is given twice")
        fields[key] = _numbers(value)
    table = Table(f"{element}: {name!r}", fields, FIELDS, GraphError)
    return _Layer(
        name=name,
        kind=description.partition("(")[0].strip() or "layer",
        forward_seconds=_total(table, "forward_compute_time") / 1000,
        backward_seconds=_total(table, "backward_compute_time") / 1000,
        activation_bytes=_whole_bytes(table, "activation_size"),
        parameter_bytes=_whole_bytes(table, "parameter_size"),
    )


def _numbers(text: str) -> list[float | str]:
    """Returns the numbers of `1.5` or `[1.5; 2]`; what is none stays text, for the error that names it."""
    listed = text.startswith("[") and text.endswith("]")
    return [_number(part.strip()) for part in (text[1:-1].split(";") if listed else [text])]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _total(table: Table, name: str) -> float:
    """Returns the sum of a field's numbers, each of them finite and not negative."""
    entries = table.get(name)
    return sum(Table(table.element, {name: entry}, (name,), GraphError).number(name) for entry in entries)


def _whole_bytes(table: Table, name: str) -> int:
    nbytes = _total(table, name)
    if nbytes > MAX_BYTES:
        raise table.wrong(f"{name} must be at most 2**62 bytes, it is {nbytes}")
    return round(nbytes)


def cluster(
    num_gpus: int = 4,
    *,
    memory_bytes: int = 2**40,
    latency_seconds: float = 134e-6,
    seconds_per_byte: float = 0.0001754e-6,
    shared_channels: bool = True,
) -> Cluster:
    """Returns the machine of the comparison: GPUs 'gpu:0'.., a copy of n bytes takes latency + n · seconds_per_byte.

    There, a device sends or receives one copy at a time. Our copy has one channel, so that can't be said; the nearest
    is one channel for all that a device sends (shared_channels), the next a channel for every ordered pair. Both allow
    more than the original (receives do not wait), so times here can be lower, not only by a better placement. The
    comparison names no memory limit, and by default there is as good as none. Speeds are 1, for all times are given.
    """
    names = [f"gpu:{i}" for i in range(num_gpus)]
    devices = tuple(Device(name, "gpu", memory_bytes, 1.0, 1.0) for name in names)
    links = tuple(
        Link(a, b, 1 / seconds_per_byte, latency_seconds, f"{a} sends" if shared_channels else None)
        for a in names
        for b in names
        if a != b
    )
    return Cluster(f"{num_gpus} GPUs of the Baechi comparison", devices, links)
