"""Small graphs and clusters to test with, made by hand and drawn at random by hypothesis."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, Link
from placewise.core.graph import COMPUTE_TYPES, PHASES, TENSOR_KINDS, Graph
from placewise.core.profile import Contention, Profile, ProfiledDevice, Timing
from placewise.formats.cluster_file import parse_cluster
from placewise.formats.graph_file import parse_graph

settings.register_profile(
    "placewise", deadline=None, derandomize=True
)  # no failures because a machine is busy, or at random
settings.load_profile("placewise")

DEVICE_KINDS = ("cpu", "gpu")


def tensor(name: str = "t", nbytes: int = 1, kind: str = "activation", **others: Any) -> dict[str, Any]:
    """Returns a row of a graph file's tensors."""
    return {"name": name, "nbytes": nbytes, "kind": kind, **others}


def op(
    name: str = "op",
    group: int = 0,
    reads: Sequence[int] = (),
    writes: Sequence[int] = (),
    phase: str = "forward",
    kind: str = "aten.op",
    **others: Any,
) -> dict[str, Any]:
    """Returns a row of a graph file's ops."""
    fields = {"name": name, "kind": kind, "phase": phase, "group": group, "reads": list(reads), "writes": list(writes)}
    return {**fields, **others}


def graph_data(tensors: list[dict[str, Any]], ops: list[dict[str, Any]], outputs: Sequence[int] = ()) -> dict[str, Any]:
    """Returns the parsed JSON of a graph file."""
    head = {"format": "placewise-graph", "version": 1, "name": "test"}
    return {**head, "tensors": tensors, "ops": ops, "outputs": list(outputs)}


def graph_of(tensors: list[dict[str, Any]], ops: list[dict[str, Any]], outputs: Sequence[int] = ()) -> Graph:
    """Returns the graph of these rows."""
    return parse_graph(graph_data(tensors, ops, outputs))


def wired(edges: Sequence[tuple[int, int]], num_ops: int, **columns: Sequence[Any]) -> Graph:
    """Returns a graph of ops that each write one tensor, with an edge for each pair of ops.

    Op n writes tensor n of n + 1 bytes. Each column has a value for every op; groups are the ops' own unless given.
    """
    rows = []
    for n in range(num_ops):
        fields = {"name": f"op{n}", "group": n, **{name: values[n] for name, values in columns.items()}}
        rows.append(op(reads=sorted({a for a, b in edges if b == n}), writes=[n], **fields))
    return graph_of([tensor(f"t{n}", n + 1) for n in range(num_ops)], rows)


def tiny_data() -> dict[str, Any]:
    """Returns the smallest training step: relu, mm, mm.backward, and an update of mm's parameter in place."""
    tensors = [
        tensor("x", 1000, "input"),
        tensor("w", 4000, "parameter", home=1),
        tensor("h", 2000),
        tensor("y", 2000),
        tensor("g", 4000, "gradient"),
        tensor("w'", 4000, "parameter", alias_of=1),
    ]
    ops = [
        op("relu", 0, [0], [2], kind="aten.relu", seconds={"gpu": 0.001}),
        op("mm", 1, [2, 1], [3], kind="aten.mm", seconds={"gpu": 0.004}),
        op("mm.backward", 2, [3, 2], [4], "backward", kind="aten.mm", seconds={"gpu": 0.003}),
        op("w.update", 1, [1, 4], [5], "update", kind="aten.add_", after=[1], seconds={"gpu": 0.002}),
    ]
    return {**graph_data(tensors, ops, [3]), "name": "tiny"}


def tiny_graph() -> Graph:
    """Returns the graph of `tiny_data`."""
    return parse_graph(tiny_data())


def tiny_cluster_data(memory: str | int = "1MiB") -> dict[str, Any]:
    """Returns two equal GPUs, 1 ms and 1 MB/s apart."""
    gpu = {"kind": "gpu", "memory": memory, "flops": 1e12, "bytes_per_second": 1e11}
    link = {"latency_seconds": 0.001, "bytes_per_second": 1e6}
    return {"name": "tiny", "devices": [{"name": "gpu:0", **gpu}, {"name": "gpu:1", **gpu}], "default_link": link}


def tiny_cluster(memory: str | int = "1MiB") -> Cluster:
    """Returns the cluster of `tiny_cluster_data`."""
    return parse_cluster(tiny_cluster_data(memory))


def mixed_cluster() -> Cluster:
    """Returns a GPU of 100 flop/s, 10 B/s and 0.5 s overhead, and a CPU of 10 flop/s and 5 B/s without overhead."""
    devices = [
        {"name": "gpu:0", "kind": "gpu", "memory": 100, "flops": 100, "bytes_per_second": 10, "overhead_seconds": 0.5},
        {"name": "cpu:0", "kind": "cpu", "memory": 1000, "flops": 10, "bytes_per_second": 5},
    ]
    link = {"latency_seconds": 1, "bytes_per_second": 1}
    return parse_cluster({"name": "mixed", "devices": devices, "default_link": link})


