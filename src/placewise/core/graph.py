"""A training step as data: ops in program order, the tensors that they read and write, and the rules that they follow."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import MAX_NUMBER, Bools, Floats, Ints, Ragged, frozen
from placewise.core.errors import GraphError, InputError

TENSOR_KINDS = ("input", "parameter", "buffer", "state", "constant", "activation", "gradient")

PHASES = ("forward", "backward", "update")

# What an op can compute in; float32 unless it says otherwise. New ones go to the end: digests have the positions.
COMPUTE_TYPES = ("float32", "tf32", "bfloat16", "float16", "float64", "float8", "int8")

TENSOR_ARRAYS = ("nbytes", "kinds", "home", "alias_of", "shape", "stands_for")  # the arrays of Tensors

MAX_BYTES = 2**62  # of all tensors together, and of a device's memory: sums of them fit in 64 bits


class Shape(NamedTuple):
    """A tensor's dtype and sizes. Only for display: costs and placements do not depend on it."""

    dtype: str  # as in torch: float32
    sizes: tuple[int, ...]  # empty for a scalar

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.sizes)}"


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors of a graph. One that no op writes is resident: it is on its home device when the step starts."""

    names: tuple[str, ...]
    nbytes: Ints  # [tensors]
    kinds: Ints  # [tensors], index into TENSOR_KINDS
    home: Ints  # [tensors], the group whose device holds a resident tensor, or -1: the group of its first reader
    alias_of: Ints  # [tensors], the tensor whose memory it shares, or -1
    shapes: tuple[Shape, ...] = ()  # the distinct shapes
    shape: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [tensors], index into shapes, or -1: unknown
    stands_for: Ints = field(  # [tensors], what is read instead while the optional op that writes it is nowhere, or -1
        default_factory=lambda: np.zeros(0, np.int64)
    )

    def __post_init__(self) -> None:
        for name in ("shape", "stands_for"):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.full(len(self.names), -1))
        for name in TENSOR_ARRAYS:
            object.__setattr__(self, name, frozen(getattr(self, name), np.int64))

    def shape_of(self, tensor: int) -> Shape | None:
        """Returns a tensor's shape, or None if it is unknown."""
        number = int(self.shape[tensor])
        return self.shapes[number] if number >= 0 else None

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, eq=False)
class Ops:
    """The ops of a graph, in program order."""

    names: tuple[str, ...]  # with the module path
    kinds: tuple[str, ...]  # the operator: aten.mm
    phases: Ints  # [ops], index into PHASES
    groups: Ints  # [ops]
    reads: Ragged  # [ops] -> tensors
    writes: Ragged  # [ops] -> tensors
    after: Ragged  # [ops] -> ops that must end before it starts, besides those that write its inputs
    flops: Floats  # [ops]
    bytes_moved: Floats  # [ops]
    devices: tuple[tuple[str, ...] | None, ...]  # the kinds of device that can run it, None: all
    micro_batches: Ints  # [ops], or -1
    seconds: Mapping[str, Floats] = field(default_factory=dict)  # device name or kind -> given times [ops], NaN: none
    compute: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [ops], index into COMPUTE_TYPES
    optional: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))  # [ops], whether it may be nowhere

    def __post_init__(self) -> None:
        for name in ("compute", "optional"):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.zeros(len(self.names), np.int64))
        object.__setattr__(self, "optional", frozen(self.optional, np.bool_))
        for name in ("phases", "groups", "micro_batches", "compute"):
            object.__setattr__(self, name, frozen(getattr(self, name), np.int64))
        for name in ("flops", "bytes_moved"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        given = {key: _plain(self.seconds[key]) for key in sorted(self.seconds)}
        object.__setattr__(self, "seconds", {key: times for key, times in given.items() if not np.isnan(times).all()})

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, eq=False)
class Graph:
    """A training step as data. The constructor checks every rule of the format."""

    name: str
    tensors: Tensors
    ops: Ops
    outputs: Ints  # tensors that are kept to the end of the step
    rewrites: tuple[str, ...] = ()  # what made it of the captured graph, with versions: "fuse 2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", frozen(self.outputs, np.int64))
        _check(self)

    def __repr__(self) -> str:
        counts = f"{len(self.ops):,} ops in {self.num_groups:,} groups, {len(self.tensors):,} tensors"
        return f"Graph({self.name!r}: {counts})"

    @cached_property
    def num_groups(self) -> int:
        """The number of groups: one more than the largest group of an op or a home."""
        return int(max(self.ops.groups.max(initial=-1), self.tensors.home.max(initial=-1))) + 1

    @cached_property
    def optional_groups(self) -> Bools:
        """Whether each group is of optional ops: [groups]."""
        optional = np.zeros(self.num_groups, np.bool_)
        optional[self.ops.groups[self.ops.optional]] = True
        return frozen(optional, np.bool_)

    @cached_property
    def has_options(self) -> bool:
        """Whether an op is optional."""
        return bool(self.ops.optional.any())

    @cached_property
    def producer(self) -> Ints:
        """The op that writes each tensor, -1 for a resident tensor: [tensors]."""
        producer = np.full(len(self.tensors), -1, np.int64)
        producer[self.ops.writes.values] = self.ops.writes.rows
        return frozen(producer, np.int64)

    @cached_property
    def first_reader(self) -> Ints:
        """The first op in program order that reads each tensor, -1 if none does: [tensors]."""
        reader = np.full(len(self.tensors), -1, np.int64)
        reader[self.ops.reads.values[::-1]] = self.ops.reads.rows[::-1]
        return frozen(reader, np.int64)

    @cached_property
    def storage(self) -> Ints:
        """The tensor that owns each tensor's memory, itself unless it is an alias: [tensors]."""
        return frozen(_storage(self.tensors.alias_of), np.int64)

    @cached_property
    def readers(self) -> Ragged:
        """The ops that read each tensor, in program order: [tensors] -> ops."""
        return Ragged.grouped(self.ops.reads.values, self.ops.reads.rows, len(self.tensors))

    @cached_property
    def edges(self) -> tuple[Ints, Ints, Ints]:
        """The writing op, the reading op and the tensor of every edge, ordered by reading op: three arrays [edges]."""
        tensors = self.ops.reads.values
        made = self.producer[tensors] >= 0
        edges = self.producer[tensors][made], self.ops.reads.rows[made], tensors[made]
        writers, readers, tensors = (frozen(array, np.int64) for array in edges)
        return writers, readers, tensors

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over the content of the graph's file, without shapes."""
        return self._digest(self.ops.seconds, self.ops.compute)

    @cached_property
    def untimed_digest(self) -> str:
        """A SHA-256 that leaves out what only changes times: given times, and the types that ops compute in.

        It is the same before and after the times are measured, and with TF32 on and off.
        """
        return self._digest({}, np.zeros(0, np.int64))

    def _digest(self, seconds: Mapping[str, Floats], compute: Ints) -> str:
        t, o = self.tensors, self.ops
        words = [self.name, t.names, o.names, o.kinds, o.devices, list(seconds)]
        arrays = [t.nbytes, t.kinds, t.home, t.alias_of, self.outputs, o.phases, o.groups, o.micro_batches]
        arrays += [array for ragged in (o.reads, o.writes, o.after) for array in (ragged.offsets, ragged.values)]
        numbers = [o.flops, o.bytes_moved, *seconds.values()]
        types = [compute] if compute.any() else []  # a graph in float32 has the digest from before there were types
        options = [t.stands_for, o.optional.astype(np.int64)] if self.has_options else []  # as types
        return digest_of(words, *arrays, *numbers, *types, *options)


