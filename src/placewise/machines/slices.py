"""Cuts devices into slices: a GPU into parts of its multiprocessors, a CPU into shares of its cores."""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ClusterError

MAX_SLICES = 256  # of one device: every two of them get a link

MAX_MULTIPROCESSORS = 999  # of a slice: more than any GPU has

INSIDE_LATENCY_SECONDS = 5e-6  # of a copy between two slices of one device: a launch within its own memory

Cut = int | tuple[int, ...]  # a number of equal slices, or the multiprocessors of each slice


def parse_cut(text: str) -> Cut:
    """Returns 4 for "4", and (32, 64) for "32+64"; a ValueError says that it is neither."""
    words = text.split("+")
    sizes = tuple(int(word) for word in words if word.isascii() and word.isdecimal())
    if len(sizes) < len(words) or min(sizes) < 1 or max(sizes) > MAX_MULTIPROCESSORS:
        raise ValueError(f"must be a number of slices or the multiprocessors of each, as in 4 or 32+64, got {text!r}")
    return sizes if len(sizes) > 1 else sizes[0]


def format_cut(cut: Cut) -> int | str:
    """Returns a cut as files have it: 4, or "32+64"."""
    return cut if isinstance(cut, int) else "+".join(map(str, cut))


def count_slices(cut: Cut) -> int:
    """Returns the number of slices."""
    return cut if isinstance(cut, int) else len(cut)


def slice_size(index: int, cut: Cut) -> int:
    """Returns a number that is the same for equal slices of one device: the size of one, or how many there are."""
    return cut if isinstance(cut, int) else cut[index]


def _shares(cut: Cut) -> list[Fraction]:
    return [Fraction(1, cut)] * cut if isinstance(cut, int) else [Fraction(size, sum(cut)) for size in cut]


def slice_devices(cluster: Cluster, slices: Mapping[str, Cut]) -> Cluster:
    """Returns the cluster with some devices, by name, cut into slices; devices are renumbered by kind.

    A slice has its share of the memory, the flops and the bandwidth. It uses the links and channels of the whole device
    to reach other devices. A copy to a slice of the same device is read and written in the device's memory.
    """
    for name, cut in slices.items():
        if name not in cluster.device_names:
            raise ClusterError(f"there is no device {name!r} to cut; the devices are {', '.join(cluster.device_names)}")
        if not 1 <= count_slices(cut) <= MAX_SLICES:
            raise ClusterError(f"device {name!r}: must be cut into 1 to {MAX_SLICES} slices, got {count_slices(cut)}")
    made: list[tuple[Device, Device]] = []  # a slice, and the whole device
    next_of: dict[str, int] = {}  # kind -> the next number
    for whole in cluster.devices:
        for share in _shares(slices.get(whole.name, 1)):
            number = next_of[whole.kind] = next_of.get(whole.kind, -1) + 1
            made.append((_slice(whole, f"{whole.kind}:{number}", share), whole))
    links = [
        _link(cluster, device, whole, other, other_whole)
        for device, whole in made
        for other, other_whole in made
        if device is not other
    ]
    return replace(cluster, devices=tuple(device for device, _ in made), links=tuple(links))


def _slice(whole: Device, name: str, share: Fraction) -> Device:
    def part(whole_speed: float) -> float:
        return whole_speed * share.numerator / share.denominator

    return replace(
        whole,
        name=name,
        memory_bytes=int(whole.memory_bytes * share),
        flops=part(whole.flops),
        bytes_per_second=part(whole.bytes_per_second),
        flops_by_type=tuple((name, part(flops)) for name, flops in whole.flops_by_type),
    )


def _link(cluster: Cluster, device: Device, whole: Device, other: Device, other_whole: Device) -> Link:
    if whole is other_whole:
        return Link(device.name, other.name, whole.bytes_per_second / 2, INSIDE_LATENCY_SECONDS)
    source, target = (cluster.device_names.index(entry.name) for entry in (whole, other_whole))
    return Link(
        device.name,
        other.name,
        float(cluster.bytes_per_second[source, target]),
        float(cluster.latency_seconds[source, target]),
        cluster.link(source, target).channel or f"{whole.name}->{other_whole.name}",
        cluster.link(source, target).host_waits,
        cluster.link(source, target).source_work,
        cluster.link(source, target).target_work,
        cluster.link(source, target).delay_seconds,
    )
