"""The machine: devices, and the links between them."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from placewise.core.arrays import MAX_NUMBER, Bools, Floats, Ints, frozen
from placewise.core.errors import ClusterError
from placewise.core.graph import COMPUTE_TYPES, MAX_BYTES, digest_of
from placewise.core.quantities import format_bytes
from placewise.core.suggestions import did_you_mean

MAX_DEVICES = 512  # every pair of them has a link, and every op a time on each


@dataclass(frozen=True)
class Device:
    """A device that runs one op at a time and has its own memory: a GPU, a CPU, or a part of one."""

    name: str
    kind: str
    memory_bytes: int
    flops: float  # achievable floating-point operations per second, not the data sheet's peak
    bytes_per_second: float  # of its memory
    overhead_seconds: float = 0.0  # added to every op that does work
    flops_by_type: tuple[tuple[str, float], ...] = ()  # the same in other types than float32, ordered as COMPUTE_TYPES
    host: str = ""  # the host that launches for it; devices of one host share it

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops_by_type", tuple(sorted(self.flops_by_type, key=_type_position)))

    def flops_in(self, compute_type: str) -> float:
        """Returns the achievable flops in a type; one that the device does not list counts as float32."""
        return dict(self.flops_by_type).get(compute_type, self.flops)


class CopyWork(NamedTuple):
    """What a copy takes of a device's own time: a fixed part, and the bytes at a speed."""

    seconds: float = 0.0
    bytes_per_second: float = np.inf


NO_WORK = CopyWork()


