"""Which cheap values a fused backward pass computes again, so that they need not be kept since the forward pass.

A cast, an activation, a normalized value: what autograd keeps of them can be made again from what is kept anyway, inside the
kernel that reads it, as the partitioner of torch.compile has it. A cut through the forward pass with the fewest bytes says
what is kept (a minimum cut: what the backward pass reads on one side, what can't be made again on the other). Products,
convolutions, attention and random ops are not repeated, nor are sums; what one of those reads in the backward pass is kept.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tag
from torch._ops import OpOverload

from placewise.core.graph import PHASES
from placewise.graph_capture.program import Call
from placewise.rewrite.fusable_ops import CONSTANTS, POINTWISE

if TYPE_CHECKING:
    from placewise.rewrite.fuse import Clusters

REPEATED = frozenset({"clone", "_to_copy", "where", "masked_fill", "_softmax", "_log_softmax"}) | CONSTANTS | POINTWISE

JOINED, MOST_JOINED = "cat", 4  # a kernel asks for each element which of the tensors it comes from

FORWARD, BACKWARD, UPDATE = (PHASES.index(name) for name in ("forward", "backward", "update"))

LARGEST = 2**30  # capacity; scipy's are 32 bits wide


def find_repeated(clusters: "Clusters", kept_storages: set[int]) -> dict[int, list[int]]:
    """Returns for each cluster of the backward pass the forward ops that it repeats, in program order.

    `kept_storages` are needed as they are, whoever reads them.
    """
    steps = _Steps(clusters, kept_storages)
    while True:
        repeated = steps.repeated()
        left_over = steps.without_result(repeated)
        if not left_over:
            return repeated
        steps.kept |= left_over


class _Steps:
    """The forward tensors that backward pieces read, and the ops that could make them again."""

    def __init__(self, clusters: "Clusters", kept_storages: set[int]) -> None:
        self.clusters = c = clusters
        o = c.graph.ops
        self.phases = o.phases.tolist()
        self.storage = c.graph.storage.tolist()
        self.nbytes = c.graph.tensors.nbytes.tolist()
        overwriters: dict[int, list[int]] = {}  # tensor -> the ops that overwrite it
        for tensor, old in enumerate(c.alias_of):
            if old >= 0:
                overwriters.setdefault(old, []).append(c.makers[tensor])
        self.is_lasting = [  # until the update
            all(self.phases[op] == UPDATE for op in overwriters.get(tensor, ())) for tensor in range(len(self.storage))
        ]
        self.kept: set[int] = set()  # tensors
        self.wanted: dict[int, list[int]] = {}  # forward tensor -> the fused backward ops that read it
        for op, reads in enumerate(c.reads):
            for tensor in reads:
                maker = c.makers[tensor]
                if maker < 0 or self.phases[maker] != FORWARD or self.phases[op] == FORWARD:
                    continue
                if self.phases[op] == BACKWARD and c.kinds[op] is not None and self.is_lasting[tensor]:
                    self.wanted.setdefault(tensor, []).append(op)
                else:
                    self.kept.add(tensor)
        self.kept |= {tensor for tensor in self.wanted if self.storage[tensor] in kept_storages}
        known: dict[int, bool] = {}
        self.repeatable = known

    def _is_repeatable(self, op: int) -> bool:
        """Whether an op can be repeated later: cheap, of tensors that are still what they were."""
        if op not in self.repeatable:
            c = self.clusters
            self.repeatable[op] = (
                self.phases[op] == FORWARD
                and c.kinds[op] is not None
                and is_cheap(c.values.op_calls[op])
                and all(c.alias_of[tensor] < 0 and self.is_lasting[tensor] for tensor in c.writes[op])
                and all(self.is_lasting[tensor] for tensor in c.reads[op])
            )
        return self.repeatable[op]

    def repeated(self) -> dict[int, list[int]]:
        """Returns for each cluster what it repeats if these tensors are kept."""
        c = self.clusters
        again = self._made_again()
        found: dict[int, list[int]] = {}
        for tensor, readers in self.wanted.items():
            if tensor not in again:
                continue
            ops: set[int] = set()
            waiting = [tensor]
            while waiting:
                op = c.makers[waiting.pop()]
                if op not in ops:
                    ops.add(op)
                    waiting += [read for read in c.reads[op] if read in again]
            for reader in readers:
                cluster = c.cluster[reader]
                found[cluster] = sorted(ops.union(found.get(cluster, ())))
        return found

    def without_result(self, repeated: dict[int, list[int]]) -> set[int]:
        """Returns what is read from forward clusters that nobody would read from otherwise."""
        c = self.clusters
        again = {(cluster, op) for cluster, ops in repeated.items() for op in ops}
        candidates = {c.cluster[op] for ops in repeated.values() for op in ops}
        is_read: set[int] = set()  # clusters

        def note(reader: int, reads: Sequence[int]) -> None:
            for tensor in reads:
                maker = c.makers[tensor]
                if maker >= 0 and (reader, maker) not in again and c.cluster[maker] != reader:
                    is_read.add(c.cluster[maker])

        for op, reads in enumerate(c.reads):
            note(c.cluster[op], reads)
        for cluster, ops in repeated.items():
            for op in ops:
                note(cluster, c.reads[op])
        outputs = set(c.graph.outputs.tolist())
        is_read |= {c.cluster[op] for op in range(len(c.cluster)) if not outputs.isdisjoint(c.writes[op])}
        is_read |= {c.cluster[op] for op in range(len(c.cluster)) if any(c.alias_of[t] >= 0 for t in c.writes[op])}
        dead = candidates - is_read
        return {t for cluster in dead for op in c.members[cluster] for t in c.writes[op] if t in self.wanted}

    def _made_again(self) -> set[int]:
        """Returns the tensors on the backward pass's side of the cut with the fewest bytes."""
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        c = self.clusters
        number: dict[int, int] = {}  # tensor -> its node where it is made; where it is read is the next
        rows, columns, capacities = [], [], []
        source, sink = 0, 1

        def add(start: int, end: int, capacity: float) -> None:
            rows.append(start)
            columns.append(end)
            capacities.append(capacity)

        inside = [self._bytes(tensor) for tensor in self.wanted]
        unit = max(1.0, 4 * sum(inside) / LARGEST)
        waiting = [tensor for tensor in self.wanted if tensor not in self.kept]
        for tensor in waiting:
            number[tensor] = 2 + 2 * len(number)
            add(number[tensor] + 1, sink, LARGEST)
        while waiting:
            tensor = waiting.pop()
            add(number[tensor], number[tensor] + 1, min(LARGEST, 1 + self._bytes(tensor) // unit))
            maker = c.makers[tensor]
            if not self._is_repeatable(maker):
                add(source, number[tensor], LARGEST)
                continue
            for read in c.reads[maker]:
                if c.makers[read] < 0 or read in self.kept or self.phases[c.makers[read]] != FORWARD:
                    continue  # it is there
                if read not in number:
                    number[read] = 2 + 2 * len(number)
                    waiting.append(read)
                add(number[read] + 1, number[tensor], LARGEST)
        if not number:
            return set()
        size = 2 + 2 * len(number)
        network = csr_matrix((np.array(capacities, np.int32), (rows, columns)), (size, size))
        flow = maximum_flow(network, source, sink).flow
        rest = network - flow
        rest.data = np.where(rest.data > 0, 1, 0).astype(np.int32)
        rest.eliminate_zeros()
        reached = breadth_first_order(rest.T.tocsr(), sink, return_predecessors=False)
        side = set(reached.tolist())
        return {tensor for tensor, node in number.items() if node in side}

    def _bytes(self, tensor: int) -> float:
        """Returns what it costs to keep a tensor: twice as much if it would not be written otherwise."""
        c = self.clusters
        maker = c.makers[tensor]
        is_written = any(
            self.phases[reader] == FORWARD and c.cluster[reader] != c.cluster[maker] for reader in c.readers[tensor]
        )
        return float(self.nbytes[tensor] * (1 if is_written else 2))


def is_cheap(call: Call) -> bool:
    """Whether an op may be repeated instead of keeping what it has made."""
    function = call.function
    if not isinstance(function, OpOverload):
        return False
    name = function._overloadpacket.__name__
    if name == JOINED:
        return len(call.args[0]) <= MOST_JOINED
    return Tag.pointwise in function.tags or name in REPEATED
