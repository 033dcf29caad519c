"""Reads and writes graph.json[.gz]."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from placewise.core.arrays import Floats, Ragged
from placewise.core.errors import GraphError
from placewise.core.graph import COMPUTE_TYPES, PHASES, TENSOR_ARRAYS, TENSOR_KINDS, Graph, Ops, Shape, Tensors
from placewise.formats.files import Fields, describe, read_json, write_bytes

FORMAT, VERSION = "placewise-graph", 1

GRAPH_FIELDS = ("format", "version", "name", "tensors", "ops", "outputs", "rewrites")

TENSOR_FIELDS = ("name", "nbytes", "kind", "home", "alias_of", "stands_for", "shape", "dtype")

OP_FIELDS = (
    "name", "kind", "phase", "group", "reads", "writes", "after", "flops", "nbytes_moved", "compute", "devices",
    "micro_batch", "seconds", "optional",
)  # fmt: skip


def read_graph(path: str | Path) -> Graph:
    """Returns the graph in a file; a GraphError names the file, the element and the rule that does not hold."""
    return parse_graph(read_json(path, GraphError), str(path))


def write_graph(graph: Graph, path: str | Path) -> None:
    """Writes the graph to a file, gzipped if its name ends in .gz; equal graphs give equal bytes."""
    data = format_graph(graph).encode()
    write_bytes(path, gzip.compress(data, compresslevel=4, mtime=0) if str(path).endswith(".gz") else data)


def parse_graph(data: Any, source: str = "graph") -> Graph:
    """Returns the graph in the parsed JSON of a file; errors name `source`."""
    top = Fields(source, data, GRAPH_FIELDS, GraphError)
    top.check_format(FORMAT, VERSION)
    tensors = _tensors(top.entries("tensors"), source)
    ops = _ops(top.entries("ops"), source)
    try:
        outputs = np.array(top.indices("outputs", []), np.int64)
        return Graph(top.text("name", ""), tensors, ops, outputs, tuple(top.texts("rewrites", [])))
    except GraphError as problem:
        raise GraphError(f"{source}: {problem}") from None


def _tensors(rows: list[Any], source: str) -> Tensors:
    names: list[str] = []
    columns: list[list[int]] = [[] for _ in TENSOR_ARRAYS]
    nbytes, kinds, homes, aliases, shape, stands_for = columns
    shapes: dict[Shape, int] = {}
    for i, row in enumerate(rows):
        tensor = Fields(f"{source}: tensors[{i}]", row, TENSOR_FIELDS, GraphError)
        names.append(tensor.text("name"))
        nbytes.append(tensor.integer("nbytes"))
        kinds.append(tensor.choice("kind", TENSOR_KINDS))
        homes.append(tensor.integer("home", -1))
        aliases.append(tensor.integer("alias_of", -1))
        stands_for.append(tensor.integer("stands_for", -1))
        found = _shape(tensor)
        shape.append(-1 if found is None else shapes.setdefault(found, len(shapes)))
    arrays = {name: np.array(column, np.int64) for name, column in zip(TENSOR_ARRAYS, columns, strict=True)}
    return Tensors(tuple(names), **arrays, shapes=tuple(shapes))


def _shape(tensor: Fields) -> Shape | None:
    """Returns a tensor's shape; its two fields are given together, or neither is."""
    if "shape" not in tensor.given and "dtype" not in tensor.given:
        return None
    return Shape(tensor.text("dtype"), tuple(tensor.indices("shape")))


def _ops(rows: list[Any], source: str) -> Ops:
    ops = [Fields(f"{source}: ops[{n}]", row, OP_FIELDS, GraphError) for n, row in enumerate(rows)]
    for n, op in enumerate(ops):
        op.element = f"{source}: ops[{n}] {op.text('name')!r}"
    return Ops(
        names=tuple([op.text("name") for op in ops]),
        kinds=tuple([op.text("kind") for op in ops]),
        phases=np.array([op.choice("phase", PHASES) for op in ops], np.int64),
        groups=np.array([op.integer("group") for op in ops], np.int64),
        reads=Ragged.of(op.indices("reads") for op in ops),
        writes=Ragged.of(op.indices("writes") for op in ops),
        after=Ragged.of(op.indices("after", []) for op in ops),
        flops=np.array([op.number("flops", 0) for op in ops], np.float64),
        bytes_moved=np.array([op.number("nbytes_moved", 0) for op in ops], np.float64),
        devices=tuple([_devices(op) for op in ops]),
        micro_batches=np.array([op.integer("micro_batch", -1) for op in ops], np.int64),
        seconds=_seconds(ops),
        compute=np.array([op.choice("compute", COMPUTE_TYPES, "float32") for op in ops], np.int64),
        optional=np.array([_is_optional(op) for op in ops], np.bool_),
    )


