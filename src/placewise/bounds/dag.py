"""A step as the bounds see it: ops that take time on a device, and edges that take time between two devices.

The bounds leave out that a device runs one op at a time, that a channel moves one copy at a time, and memory: that can only
make the step shorter. What is left is a graph in which one sweep finds the earliest start of every op on every device. All
devices that are `alike` have the same ones, so most bounds see one device for each class: a cluster of 64 equal GPUs is one.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.cluster import Cluster, copy_seconds
from placewise.core.labels import sum_by_label
from placewise.core.problem import Problem
from placewise.simulate.compile import kernel
from placewise.simulate.flat_problem import tensor_groups, unique_reads

EDGE_TIMES = 2**22  # copy times that a sweep works out at once
ANCESTOR_BITS = 1024  # ops whose readers are counted in one sweep
COUNTED_OPS = 200_000  # ops of a step up to which the ops before each op are counted


class Copies(NamedTuple):
    """What the edges carry from device to device: their times are worked out when they are needed.

    The best of several ways counts: devices that are alike may have different links to another one.
    """

    nbytes: Floats  # [edges]
    counts: Floats  # [edges], tensors
    together: Bools  # [edges], whether both ops are in one group, and so on one device
    latency: Floats  # [ways, devices, devices]
    rate: Floats  # [ways, devices, devices], bytes per second

    def seconds(self, edges: Ints) -> Floats:
        """Returns how long these edges take from each device to each: [edges, devices, devices]."""
        nbytes, counts = self.nbytes[edges], self.counts[edges]
        seconds: Floats = np.full((len(edges), *self.rate.shape[1:]), np.inf)
        for latency, rate in zip(self.latency, self.rate, strict=True):
            way = copy_seconds(nbytes[:, None, None], latency, rate, counts[:, None, None])
            np.minimum(seconds, way, out=seconds)
        seconds[self.together[edges]] = np.where(np.eye(self.rate.shape[1], dtype=np.bool_), 0.0, np.inf)
        return seconds

    def part(self, edges: Ints, devices: Ints) -> "Copies":
        """Returns what these edges carry between these devices."""
        ways = (table[:, devices[:, None], devices] for table in (self.latency, self.rate))
        return Copies(self.nbytes[edges], self.counts[edges], self.together[edges], *ways)


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
    copies: Copies

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
            arrivals = self._best(ends[:, :, None], layer.edges, 1)
            start[layer.nodes] = np.maximum(start[layer.nodes], np.maximum.reduceat(arrivals, layer.starts, axis=0))
        start[np.isinf(seconds)] = np.inf
        return start

    def tails(self, seconds: Floats | None = None) -> Floats:
        """Returns the least time from every op's end on a device to the end of the last op: [ops, devices]."""
        seconds = self.seconds if seconds is None else seconds
        after = np.zeros_like(seconds)
        for layer in self._backward:
            target = self.targets[layer.edges]
            rest = after[target] + seconds[target]  # [edges, devices]
            remaining = self._best(rest[:, None, :], layer.edges, 2)
            after[layer.nodes] = np.maximum.reduceat(remaining, layer.starts, axis=0)
        after[np.isinf(seconds)] = np.inf
        return after

    def _best(self, times: Floats, edges: Ints, axis: int) -> Floats:
        """Returns the least of times and copies over one end's devices: [edges, devices of the other end]."""
        num_devices = self.seconds.shape[1]
        size = max(EDGE_TIMES // num_devices**2, 1)
        if len(edges) <= size:
            return np.asarray((times + self.copies.seconds(edges)).min(axis=axis))
        found = np.empty((len(edges), num_devices))
        for first in range(0, len(edges), size):
            some = slice(first, first + size)
            found[some] = (times[some] + self.copies.seconds(edges[some])).min(axis=axis)
        return found

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
            copies=self.copies.part(inside, devices),
        )