def digest_of(words: object, *arrays: NDArray[np.int64] | NDArray[np.float64]) -> str:
    """Returns the SHA-256 of JSON data and of arrays, the same on every machine."""
    sha = hashlib.sha256(json.dumps(words, ensure_ascii=True, separators=(",", ":")).encode())
    for array in arrays:
        sha.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        sha.update(b"|")
    return sha.hexdigest()


def _plain(values: Floats) -> Floats:
    """Returns an array in which equal numbers have equal bytes: no -0.0, and only one kind of NaN."""
    return frozen(np.where(np.isnan(values), np.nan, np.asarray(values, np.float64) + 0.0), np.float64)


def _storage(alias_of: Ints) -> Ints:
    """Returns the end of each tensor's chain of aliases, -2 if the chain is a cycle."""
    root = np.where(alias_of >= 0, alias_of, np.arange(len(alias_of)))
    for _ in range(len(alias_of).bit_length() + 1):
        root = root[root]  # each pass doubles the distance that is followed
    return np.where(alias_of[root] >= 0, -2, root)


def _check(graph: Graph) -> None:
    """Raises a GraphError for the first rule that does not hold; its message starts with the element."""
    _check_arrays(graph)
    _check_tensors(graph)
    _check_program_order(graph)
    _check_storages(graph)
    _check_options(graph)


