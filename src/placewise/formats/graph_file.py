"""graph.json[.gz]: a graph as text. Reading executes nothing."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from placewise.core.arrays import Floats, Ragged
from placewise.core.errors import GraphError
from placewise.core.graph import PHASES, TENSOR_COLUMNS, TENSOR_KINDS, Graph, Ops, Shape, Tensors
from placewise.formats.files import Table, parse_json, read_bytes, write_bytes

FORMAT, VERSION = "placewise-graph", 1

GRAPH_FIELDS = ("format", "version", "name", "tensors", "ops", "outputs")

TENSOR_FIELDS = ("name", "nbytes", "kind", "home", "alias_of", "shape", "dtype")

OP_FIELDS = (
    *("name", "kind", "phase", "group", "reads", "writes", "after", "flops", "nbytes_moved"),
    *("devices", "micro_batch", "seconds"),
)


def read_graph(path: str | Path) -> Graph:
    """Returns the graph of a file; a GraphError names the file, the element and the rule that does not hold."""
    return parse_graph(parse_json(path, read_bytes(path, GraphError), GraphError), str(path))


def write_graph(graph: Graph, path: str | Path) -> None:
    """Writes the graph, gzipped where the name ends in .gz; the same graph gives the same bytes."""
    data = format_graph(graph).encode()
    write_bytes(path, gzip.compress(data, compresslevel=4, mtime=0) if str(path).endswith(".gz") else data)


def parse_graph(data: Any, source: str = "graph") -> Graph:
    """Returns the graph that plain data (of JSON) says; `source` is named in errors."""
    top = Table(source, data, GRAPH_FIELDS, GraphError)
    top.kind_of_file(FORMAT, VERSION)
    tensors = _tensors(top.rows("tensors"), source)
    ops = _ops(top.rows("ops"), source)
    try:
        return Graph(top.text("name", ""), tensors, ops, np.array(top.indices("outputs", []), np.int64))
    except GraphError as problem:
        raise GraphError(f"{source}: {problem}") from None


def _tensors(rows: list[Any], source: str) -> Tensors:
    names: list[str] = []
    columns: list[list[int]] = [[] for _ in TENSOR_COLUMNS]
    nbytes, kinds, homes, aliases, shape = columns
    shapes: dict[Shape, int] = {}
    for i, row in enumerate(rows):
        table = Table(f"{source}: tensors[{i}]", row, TENSOR_FIELDS, GraphError)
        names.append(table.text("name"))
        nbytes.append(table.integer("nbytes"))
        kinds.append(table.choice("kind", TENSOR_KINDS))
        homes.append(table.integer("home", -1))
        aliases.append(table.integer("alias_of", -1))
        found = _shape(table)
        shape.append(-1 if found is None else shapes.setdefault(found, len(shapes)))
    arrays = {name: np.array(column, np.int64) for name, column in zip(TENSOR_COLUMNS, columns, strict=True)}
    return Tensors(tuple(names), **arrays, shapes=tuple(shapes))


def _shape(tensor: Table) -> Shape | None:
    """Returns a tensor's shape; its two fields stand together, or neither does."""
    if "shape" not in tensor.fields and "dtype" not in tensor.fields:
        return None
    return Shape(tensor.text("dtype"), tuple(tensor.indices("shape")))


def _ops(rows: list[Any], source: str) -> Ops:
    tables = [Table(f"{source}: ops[{n}]", row, OP_FIELDS, GraphError) for n, row in enumerate(rows)]
    for n, table in enumerate(tables):
        table.element = f"{source}: ops[{n}] {table.text('name')!r}"
    return Ops(
        names=tuple([table.text("name") for table in tables]),
        kinds=tuple([table.text("kind") for table in tables]),
        phases=np.array([table.choice("phase", PHASES) for table in tables], np.int64),
        groups=np.array([table.integer("group") for table in tables], np.int64),
        reads=Ragged.of(table.indices("reads") for table in tables),
        writes=Ragged.of(table.indices("writes") for table in tables),
        after=Ragged.of(table.indices("after", []) for table in tables),
        flops=np.array([table.number("flops", 0) for table in tables], np.float64),
        bytes_moved=np.array([table.number("nbytes_moved", 0) for table in tables], np.float64),
        devices=tuple([_devices(table) for table in tables]),
        micro_batches=np.array([table.integer("micro_batch", -1) for table in tables], np.int64),
        seconds=_seconds(tables),
    )


