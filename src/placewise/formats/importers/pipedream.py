"""Profiles of msr-fiddle/pipedream (Narayanan et al., SOSP 2019): the layers of a network, timed on one GPU.

A line `node7 -- Conv2d(...) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=4096.0,
parameter_size=512.0` is a layer, in milliseconds and bytes; a size can be a list `[a; b]`, which is summed. A line that
starts with a tab, `node7 -- node8`, is an edge. A profile has no times of updates, so the graph has no update ops. All
times were measured on a GPU, so every op has devices = ('gpu',).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ClusterError, GraphError
from placewise.core.graph import MAX_BYTES, Graph
from placewise.formats.files import Fields, read_bytes
from placewise.formats.graph_file import FORMAT, VERSION, parse_graph
from placewise.formats.importers.program_order import topological_order

QUEUES = ("sender", "device", "pair")  # what copies of the comparison's machine wait for

LAYER_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


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
    layers: list[_Layer]  # in topological order, ties by their position in the file
    before: list[list[int]]  # [layers] -> the layers whose outputs it reads, in the order of the file's edges
    after: list[list[int]]  # [layers] -> the layers that read its output

    def is_input(self, i: int) -> bool:
        """Returns whether a layer only provides data: without parameters and inputs, it needs no gradient."""
        layer = self.layers[i]
        return not self.before[i] and layer.parameter_bytes == 0 and layer.backward_seconds == 0


def is_pipedream(data: bytes) -> bool:
    """Returns whether a file starts like a profile, valid or not."""
    first = next((line for line in data.split(b"\n") if line.strip()), b"")
    return b" -- " in first


def read_pipedream(path: str | Path, *, merged: bool = False) -> Graph:
    """Returns the graph of a profile; a GraphError names the file, the line and the rule that does not hold.

    With `merged`, a layer's forward and backward pass are one op, as in the comparison in docs/importers.md.
    """
    return parse_pipedream(read_bytes(path, GraphError), str(path), merged=merged)


def parse_pipedream(data: bytes, source: str = "graph", *, merged: bool = False) -> Graph:
    """Returns the graph in the bytes of a profile; errors name `source`, and the graph is named after it.

    A layer is a group: its parameters, forward op and backward op are placed together, as in PipeDream.
    """
    profile = _profile(data, source)
    tensors, ops, outputs = _merged_rows(profile) if merged else _rows(profile)
    name = Path(source).name.split(".")[0]
    graph = {"format": FORMAT, "version": VERSION, "name": name, "tensors": tensors, "ops": ops, "outputs": outputs}
    return parse_graph(graph, source)


_Rows = tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]  # tensors, ops and outputs, as in a graph's file


def _merged_rows(profile: _Profile) -> _Rows:
    """Returns one op per layer, which reads its parameters and the layers before it, and writes its activation."""
    layers = profile.layers
    tensors = [_tensor(layer.name, layer.activation_bytes, "activation") for layer in layers]
    ops = []
    for i, layer in enumerate(layers):
        reads = profile.before[i] + _add_parameters(tensors, layer, i)
        ops.append(_op(layer.name, layer.kind, "forward", i, reads, [i], layer.forward_seconds + layer.backward_seconds))
    return tensors, ops, []


def _rows(profile: _Profile) -> _Rows:
    """Returns the forward ops in order, then the backward ops in reverse; the outputs are the parameters' gradients.

    A backward op reads what its forward op has read, and the gradient from each layer that reads its output; the last
    layer, where the loss starts, reads its own activation instead. It writes a gradient for each layer before it that is
    not an input, as large as that layer's activation, and one for its parameters.
    """
    layers, before, after = profile.layers, profile.before, profile.after
    tensors = [_tensor(layer.name, layer.activation_bytes, "activation") for layer in layers]
    parameters = [_add_parameters(tensors, layer, i) for i, layer in enumerate(layers)]
    ops = [
        _op(layer.name, layer.kind, "forward", i, before[i] + parameters[i], [i], layer.forward_seconds)
        for i, layer in enumerate(layers)
    ]
    gradient: dict[tuple[int, int], int] = {}  # (layer, reader of its output that writes this) -> tensor
    outputs = []
    for i, layer in reversed(list(enumerate(layers))):
        if profile.is_input(i):
            continue
        reads = [gradient[i, j] for j in after[i]] or [i]
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
    """Adds the layer's parameters, if it has any, as a resident tensor; returns the numbers of the added tensors."""
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
    line_of: dict[str, int] = {}  # layer name -> line number
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
            raise GraphError(f"{element}: {layer.name!r} is already the layer in line {line_of[layer.name]}")
        line_of[layer.name] = number
        layers.append(layer)
    if not layers:
        raise GraphError(f"{source}: must have at least one layer")
    position = {layer.name: i for i, layer in enumerate(layers)}
    for element, *names in ends:
        for name in names:
            if name not in position:
                raise GraphError(f"{element}: the edge names {name!r}, which is not a layer")
    edges = list(dict.fromkeys((position[tail], position[head]) for _, tail, head in ends))
    return _in_order(layers, edges, source)


