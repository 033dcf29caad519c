"""What was measured on real devices: op times by signature, links, the host's launches, and slices that are busy together.

A profile is of a machine, not of a model: an op's signature (function, shapes, strides, types, plain arguments) says all
that its time depends on, so one file serves every model whose signatures it has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from placewise.core.arrays import Floats
from placewise.core.cluster import Cluster, Link
from placewise.core.errors import ProfileError
from placewise.core.graph import Graph


@dataclass(frozen=True)
class Timing:
    """How long something took, over repeated stretches."""

    seconds: float  # the median
    spread_seconds: float  # between the quartiles
    count: int  # stretches


@dataclass(frozen=True)
class ProfiledDevice:
    """A device that was measured, or that is like one that was."""

    name: str
    kind: str
    hardware: str  # what the machine calls it
    times_of: str  # the device whose times it has: slices of one GPU, and equal shares of the cores, are alike
    slices: int = 1  # it is one of so many devices on one GPU, or on the host's cores


@dataclass(frozen=True)
class Contention:
    """How much slower an op is while others on the same hardware are busy: the factor by how many are, [0] is 1."""

    compute: tuple[float, ...] = (1.0,)
    memory: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Profile:
    """One machine, measured."""

    devices: tuple[ProfiledDevice, ...]
    timings: Mapping[str, Mapping[str, Timing]]  # signature -> device -> its time
    links: tuple[Link, ...] = ()
    dispatch_seconds: float = 0.0
    contention: Mapping[str, Contention] = field(default_factory=dict)  # by kind of device

    def check_covers(self, cluster: Cluster, source: str = "profile") -> None:
        """Refuses a cluster that has a device that was not measured."""
        known = {device.name: device.kind for device in self.devices}
        for device in cluster.devices:
            if device.name not in known:
                names = ", ".join(known)
                raise ProfileError(f"{source}: has no device {device.name!r} of cluster {cluster.name!r}; it has {names}")
            if known[device.name] != device.kind:
                raise ProfileError(
                    f"{source}: device {device.name!r} is of kind {known[device.name]!r}, "
                    f"in cluster {cluster.name!r} it is of kind {device.kind!r}"
                )

    def measured_graph(self, graph: Graph, signatures: Sequence[str], cluster: Cluster, busy: float = 0.0) -> Graph:
        """Returns the graph with measured times by device name; what was not measured keeps the times that it has.

        `signatures` are those of the ops. `busy` is the share of the time in which all other devices on the same hardware
        are taken to work too: 0 gives the times of a device alone, 1 those under full contention.
        """
        seconds = dict(graph.ops.seconds)
        for device in cluster.devices:
            times_of = next(entry.times_of for entry in self.devices if entry.name == device.name)
            found = [self.timings.get(signature, {}).get(times_of) for signature in signatures]
            times = np.array([np.nan if timing is None else timing.seconds for timing in found], np.float64)
            times = times * self.slowdown(graph, cluster, device.name, busy)
            before = seconds.get(device.name, np.full(len(graph.ops), np.nan))
            seconds[device.name] = np.where(np.isnan(times), before, times)
        return replace(graph, ops=replace(graph.ops, seconds=seconds))

    def slowdown(self, graph: Graph, cluster: Cluster, name: str, busy: float | Floats) -> Floats:
        """Returns each op's factor on a device while its neighbours are busy for this share of the time: [ops]."""
        device = next(entry for entry in cluster.devices if entry.name == name)
        factors = self.contention.get(device.kind, Contention())
        is_compute = graph.ops.flops / device.flops > graph.ops.bytes_moved / device.bytes_per_second
        share = np.broadcast_to(np.asarray(busy, np.float64), (len(graph.ops),))
        return np.where(is_compute, _factor(factors.compute, share), _factor(factors.memory, share))

    def measured_cluster(self, cluster: Cluster) -> Cluster:
        """Returns the cluster with the measured links and launches; a link keeps its channel."""
        found = {(link.source, link.target): link for link in self.links}
        links = []
        for link in cluster.links:
            measured = found.get((link.source, link.target))
            links.append(link if measured is None else replace(measured, channel=link.channel))
        return replace(cluster, links=tuple(links), dispatch_seconds=self.dispatch_seconds)


def _factor(factors: Sequence[float], share: Floats) -> Floats:
    """Returns the factor for a share of the neighbours, on straight lines between whole numbers of them."""
    others = len(factors) - 1
    return np.interp(share * others, np.arange(others + 1), np.asarray(factors, np.float64))
