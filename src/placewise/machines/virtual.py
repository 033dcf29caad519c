"""Devices cut into equal pieces: a GPU into slices, a CPU into shares of its cores."""

from collections.abc import Mapping
from dataclasses import replace

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ClusterError

MOST_PIECES = 256  # every two of them get a link

INSIDE_LATENCY_SECONDS = 5e-6  # of a copy between two pieces of one device: a launch inside its own memory


def cut_devices(cluster: Cluster, pieces: Mapping[str, int]) -> Cluster:
    """Returns the cluster with some devices cut into so many equal pieces, and all devices numbered anew by kind.

    A piece has its part of the memory, the flops and the bandwidth. It reaches other devices over the links, and by the
    channels, of the whole; a copy to a piece of the same device is read and written in its memory.
    """
    for name, count in pieces.items():
        if name not in cluster.device_names:
            raise ClusterError(f"there is no device {name!r} to cut; the devices are {', '.join(cluster.device_names)}")
        if not 1 <= count <= MOST_PIECES:
            raise ClusterError(f"device {name!r}: must be cut into 1 to {MOST_PIECES} pieces, got {count}")
    made: list[tuple[Device, Device]] = []  # a piece, and the whole that it is of
    next_of: dict[str, int] = {}
    for whole in cluster.devices:
        for _ in range(pieces.get(whole.name, 1)):
            number = next_of[whole.kind] = next_of.get(whole.kind, -1) + 1
            made.append((_piece(whole, f"{whole.kind}:{number}", pieces.get(whole.name, 1)), whole))
    links = [
        _link(cluster, piece, whole, other, other_whole)
        for piece, whole in made
        for other, other_whole in made
        if piece is not other
    ]
    return replace(cluster, devices=tuple(piece for piece, _ in made), links=tuple(links))


def _piece(whole: Device, name: str, count: int) -> Device:
    return replace(
        whole,
        name=name,
        memory_bytes=whole.memory_bytes // count,
        flops=whole.flops / count,
        bytes_per_second=whole.bytes_per_second / count,
    )


def _link(cluster: Cluster, piece: Device, whole: Device, other: Device, other_whole: Device) -> Link:
    if whole is other_whole:
        return Link(piece.name, other.name, whole.bytes_per_second / 2, INSIDE_LATENCY_SECONDS)
    source, target = (cluster.device_names.index(entry.name) for entry in (whole, other_whole))
    return Link(
        piece.name,
        other.name,
        float(cluster.bytes_per_second[source, target]),
        float(cluster.latency_seconds[source, target]),
        cluster.channel_names[cluster.channels[source, target]],
    )
