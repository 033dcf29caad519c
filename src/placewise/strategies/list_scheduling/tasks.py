"""A problem as the papers on list scheduling have it: tasks and edges with bytes, without queues for copies."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints, Ragged
from placewise.core.cluster import copy_seconds
from placewise.core.labels import sum_by_label
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import tensor_groups

TOGETHER = -1.0  # the bytes of an edge that moves nothing: an `after`, or an edge inside a group


class Tasks(NamedTuple):
    """The ops and the edges between them, each pair of ops once."""

    op_groups: Ints  # [ops]
    op_seconds: Floats  # [ops, devices]
    allowed: Bools  # [groups, devices]
    input_ends: Ints  # [ops + 1], op n has the edges input_ends[n] .. input_ends[n + 1] of the next two
    input_ops: Ints  # [edges]
    input_bytes: Floats  # [edges], or TOGETHER
    output_ends: Ints  # [ops + 1], the same by the op that an edge leaves
    output_ops: Ints  # [edges]
    output_bytes: Floats  # [edges], or TOGETHER
    latency_seconds: Floats  # [devices, devices]
    bytes_per_second: Floats  # [devices, devices]


def build_tasks(problem: Problem) -> Tasks:
    """Returns the problem's tasks; resident tensors are on every device, as the papers do not know them."""
    sources, targets, nbytes = task_edges(problem)
    inputs = Ragged.grouped(targets, np.arange(len(targets)), problem.num_ops)
    outputs = Ragged.grouped(sources, np.arange(len(sources)), problem.num_ops)
    return Tasks(
        op_groups=np.array(problem.op_groups),
        op_seconds=np.array(problem.op_seconds),
        allowed=np.array(problem.allowed),
        input_ends=np.array(inputs.offsets),
        input_ops=sources[inputs.values],
        input_bytes=nbytes[inputs.values],
        output_ends=np.array(outputs.offsets),
        output_ops=targets[outputs.values],
        output_bytes=nbytes[outputs.values],
        latency_seconds=problem.cluster.latency_seconds + problem.cluster.delay_seconds,
        bytes_per_second=np.array(problem.cluster.bytes_per_second),
    )


def task_edges(problem: Problem) -> tuple[Ints, Ints, Floats]:
    """Returns the source, target and bytes of every edge between two ops, sorted by target and then source.

    All tensors from one op to another are one edge. Its bytes are TOGETHER if both ops are in one group, or if there is
    only an `after`.
    """
    count = max(problem.num_ops, 1)
    writers, readers, tensors = problem.graph.edges
    reads = np.unique(np.stack([readers * count + writers, tensors]), axis=1)  # a tensor that is read twice is copied once
    pairs, inverse = np.unique(reads[0], return_inverse=True)
    nbytes = sum_by_label(inverse.ravel(), problem.graph.tensors.nbytes[reads[1]].astype(np.float64), len(pairs))
    after = problem.graph.ops.after
    bare = np.setdiff1d(after.rows * count + after.values, pairs)
    pairs, nbytes = np.append(pairs, bare), np.append(nbytes, np.full(len(bare), TOGETHER))
    order = np.argsort(pairs, kind="stable")
    sources, targets, nbytes = pairs[order] % count, pairs[order] // count, nbytes[order]
    return sources, targets, np.where(problem.op_groups[sources] == problem.op_groups[targets], TOGETHER, nbytes)


def mean_op_seconds(problem: Problem, devices: Bools) -> Floats:
    """Returns each op's mean time over the devices of its group, [groups, devices]: [ops]."""
    can = devices[problem.op_groups]
    return np.asarray(np.where(can, problem.op_seconds, 0.0).sum(axis=1) / can.sum(axis=1), np.float64)


def mean_copy_seconds(problem: Problem, nbytes: Floats, devices: Bools) -> Floats:
    """Returns mean latency + bytes / mean bandwidth of the links between these devices [devices], 0 for TOGETHER."""
    pairs = np.outer(devices, devices) & ~np.eye(problem.num_devices, dtype=np.bool_)
    if not pairs.any():
        return np.zeros(len(nbytes))
    latency = (problem.cluster.latency_seconds + problem.cluster.delay_seconds)[pairs].mean()
    bandwidth = problem.cluster.bytes_per_second[pairs].mean()
    return np.where(nbytes < 0, 0.0, copy_seconds(np.maximum(nbytes, 0.0), latency, bandwidth))


def place_the_rest(problem: Problem, placement: Ints) -> Ints:
    """Returns the placement with a device for the groups that have none, -1: those without ops.

    Such a group holds resident tensors. It goes to the device of their first reader, or if it can't, to the first allowed.
    """
    placement = np.array(placement)
    reader = problem.graph.first_reader
    read = np.flatnonzero((problem.graph.producer < 0) & (reader >= 0))
    first = np.full(problem.num_groups + 1, problem.num_ops, np.int64)
    np.minimum.at(first, tensor_groups(problem)[read], reader[read])
    for group in np.flatnonzero(placement < 0).tolist():
        op = first[group]
        device = placement[problem.op_groups[op]] if op < problem.num_ops else -1
        placement[group] = device if device >= 0 and problem.allowed[group, device] else problem.allowed[group].argmax()
    return placement


def group_bytes(problem: Problem) -> Ints:
    """Returns the bytes of each group's resident tensors and of all that its ops make, without views: [groups]."""
    graph = problem.graph
    groups = tensor_groups(problem)
    own = np.flatnonzero((graph.storage == np.arange(len(graph.tensors))) & (groups >= 0))
    total = np.zeros(problem.num_groups, np.int64)
    np.add.at(total, groups[own], graph.tensors.nbytes[own])
    return total