def _refuse(element: str, rule: str) -> NoReturn:
    raise GraphError(f"{element}: {rule}")


def _op(graph: Graph, n: int) -> str:
    return f"ops[{n}] {graph.ops.names[n]!r}"


def _tensor(graph: Graph, t: int) -> str:
    return f"tensors[{t}] {graph.tensors.names[t]!r}"


def _first(where: NDArray[np.bool_]) -> int | None:
    """Returns the index of the first True, or None."""
    return int(where.argmax()) if where.any() else None


def _check_arrays(graph: Graph) -> None:
    """Checks the length and the range of every array."""
    o, t = graph.ops, graph.tensors
    limits = {"phases": len(PHASES), "groups": len(o) + len(t), "compute": len(COMPUTE_TYPES)}
    lengths = [len(getattr(o, name)) for name in ("kinds", "phases", "groups", "reads", "writes", "after", "flops")]
    lengths += [
        len(o.bytes_moved),
        len(o.devices),
        len(o.micro_batches),
        len(o.compute),
        len(o.optional),
        *map(len, o.seconds.values()),
    ]
    if any(length != len(o) for length in lengths) or any(len(getattr(t, name)) != len(t) for name in TENSOR_ARRAYS):
        _refuse("graph", "every array must have one entry for each op or each tensor")
    for name, limit in limits.items():
        array = getattr(o, name)
        if (n := _first((array < 0) | (array >= limit))) is not None:
            _refuse(_op(graph, n), f"{name.removesuffix('s')} must be at least 0 and below {limit}, got {array[n]}")
    rule = f"must be finite (below {MAX_NUMBER:g}) and not negative"
    for name, floats in {"flops": o.flops, "nbytes_moved": o.bytes_moved}.items():
        if (n := _first(~((floats >= 0) & (floats < MAX_NUMBER)))) is not None:
            _refuse(_op(graph, n), f"{name} {rule}, got {floats[n]}")
    for key, floats in o.seconds.items():
        if (n := _first((floats < 0) | (floats >= MAX_NUMBER))) is not None:
            _refuse(_op(graph, n), f"seconds[{key!r}] {rule}, got {floats[n]}")
    if (n := _first(o.micro_batches < -1)) is not None:
        _refuse(_op(graph, n), f"micro_batch must be at least 0, got {o.micro_batches[n]}")
    if () in o.devices:
        _refuse(_op(graph, o.devices.index(())), "devices must name at least one kind of device")
    for name, ragged, limit in (("reads", o.reads, len(t)), ("writes", o.writes, len(t)), ("after", o.after, len(o))):
        if (i := _first((ragged.values < 0) | (ragged.values >= limit))) is not None:
            what = "op" if name == "after" else "tensor"
            _refuse(_op(graph, ragged.rows[i]), f"{name} names {what} {ragged.values[i]}, there are only {limit}")
    if (i := _first((graph.outputs < 0) | (graph.outputs >= len(t)))) is not None:
        _refuse(f"outputs[{i}]", f"names tensor {graph.outputs[i]}, there are only {len(t)}")


def _check_tensors(graph: Graph) -> None:
    """Checks sizes, kinds, homes and aliases."""
    t = graph.tensors
    if (i := _first((t.nbytes < 0) | (t.nbytes > MAX_BYTES))) is not None:
        _refuse(_tensor(graph, i), f"nbytes must be at least 0 and at most 2**62, got {t.nbytes[i]}")
    if (together := float(t.nbytes.sum(dtype=np.float64))) > MAX_BYTES:
        _refuse("tensors", f"must have at most 2**62 bytes together, they have {together:.3g}")
    if (i := _first((t.kinds < 0) | (t.kinds >= len(TENSOR_KINDS)))) is not None:
        _refuse(_tensor(graph, i), f"kind must be one of {', '.join(TENSOR_KINDS)}")
    if (i := _first((t.home < -1) | (t.home >= len(graph.ops) + len(t)))) is not None:
        _refuse(_tensor(graph, i), f"home must be a group, got {t.home[i]}")
    if (i := _first((t.alias_of < -1) | (t.alias_of >= len(t)))) is not None:
        _refuse(_tensor(graph, i), f"alias_of names tensor {t.alias_of[i]}, there are only {len(t)}")
    if (i := _first((t.stands_for < -1) | (t.stands_for >= len(t)))) is not None:
        _refuse(_tensor(graph, i), f"stands_for names tensor {t.stands_for[i]}, there are only {len(t)}")
    if (i := _first((t.shape < -1) | (t.shape >= len(t.shapes)))) is not None:
        _refuse(_tensor(graph, i), f"shape must be one of the {len(t.shapes)} shapes, got number {t.shape[i]}")
    if negative := [shape for shape in t.shapes if min(shape.sizes, default=0) < 0]:
        _refuse("shapes", f"every size must be at least 0, there is {negative[0]}")
    if (i := _first(graph.storage < 0)) is not None:
        _refuse(_tensor(graph, i), "alias_of must not lead back to itself")