@dataclass(frozen=True)
class Link:
    """A one-way connection from one device to another. Links with the same channel share one queue of copies.

    A link may use two channels, such as the sender's network card and the receiver's: a copy then needs both at once.
    """

    source: str
    target: str
    bytes_per_second: float
    latency_seconds: float
    channel: str | tuple[str, ...] | None = None  # None: a channel of its own
    host_waits: bool = False  # the host launches a copy only when its tensor is made, and nothing else before
    source_work: CopyWork = NO_WORK  # of the source: it sends, and runs its next op so much later
    target_work: CopyWork = NO_WORK  # of the target: it receives
    delay_seconds: float = 0.0  # between a copy's end on its channels and its arrival: the next copy is on its way then

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the channels that a copy needs: one or two."""
        if self.channel is None:
            return (f"{self.source}->{self.target}",)
        return (self.channel,) if isinstance(self.channel, str) else self.channel


@dataclass(frozen=True, eq=False)
class Cluster:
    """A machine: devices, and a link for every ordered pair of them. The constructor checks every rule of the format."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    dispatch_seconds: float = 0.0  # host time to launch an op or a copy; one between hosts takes it on both
    description: str = ""
    copy_dispatch_seconds: float | None = None  # host time to launch a copy, if that takes longer than an op's launch
    cuda_graphs: bool = False  # the two times are those with CUDA graphs (machines/variants.py); plans for it use them

    def __post_init__(self) -> None:
        _check(self)

    @property
    def copy_launch_seconds(self) -> float:
        """The host's time to launch a copy."""
        return self.dispatch_seconds if self.copy_dispatch_seconds is None else self.copy_dispatch_seconds

    @classmethod
    def load(cls, name: str) -> "Cluster":
        """Returns the preset of this name, the cluster in this file, or the one of a composed name (`3090+1080ti`)."""
        from placewise.formats.cluster_file import read_cluster
        from placewise.machines.composed import compose, is_composed
        from placewise.machines.presets import PRESETS, preset

        if name in PRESETS:
            return preset(name)
        if is_composed(name) and not os.path.exists(name):
            return compose(name)
        if not os.path.exists(name):  # unlike Path.exists, False for a name that is too long
            raise ClusterError(f"{name}: is neither a file nor a preset: {did_you_mean(name, PRESETS)}")
        return read_cluster(name)

    @classmethod
    def detect(cls) -> "Cluster":
        """Returns the machine that this process runs on."""
        from placewise.machines.detect import detect

        return detect()

    def limited(self, memory_bytes: Mapping[str, int]) -> "Cluster":
        """Returns the cluster with less memory on some devices: {"gpu:0": 2 * 2**30}."""
        for name, limit in memory_bytes.items():
            if name not in self.device_names:
                raise ClusterError(f"memory: there is no device {name!r}: {did_you_mean(name, self.device_names)}")
            has = int(self.memory_bytes[self.device_names.index(name)])
            if not 0 <= limit <= has:
                raise ClusterError(
                    f"memory: {name!r} has {format_bytes(has)}, a limit can only lower it, got {format_bytes(limit)}"
                )
        limits = [memory_bytes.get(device.name, device.memory_bytes) for device in self.devices]
        devices = [replace(device, memory_bytes=limit) for device, limit in zip(self.devices, limits, strict=True)]
        return replace(self, devices=tuple(devices)) if memory_bytes else self

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.devices)

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """The devices' names, in order."""
        return tuple(device.name for device in self.devices)

    @cached_property
    def memory_bytes(self) -> Ints:
        """Each device's memory: [devices]."""
        return frozen([device.memory_bytes for device in self.devices], np.int64)

    @cached_property
    def latency_seconds(self) -> Floats:
        """The latency of each link, 0 within a device: [devices, devices]."""
        return self._matrix({pair: link.latency_seconds for pair, link in self._link_of.items()}, 0.0)

    @cached_property
    def delay_seconds(self) -> Floats:
        """How long what leaves each link's channels is still on its way: [devices, devices]."""
        return self._matrix({pair: link.delay_seconds for pair, link in self._link_of.items()}, 0.0)

    @cached_property
    def bytes_per_second(self) -> Floats:
        """The bandwidth of each link, infinite within a device: [devices, devices]."""
        return self._matrix({pair: link.bytes_per_second for pair, link in self._link_of.items()}, np.inf)

    def copy_seconds(self, nbytes: Any, num_copies: Any = 1) -> Floats:
        """Returns how long `num_copies` [...] copies, one after the other, of `nbytes` [...] in all take over each link.

        The result is [..., devices, devices].
        """
        nbytes, num_copies = (np.asarray(values)[..., None, None] for values in (nbytes, num_copies))
        return copy_seconds(nbytes, self.latency_seconds, self.bytes_per_second, num_copies)

    @cached_property
    def channel_names(self) -> tuple[str, ...]:
        """The channels' names, ordered by the first ordered pair of devices that uses them."""
        pairs = sorted(self._link_of)
        return tuple(dict.fromkeys(name for pair in pairs for name in self._link_of[pair].channels))

    @cached_property
    def channels(self) -> Ints:
        """The first channel of each link, -1 within a device: [devices, devices]."""
        return self._channel_matrix(0)

    @cached_property
    def second_channels(self) -> Ints:
        """The other channel of each link, or its only one again; -1 within a device: [devices, devices]."""
        return self._channel_matrix(-1)

    @cached_property
    def host_waits(self) -> Bools:
        """Whether the host waits for what is copied over each link: [devices, devices]."""
        matrix = np.zeros((self.num_devices, self.num_devices), np.bool_)
        for pair, link in self._link_of.items():
            matrix[pair] = link.host_waits
        return frozen(matrix, np.bool_)

    @cached_property
    def copy_work(self) -> Floats:
        """What copies over each link take of the source's and the target's own time: [4, devices, devices].

        The rows are the source's seconds and seconds per byte, then the target's.
        """
        rows = np.zeros((4, self.num_devices, self.num_devices))
        for pair, link in self._link_of.items():
            source, target = link.source_work, link.target_work
            rows[:, *pair] = source.seconds, 1 / source.bytes_per_second, target.seconds, 1 / target.bytes_per_second
        return frozen(rows, np.float64)

    @cached_property
    def host_names(self) -> tuple[str, ...]:
        """The hosts' names, ordered by their first devices."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    @cached_property
    def hosts(self) -> Ints:
        """The host of each device, an index into `host_names`: [devices]."""
        return frozen([self.host_names.index(device.host) for device in self.devices], np.int64)

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over everything that a step's time and memory depend on, including the devices' names and order."""
        devices = [[d.name, d.kind, d.memory_bytes] for d in self.devices]
        numbers = [[d.flops, d.bytes_per_second, d.overhead_seconds] for d in self.devices]
        links = (self.latency_seconds, self.bytes_per_second, np.array([self.dispatch_seconds]))
        words: list[Any] = [devices, self.channel_names]
        if any(d.flops_by_type for d in self.devices):  # others have the digest from before there were types
            words.append([[[name, float(flops)] for name, flops in d.flops_by_type] for d in self.devices])
        arrays = [self.channels, np.array(numbers, np.float64), *links]
        if len(self.host_names) > 1:  # the same for hosts, and for links that use two channels
            arrays.append(self.hosts)
        if not np.array_equal(self.channels, self.second_channels):
            arrays.append(self.second_channels)
        if self.copy_launch_seconds != self.dispatch_seconds:
            words.append(["launch of a copy", self.copy_launch_seconds])
        if self.host_waits.any():
            words.append("host waits")
            arrays.append(self.host_waits)
        if self.copy_work.any():
            words.append("work of copies")
            arrays.append(self.copy_work)
        if self.delay_seconds.any():
            words.append("delays")
            arrays.append(self.delay_seconds)
        return digest_of(words, *arrays)

    def link(self, source: int, target: int) -> Link:
        """Returns the link from one device to another."""
        return self._link_of[source, target]

    @cached_property
    def _link_of(self) -> dict[tuple[int, int], Link]:
        """The link of each ordered pair; if a pair has several, the last one counts."""
        index = {name: i for i, name in enumerate(self.device_names)}
        return {(index[link.source], index[link.target]): link for link in self.links}

    def _channel_matrix(self, position: int) -> Ints:
        number = {name: i for i, name in enumerate(self.channel_names)}
        matrix = np.full((self.num_devices, self.num_devices), -1, np.int64)
        for pair, link in self._link_of.items():
            matrix[pair] = number[link.channels[position]]
        return frozen(matrix, np.int64)

    def _matrix(self, entries: dict[tuple[int, int], float], fill: float) -> Floats:
        matrix = np.full((self.num_devices, self.num_devices), fill)
        for pair, value in entries.items():
            matrix[pair] = value
        return frozen(matrix, np.float64)


