"""Which op waits for which values and ops, for list schedules."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints, Ragged
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import Small, ends_of, tensor_groups, unique_reads


class Dependencies(NamedTuple):
    """Who waits for whom. A *value* is a tensor that some op waits for."""

    value_groups: Small  # [values], the group that it is with
    value_bytes: Ints  # [values]
    reader_ends: Small  # [values + 1], value v has the readers reader_ends[v] .. reader_ends[v + 1]
    readers: Small  # [waits], ops
    output_ends: Small  # [ops + 1], op n makes the values output_ends[n] .. output_ends[n + 1] of `outputs`
    outputs: Small  # values
    residents: Small  # values that are there from the start
    follower_ends: Small  # [ops + 1]
    followers: Small  # ops that must stay behind an op
    input_ends: Small  # [ops + 1]
    input_values: Small  # values
    input_makers: Small  # the op that makes it, or -1
    pending: Small  # [ops], how many values and ops each op waits for


def build_dependencies(problem: Problem) -> Dependencies:
    """Returns who waits for whom."""
    graph, ops = problem.graph, problem.graph.ops
    groups = tensor_groups(problem)
    reading, read = unique_reads(ops.reads)
    waits = (graph.producer[read] >= 0) | (groups[read] != problem.op_groups[reading])
    reading, read = reading[waits], read[waits]
    tensors, values = np.unique(read, return_inverse=True)
    makers = graph.producer[tensors]
    by_reader = Ragged.grouped(values, reading, len(tensors))
    made = np.flatnonzero(makers >= 0)
    outputs = made[np.argsort(makers[made], kind="stable")]
    after = ops.after
    followers = Ragged.grouped(after.values, after.rows, len(ops))
    pending = np.bincount(reading, minlength=len(ops)) + np.diff(after.offsets)
    return Dependencies(
        value_groups=groups[tensors].astype(np.int32),
        value_bytes=graph.tensors.nbytes[tensors],
        reader_ends=by_reader.offsets.astype(np.int32),
        readers=by_reader.values.astype(np.int32),
        output_ends=ends_of(makers[outputs], len(ops)),
        outputs=outputs.astype(np.int32),
        residents=np.flatnonzero(makers < 0).astype(np.int32),
        follower_ends=followers.offsets.astype(np.int32),
        followers=followers.values.astype(np.int32),
        input_ends=ends_of(reading, len(ops)),
        input_values=values.astype(np.int32),
        input_makers=makers[values].astype(np.int32),
        pending=pending.astype(np.int32),
    )
