"""A step as the bounds see it: ops that take time on a device, and edges that take time between two devices.

The bounds leave out that a device runs one op at a time, that a channel moves one copy at a time, and memory: that can only
make the step shorter. What is left is a graph in which one sweep finds the earliest start of every op on every device.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import tensor_groups, unique_reads


class _Layer(NamedTuple):
    """The ops of one level and the edges into them; no edge joins two ops of one level."""

    nodes: Ints  # [nodes], the ops
    edges: Ints  # [edges], sorted by op
    starts: Ints  # [nodes], where each op's edges begin


@dataclass(frozen=True, eq=False)
class Dag:
    """Ops in topological order, and the edges between them."""

    seconds: Floats  # [ops, devices], infinite where an op can't run
    earliest: Floats  # [ops, devices], no op can start before this
    groups: Ints  # [ops], ops of one group are on one device
    sources: Ints  # [edges], op
    targets: Ints  # [edges], op
    copy_seconds: Floats  # [edges, devices, devices], from the source's device to the target's

    @property
    def num_ops(self) -> int:
        """How many ops there are."""
        return len(self.seconds)

    @cached_property
    def _forward(self) -> list[_Layer]:
        return _layers(self.sources, self.targets, self.num_ops)

    @cached_property
    def _backward(self) -> list[_Layer]:
        last = self.num_ops - 1
        layers = _layers(last - self.targets, last - self.sources, self.num_ops)
        return [_Layer(last - layer.nodes, layer.edges, layer.starts) for layer in layers]

    def heads(self, seconds: Floats | None = None) -> Floats:
        """Returns the earliest start of every op on every device, infinite where it can't run: [ops, devices].

        Every input comes from the device that is best for this op, and is copied from there.
        """
        seconds = self.seconds if seconds is None else seconds
        start = self.earliest.copy()
        for layer in self._forward:
            source = self.sources[layer.edges]
            ends = start[source] + seconds[source]  # [edges, devices]
            arrivals = (ends[:, :, None] + self.copy_seconds[layer.edges]).min(axis=1)
            start[layer.nodes] = np.maximum(start[layer.nodes], np.maximum.reduceat(arrivals, layer.starts, axis=0))
        return np.where(np.isinf(seconds), np.inf, start)

    def tails(self, seconds: Floats | None = None) -> Floats:
        """Returns the least time from every op's end on a device to the end of the last op: [ops, devices]."""
        seconds = self.seconds if seconds is None else seconds
        after = np.zeros_like(seconds)
        for layer in self._backward:
            target = self.targets[layer.edges]
            rest = after[target] + seconds[target]  # [edges, devices]
            remaining = (rest[:, None, :] + self.copy_seconds[layer.edges]).min(axis=2)
            after[layer.nodes] = np.maximum.reduceat(remaining, layer.starts, axis=0)
        return np.where(np.isinf(seconds), np.inf, after)

    def part(self, ops: Ints, devices: Ints) -> "Dag":
        """Returns the graph of some ops (in rising order) on some devices, in which every op may start at 0."""
        number = np.full(self.num_ops, -1, np.int64)
        number[ops] = np.arange(len(ops))
        inside = np.flatnonzero((number[self.sources] >= 0) & (number[self.targets] >= 0))
        return Dag(
            seconds=self.seconds[np.ix_(ops, devices)],
            earliest=np.zeros((len(ops), len(devices))),
            groups=self.groups[ops],
            sources=number[self.sources[inside]],
            targets=number[self.targets[inside]],
            copy_seconds=self.copy_seconds[np.ix_(inside, devices, devices)],
        )


def build_dag(problem: Problem) -> Dag:
    """Returns the graph of all ops of a problem.

    An edge is all that one op reads from another: the copies of these tensors go over one channel, one after the other. Ops
    of one group are on one device, so an edge inside a group never changes the device. `after` needs no copy.
    """
    graph, cluster = problem.graph, problem.cluster
    readers, tensors = unique_reads(graph.ops.reads)
    made = graph.producer[tensors] >= 0
    after = graph.ops.after
    sources = np.concatenate([graph.producer[tensors[made]], after.values])
    targets = np.concatenate([readers[made], after.rows])
    nbytes = np.concatenate([graph.tensors.nbytes[tensors[made]], np.zeros(len(after.values), np.int64)])
    counts = np.concatenate([np.ones(int(made.sum())), np.zeros(len(after.values))])
    keys, inverse = np.unique(targets * max(problem.num_ops, 1) + sources, return_inverse=True)
    targets, sources = np.divmod(keys, max(problem.num_ops, 1))
    nbytes = np.bincount(inverse, weights=nbytes, minlength=len(keys))
    counts = np.bincount(inverse, weights=counts, minlength=len(keys))
    copies = cluster.copy_seconds(nbytes, counts)
    together = problem.op_groups[sources] == problem.op_groups[targets]
    copies[together] = np.where(np.eye(problem.num_devices, dtype=np.bool_), 0.0, np.inf)
    allowed = problem.allowed[problem.op_groups]
    return Dag(
        seconds=np.where(allowed, problem.op_seconds, np.inf),
        earliest=_earliest(problem, readers[~made], tensors[~made], sources, targets),
        groups=np.asarray(problem.op_groups),
        sources=sources,
        targets=targets,
        copy_seconds=copies,
    )


