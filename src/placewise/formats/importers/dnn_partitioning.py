"""Graphs and machines of msr-fiddle/dnn-partitioning (Tarnawski et al., NeurIPS 2020, arXiv 2006.16423).

A node is an op, on a CPU or on an accelerator (they say FPGA, we say 'gpu'), with given times. A node's output is a
tensor that its edges' heads read. Their algorithms read an edge's `cost` alone, the milliseconds of one transfer
between an accelerator and host memory, and `size` is a remark; so `cost` decides here too: the file's bandwidth is the
total size over the total cost of the edges that have both, and a tensor has cost · bandwidth bytes, to the nearest
byte. Where size / cost is the same for all edges with a cost, as in the published inference files, that is `size`. The
bandwidth is 2 GiB/s in them, but a thousand times that in throughput-inputs/LayerGraphs, whose costs are a thousand
times smaller (seconds, it seems, beside times in milliseconds): the file is taken at its word, and
`cluster_of(path, bytes_per_second=2**31)` takes the other view.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ClusterError, GraphError
from placewise.core.graph import MAX_BYTES, Graph
from placewise.formats.files import Table, describe, parse_json, read_bytes
from placewise.formats.graph_file import FORMAT, VERSION, parse_graph
from placewise.formats.importers.program_order import topological_order

DEFAULT_BYTES_PER_SECOND = 2.0**31  # of nearly all published files; for one whose edges do not say

HOST_BYTES_PER_SECOND = 1e18  # between CPUs, which share host memory: nothing to copy

MAX_DEVICES = 1000


@dataclass(frozen=True)
class _Node:
    name: str
    color: int | None  # nodes of one color are placed together
    backward: bool
    seconds: dict[str, float]  # by the kinds of device that it can run on
    size_bytes: int


@dataclass(frozen=True)
class _Edge:
    tail: int  # position in the file's nodes
    head: int
    cost_seconds: float
    size_bytes: float


def recognises(fields: Any) -> bool:
    """Returns whether the data of a JSON file is a graph of this format, broken or not."""
    return isinstance(fields, dict) and "format" not in fields and not {"nodes", "edges"}.isdisjoint(fields)


def read(path: str | Path) -> Graph:
    """Returns the graph of a file; a GraphError names the file, the node or edge and the rule that does not hold."""
    return parse(parse_json(path, read_bytes(path, GraphError), GraphError), str(path))


def parse(data: Any, source: str = "graph") -> Graph:
    """Returns the graph that plain data (of JSON) says; `source` is named in errors, and names the graph.

    Ops stand in topological order, ties by their place in the file; groups are numbered as they come up in that order.
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
            if not nbytes <= MAX_BYTES:  # nor NaN, where the bandwidth is infinite
                raise GraphError(f"{source}: node {node.name!r}: its output must be at most 2**62 bytes, it is {nbytes}")
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
    """Adds what nodes hold beside their outputs as resident tensors; returns the outputs that stay to the step's end.

    Their rule is that the sizes of an accelerator's nodes fit, all at once, and a size has weights and outputs in it.
    So outputs stay, and only the rest is resident. The output of a node whose size has no room for it (a view: its size
    is 0) comes on top while it is in use. At the step's end a device holds its nodes' sizes exactly.
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
        "kind": stem if stem.isalpha() else "node",  # 'Conv12' is a Conv, 'encoder.0.weight' says no operator
        "phase": "backward" if node.backward else "forward",
        "group": group,
        "reads": list(dict.fromkeys(reads)),
        "writes": writes,
        "devices": list(node.seconds),
        "seconds": node.seconds,
    }


def _groups(nodes: list[_Node], order: list[int]) -> list[int]:
    """Returns each node's group: one for each color, and one for each node without a color."""
    number: dict[tuple[str, int], int] = {}
    groups = [0] * len(nodes)
    for n in order:
        color = nodes[n].color
        key = ("node", n) if color is None else ("color", color)
        groups[n] = number.setdefault(key, len(number))
    return groups


