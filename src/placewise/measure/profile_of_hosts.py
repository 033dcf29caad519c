"""A profile over the hosts of a process group: each rank measures its own devices, all of them the network between them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist

from placewise import __version__
from placewise.core.cluster import Cluster, Link
from placewise.core.plan import digest_of_graph
from placewise.core.profile import Profile
from placewise.graph_capture.capture import CapturedStep
from placewise.machines.composed import Connection, link_of_hosts
from placewise.machines.slices import Cut
from placewise.machines.variants import without
from placewise.measure.all_hosts import measure_network
from placewise.measure.profiler import Profiling, measure_profile
from placewise.run.backends.hosts import Hosts


def profile_hosts(
    captured: CapturedStep,
    cluster: Cluster,
    virtual: Mapping[str, Cut] | None = None,
    *,
    runs_step: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> Profiling:
    """Returns the profile of all hosts, on every rank; all ranks must call it with the same step and cluster.

    Hosts measure at the same time, because in a good plan they also work at the same time.
    """
    hosts = Hosts(cluster)
    hosts.agree({
        "version of placewise": __version__, "graph": digest_of_graph(captured.graph), "cluster": cluster.digest,
    })  # fmt: skip
    report("the network")
    network = measure_network()
    own = cluster
    for device, rank in zip(cluster.devices, hosts.ranks, strict=True):
        if rank != hosts.rank:
            own = without(own, device.name)
    devices = [device for device in hosts.real_devices(cluster, virtual) if device.rank is None]
    found = measure_profile(captured, own, devices=devices, runs_step=runs_step, report=report)
    everyone: list[Any] = [found] * len(hosts.names)
    dist.all_gather_object(everyone, found)
    profile = join_profiles(cluster, [profiling.profile for profiling in everyone], network)
    return Profiling(
        profile,
        len(profile.timings),
        tuple(failure for profiling in everyone for failure in profiling.failures),
        max(profiling.seconds for profiling in everyone),
    )


def join_profiles(cluster: Cluster, own: list[Profile], network: Mapping[tuple[int, int], Connection]) -> Profile:
    """Returns one profile from those of each host's devices, and the network from each host to each other one.

    The cluster has one host time for a launch, which is that of the slowest host.
    """
    timings: dict[str, dict[str, Any]] = {}
    contention = {}
    for profile in own:
        for signature, times in profile.timings.items():
            timings.setdefault(signature, {}).update(times)
        for device in profile.devices:
            if device.name == device.times_of and {device.name, device.kind} & {*profile.contention}:
                contention[device.name] = profile.contention_of(device.name, device.kind)
    copy_launches = [profile.copy_dispatch_seconds for profile in own if profile.copy_dispatch_seconds is not None]
    return Profile(
        tuple(
            replace(device, part_of=f"{name}: {device.shared_hardware}")
            for name, profile in zip(cluster.host_names, own, strict=True)
            for device in profile.devices
        ),
        timings,
        tuple(link for profile in own for link in profile.links) + _between_hosts(cluster, own, network),
        max(profile.dispatch_seconds for profile in own),
        contention,
        copy_dispatch_seconds=max(copy_launches, default=None),
    )


def _between_hosts(cluster: Cluster, own: list[Profile], network: Mapping[tuple[int, int], Connection]) -> tuple[Link, ...]:
    """Returns the links between devices of different hosts."""
    to_card = {}  # a GPU's copies pass the CPU of its host
    for device, host in zip(cluster.devices, cluster.hosts.tolist(), strict=True):
        cpus = {entry.name for entry in own[host].devices if entry.kind == "cpu"}
        speeds = [link.bytes_per_second for link in own[host].links if link.source == device.name and link.target in cpus]
        to_card[device.name] = np.inf if device.kind == "cpu" else max(speeds, default=np.inf)
    ends = list(zip(cluster.devices, cluster.hosts.tolist(), strict=True))
    return tuple(
        link_of_hosts(a, b, network[host_a, host_b], to_card) for a, host_a in ends for b, host_b in ends if host_a != host_b
    )