def _earliest(problem: Problem, readers: Ints, tensors: Ints, sources: Ints, targets: Ints) -> Floats:
    """Returns the earliest start that each op's launch and resident inputs allow: [ops, devices]."""
    cluster = problem.cluster
    earliest = np.zeros((problem.num_ops, problem.num_devices))
    home = tensor_groups(problem)[tensors]
    narrow = ~problem.allowed[home].all(axis=1)  # any other resident tensor may be where it is read
    for n, t, group in zip(readers[narrow].tolist(), tensors[narrow].tolist(), home[narrow].tolist(), strict=True):
        copies = cluster.copy_seconds(problem.graph.tensors.nbytes[t])
        if group == problem.op_groups[n]:
            continue
        earliest[n] = np.maximum(earliest[n], np.where(problem.allowed[group][:, None], copies, np.inf).min(axis=0))
    if cluster.dispatch_seconds > 0.0:
        launches = _count_ancestors(sources, targets, problem.num_ops) + 1
        launches = -(-launches // len(cluster.host_names))  # one of the hosts launches at least its share of these ops
        earliest = np.maximum(earliest, launches[:, None] * cluster.dispatch_seconds)
    return earliest


def _count_ancestors(sources: Ints, targets: Ints, num_ops: int) -> Ints:
    """Returns how many ops must be launched before each op: [ops]; the edges are sorted by target."""
    sets = [0] * num_ops  # sets of ops, as bits
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        sets[target] |= sets[source] | 1 << source
    return np.array([bits.bit_count() for bits in sets], np.int64)


def _layers(sources: Ints, targets: Ints, num_ops: int) -> list[_Layer]:
    """Returns the edges by the level of their targets; an op's level is above the levels of its inputs."""
    level = [0] * num_ops
    order = np.lexsort((sources, targets))
    for source, target in zip(sources[order].tolist(), targets[order].tolist(), strict=True):
        if level[source] >= level[target]:
            level[target] = level[source] + 1
    levels = np.array(level, np.int64)
    order = np.lexsort((targets, levels[targets]))
    of_edge = levels[targets[order]]
    cuts = np.flatnonzero(np.diff(of_edge)) + 1
    layers = []
    for edges in np.split(order, cuts) if len(order) else []:
        nodes, starts = np.unique(targets[edges], return_index=True)
        layers.append(_Layer(nodes, edges, starts))
    return layers


def restrict(seconds: Floats, allowed: Bools) -> Floats:
    """Returns the times, infinite where a device is not allowed."""
    return np.where(allowed, seconds, np.inf)


def interchangeable(problem: Problem) -> Ints:
    """Returns the class of each device: [devices]. Devices of one class can be swapped without a change in time or memory.

    Classes are numbered in the order of their first devices.
    """
    latency, rate = problem.cluster.latency_seconds, problem.cluster.bytes_per_second
    memory = problem.cluster.memory_bytes
    classes = np.arange(problem.num_devices)

    def are_alike(a: int, b: int) -> bool:
        swapped = np.arange(problem.num_devices)
        swapped[[a, b]] = b, a
        return (
            memory[a] == memory[b]
            and np.array_equal(problem.op_seconds[:, a], problem.op_seconds[:, b])
            and np.array_equal(problem.allowed[:, a], problem.allowed[:, b])
            and all(np.array_equal(m, m[np.ix_(swapped, swapped)]) for m in (latency, rate))
        )

    for b in range(problem.num_devices):
        for a in range(b):
            if classes[a] == a and are_alike(a, b):
                classes[b] = a
                break
    return np.unique(classes, return_inverse=True)[1]
