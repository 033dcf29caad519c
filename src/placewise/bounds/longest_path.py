"""The longest chain of ops, where every op is on the device that is best for the chain and copies cost time.

A group g is on some device d, so the step takes at least min over d of the longest path through g when g is on d. The bound
is the maximum of this over all groups.
"""

from typing import NamedTuple

import numpy as np

from placewise.bounds.dag import Dag
from placewise.core.arrays import Floats, Ints


class Path(NamedTuple):
    """The bound, and what proves it."""

    seconds: float
    group: int  # the group g
    ops: Ints  # [ops], those on the longest paths


def longest_path(dag: Dag, heads: Floats, tails: Floats) -> Path:
    """Returns the bound; ties go to the lowest group."""
    if not dag.num_ops:
        return Path(0.0, -1, np.zeros(0, np.int64))
    through = heads + dag.seconds + tails  # [ops, devices]
    longest = np.full((int(dag.groups.max()) + 1, through.shape[1]), -1.0)  # [groups, devices]; -1 for one without ops
    np.maximum.at(longest, dag.groups, through)
    least = longest.min(axis=1)
    group = int(least.argmax())
    members = np.flatnonzero(dag.groups == group)
    ops = {int(members[through[members, d].argmax()]) for d in range(through.shape[1])}
    return Path(float(least[group]), group, _support(dag, heads, tails, sorted(ops)))


def _support(dag: Dag, heads: Floats, tails: Floats, ops: list[int]) -> Ints:
    """Returns the ops that determine the heads and tails of these ops."""

    def copy_seconds(edge: int) -> Floats:
        return np.asarray(dag.copies.seconds(np.array([edge]))[0])  # [devices, devices]

    forward, backward = _edges_by(dag.targets, dag.num_ops), _edges_by(dag.sources, dag.num_ops)
    kept = set(ops)
    waiting = list(ops)
    while waiting:
        target = waiting.pop()
        for edge in forward[target]:
            source = int(dag.sources[edge])
            arrival = (heads[source, :, None] + dag.seconds[source, :, None] + copy_seconds(edge)).min(axis=0)
            if source not in kept and (arrival >= heads[target]).any():
                kept.add(source)
                waiting.append(source)
    before = set(kept)
    waiting, kept = list(ops), set(ops)
    while waiting:
        source = waiting.pop()
        for edge in backward[source]:
            target = int(dag.targets[edge])
            rest = (copy_seconds(edge) + dag.seconds[target] + tails[target]).min(axis=1)
            if target not in kept and (rest >= tails[source]).any():
                kept.add(target)
                waiting.append(target)
    return np.array(sorted(before | kept), np.int64)


def _edges_by(ends: Ints, num_ops: int) -> list[list[int]]:
    edges: list[list[int]] = [[] for _ in range(num_ops)]
    for edge, op in enumerate(ends.tolist()):
        edges[op].append(edge)
    return edges