def _in_order(layers: list[_Layer], edges: list[tuple[int, int]], source: str) -> _Profile:
    order = topological_order([f"layer {layer.name!r}" for layer in layers], edges, source)
    place = {old: new for new, old in enumerate(order)}
    before: list[list[int]] = [[] for _ in layers]
    after: list[list[int]] = [[] for _ in layers]
    for tail, head in edges:
        before[place[head]].append(place[tail])
        after[place[tail]].append(place[head])
    return _Profile([layers[old] for old in order], before, after)


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
    layer = Fields(f"{element}: {name!r}", fields, LAYER_FIELDS, GraphError)
    return _Layer(
        name=name,
        kind=description.partition("(")[0].strip() or "layer",
        forward_seconds=_total(layer, "forward_compute_time") / 1000,
        backward_seconds=_total(layer, "backward_compute_time") / 1000,
        activation_bytes=_whole_bytes(layer, "activation_size"),
        parameter_bytes=_whole_bytes(layer, "parameter_size"),
    )


def _numbers(text: str) -> list[float | str]:
    """Returns the numbers in `1.5` or `[1.5; 2]`; what is not a number stays text, for the error that names it."""
    listed = text.startswith("[") and text.endswith("]")
    return [_number(part.strip()) for part in (text[1:-1].split(";") if listed else [text])]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _total(layer: Fields, name: str) -> float:
    """Returns the sum of a field's numbers, which must all be finite and at least 0."""
    entries = layer.get(name)
    return sum(Fields(layer.element, {name: entry}, (name,), GraphError).number(name) for entry in entries)


def _whole_bytes(layer: Fields, name: str) -> int:
    nbytes = _total(layer, name)
    if nbytes > MAX_BYTES:
        raise layer.wrong(f"{name} must be at most 2**62 bytes, got {nbytes}")
    return round(nbytes)


def _channel(queue: str, source: str, target: str) -> str | tuple[str, str] | None:
    """Returns the channels of a link on the machine of the comparison."""
    return {"device": (f"{source} card", f"{target} card"), "sender": f"{source} sends", "pair": None}[queue]


def pipedream_cluster(
    num_gpus: int = 4,
    *,
    memory_bytes: int = 2**40,
    latency_seconds: float = 134e-6,
    seconds_per_byte: float = 0.0001754e-6,
    queue: str = "sender",
) -> Cluster:
    """Returns the machine of the comparison: GPUs 'gpu:0'.., a copy of n bytes takes latency + n · seconds_per_byte.

    There, a device sends or receives one copy at a time: with the `queue` "device", a copy needs the channels of both its
    ends. More permissive machines have a channel for everything that a device sends ("sender"), or one for every ordered
    pair ("pair"); a step can be faster there without a better placement. The comparison states no memory limit, so the
    default is practically unlimited. Speeds are 1 because all times are given.
    """
    if queue not in QUEUES:
        raise ClusterError(f"queue must be one of {', '.join(QUEUES)}, got {queue!r}")
    names = [f"gpu:{i}" for i in range(num_gpus)]
    devices = tuple(Device(name, "gpu", memory_bytes, 1.0, 1.0) for name in names)
    links = tuple(
        Link(a, b, 1 / seconds_per_byte, latency_seconds, _channel(queue, a, b)) for a in names for b in names if a != b
    )
    return Cluster(f"{num_gpus} GPUs of the Baechi comparison", devices, links)
