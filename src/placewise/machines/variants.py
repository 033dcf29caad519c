"""Machines that are a little different from a given one: faster links, a GPU more or less, other memory."""

import re
from dataclasses import replace

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import InputError

GRAPHED = 0.02  # of an op's launch: what the host needs for an op of a CUDA graph; 0.3 of 17.4 µs on an H200 (docs/run.md)


def with_faster_links(cluster: Cluster, factor: float) -> Cluster:
    """Returns the cluster with links that move bytes this much faster, after a latency that is as much shorter."""
    links = [
        replace(
            link,
            bytes_per_second=link.bytes_per_second * factor,
            latency_seconds=link.latency_seconds / factor,
            delay_seconds=link.delay_seconds / factor,
        )
        for link in cluster.links
    ]
    return replace(cluster, name=f"{cluster.name}, faster links", links=tuple(links))


def with_faster_launches(cluster: Cluster, factor: float) -> Cluster:
    """Returns the cluster with a host that launches this much faster."""
    return replace(with_launches(cluster, 1 / factor), name=f"{cluster.name}, faster host")


def with_launches(cluster: Cluster, factor: float) -> Cluster:
    """Returns the cluster with launches of ops and copies that take the host this many times as long."""
    copies = None if cluster.copy_dispatch_seconds is None else cluster.copy_dispatch_seconds * factor
    return replace(cluster, dispatch_seconds=cluster.dispatch_seconds * factor, copy_dispatch_seconds=copies)


def with_cuda_graphs(cluster: Cluster) -> Cluster:
    """Returns the cluster with a host that replays CUDA graphs; itself if it does already.

    An op then takes 2% of a launch. A copy takes a launch more than before: it ends a graph, so there is one more of them.
    """
    if cluster.cuda_graphs:
        return cluster
    if all(device.kind != "gpu" for device in cluster.devices):
        raise InputError(f"cuda_graphs: cluster {cluster.name!r} has no GPU")
    launch = cluster.dispatch_seconds
    copy = cluster.copy_launch_seconds + launch
    return replace(cluster, dispatch_seconds=GRAPHED * launch, copy_dispatch_seconds=copy, cuda_graphs=True)


def gpus_of(cluster: Cluster) -> list[Device]:
    """Returns the devices that are no CPUs, the fastest first; ties go to the first."""
    return sorted((device for device in cluster.devices if device.kind != "cpu"), key=lambda device: -device.flops)


def with_one_more(cluster: Cluster) -> Cluster | None:
    """Returns the cluster with a second one of its fastest GPU, on links like those of the first; None without a GPU.

    The two are connected as the first is with the next GPU of its host, or else with another device, first of its host.
    """
    gpus = gpus_of(cluster)
    if not gpus or len(cluster.devices) < 2:
        return None
    first = gpus[0]
    stem = first.name.rpartition(":")[0] or "gpu"  # a/gpu of a/gpu:0
    number = next(n for n in range(len(cluster.devices) + 1) if f"{stem}:{n}" not in cluster.device_names)
    new = replace(first, name=f"{stem}:{number}")
    rest = [device for device in (*gpus, *cluster.devices) if device.name != first.name]
    other = min(rest, key=lambda device: device.host != first.host).name  # the first one of this host, or of all
    links = list(cluster.links)
    for link in cluster.links:
        if first.name in (link.source, link.target):
            links.append(_with_end(link, first.name, new.name))
        if {first.name, other} == {link.source, link.target}:
            links.append(_with_end(link, other, new.name))
    name = f"{cluster.name} and one more {first.name}"
    return replace(cluster, name=name, devices=(*cluster.devices, new), links=tuple(links))


def _with_end(link: Link, old: str, new: str) -> Link:
    """Returns a link with another device at one end; so is the channel that has the old one's name in its own."""

    def channel(name: str) -> str:
        return re.sub(rf"{re.escape(old)}(?!\w)", lambda _: new, name)

    channels = link.channel
    if isinstance(channels, str):
        channels = channel(channels)
    elif channels is not None:
        channels = tuple(map(channel, channels))
    source, target = (new if name == old else name for name in (link.source, link.target))
    return replace(link, source=source, target=target, channel=channels)


def with_one_less(cluster: Cluster) -> tuple[Cluster, str] | None:
    """Returns the cluster without its slowest GPU, and that GPU's name; None if it has fewer than two."""
    gpus = gpus_of(cluster)
    return (without(cluster, gpus[-1].name), gpus[-1].name) if len(gpus) > 1 else None


def without(cluster: Cluster, name: str) -> Cluster:
    """Returns the cluster without the device of this name."""
    devices = tuple(device for device in cluster.devices if device.name != name)
    links = tuple(link for link in cluster.links if name not in (link.source, link.target))
    return replace(cluster, name=f"{cluster.name} without {name}", devices=devices, links=links)


def with_half_the_memory(cluster: Cluster) -> Cluster:
    """Returns the cluster with half of each GPU's memory."""
    limits = {device.name: device.memory_bytes // 2 for device in gpus_of(cluster)}
    return replace(cluster.limited(limits), name=f"{cluster.name}, half the GPUs' memory")
