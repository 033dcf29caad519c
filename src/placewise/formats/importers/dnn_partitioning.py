"""Graphs and machines of msr-fiddle/dnn-partitioning (Tarnawski et al., NeurIPS 2020, arXiv 2006.16423).

A node becomes an op with given times, on a CPU or on an accelerator ('fpga' in their files, 'gpu' in ours). A node's
output becomes a tensor, which the heads of its edges read.

Their algorithms use an edge's `cost`, the milliseconds of one transfer between an accelerator and host memory, and ignore
its `size`. So `cost` counts here too: the bandwidth is the total size over the total cost of the edges that have both, and
a tensor has cost · bandwidth bytes, rounded. Where size / cost is the same for all edges, as in the published inference
files, that equals `size`. The bandwidth in those files is 2 GiB/s. In throughput-inputs/LayerGraphs it comes out a thousand
times larger, because the costs there are a thousand times smaller (apparently in seconds, while the times of the nodes are
in milliseconds). We use the numbers as they are; `dnn_partitioning_cluster(path, bytes_per_second=2**31)` gives the machine
with the bandwidth of the other files.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ClusterError, GraphError
from placewise.core.graph import MAX_BYTES, Graph
from placewise.formats.files import Fields, describe, read_json
from placewise.formats.graph_file import FORMAT, VERSION, parse_graph
from placewise.formats.importers.program_order import topological_order

DEFAULT_BYTES_PER_SECOND = 2.0**31  # that of nearly all published files, for one whose edges have no size or no cost

HOST_BYTES_PER_SECOND = 1e18  # between CPUs, which share host memory, so there is nothing to copy

MAX_DEVICES = 1000


@dataclass(frozen=True)
class _Node:
    name: str
    color: int | None  # nodes of the same color are placed together
    backward: bool
    seconds: dict[str, float]  # by the kinds of device that it can run on
    size_bytes: int


@dataclass(frozen=True)
class _Edge:
    tail: int  # position in the file's nodes
    head: int
    cost_seconds: float
    size_bytes: float


def is_dnn_partitioning(data: Any) -> bool:
    """Returns whether the parsed JSON of a file is in this format, valid or not."""
    return isinstance(data, dict) and "format" not in data and not {"nodes", "edges"}.isdisjoint(data)


def read_dnn_partitioning(path: str | Path) -> Graph:
    """Returns the graph in a file; a GraphError names the file, the node or edge and the rule that does not hold."""
    return parse_dnn_partitioning(read_json(path, GraphError), str(path))


def parse_dnn_partitioning(data: Any, source: str = "graph") -> Graph:
    """Returns the graph in the parsed JSON of a file; errors name `source`, and the graph is named after it.

    The ops are in topological order, ties by their position in the file; groups are numbered by first op.
    """
    nodes, edges = _nodes_and_edges(data, source)
    bytes_per_second = _bytes_per_second(edges)
    order = topological_order([f"node {node.name!r}" for node in nodes], [(e.tail, e.head) for e in edges], source)
    groups = _groups(nodes, order)
    made: dict[tuple[int, float], int] = {}  # (node, cost) -> its output tensor; one for each node, if costs agree
    tensors: list[dict[str, Any]] = []
    for edge in sorted(edges, key=lambda edge: edge.tail):
        if (edge.tail, edge.cost_seconds) not in made:
            made[edge.tail, edge.cost_seconds] = len(tensors)
            node, nbytes = nodes[edge.tail], edge.cost_seconds * bytes_per_second
            if not nbytes <= MAX_BYTES:  # this refuses NaN too, which an infinite bandwidth gives
                raise GraphError(f"{source}: node {node.name!r}: its output must be at most 2**62 bytes, got {nbytes}")
            kind = "gradient" if node.backward else "activation"
            tensors.append({"name": node.name, "nbytes": round(nbytes), "kind": kind})
    reads: list[list[int]] = [[] for _ in nodes]
    writes: list[list[int]] = [[] for _ in nodes]
    for edge in edges:
        reads[edge.head].append(made[edge.tail, edge.cost_seconds])
    for (tail, _), tensor in made.items():
        writes[tail].append(tensor)
    outputs = _add_memory(nodes, groups, tensors, reads, writes)
    ops = [_op(nodes[n], groups[n], reads[n], writes[n]) for n in order]
    name = Path(source).name.split(".")[0]
    graph = {"format": FORMAT, "version": VERSION, "name": name, "tensors": tensors, "ops": ops, "outputs": outputs}
    return parse_graph(graph, source)


def _add_memory(
    nodes: list[_Node],
    groups: list[int],
    tensors: list[dict[str, Any]],
    reads: list[list[int]],
    writes: list[list[int]],
) -> list[int]:
    """Adds the memory of nodes besides their outputs as resident tensors; returns the outputs to keep to the end.

    Their rule is that the sizes of all nodes on an accelerator fit together, and a size includes weights and outputs. So
    outputs are kept to the end of the step, and only the rest is resident. If a node's size is smaller than its output
    (a view has size 0), the output takes memory only while it is in use. At the end of the step a device holds exactly
    the sizes of its nodes.
    """
    kept = []
    for n, node in enumerate(nodes):
        output_bytes = sum(tensors[tensor]["nbytes"] for tensor in writes[n])
        rest_bytes = node.size_bytes
        if output_bytes <= node.size_bytes:
            kept += writes[n]
            rest_bytes -= output_bytes
        if rest_bytes > 0:
            reads[n].append(len(tensors))
            resident = {"name": f"{node.name}.size", "nbytes": rest_bytes, "kind": "parameter", "home": groups[n]}
            tensors.append(resident)
    return kept


def _op(node: _Node, group: int, reads: list[int], writes: list[int]) -> dict[str, Any]:
    stem = node.name.rstrip("0123456789")
    return {
        "name": node.name,
        "kind": stem if stem.isalpha() else "node",  # 'Conv12' is a Conv, 'encoder.0.weight' names no operator
        "phase": "backward" if node.backward else "forward",
        "group": group,
        "reads": list(dict.fromkeys(reads)),
        "writes": writes,
        "devices": list(node.seconds),
        "seconds": node.seconds,
    }


def _groups(nodes: list[_Node], order: list[int]) -> list[int]:
    """Returns each node's group: one per color, and one per node without a color."""
    number: dict[tuple[str, int], int] = {}
    groups = [0] * len(nodes)
    for n in order:
        color = nodes[n].color
        key = ("node", n) if color is None else ("color", color)
        groups[n] = number.setdefault(key, len(number))
    return groups


