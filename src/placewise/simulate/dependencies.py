"""Which ops wait for which values and ops, for list schedules."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints, Ragged
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import Int32s, row_ends, tensor_groups, unique_reads


class Dependencies(NamedTuple):
    """Which ops wait for what. A *value* is a tensor that some op waits for."""

    value_groups: Int32s  # [values], the group that each is with
    value_bytes: Ints  # [values]
    reader_ends: Int32s  # [values + 1], value v has the entries reader_ends[v] .. reader_ends[v + 1] of `readers`
    readers: Int32s  # [waits], ops
    output_ends: Int32s  # [ops + 1], op n has the entries output_ends[n] .. output_ends[n + 1] of `outputs`
    outputs: Int32s  # values that each op makes
    residents: Int32s  # values that exist before the step starts
    follower_ends: Int32s  # [ops + 1], of `followers`
    followers: Int32s  # ops that come after an op by `after`
    input_ends: Int32s  # [ops + 1], of `input_values` and `input_makers`
    input_values: Int32s  # values that each op waits for
    input_makers: Int32s  # the op that makes each of them, or -1: resident
    pending: Int32s  # [ops], how many values and ops each op waits for


def build_dependencies(problem: Problem) -> Dependencies:
    """Returns the dependencies of a problem's ops."""
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
        output_ends=row_ends(makers[outputs], len(ops)),
        outputs=outputs.astype(np.int32),
        residents=np.flatnonzero(makers < 0).astype(np.int32),
        follower_ends=followers.offsets.astype(np.int32),
        followers=followers.values.astype(np.int32),
        input_ends=row_ends(reading, len(ops)),
        input_values=values.astype(np.int32),
        input_makers=makers[values].astype(np.int32),
        pending=pending.astype(np.int32),
    )
