"""A problem as flat arrays, in the form in which the kernels walk over them.

Two facts keep the passes short. An input that was made on the op's own device never delays it, because the device works in
launch order; so only reads that can come from another device are listed. And where a tensor is follows from the placement
of one group (its producer's, or its home), so nothing has to be remembered about places while a pass runs.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Floats, Ints, Ragged
from placewise.core.problem import Problem

Small = NDArray[np.int32]


class FlatProblem(NamedTuple):
    """A problem for the kernels. A *copied* tensor is one that can be read from another device than its own."""

    num_devices: int
    op_groups: Small  # [ops]
    op_seconds: Floats  # [ops * devices]
    read_ends: Small  # [ops + 1], op n has the reads read_ends[n] .. read_ends[n + 1]: those from another group
    read_groups: Small  # [reads], the group that the tensor is with
    read_copies: Small  # [reads], number of the copied tensor
    read_storages: Small  # [reads], number of the storage that the step makes, or -1: resident
    copy_bytes: Ints  # [copied tensors]
    copy_makers: Small  # [copied tensors], the op that writes it, or -1: resident
    after_ends: Small  # [ops + 1], as read_ends: those of another group
    after_ops: Small  # [afters]
    touch_ends: Small  # [ops + 1], as read_ends
    touch_storages: Small  # [touches], storages that ops of their own group read, and those that nobody reads
    made_bytes: Ints  # [ops], of the storages that an op makes
    storage_bytes: Ints  # [storages], 0 for one that lives to the end
    storage_groups: Small  # [storages]
    storage_makers: Small  # [storages], the op that makes it
    storage_sizes: Ints  # [storages], bytes
    resident_bytes: Ints  # [groups]
    floating_bytes: int  # resident tensors that nobody reads and that have no home: they are on device 0
    memory_bytes: Ints  # [devices]
    latency_seconds: Floats  # [devices * devices]
    bytes_per_second: Floats  # [devices * devices]
    channels: Small  # [devices * devices]
    num_channels: int
    dispatch_seconds: float


def flatten(problem: Problem) -> FlatProblem:
    """Returns the problem's tables."""
    graph, cluster = problem.graph, problem.cluster
    ops, tensors = graph.ops, graph.tensors
    op_groups = problem.op_groups
    groups = tensor_groups(problem)

    reading, read = unique_reads(ops.reads)
    elsewhere = groups[read] != op_groups[reading]
    storage_of = np.full(len(tensors), -1, np.int64)  # tensor -> number among the storages that the step makes
    made = np.flatnonzero((graph.producer >= 0) & (graph.storage == np.arange(len(tensors))))
    storage_of[made] = np.arange(len(made))
    storage_of = storage_of[graph.storage]
    copied, read_copies = np.unique(read[elsewhere], return_inverse=True)

    local = ~elsewhere & (storage_of[read] >= 0)
    unread = np.setdiff1d(storage_of[made], storage_of[read])  # all others get their last use from a reader
    in_place = (graph.storage[ops.writes.values] != ops.writes.values) & (storage_of[ops.writes.values] >= 0)
    writing, written = ops.writes.rows[in_place], storage_of[ops.writes.values[in_place]]
    reads_it = np.isin(writing * len(tensors) + written, reading * len(tensors) + storage_of[read])
    unread = np.append(unread, written[~reads_it])  # an order may launch such a write before the maker, which then is last
    touching = np.concatenate([reading[local], graph.producer[made[unread]], writing])
    touched = np.concatenate([storage_of[read[local]], unread, written])
    touches = np.unique(np.stack([touching, touched]), axis=1)
    kept = np.zeros(len(made), np.bool_)
    kept[storage_of[graph.outputs][storage_of[graph.outputs] >= 0]] = True
    made_bytes = np.zeros(len(ops), np.int64)
    np.add.at(made_bytes, graph.producer[made], tensors.nbytes[made])

    at_home = np.flatnonzero((graph.producer < 0) & (tensors.alias_of < 0))
    resident_bytes = np.zeros(problem.num_groups + 1, np.int64)
    np.add.at(resident_bytes, groups[at_home], tensors.nbytes[at_home])
    apart = op_groups[ops.after.rows] != op_groups[ops.after.values]
    return FlatProblem(
        num_devices=problem.num_devices,
        op_groups=op_groups.astype(np.int32),
        op_seconds=np.ascontiguousarray(problem.op_seconds).reshape(-1),
        read_ends=ends_of(reading[elsewhere], len(ops)),
        read_groups=groups[read[elsewhere]].astype(np.int32),
        read_copies=read_copies.astype(np.int32),
        read_storages=storage_of[read[elsewhere]].astype(np.int32),
        copy_bytes=tensors.nbytes[copied],
        copy_makers=graph.producer[copied].astype(np.int32),
        after_ends=ends_of(ops.after.rows[apart], len(ops)),
        after_ops=ops.after.values[apart].astype(np.int32),
        touch_ends=ends_of(touches[0], len(ops)),
        touch_storages=touches[1].astype(np.int32),
        made_bytes=made_bytes,
        storage_bytes=np.where(kept, 0, tensors.nbytes[made]),
        storage_groups=op_groups[graph.producer[made]].astype(np.int32),
        storage_makers=graph.producer[made].astype(np.int32),
        storage_sizes=tensors.nbytes[made],
        resident_bytes=resident_bytes[:-1],
        floating_bytes=int(resident_bytes[-1]),
        memory_bytes=np.array(cluster.memory_bytes),
        latency_seconds=np.array(cluster.latency_seconds).reshape(-1),
        bytes_per_second=np.array(cluster.bytes_per_second).reshape(-1),
        channels=cluster.channels.astype(np.int32).reshape(-1),
        num_channels=len(cluster.channel_names),
        dispatch_seconds=float(cluster.dispatch_seconds),
    )


def copied_tensors(problem: Problem) -> Ints:
    """Returns the graph's tensor for each copied tensor of the tables."""
    reading, read = unique_reads(problem.graph.ops.reads)
    return np.unique(read[tensor_groups(problem)[read] != problem.op_groups[reading]])


def tensor_groups(problem: Problem) -> Ints:
    """Returns the group that each tensor is with: its producer's, its home, its first reader's, or -1: [tensors]."""
    graph = problem.graph
    maker = np.where(graph.producer >= 0, graph.producer, graph.first_reader)
    groups = np.where(maker >= 0, np.append(problem.op_groups, -1)[maker], -1)
    home = graph.tensors.home
    at_home = (graph.producer < 0) & (home >= 0)
    return np.where(at_home, np.append(problem.merged, -1)[home], groups)


def unique_reads(reads: Ragged) -> tuple[Ints, Ints]:
    """Returns (op, tensor) of every read, each pair once, in the order in which an op names its tensors."""
    pairs = reads.rows * (int(reads.values.max(initial=0)) + 1) + reads.values
    _, first = np.unique(pairs, return_index=True)
    first.sort()
    return reads.rows[first], reads.values[first]


def ends_of(rows: Ints, count: int) -> Small:
    """Returns where each row's entries start, and where the last one's end, for entries that are sorted by row."""
    return np.searchsorted(rows, np.arange(count + 1)).astype(np.int32)