def build_dag(problem: Problem, classes: Ints | None = None) -> Dag:
    """Returns the graph of all ops of a problem; with classes [devices] of `alike` devices, one device stands for each.

    An edge is all that one op reads from another: the copies of these tensors go over one channel, one after the other. Ops
    of one group are on one device, so an edge inside a group never changes the device. `after` needs no copy.
    """
    graph = problem.graph
    classes = np.arange(problem.num_devices) if classes is None else classes
    firsts = np.unique(classes, return_index=True)[1]
    readers, tensors = unique_reads(graph.ops.reads)
    made = graph.producer[tensors] >= 0
    after = graph.ops.after
    sources = np.concatenate([graph.producer[tensors[made]], after.values])
    targets = np.concatenate([readers[made], after.rows])
    nbytes = np.concatenate([graph.tensors.nbytes[tensors[made]], np.zeros(len(after.values), np.int64)])
    counts = np.concatenate([np.ones(int(made.sum())), np.zeros(len(after.values))])
    keys, inverse = np.unique(targets * max(problem.num_ops, 1) + sources, return_inverse=True)
    targets, sources = np.divmod(keys, max(problem.num_ops, 1))
    latency, rate = _ways(problem.cluster, classes)
    seconds = problem.op_seconds[:, firsts]
    seconds[~problem.allowed[:, firsts][problem.op_groups]] = np.inf
    return Dag(
        seconds=seconds,
        earliest=_earliest(problem, readers[~made], tensors[~made], sources, targets)[:, firsts],
        groups=np.asarray(problem.op_groups),
        sources=sources,
        targets=targets,
        copies=Copies(
            nbytes=sum_by_label(inverse, nbytes, len(keys)),
            counts=sum_by_label(inverse, counts, len(keys)),
            together=np.asarray(problem.op_groups[sources] == problem.op_groups[targets]),
            latency=latency,
            rate=rate,
        ),
    )


def _ways(cluster: Cluster, classes: Ints) -> tuple[Floats, Floats]:
    """Returns latency and rate of the best ways from each class to each, both [ways, classes, classes].

    They are the ways to a class's first device, because the others have the same. Inside a class an op stays on its device.
    """
    firsts = np.unique(classes, return_index=True)[1]
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for there, b in enumerate(firsts.tolist()):
        for here in range(len(firsts)):
            devices = [b] if here == there else np.flatnonzero(classes == here).tolist()
            ways = {(float(cluster.latency_seconds[a, b]), -float(cluster.bytes_per_second[a, b])) for a in devices}
            best: list[tuple[float, float]] = []
            for latency, rate in sorted(ways):
                if not best or rate < best[-1][1]:
                    best.append((latency, rate))
            found[here, there] = best
    num_ways, size = max(map(len, found.values()), default=1), len(firsts)
    latencies, rates = np.zeros((num_ways, size, size)), np.zeros((num_ways, size, size))
    for (here, there), best in found.items():
        for way in range(num_ways):
            latencies[way, here, there], negative = best[min(way, len(best) - 1)]
            rates[way, here, there] = -negative
    return latencies, rates