def _check_program_order(graph: Graph) -> None:
    """Checks that a tensor is written once and read only after that, and that `after` names earlier ops."""
    o = graph.ops
    written, counts = np.unique(o.writes.values, return_counts=True)
    if (i := _first(counts > 1)) is not None:
        writers = o.writes.rows[o.writes.values == written[i]]
        _refuse(_tensor(graph, written[i]), f"is written by ops {writers[0]} and {writers[1]}, at most one may write it")
    if (i := _first(graph.producer[o.reads.values] >= o.reads.rows)) is not None:
        n, tensor = o.reads.rows[i], o.reads.values[i]
        _refuse(
            _op(graph, n),
            f"reads tensor {tensor} {graph.tensors.names[tensor]!r} before op {graph.producer[tensor]} has written it",
        )
    if (i := _first(o.after.values >= o.after.rows)) is not None:
        _refuse(_op(graph, o.after.rows[i]), f"after names op {o.after.values[i]}, which does not come before it")


def _check_storages(graph: Graph) -> None:
    """Checks that all ops that write one storage are in one group, which is the home if the storage is resident."""
    o, t, root = graph.ops, graph.tensors, graph.storage
    if (i := _first((graph.producer >= 0) & (t.home >= 0))) is not None:
        _refuse(_tensor(graph, i), f"has a home, but op {graph.producer[i]} writes it: only resident tensors have one")
    owner = np.where(t.alias_of >= 0, t.alias_of, root)
    if (i := _first(graph.producer < graph.producer[owner])) is not None:
        _refuse(_tensor(graph, i), f"shares the memory of tensor {owner[i]}, which is written later")
    if (i := _first((graph.producer < 0) & (t.home != t.home[root]))) is not None:
        _refuse(_tensor(graph, i), f"shares the memory of tensor {root[i]} and must have its home, {t.home[root[i]]}")
    group = np.where(
        graph.producer >= 0, np.append(o.groups, -1)[graph.producer], t.home
    )  # [tensors], the group that writes it, or its home
    made = graph.producer >= 0
    if (i := _first(made & (root != np.arange(len(t))) & (group != group[root]))) is not None:
        storage, n = root[i], graph.producer[i]
        rule = (
            f"must be in group {group[storage]}"
            if group[storage] >= 0
            else f"needs tensor {storage} {t.names[storage]!r} to have home = {o.groups[n]}"
        )
        _refuse(_op(graph, n), f"writes the memory of tensor {storage} in place and {rule}, its group is {o.groups[n]}")


def _check_options(graph: Graph) -> None:
    """Checks that what optional ops write stands for something earlier, and that their groups have nothing else."""
    o, t, producer = graph.ops, graph.tensors, graph.producer
    of_optional = (producer >= 0) & np.append(o.optional, False)[producer]  # [tensors]
    if (i := _first(of_optional & (t.stands_for < 0))) is not None:
        _refuse(_tensor(graph, i), f"must have stands_for, because op {producer[i]}, which writes it, is optional")
    if (i := _first(~of_optional & (t.stands_for >= 0))) is not None:
        _refuse(_tensor(graph, i), "has stands_for, but no optional op writes it")
    if (i := _first(of_optional & (producer[t.stands_for] >= producer))) is not None:
        _refuse(_tensor(graph, i), f"stands for tensor {t.stands_for[i]}, which is not written before it")
    if (n := _first(~o.optional & graph.optional_groups[o.groups])) is not None:
        _refuse(_op(graph, n), f"is not optional, but others of its group {o.groups[n]} are")
    if (i := _first((t.home >= 0) & np.append(graph.optional_groups, False)[t.home])) is not None:
        _refuse(_tensor(graph, i), f"its home {t.home[i]} is a group of optional ops, which may be nowhere")


def as_graph(step: Any) -> Graph:
    """Returns the graph of a captured step, or the graph itself."""
    graph = getattr(step, "graph", step)
    if not isinstance(graph, Graph):
        raise InputError(f"step must be a captured step (placewise.capture) or a Graph, got a {type(step).__name__}")
    return graph
