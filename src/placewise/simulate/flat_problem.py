"""A problem as flat arrays, in the form that the kernels loop over.

Two facts keep the kernels short. An input that is made on the op's own device never delays the op, because a device works in
launch order; so only reads that can come from another device are listed. And a tensor is where one group is (its producer's
group, or its home), so a kernel need not keep track of tensors.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Bools, Floats, Ints, Ragged
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem

Int32s = NDArray[np.int32]


class FlatProblem(NamedTuple):
    """A problem for the kernels. A *copied* tensor is one that can be read on another device than its own."""

    num_devices: int
    op_groups: Int32s  # [ops]
    op_seconds: Floats  # [ops * devices]
    read_ends: Int32s  # [ops + 1], op n has the reads read_ends[n] .. read_ends[n + 1], those of other groups' tensors
    read_groups: Int32s  # [reads], the group that the tensor is with
    read_copies: Int32s  # [reads], number of the copied tensor
    read_storages: Int32s  # [reads], number of the storage that the step makes, or -1: resident
    copy_bytes: Ints  # [copied tensors]
    copy_makers: Int32s  # [copied tensors], the op that writes it, or -1: resident
    after_ends: Int32s  # [ops + 1], as read_ends, those of other groups' ops
    after_ops: Int32s  # [afters]
    touch_ends: Int32s  # [ops + 1], as read_ends
    touch_storages: Int32s  # [touches], storages that ops of their own group read or write, and those that nobody reads
    made_bytes: Ints  # [ops], of the storages that each op makes
    storage_bytes: Ints  # [storages], 0 for one that is kept to the end
    storage_groups: Int32s  # [storages]
    storage_makers: Int32s  # [storages], the op that makes it
    storage_sizes: Ints  # [storages], bytes
    resident_bytes: Ints  # [groups]
    floating_bytes: int  # of resident tensors without a home that nobody reads: they are on device 0
    memory_bytes: Ints  # [devices]
    latency_seconds: Floats  # [devices * devices]
    bytes_per_second: Floats  # [devices * devices]
    delay_seconds: Floats  # [devices * devices]
    channels: Int32s  # [devices * devices]
    second_channels: Int32s  # [devices * devices], the same one again for a link that uses one channel
    host_waits: Bools  # [devices * devices], the host launches a copy over this link when its tensor is made
    copies_take_work: bool  # of the devices at their ends
    source_seconds: Floats  # [devices * devices], that a copy takes of its source's own time
    source_seconds_per_byte: Floats  # [devices * devices]
    target_seconds: Floats  # [devices * devices], as of its target's
    target_seconds_per_byte: Floats  # [devices * devices]
    num_channels: int
    hosts: Int32s  # [devices], the host that launches for each
    num_hosts: int
    dispatch_seconds: float
    copy_dispatch_seconds: float


def flatten(problem: Problem) -> FlatProblem:
    """Returns the problem as flat arrays."""
    graph, cluster = problem.graph, problem.cluster
    ops, tensors = graph.ops, graph.tensors
    op_groups = problem.op_groups
    groups = tensor_groups(problem)

    reading, read = unique_reads(ops.reads)
    elsewhere = groups[read] != op_groups[reading]
    storage_of = np.full(len(tensors), -1, np.int64)  # [tensors], number among the storages that the step makes
    made = np.flatnonzero((graph.producer >= 0) & (graph.storage == np.arange(len(tensors))))
    storage_of[made] = np.arange(len(made))
    storage_of = storage_of[graph.storage]
    copied, read_copies = np.unique(read[elsewhere], return_inverse=True)

    local = ~elsewhere & (storage_of[read] >= 0)
    unread = np.setdiff1d(storage_of[made], storage_of[read])  # all others have their last use at a reader
    in_place = (graph.storage[ops.writes.values] != ops.writes.values) & (storage_of[ops.writes.values] >= 0)
    writing, written = ops.writes.rows[in_place], storage_of[ops.writes.values[in_place]]
    reads_it = np.isin(writing * len(tensors) + written, reading * len(tensors) + storage_of[read])
    unread = np.append(
        unread, written[~reads_it]
    )  # an order may launch such a write before the maker, whose launch is then the last use
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
        read_ends=row_ends(reading[elsewhere], len(ops)),
        read_groups=groups[read[elsewhere]].astype(np.int32),
        read_copies=read_copies.astype(np.int32),
        read_storages=storage_of[read[elsewhere]].astype(np.int32),
        copy_bytes=tensors.nbytes[copied],
        copy_makers=graph.producer[copied].astype(np.int32),
        after_ends=row_ends(ops.after.rows[apart], len(ops)),
        after_ops=ops.after.values[apart].astype(np.int32),
        touch_ends=row_ends(touches[0], len(ops)),
        touch_storages=touches[1].astype(np.int32),
        made_bytes=made_bytes,
        storage_bytes=np.where(kept, 0, tensors.nbytes[made]),
        storage_groups=op_groups[graph.producer[made]].astype(np.int32),
        storage_makers=graph.producer[made].astype(np.int32),
        storage_sizes=tensors.nbytes[made],
        resident_bytes=resident_bytes[:-1],
        floating_bytes=int(resident_bytes[-1]),
        **cluster_columns(cluster),
    )


def cluster_columns(cluster: Cluster) -> dict[str, Any]:
    """Returns what the kernels need to know of a cluster, by name."""
    source, source_per_byte, target, target_per_byte = np.array(cluster.copy_work).reshape(4, -1)
    return {
        "memory_bytes": np.array(cluster.memory_bytes),
        "latency_seconds": np.array(cluster.latency_seconds).reshape(-1),
        "bytes_per_second": np.array(cluster.bytes_per_second).reshape(-1),
        "delay_seconds": np.array(cluster.delay_seconds).reshape(-1),
        "channels": cluster.channels.astype(np.int32).reshape(-1),
        "second_channels": cluster.second_channels.astype(np.int32).reshape(-1),
        "host_waits": np.array(cluster.host_waits).reshape(-1),
        "copies_take_work": bool(cluster.copy_work.any()),
        "source_seconds": source,
        "source_seconds_per_byte": source_per_byte,
        "target_seconds": target,
        "target_seconds_per_byte": target_per_byte,
        "num_channels": len(cluster.channel_names),
        "hosts": cluster.hosts.astype(np.int32),
        "num_hosts": len(cluster.host_names),
        "dispatch_seconds": float(cluster.dispatch_seconds),
        "copy_dispatch_seconds": float(cluster.copy_launch_seconds),
    }


def copied_tensors(problem: Problem) -> Ints:
    """Returns the graph's tensor for each copied tensor of the flat problem."""
    reading, read = unique_reads(problem.graph.ops.reads)
    return np.unique(read[tensor_groups(problem)[read] != problem.op_groups[reading]])


def tensor_groups(problem: Problem) -> Ints:
    """Returns the group that each tensor is with: [tensors].

    It is its producer's group; for a resident tensor its home, else its first reader's group, else -1.
    """
    graph = problem.graph
    maker = np.where(graph.producer >= 0, graph.producer, graph.first_reader)
    groups = np.where(maker >= 0, np.append(problem.op_groups, -1)[maker], -1)
    home = graph.tensors.home
    at_home = (graph.producer < 0) & (home >= 0)
    return np.where(at_home, np.append(problem.merged, -1)[home], groups)


def unique_reads(reads: Ragged) -> tuple[Ints, Ints]:
    """Returns the ops and the tensors of all reads, each pair once, in the order of each op's reads."""
    pairs = reads.rows * (int(reads.values.max(initial=0)) + 1) + reads.values
    _, first = np.unique(pairs, return_index=True)
    first.sort()
    return reads.rows[first], reads.values[first]


def row_ends(rows: Ints, count: int) -> Int32s:
    """Returns where the entries of each row start, and where those of the last row end: [count + 1]; rows are sorted."""
    return np.searchsorted(rows, np.arange(count + 1)).astype(np.int32)
