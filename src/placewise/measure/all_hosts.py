"""The hosts of a process group as one cluster, with the links between them measured."""

import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from placewise.core.cluster import Cluster
from placewise.machines.composed import join_hosts
from placewise.measure.links import fit_line
from placewise.run.backends.rank_messages import Incoming, Outgoing, let_senders_run_first

SIZES = (2**10, 2**16, 2**20, 2**22)  # bytes of the copies that a link is measured by

WARM_UP, REPEATS, LARGE_REPEATS, SMALL = 2, 20, 5, 2**16  # the median of the repeats counts; fewer above so many bytes

WORK_SECONDS = 5e-4  # between a receive and the next send

TAG = 0  # of the messages


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
    """Returns (latency seconds, bytes per second) on the source's rank, None on others.

    Tensors go as in a step (`run/backends/rank_messages.py`), and a small one comes back for each. Between them each side
    works for a while, as it does in a step: a core that waits for long takes longer to wake up.
    """
    let_senders_run_first()
    dist.barrier()
    rank = dist.get_rank()
    if rank not in (source, target):
        return None
    seconds = [_round_trip(size, rank == source, target if rank == source else source) for size in (1, *SIZES)]
    if rank == target:
        return None
    back = seconds[0] / 2  # of the answer
    return fit_line(SIZES, [max(found - back, found / 2) for found in seconds[1:]])


def _round_trip(size: int, is_source: bool, peer: int) -> float:
    """Returns the seconds until a tensor of some bytes is at the peer, and the answer is here; 0 on the peer."""
    group, times, repeats = dist.group.WORLD, list[float](), REPEATS if size <= SMALL else LARGE_REPEATS
    assert group is not None
    there, back = Outgoing(peer, TAG, group, _plainly, "a test"), Incoming(peer, TAG, group, _plainly, torch.empty_strided)
    tensor = torch.zeros(size if is_source else 1, dtype=torch.uint8)
    for number in range(WARM_UP + repeats):
        began = time.perf_counter()
        if is_source:
            if number:
                back.announce()
            _work()
            there.send(tensor)
            back.receive()
        else:
            back.receive()
            if number + 1 < WARM_UP + repeats:
                back.announce()
            _work()
            there.send(tensor)
        there.finish()
        times.append(time.perf_counter() - began - 2 * WORK_SECONDS)
    return float(np.median(times[WARM_UP:])) if is_source else 0.0


def _work() -> None:
    until = time.perf_counter() + WORK_SECONDS
    while time.perf_counter() < until:
        pass


def _plainly(_: int | None, communicate: Callable[[], Any]) -> Any:
    return communicate()