def _nodes_and_edges(data: Any, source: str) -> tuple[list[_Node], list[_Edge]]:
    """Returns the checked nodes and edges; unknown fields are ignored."""
    top = Fields(source, data, data, GraphError)
    nodes: list[_Node] = []
    position: dict[int, int] = {}
    for i, row in enumerate(top.entries("nodes")):
        node = Fields(f"{source}: nodes[{i}]", row, row, GraphError)
        identity = node.integer("id")
        node.element = f"{source}: node {identity}"
        if identity in position:
            raise node.wrong(f"nodes[{position[identity]}] and nodes[{i}] have the same id")
        position[identity] = i
        nodes.append(_node(node, identity))
    edges = []
    for i, row in enumerate(top.entries("edges")):
        edge = Fields(f"{source}: edges[{i}]", row, row, GraphError)
        tail, head = (_end(edge, field, position) for field in ("sourceId", "destId"))
        edges.append(_Edge(tail, head, edge.number("cost") / 1000, edge.number("size", 0)))
    return nodes, edges


def _node(node: Fields, identity: int) -> _Node:
    seconds = {"cpu": node.number("cpuLatency") / 1000}
    if _flag(node, "supportedOnFpga"):
        seconds["gpu"] = node.number("fpgaLatency") / 1000
    return _Node(
        name=node.text("name", f"node{identity}"),
        color=node.integer("colorClass") if "colorClass" in node.given else None,
        backward=_flag(node, "isBackwardNode"),
        seconds=seconds,
        size_bytes=_whole_bytes(node, "size"),
    )


def _flag(fields: Fields, name: str) -> bool:
    value = fields.get(name)
    if value not in (0, 1) or not isinstance(value, int):
        raise fields.wrong(f"{name} must be true, false, 1 or 0, got {describe(value)}")
    return bool(value)


def _end(edge: Fields, name: str, position: dict[int, int]) -> int:
    identity = edge.integer(name)
    if identity not in position:
        raise edge.wrong(f"{name} names node {identity}, which does not exist")
    return position[identity]


def _whole_bytes(fields: Fields, name: str) -> int:
    nbytes = fields.number(name)
    if nbytes > MAX_BYTES:
        raise fields.wrong(f"{name} must be at most 2**62 bytes, got {nbytes}")
    return round(nbytes)


def _bytes_per_second(edges: list[_Edge]) -> float:
    """Returns the bandwidth of an accelerator's link: total size / total cost of the edges that have both."""
    both = [edge for edge in edges if edge.size_bytes > 0 and edge.cost_seconds > 0]
    if not both:
        return DEFAULT_BYTES_PER_SECOND
    return math.fsum(edge.size_bytes for edge in both) / math.fsum(edge.cost_seconds for edge in both)


def dnn_partitioning_cluster(
    path: str | Path, *, bytes_per_second: float | None = None, host_memory_bytes: int = 2**40
) -> Cluster:
    """Returns the machine that a file describes: maxFPGAs accelerators 'gpu:0'.. and maxCPUs cores 'cpu:0'..

    An accelerator has maxSizePerFPGA bytes, and links to and from host memory with the file's bandwidth unless another
    is given. A copy between two accelerators goes through host memory and takes twice as long; copies between cores take
    next to no time. Every core has host_memory_bytes: their model does not limit host memory. Every ordered pair has its
    own channel, so copies overlap with each other and with ops, while in their model a copy blocks the accelerator.
    Speeds are 1 because all times are given: the machine is useful only with graphs of this format.
    """
    source = str(path)
    data = read_json(path, GraphError)
    top = Fields(source, data, data, GraphError)
    num_gpus, num_cpus = top.integer("maxFPGAs"), top.integer("maxCPUs")
    if not 1 <= num_gpus + num_cpus <= MAX_DEVICES:
        raise top.wrong(f"maxFPGAs + maxCPUs must be from 1 to {MAX_DEVICES}, got {num_gpus + num_cpus}")
    gpu_memory_bytes = _whole_bytes(top, "maxSizePerFPGA")
    _, edges = _nodes_and_edges(data, source)
    transfer = _bytes_per_second(edges) if bytes_per_second is None else bytes_per_second
    bandwidth = {("gpu", "gpu"): transfer / 2, ("cpu", "cpu"): HOST_BYTES_PER_SECOND}
    devices = [Device(f"gpu:{i}", "gpu", gpu_memory_bytes, 1.0, 1.0) for i in range(num_gpus)]
    devices += [Device(f"cpu:{i}", "cpu", host_memory_bytes, 1.0, 1.0) for i in range(num_cpus)]
    links = [
        Link(a.name, b.name, bandwidth.get((a.kind, b.kind), transfer), 0.0) for a in devices for b in devices if a != b
    ]
    try:
        return Cluster(f"{Path(source).name.split('.')[0]} machine", tuple(devices), tuple(links))
    except ClusterError as problem:
        raise ClusterError(f"{source}: {problem}") from None