def profile_of_two_slices() -> Profile:
    """Returns a profile of two slices of one GPU, measured on gpu:0: relu takes 1 s, mm 2 s; add_ was not measured."""
    return Profile(
        (ProfiledDevice("gpu:0", "gpu", "H1", "gpu:0", 2), ProfiledDevice("gpu:1", "gpu", "H1", "gpu:0", 2)),
        {"relu": {"gpu:0": Timing(1.0, 5)}, "mm": {"gpu:0": Timing(2.0, 5)}},
        (Link("gpu:0", "gpu:1", 5e9, 1e-5), Link("gpu:1", "gpu:0", 6e9, 2e-5)),
        3e-6,
        {"gpu": Contention((1.0, 1.5), (1.0, 3.0))},
    )


def replaced(graph: Graph, *, tensors: Mapping[str, Any] | None = None, ops: Mapping[str, Any] | None = None) -> Graph:
    """Returns the graph with other columns."""
    return dataclasses.replace(
        graph,
        tensors=dataclasses.replace(graph.tensors, **(tensors or {})),
        ops=dataclasses.replace(graph.ops, **(ops or {})),
    )


def random_dag(rng: np.random.Generator, num_nodes: int, num_edges: int) -> tuple[Ints, Ints]:
    """Returns the ends of distinct edges that all point from a lower to a higher node."""
    if num_nodes < 2:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    a, b = rng.integers(0, num_nodes, (2, num_edges))
    pairs = np.unique(np.stack([np.minimum(a, b), np.maximum(a, b)])[:, a != b], axis=1)
    return pairs[0], pairs[1]


NAMES = st.text(max_size=6) | st.sampled_from(["encoder.0.mm", "encoder.0.mm.backward_1", "w.update", "é\n\x00", "\ud800"])
AMOUNTS = st.sampled_from([0, 0.0, 1, 2.5, 1e-9, 10**15, 1e299]) | st.floats(0, 1e18)
SHAPES: tuple[dict[str, Any], ...] = (  # of a tensor: not known, a number, something, nothing in no known type
    *({}, {"shape": [], "dtype": "int64"}, {"shape": [64, 1024], "dtype": "float32"}, {"shape": [2, 0, 3], "dtype": ""}),
)
SECONDS = st.dictionaries(st.sampled_from(["cpu", "gpu", "gpu:0", ""]), AMOUNTS, max_size=3)


@st.composite
def graph_rows(draw: st.DrawFn, max_ops: int = 8) -> dict[str, Any]:
    """Draws a valid graph as plain data: every optional field, in-place versions, views, ops that do no work, parts apart.

    There may be no op and no tensor; groups may be empty, and an op may read nothing, or the same tensor twice.
    """
    num_ops = draw(st.integers(0, max_ops))
    groups = st.integers(0, max(num_ops - 1, 0))
    tensors: list[dict[str, Any]] = []
    owner: list[int] = []  # of each tensor: the group that may write its storage, -1: none may
    readers: list[list[int]] = []  # of each tensor: the ops that read it

    def add(**fields: Any) -> int:
        fields |= draw(st.sampled_from(SHAPES))
        tensors.append(tensor(draw(NAMES), draw(st.integers(0, 2**40)), draw(st.sampled_from(TENSOR_KINDS)), **fields))
        readers.append([])
        return len(tensors) - 1

    for _ in range(draw(st.integers(0, 4 if num_ops else 1))):
        home = draw(st.none() | groups) if num_ops else None
        add(**({} if home is None else {"home": home}))
        owner.append(-1 if home is None else home)
    ops = []
    for n in range(num_ops):
        existing = st.integers(0, len(tensors) - 1)
        reads = draw(st.lists(existing, max_size=3)) if tensors else []
        row = op(draw(NAMES), draw(groups), reads, phase=draw(st.sampled_from(PHASES)), kind=draw(NAMES))
        after = set(draw(st.lists(st.integers(0, n - 1), max_size=2))) if n else set()
        for t in reads:
            readers[t].append(n)
        for _ in range(draw(st.integers(0, 2))):
            mine = [t for t in range(len(tensors)) if owner[t] == row["group"]]
            base = draw(st.none() | st.sampled_from(mine)) if mine else None
            row["writes"].append(add(**({} if base is None else {"alias_of": base})))
            owner.append(row["group"])
            if base is not None:
                after |= {m for m in readers[base] if m < n}
        if after:
            row["after"] = sorted(after)
        optional = {
            "flops": AMOUNTS,
            "nbytes_moved": AMOUNTS,
            "compute": st.sampled_from(COMPUTE_TYPES),
            "devices": st.lists(st.sampled_from(DEVICE_KINDS), min_size=1, max_size=2, unique=True),
            "micro_batch": st.integers(0, 3),
            "seconds": SECONDS,
        }
        ops.append(row | draw(st.fixed_dictionaries({}, optional=optional)))
    outputs = draw(st.lists(st.integers(0, len(tensors) - 1), max_size=3, unique=True)) if tensors else []
    return {**graph_data(tensors, ops, outputs), "name": draw(NAMES)}


def graphs(max_ops: int = 8) -> st.SearchStrategy[Graph]:
    """Draws a valid graph."""
    return graph_rows(max_ops).map(parse_graph)