def _nodes_and_edges(data: Any, source: str) -> tuple[list[_Node], list[_Edge]]:
    """Returns the checked rows; fields that the format does not have are remarks, and ignored."""
    top = Table(source, data, data, GraphError)
    nodes: list[_Node] = []
    position: dict[int, int] = {}
    for i, row in enumerate(top.rows("nodes")):
        table = Table(f"{source}: nodes[{i}]", row, row, GraphError)
        identity = table.integer("id")
        table.element = f"{source}: node {identity}"
        if identity in position:
            raise table.wrong(f"nodes[{position[identity]}] and nodes[{i}] have the same id")
        position[identity] = i
        nodes.append(_node(table, identity))
    edges = []
    for i, row in enumerate(top.rows("edges")):
        table = Table(f"{source}: edges[{i}]", row, row, GraphError)
        tail, head = (_end(table, field, position) for field in ("sourceId", "destId"))
        edges.append(_Edge(tail, head, table.number("cost") / 1000, table.number("size", 0)))
    return nodes, edges


def _node(table: Table, identity: int) -> _Node:
    seconds = {"cpu": table.number("cpuLatency") / 1000}
    if _flag(table, "supportedOnFpga"):
        seconds["gpu"] = table.number("fpgaLatency") / 1000
    return _Node(
        name=table.text("name", f"node{identity}"),
        color=table.integer("colorClass") if "colorClass" in table.fields else None,
        backward=_flag(table, "isBackwardNode"),
        seconds=seconds,
        size_bytes=_whole_bytes(table, "size"),
    )


def _flag(table: Table, name: str) -> bool:
    value = table.get(name)
    if value not in (0, 1) or not isinstance(value, int):
        raise table.wrong(f"{name} must be true, false, 1 or 0, it is {describe(value)}")
    return bool(value)


def _end(edge: Table, name: str, position: dict[int, int]) -> int:
    identity = edge.integer(name)
    if identity not in position:
        raise edge.wrong(f"{name} names node {identity}, there is none")
    return position[identity]


def _whole_bytes(table: Table, name: str) -> int:
    nbytes = table.number(name)
    if nbytes > MAX_BYTES:
        raise table.wrong(f"{name} must be at most 2**62 bytes, it is {nbytes}")
    return round(nbytes)


def _bytes_per_second(edges: list[_Edge]) -> float:
    """Returns the bandwidth of an accelerator's link: total size / total cost of the edges that have both."""
    both = [edge for edge in edges if edge.size_bytes > 0 and edge.cost_seconds > 0]
    if not both:
        return DEFAULT_BYTES_PER_SECOND
    return math.fsum(edge.size_bytes for edge in both) / math.fsum(edge.cost_seconds for edge in both)


def cluster_of(path: str | Path, *, bytes_per_second: float | None = None, host_memory_bytes: int = 2**40) -> Cluster:
    """Returns the machine that a file describes: maxFPGAs accelerators 'gpu:0'.. and maxCPUs cores 'cpu:0'..

    An accelerator has maxSizePerFPGA bytes and a link to and from host memory of the file's bandwidth, or of the given
    one; a copy between two accelerators goes through host memory and takes twice as long. Copies between cores are as
    good as free. Every core has host_memory_bytes, for their model does not limit host memory. Every ordered pair has
    its own channel: copies run beside each other and beside ops, while theirs hold up the accelerator. Speeds are 1,
    for all times are given: the machine is of use with graphs of this format alone.
    """
    source = str(path)
    data = parse_json(path, read_bytes(path, GraphError), GraphError)
    top = Table(source, data, data, GraphError)
    num_gpus, num_cpus = top.integer("maxFPGAs"), top.integer("maxCPUs")
    if not 1 <= num_gpus + num_cpus <= MAX_DEVICES:
        raise top.wrong(f"maxFPGAs + maxCPUs must be from 1 to {MAX_DEVICES}, it is {num_gpus + num_cpus}")
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