def copy_seconds(nbytes: Any, latency_seconds: Any, bytes_per_second: Any, num_copies: Any = 1) -> Floats:
    """Returns how long copies, one after the other, of `nbytes` in all take; the arguments broadcast.

    The one formula for a copy's time; `simulate.kernels.arrival_time` is the same for compiled code.
    """
    seconds: Floats = num_copies * latency_seconds + nbytes / bytes_per_second
    return seconds


def _type_position(entry: tuple[str, float]) -> int:
    """Returns where a type stands in COMPUTE_TYPES; one that does not is refused by the cluster."""
    return COMPUTE_TYPES.index(entry[0]) if entry[0] in COMPUTE_TYPES else len(COMPUTE_TYPES)


def _check(cluster: Cluster) -> None:
    """Raises a ClusterError for the first rule that does not hold; its message starts with the element."""
    names = [device.name for device in cluster.devices]
    if not names:
        _refuse("devices", "a cluster needs at least one device")
    if len(names) > MAX_DEVICES:
        _refuse("devices", f"a cluster has at most {MAX_DEVICES} devices, got {len(names):,}")
    known = Counter(names)
    for device in cluster.devices:
        element = f"device {device.name!r}"
        if not device.name or known[device.name] > 1:
            _refuse(element, "the name must not be empty, and no two devices may have the same one")
        if not device.kind:
            _refuse(element, "kind must not be empty")
        if not 0 <= device.memory_bytes <= MAX_BYTES:
            _refuse(element, f"memory must be at least 0 and at most 2**62 bytes, got {device.memory_bytes}")
        _check_positive(element, flops=device.flops, bytes_per_second=device.bytes_per_second)
        _check_types(element, device)
        _check_not_negative(element, overhead_seconds=device.overhead_seconds)
    for link in cluster.links:
        element = f"link {link.source!r} -> {link.target!r}"
        for name in (link.source, link.target):
            if name not in known:
                _refuse(element, f"there is no device {name!r}; the devices are {', '.join(names)}")
        if link.source == link.target:
            _refuse(element, "from and to must be different devices")
        _check_positive(element, bytes_per_second=link.bytes_per_second)
        _check_not_negative(element, latency_seconds=link.latency_seconds, delay_seconds=link.delay_seconds)
        for end, work in (("source_work", link.source_work), ("target_work", link.target_work)):
            _check_not_negative(f"{element}: {end}", seconds=work.seconds)
            if not work.bytes_per_second > 1 / MAX_NUMBER:
                rule = f"bytes_per_second must be above {1 / MAX_NUMBER:g}, got {work.bytes_per_second}"
                _refuse(f"{element}: {end}", rule)
        if not 1 <= len(link.channels) <= 2:
            _refuse(element, f"a copy needs one channel or two, got {len(link.channels)}")
    _check_not_negative("cluster", dispatch_seconds=cluster.dispatch_seconds)
    if not cluster.dispatch_seconds <= cluster.copy_launch_seconds < np.inf:
        _refuse(
            "cluster",
            f"copy_dispatch_seconds must be a finite number, at least dispatch_seconds, got {cluster.copy_launch_seconds}",
        )
    given = {(link.source, link.target) for link in cluster.links}
    for source in names:
        for target in names:
            if source != target and (source, target) not in given:
                _refuse("links", f"there is no link from {source!r} to {target!r}, and no default_link")


def _check_types(element: str, device: Device) -> None:
    names = [name for name, _ in device.flops_by_type]
    for name, flops in device.flops_by_type:
        if name not in COMPUTE_TYPES[1:] or names.count(name) > 1:
            _refuse(element, f"flops_by_type must have each of {', '.join(COMPUTE_TYPES[1:])} at most once, got {name!r}")
        _check_positive(element, **{f"flops in {name}": flops})


def _check_positive(element: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not (np.isfinite(value) and value > 0):
            _refuse(element, f"{name} must be a finite number above 0, got {value}")


def _check_not_negative(element: str, **numbers: float) -> None:
    for name, value in numbers.items():
        if not (np.isfinite(value) and value >= 0):
            _refuse(element, f"{name} must be a finite number at least 0, got {value}")


def _refuse(element: str, rule: str) -> NoReturn:
    raise ClusterError(f"{element}: {rule}")


def as_cluster(given: Any) -> Cluster:
    """Returns the cluster itself, or the one with this preset or file name."""
    if isinstance(given, Cluster):
        return given
    if not isinstance(given, (str, Path)):
        raise ClusterError(f"cluster must be a Cluster, or the name of a preset or a file, got a {type(given).__name__}")
    return Cluster.load(str(given))
