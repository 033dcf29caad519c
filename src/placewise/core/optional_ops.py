"""Optional ops: a group of them may be nowhere, and readers then read the tensor that its result stands for.

A repeated op stands for what its original wrote. An op without work that reads a tensor and stands for it lets the tensor
wait on another device. What is left when some groups are nowhere is an ordinary graph, and all tools work on that one.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Ints, Ragged
from placewise.core.graph import Graph, Ops, Tensors


class PresentGraph(NamedTuple):
    """What is left of a graph when some groups of optional ops are nowhere; nothing in it is optional."""

    graph: Graph
    ops: Ints  # [ops left], their numbers in the whole graph
    tensors: Ints  # [tensors left], as ops
    groups: Ints  # [groups left], as ops; those with neither ops nor homes are left out


def leave_out(graph: Graph, is_there: Bools) -> PresentGraph:
    """Returns what is left of a graph; `is_there` [groups] must hold for every group that is not optional."""
    o, t = graph.ops, graph.tensors
    op_there = is_there[o.groups]
    absent = (graph.producer >= 0) & ~np.append(op_there, True)[graph.producer]
    ops, tensors = np.flatnonzero(op_there), np.flatnonzero(~absent)
    groups = np.unique(np.concatenate([o.groups[ops], t.home[t.home >= 0]]))
    read_instead = np.where(absent, t.stands_for, np.arange(len(t)))
    while absent[read_instead].any():
        read_instead = read_instead[read_instead]
    op_number, tensor_number, group_number = (
        _numbers(kept, size) for kept, size in ((ops, len(o)), (tensors, len(t)), (groups, len(is_there)))
    )
    reads, writes = _rows(o.reads, op_there), _rows(o.writes, op_there)
    after = op_there[o.after.rows] & op_there[o.after.values]
    left = Ops(
        names=tuple([o.names[n] for n in ops.tolist()]),
        kinds=tuple([o.kinds[n] for n in ops.tolist()]),
        phases=o.phases[ops],
        groups=group_number[o.groups[ops]],
        reads=Ragged(reads.offsets, tensor_number[read_instead[reads.values]]),
        writes=Ragged(writes.offsets, tensor_number[writes.values]),
        after=Ragged.grouped(op_number[o.after.rows[after]], op_number[o.after.values[after]], len(ops)),
        flops=o.flops[ops],
        bytes_moved=o.bytes_moved[ops],
        devices=tuple([o.devices[n] for n in ops.tolist()]),
        micro_batches=o.micro_batches[ops],
        seconds={key: times[ops] for key, times in o.seconds.items()},
        compute=o.compute[ops],
    )
    stored = Tensors(
        names=tuple([t.names[i] for i in tensors.tolist()]),
        nbytes=t.nbytes[tensors],
        kinds=t.kinds[tensors],
        home=np.append(group_number, -1)[t.home[tensors]],
        alias_of=np.append(tensor_number, -1)[t.alias_of[tensors]],
        shapes=t.shapes,
        shape=t.shape[tensors],
    )
    outputs = tensor_number[read_instead[graph.outputs]]
    return PresentGraph(replace(graph, tensors=stored, ops=left, outputs=outputs), ops, tensors, groups)


def _rows(ragged: Ragged, is_kept: Bools) -> Ragged:
    lengths = np.diff(ragged.offsets)
    return Ragged(np.append(0, np.cumsum(lengths[is_kept])), ragged.values[np.repeat(is_kept, lengths)])


def _numbers(kept: Ints, size: int) -> Ints:
    numbers = np.full(size, -1, np.int64)
    numbers[kept] = np.arange(len(kept))
    return numbers
