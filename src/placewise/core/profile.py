"""Measurements of a machine: op times by signature, links, host time per launch, and slowdowns by contention.

A profile describes a machine, not a model: an op's signature (function, shapes, strides, dtypes, plain arguments) has
everything that its time depends on, so one file serves every model whose signatures it contains.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from placewise.core.arrays import Bools, Floats
from placewise.core.cluster import Cluster, Device, Link
from placewise.core.costs import compute_seconds
from placewise.core.errors import ProfileError
from placewise.core.graph import Graph
from placewise.core.quantities import format_seconds

DOUBTFUL = 0.15  # a profile whose prediction was off by more than this can't be relied on


@dataclass(frozen=True)
class Timing:
    """The time of something that was measured several times."""

    seconds: float  # the median
    count: int  # of measurements

    @classmethod
    def of(cls, times: Sequence[float]) -> "Timing":
        """Returns the median of some times."""
        return cls(float(np.percentile(times, 50)), len(times))


@dataclass(frozen=True)
class ProfiledDevice:
    """A device that was measured, or that is equal to one that was."""

    name: str
    kind: str
    hardware: str  # its name on the machine
    times_of: str  # the device that was measured for it: slices of one GPU, and equal shares of the cores, are equal
    slices: int = 1  # the number of devices on the same GPU, or on the host's cores
    part_of: str = ""  # the GPU, or the processor, that these share; empty: devices with the same `times_of` share theirs

    @property
    def shared_hardware(self) -> str:
        """A name that is the same for devices on the same hardware."""
        return self.part_of or self.times_of


@dataclass(frozen=True)
class Contention:
    """How much slower work is while other devices on the same hardware are busy.

    Entry n of each tuple is the factor with n busy devices; entry 0 is 1.
    """

    compute: tuple[float, ...] = (1.0,)  # matrix products, while the others run matrix products
    memory: tuple[float, ...] = (1.0,)  # additions, while the others run additions
    memory_beside_compute: tuple[float, ...] = (1.0,)  # additions, while the others run matrix products
    copies: tuple[float, ...] = (1.0,)  # copies between two devices, while n devices run matrix products
    cached: tuple[float, ...] = (1.0,)  # additions within the shared cache, while the others run additions
    cached_beside_compute: tuple[float, ...] = (1.0,)  # the same, while the others run matrix products
    cache_bytes: float = 0.0  # ops that move fewer bytes than this count as cached


@dataclass(frozen=True)
class CheckedPrediction:
    """A placement that was predicted with a profile, and then run."""

    placement: str  # what it is, in a word: the name of a strategy
    predicted_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of the measured step: 0.1 is 10% too long."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def distance(self) -> float:
        """How far apart the two times are, whichever is longer: the logarithm of their ratio, also where it has no float."""
        return abs(math.log(self.predicted_seconds) - math.log(self.measured_seconds))


@dataclass(frozen=True)
class Profile:
    """The measurements of one machine."""

    devices: tuple[ProfiledDevice, ...]
    timings: Mapping[str, Mapping[str, Timing]]  # signature -> device -> time
    links: tuple[Link, ...] = ()
    dispatch_seconds: float = 0.0  # host time per launch
    contention: Mapping[str, Contention] = field(default_factory=dict)  # by measured device, or for all of a kind
    checks: tuple[CheckedPrediction, ...] = ()  # different placements of the step, run when the profile was made
    copy_dispatch_seconds: float | None = None  # host time to launch a copy, where the host launches

    @property
    def worst_check(self) -> CheckedPrediction | None:
        """The check whose prediction is off by the largest factor; ties go to the first."""
        return max(self.checks, key=lambda check: check.distance, default=None)

    def doubt(self) -> str:
        """Returns why predictions with this profile can't be relied on; empty if its checks agree."""
        worst = self.worst_check
        if worst is None or abs(worst.error) <= DOUBTFUL:
            return ""
        seconds = f"{format_seconds(worst.predicted_seconds)} predicted, {format_seconds(worst.measured_seconds)} measured"
        off = f"{worst.error:+.0%}" if worst.error < 100 else f"a factor of {worst.error + 1:.3g}"
        return f"its prediction for {worst.placement} was off by {off} when it was made ({seconds})"

    def check_covers(self, cluster: Cluster, source: str = "profile") -> None:
        """Raises a ProfileError if the cluster has a device that was not measured."""
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
        """Returns the graph with measured times by device name; ops that were not measured keep their times.

        `signatures` [ops] are those of the ops. `busy` is the assumed share of the time in which all other devices on the
        same hardware work too, with the graph's mix of compute and memory work; 0 gives the times of a device alone.
        """
        seconds = dict(graph.ops.seconds)
        for device in cluster.devices:
            times_of = next(entry.times_of for entry in self.devices if entry.name == device.name)
            found = [self.timings.get(signature, {}).get(times_of) for signature in signatures]
            times = np.array([np.nan if timing is None else timing.seconds for timing in found], np.float64)
            if busy:
                in_memory = np.nansum(times[~is_compute(graph, device)]) / max(np.nansum(times), 1e-30)
                times = times * self.slowdown(graph, device, busy * (1 - in_memory), busy * in_memory)
            before = seconds.get(device.name, np.full(len(graph.ops), np.nan))
            seconds[device.name] = np.where(np.isnan(times), before, times)
        return replace(graph, ops=replace(graph.ops, seconds=seconds))

    def slowdown(self, graph: Graph, device: Device, compute: float | Floats, memory: float | Floats) -> Floats:
        """Returns each op's slowdown on a device while these shares of its neighbours do compute and memory work: [ops]."""
        factors = self.contention_of(device.name, device.kind)
        in_compute, in_memory = np.asarray(compute, np.float64), np.asarray(memory, np.float64)
        of_memory = _factor(factors.memory, in_memory) * _factor(factors.memory_beside_compute, in_compute)
        of_cached = _factor(factors.cached, in_memory) * _factor(factors.cached_beside_compute, in_compute)
        of_memory = np.where(graph.ops.bytes_moved < factors.cache_bytes, of_cached, of_memory)
        return np.where(is_compute(graph, device), _factor(factors.compute, in_compute + in_memory), of_memory)

    def measured_cluster(self, cluster: Cluster, busy: float = 0.0) -> Cluster:
        """Returns the cluster with the measured links and host time per launch.

        A link keeps its channel. Links within one piece of hardware share a channel if copies slow down on busy hardware.
        `busy` is the assumed share of the time in which all devices on the same hardware work.
        """
        found = {(link.source, link.target): link for link in self.links}
        links = []
        for link in cluster.links:
            measured = found.get((link.source, link.target), link)
            links.append(replace(measured, channel=link.channel or self._shared_channel(link.source, link.target)))
        measured_cluster = replace(
            cluster,
            links=tuple(links),
            dispatch_seconds=self.dispatch_seconds,
            copy_dispatch_seconds=self.copy_dispatch_seconds and max(self.copy_dispatch_seconds, self.dispatch_seconds),
        )
        if not busy:
            return measured_cluster
        return slower_links(measured_cluster, {ends: float(self.copy_slowdown(*ends, np.array(busy))) for ends in found})

    def contention_of(self, name: str, kind: str) -> Contention:
        """Returns how much slower a device's work is while others on its hardware are busy."""
        times_of = next((entry.times_of for entry in self.devices if entry.name == name), name)
        return self.contention.get(times_of, self.contention.get(kind, Contention()))

    def _shared_channel(self, source: str, target: str) -> str | None:
        known = {device.name: device for device in self.devices}
        ends = [known[name] for name in (source, target) if name in known]
        if len({end.shared_hardware for end in ends}) != 1 or len(ends) < 2:
            return None
        copies = self.contention_of(source, ends[0].kind).copies
        return f"inside {ends[0].shared_hardware}" if len(copies) > 1 else None

    def copy_slowdown(self, source: str, target: str, busy: Floats) -> Floats:
        """Returns the slowdown of copies while these shares of the devices on the same hardware work."""
        if self._shared_channel(source, target) is None:
            return np.ones_like(busy)
        kind = next(device.kind for device in self.devices if device.name == source)
        return _factor(self.contention_of(source, kind).copies, busy)


def slower_links(cluster: Cluster, factors: Mapping[tuple[str, str], float]) -> Cluster:
    """Returns the cluster with the bandwidth of some links, by source and target, divided by a factor."""
    links = []
    for link in cluster.links:
        factor = factors.get((link.source, link.target), 1.0)
        links.append(replace(link, bytes_per_second=link.bytes_per_second / factor))
    return replace(cluster, links=tuple(links))


def is_compute(graph: Graph, device: Device) -> Bools:
    """Returns whether each op is bound by compute, not by memory, on a device: [ops]."""
    found: Bools = compute_seconds(graph, device) > graph.ops.bytes_moved / device.bytes_per_second
    return found


def _factor(factors: Sequence[float], share: Floats) -> Floats:
    """Returns the factor for a share of the other devices, interpolated linearly between whole numbers of them."""
    others = len(factors) - 1
    return np.interp(share * others, np.arange(others + 1), np.asarray(factors, np.float64))
