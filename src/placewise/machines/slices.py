"""Cuts devices into equal slices: a GPU into parts of its multiprocessors, a CPU into shares of its cores."""

from collections.abc import Mapping
from dataclasses import replace

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ClusterError

MAX_SLICES = 256  # of one device: every two of them get a link

INSIDE_LATENCY_SECONDS = 5e-6  # of a copy between two slices of one device: a launch within its own memory


def slice_devices(cluster: Cluster, slices: Mapping[str, int]) -> Cluster:
    """Returns the cluster with some devices, by name, cut into this many equal slices; devices are renumbered by kind.

    A slice has its share of the memory, the flops and the bandwidth. It uses the links and channels of the whole device
    to reach other devices. A copy to a slice of the same device is read and written in the device's memory.
    """
    for name, count in slices.items():
        if name not in cluster.device_names:
            raise ClusterError(f"there is no device {name!r} to cut; the devices are {', '.join(cluster.device_names)}")
        if not 1 <= count <= MAX_SLICES:
            raise ClusterError(f"device {name!r}: must be cut into 1 to {MAX_SLICES} slices, got {count}")
    made: list[tuple[Device, Device]] = []  # a slice, and the whole device
    next_of: dict[str, int] = {}  # kind -> the next number
    for whole in cluster.devices:
        for _ in range(slices.get(whole.name, 1)):
            number = next_of[whole.kind] = next_of.get(whole.kind, -1) + 1
            made.append((_slice(whole, f"{whole.kind}:{number}", slices.get(whole.name, 1)), whole))
    links = [
        _link(cluster, device, whole, other, other_whole)
        for device, whole in made
        for other, other_whole in made
        if device is not other
    ]
    return replace(cluster, devices=tuple(device for device, _ in made), links=tuple(links))


def _slice(whole: Device, name: str, count: int) -> Device:
    return replace(
        whole,
        name=name,
        memory_bytes=whole.memory_bytes // count,
        flops=whole.flops / count,
        bytes_per_second=whole.bytes_per_second / count,
        flops_by_type=tuple((name, flops / count) for name, flops in whole.flops_by_type),
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
    )