def _earliest(problem: Problem, readers: Ints, tensors: Ints, sources: Ints, targets: Ints) -> Floats:
    """Returns the earliest start that each op's launch and resident inputs allow: [ops, devices]."""
    cluster = problem.cluster
    earliest = np.zeros((problem.num_ops, problem.num_devices))
    home = tensor_groups(problem)[tensors]
    narrow = ~np.asarray(problem.allowed.all(axis=1))[home]  # any other resident tensor may be where it is read
    for n, t, group in zip(readers[narrow].tolist(), tensors[narrow].tolist(), home[narrow].tolist(), strict=True):
        copies = cluster.copy_seconds(problem.graph.tensors.nbytes[t])
        if group == problem.op_groups[n]:
            continue
        earliest[n] = np.maximum(earliest[n], np.where(problem.allowed[group][:, None], copies, np.inf).min(axis=0))
    if cluster.dispatch_seconds > 0.0:
        count = _count_ancestors if problem.num_ops <= COUNTED_OPS else _count_levels
        launches = count(sources, targets, problem.num_ops) + 1
        launches = -(-launches // len(cluster.host_names))  # one of the hosts launches at least its share of these ops
        np.maximum(earliest, launches[:, None] * cluster.dispatch_seconds, out=earliest)
    return earliest


def _count_ancestors(sources: Ints, targets: Ints, num_ops: int) -> Ints:
    """Returns how many ops must be launched before each op: [ops]; the edges are sorted by target."""
    counts = np.zeros(num_ops, np.int64)
    for first in range(0, num_ops, ANCESTOR_BITS):  # of so many ops at a time, so that the sets stay small
        _add_ancestors(sources, targets, first, np.zeros((num_ops, ANCESTOR_BITS // 64), np.uint64), counts)
    return counts


@kernel
def _add_ancestors(sources: Ints, targets: Ints, first: int, sets: Any, counts: Ints) -> None:
    """Adds to `counts` how many of the ops from `first` on, as many as `sets` has bits, come before each op."""
    words = sets.shape[1]
    for edge in range(np.searchsorted(targets, first), len(targets)):
        source, target = sources[edge], targets[edge]
        if source >= first:
            bit = source - first
            if bit < words * 64:
                sets[target, bit >> 6] |= np.uint64(1) << np.uint64(bit & 63)
            for word in range(words):
                sets[target, word] |= sets[source, word]
    for op in range(first, len(counts)):
        for word in range(words):
            bits = sets[op, word]
            while bits:
                bits &= bits - np.uint64(1)
                counts[op] += 1


def _count_levels(sources: Ints, targets: Ints, num_ops: int) -> Ints:
    """Returns how many ops the longest chain to each op has before it: [ops]; the edges are sorted by target."""
    level = [0] * num_ops
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        level[target] = max(level[target], level[source] + 1)
    return np.array(level, np.int64)


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


def alike(problem: Problem) -> Ints:
    """Returns the class of each device: [devices]. Devices of a class have the same heads and tails, memory and times.

    Classes are refined until all devices of one have links of the same kinds to and from each other class (color
    refinement). Unlike those of `interchangeable`, devices of several hosts may be in one class. Classes are numbered in the
    order of their first devices.
    """
    latency, rate = problem.cluster.latency_seconds.tolist(), problem.cluster.bytes_per_second.tolist()
    devices = range(problem.num_devices)
    classes: list[int] = []
    firsts: list[int] = []
    for b in devices:
        same = [c for c, a in enumerate(firsts) if _have_same_times(problem, a, b)]
        classes.append(same[0] if same else len(firsts))
        firsts += [] if same else [b]
    while True:
        numbers: dict[Any, int] = {}
        refined = []
        for b in devices:
            others = [a for a in devices if classes[a] != classes[b]]
            to = frozenset((classes[a], latency[a][b], rate[a][b]) for a in others)
            back = frozenset((classes[a], latency[b][a], rate[b][a]) for a in others)
            refined.append(numbers.setdefault((classes[b], to, back), len(numbers)))
        if len(numbers) == len(set(classes)):
            return np.array(classes, np.int64)
        classes = refined


def _have_same_times(problem: Problem, a: int, b: int) -> bool:
    return bool(
        problem.cluster.memory_bytes[a] == problem.cluster.memory_bytes[b]
        and np.array_equal(problem.op_seconds[:, a], problem.op_seconds[:, b])
        and np.array_equal(problem.allowed[:, a], problem.allowed[:, b])
    )


def interchangeable(problem: Problem) -> Ints:
    """Returns the class of each device: [devices]. Devices of one class can be swapped without a change in time or memory.

    Classes are numbered in the order of their first devices.
    """
    latency, rate = problem.cluster.latency_seconds, problem.cluster.bytes_per_second
    classes = np.arange(problem.num_devices)

    def are_alike(a: int, b: int) -> bool:
        swapped = np.arange(problem.num_devices)
        swapped[[a, b]] = b, a
        return _have_same_times(problem, a, b) and all(
            np.array_equal(m, m[np.ix_(swapped, swapped)]) for m in (latency, rate)
        )

    for b in range(problem.num_devices):
        for a in range(b):
            if classes[a] == a and are_alike(a, b):
                classes[b] = a
                break
    return np.unique(classes, return_inverse=True)[1]