def _is_optional(op: Fields) -> bool:
    if (given := op.get("optional", False)) is not True and given is not False:
        raise op.wrong(f"optional must be true or false, got {describe(given)}")
    return bool(given)


def _devices(op: Fields) -> tuple[str, ...] | None:
    if "devices" not in op.given:
        return None
    kinds = op.entries("devices")
    if not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise op.wrong("devices must be a list of at least one kind of device")
    return tuple(kinds)


def _seconds(ops: list[Fields]) -> dict[str, Floats]:
    """Returns the given times by device name or kind: [ops] each, NaN for an op without one."""
    seconds: dict[str, Floats] = {}
    for n, op in enumerate(ops):
        if "seconds" not in op.given:
            continue
        given = op.mapping("seconds")
        times = Fields(f"{op.element}: seconds", given, tuple(given), GraphError)
        for key in given:
            seconds.setdefault(key, np.full(len(ops), np.nan))[n] = times.number(key)
    return seconds


def format_graph(graph: Graph) -> str:
    """Returns the text of a graph's file, with a line for each tensor and op; optional fields are left out where empty."""
    rewrites = {"rewrites": graph.rewrites} if graph.rewrites else {}
    head = json.dumps({"format": FORMAT, "version": VERSION, "name": graph.name, **rewrites})[:-1]
    tensors = ",\n  ".join(map(_ENCODER.encode, _tensor_rows(graph.tensors)))
    ops = ",\n  ".join(map(_ENCODER.encode, _op_rows(graph.ops)))
    outputs = json.dumps(graph.outputs.tolist())
    return f'{head},\n "tensors": [\n  {tensors}],\n "ops": [\n  {ops}],\n "outputs": {outputs}}}\n'


_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False)


def _tensor_rows(tensors: Tensors) -> list[dict[str, Any]]:
    rows = []
    columns = (getattr(tensors, name).tolist() for name in TENSOR_ARRAYS)
    for name, nbytes, kind, home, alias_of, shape, stands_for in zip(tensors.names, *columns, strict=True):
        row: dict[str, Any] = {"name": name, "nbytes": nbytes, "kind": TENSOR_KINDS[kind]}
        if home >= 0:
            row["home"] = home
        if alias_of >= 0:
            row["alias_of"] = alias_of
        if stands_for >= 0:
            row["stands_for"] = stands_for
        if shape >= 0:
            row["shape"], row["dtype"] = tensors.shapes[shape].sizes, tensors.shapes[shape].dtype
        rows.append(row)
    return rows


def _op_rows(ops: Ops) -> list[dict[str, Any]]:
    rows = []
    columns = (
        ops.names, ops.kinds, ops.phases.tolist(), ops.groups.tolist(), ops.reads.lists(), ops.writes.lists(),
        ops.after.lists(), _shortest(ops.flops), _shortest(ops.bytes_moved), ops.compute.tolist(), ops.devices,
        ops.micro_batches.tolist(), ops.optional.tolist(),
    )  # fmt: skip
    for name, kind, phase, group, reads, writes, after, flops, moved, compute, devices, micro_batch, optional in zip(
        *columns, strict=True
    ):
        row = {"name": name, "kind": kind, "phase": PHASES[phase], "group": group, "reads": reads, "writes": writes}
        if after:
            row["after"] = after
        if flops:
            row["flops"] = flops
        if moved:
            row["nbytes_moved"] = moved
        if compute:
            row["compute"] = COMPUTE_TYPES[compute]
        if devices is not None:
            row["devices"] = devices
        if micro_batch >= 0:
            row["micro_batch"] = micro_batch
        if optional:
            row["optional"] = True
        rows.append(row)
    for key, times in ops.seconds.items():
        for n in np.flatnonzero(~np.isnan(times)).tolist():
            rows[n].setdefault("seconds", {})[key] = float(times[n])
    return rows


def _shortest(column: Floats) -> list[int | float]:
    """Returns whole numbers as integers, which are shorter in a file and read back the same."""
    return [int(value) if value.is_integer() else value for value in column.tolist()]
