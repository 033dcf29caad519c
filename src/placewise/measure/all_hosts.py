"""The hosts of a process group as one cluster, with the links between them measured."""

import socket
import time
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist

from placewise.core.cluster import Cluster
from placewise.machines.composed import join_hosts
from placewise.measure.links import fit_line

SIZES = (2**10, 2**16, 2**20, 2**22)  # bytes of the copies that a link is measured by

REPEATS = 5  # of which the median counts


def describe_hosts(own: Cluster) -> Cluster:
    """Returns the machines of all ranks, of which this one is `own`; all ranks must call it.

    Hosts have their names in the network. A link is measured by sends of several sizes between two CPUs, one link at a time.
    """
    ranks = dist.get_world_size()
    everyone: list[tuple[str, Cluster]] = [("", own)] * ranks
    dist.all_gather_object(everyone, (socket.gethostname(), own))
    names = host_names([name for name, _ in everyone])
    hosts = [cluster for _, cluster in everyone]
    figures = {(a, b): measure_link(a, b) for a in range(ranks) for b in range(ranks) if a != b}
    known: list[dict[tuple[int, int], tuple[float, float] | None]] = [{}] * ranks
    dist.all_gather_object(known, figures)

    def network(source: int, target: int) -> tuple[float, float]:
        latency_seconds, bytes_per_second = known[source][source, target] or (0.0, np.inf)
        return bytes_per_second, latency_seconds

    words = "; ".join(
        f"{name}: {host.description.removeprefix('detected: ')}" for name, host in zip(names, hosts, strict=True)
    )
    return join_hosts("detected-hosts", names, hosts, network, f"detected: {words}; links between hosts measured")


def host_names(given: list[str]) -> list[str]:
    """Returns the names of hosts, with the rank where several have the same."""
    counts = Counter(given)
    return [name if counts[name] == 1 else f"{name}-{rank}" for rank, name in enumerate(given)]


def measure_link(source: int, target: int) -> tuple[float, float] | None:
    """Returns (latency seconds, bytes per second) on the source's rank, None on others; the target answers with one byte."""
    rank, seconds = dist.get_rank(), list[float]()
    answer = torch.zeros(1, dtype=torch.uint8)
    dist.barrier()
    for size in (1, *SIZES):
        content, times = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(1 + REPEATS):
            began = time.perf_counter()
            if rank == source:
                dist.send(content, target)
                dist.recv(answer, target)
            elif rank == target:
                dist.recv(content, source)
                dist.send(answer, source)
            times.append(time.perf_counter() - began)
        seconds.append(float(np.median(times[1:])))
    if rank != source:
        return None
    back = seconds[0] / 2  # of the answer
    return fit_line(SIZES, [max(found - back, found / 2) for found in seconds[1:]])