def _devices(op: Table) -> tuple[str, ...] | None:
    if "devices" not in op.fields:
        return None
    kinds = op.rows("devices")
    if not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise op.wrong("devices must be a list of at least one kind of device")
    return tuple(kinds)


def _seconds(tables: list[Table]) -> dict[str, Floats]:
    """Returns the given times as columns; NaN where an op has none."""
    columns: dict[str, Floats] = {}
    for n, op in enumerate(tables):
        if "seconds" not in op.fields:
            continue
        given = op.get("seconds")
        if not isinstance(given, dict):
            raise op.wrong("seconds must be a table from a device's name or kind to seconds")
        times = Table(f"{op.element}: seconds", given, tuple(given), GraphError)
        for key in given:
            columns.setdefault(key, np.full(len(tables), np.nan))[n] = times.number(key)
    return columns


def format_graph(graph: Graph) -> str:
    """Returns the text of a graph's file: a line for each tensor and op, optional fields only where they say something."""
    head = json.dumps({"format": FORMAT, "version": VERSION, "name": graph.name})[:-1]
    tensors = ",\n  ".join(map(_ENCODER.encode, _tensor_rows(graph.tensors)))
    ops = ",\n  ".join(map(_ENCODER.encode, _op_rows(graph.ops)))
    outputs = json.dumps(graph.outputs.tolist())
    return f'{head},\n "tensors": [\n  {tensors}],\n "ops": [\n  {ops}],\n "outputs": {outputs}}}\n'


_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False)


def _tensor_rows(tensors: Tensors) -> list[dict[str, Any]]:
    rows = []
    columns = (getattr(tensors, name).tolist() for name in TENSOR_COLUMNS)
    for name, nbytes, kind, home, alias_of, shape in zip(tensors.names, *columns, strict=True):
        row: dict[str, Any] = {"name": name, "nbytes": nbytes, "kind": TENSOR_KINDS[kind]}
        if home >= 0:
            row["home"] = home
        if alias_of >= 0:
            row["alias_of"] = alias_of
        if shape >= 0:
            row["shape"], row["dtype"] = tensors.shapes[shape].sizes, tensors.shapes[shape].dtype
        rows.append(row)
    return rows


def _op_rows(ops: Ops) -> list[dict[str, Any]]:
    rows = []
    columns = (
        *(ops.names, ops.kinds, ops.phases.tolist(), ops.groups.tolist()),
        *(ops.reads.lists(), ops.writes.lists(), ops.after.lists()),
        *(_plain(ops.flops), _plain(ops.bytes_moved), ops.devices, ops.micro_batches.tolist()),
    )
    for name, kind, phase, group, reads, writes, after, flops, moved, devices, micro_batch in zip(*columns, strict=True):
        row = {"name": name, "kind": kind, "phase": PHASES[phase], "group": group, "reads": reads, "writes": writes}
        if after:
            row["after"] = after
        if flops:
            row["flops"] = flops
        if moved:
            row["nbytes_moved"] = moved
        if devices is not None:
            row["devices"] = devices
        if micro_batch >= 0:
            row["micro_batch"] = micro_batch
        rows.append(row)
    for key, times in ops.seconds.items():
        for n in np.flatnonzero(~np.isnan(times)).tolist():
            rows[n].setdefault("seconds", {})[key] = float(times[n])
    return rows


def _plain(column: Floats) -> list[int | float]:
    """Returns whole numbers as integers, which are shorter to write and the same when read."""
    return [int(value) if value.is_integer() else value for value in column.tolist()]
