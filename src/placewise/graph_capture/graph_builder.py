"""Builds the graph of a step while it is recorded: its ops and tensors, and which ops must share a device."""

import numpy as np

from placewise.core.arrays import Ints, Ragged
from placewise.core.graph import PHASES, TENSOR_KINDS, Graph, Ops, Shape, Tensors
from placewise.core.labels import connected_components

FORWARD, BACKWARD, UPDATE = range(len(PHASES))


class GraphBuilder:
    """The ops and tensors recorded so far, in lists with one entry for each."""

    def __init__(self) -> None:
        self.op_names: list[str] = []
        self.op_kinds: list[str] = []
        self.phases: list[int] = []
        self.micro_batches: list[int] = []
        self.reads: list[list[int]] = []
        self.writes: list[list[int]] = []
        self.after: list[list[int]] = []
        self.flops: list[float] = []
        self.bytes_moved: list[float] = []
        self.compute: list[int] = []  # index into COMPUTE_TYPES
        self.devices: list[tuple[str, ...] | None] = []
        self.owners: list[str] = []  # [ops], the parameter that an update op belongs to, or ""
        self.colocated: list[tuple[int, int]] = []  # pairs of ops that must be on one device for another reason
        self.tensor_names: list[str] = []
        self.tensor_bytes: list[int] = []
        self.tensor_kinds: list[str] = []
        self.alias_of: list[int] = []
        self.readers: list[list[int]] = []  # [tensors] -> ops that read it
        self.tensor_owners: list[str] = []
        self.tensor_shapes: list[int] = []  # index into shapes
        self.shapes: list[Shape] = []  # the distinct shapes

    def add_tensor(self, name: str, nbytes: int, kind: str, alias_of: int, owner: str, shape: int) -> int:
        """Adds a tensor and returns its number."""
        self.tensor_names.append(name)
        self.tensor_bytes.append(nbytes)
        self.tensor_kinds.append(kind)
        self.alias_of.append(alias_of)
        self.readers.append([])
        self.tensor_owners.append(owner)
        self.tensor_shapes.append(shape)
        return len(self.tensor_names) - 1

    def add_version(self, old: int, owner: str) -> int:
        """Adds the new version of a tensor that an op writes in place, and returns its number."""
        name = self.tensor_names[old].rstrip("'") + "'"
        owner = self.tensor_owners[old] or owner
        return self.add_tensor(name, self.tensor_bytes[old], self.tensor_kinds[old], old, owner, self.tensor_shapes[old])

    def to_graph(self, outputs: list[int], name: str) -> Graph:
        """Returns the graph with the smallest possible groups; a resident tensor's home is the group that writes it."""
        storages = _storages(self.alias_of)
        writes = Ragged.of(self.writes)
        groups = self._colocated(storages)
        home = np.full(len(storages), -1, np.int64)
        home[storages[writes.values]] = groups[writes.rows]
        home[writes.values] = -1  # tensors that the step writes have no home
        tensors = Tensors(
            tuple(self.tensor_names),
            np.array(self.tensor_bytes, np.int64),
            np.array([TENSOR_KINDS.index(kind) for kind in self.tensor_kinds], np.int64),
            home,
            np.array(self.alias_of, np.int64),
            tuple(self.shapes),
            np.array(self.tensor_shapes, np.int64),
        )
        ops = Ops(
            names=tuple(self.op_names),
            kinds=tuple(self.op_kinds),
            phases=np.array(self.phases, np.int64),
            groups=groups,
            reads=Ragged.of(self.reads),
            writes=writes,
            after=Ragged.of(self.after),
            flops=np.array(self.flops, np.float64),
            bytes_moved=np.array(self.bytes_moved, np.float64),
            devices=tuple(self.devices),
            micro_batches=np.array(self.micro_batches, np.int64),
            compute=np.array(self.compute, np.int64),
        )
        return Graph(name, tensors, ops, np.array(outputs, np.int64))

    def _colocated(self, storages: Ints) -> Ints:
        """Returns the smallest groups: ops that write the same storage, all update ops of a parameter, and pairs: [ops]."""
        roots = storages.tolist()
        first: dict[int | str, int] = {}  # storage or parameter -> the first op that writes it or belongs to it
        pairs = list(self.colocated)
        for op, (writes, owner) in enumerate(zip(self.writes, self.owners, strict=True)):
            shared: list[int | str] = [roots[tensor] for tensor in writes]
            pairs += [(first.setdefault(key, op), op) for key in ([*shared, owner] if owner else shared)]
        return connected_components(len(self.op_names), pairs)


def _storages(alias_of: list[int]) -> Ints:
    """Returns the tensor that owns each tensor's memory; aliases come after the tensors that they refer to: [tensors]."""
    storages = list(range(len(alias_of)))
    for tensor, alias in enumerate(alias_of):
        if alias >= 0:
            storages[tensor] = storages[alias]
    return np.array(storages, np.int64)
