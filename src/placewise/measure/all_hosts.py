"""The hosts of a process group as one cluster, with the links between them measured."""

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from placewise.core.cluster import Cluster, CopyWork
from placewise.machines.composed import Network, join_hosts
from placewise.measure.links import fit_line
from placewise.run.backends.rank_messages import Incoming, Outgoing, let_senders_run_first, new_tag

SIZES = (2**10, 2**14, 2**16, 2**20, 2**22)  # bytes of the copies that a link is measured by

WARM_UP, REPEATS, LARGE_REPEATS, SMALL = 2, 20, 5, 2**16  # the median of the repeats counts; fewer above so many bytes

WORK_SECONDS = 5e-4  # between a receive and the next send

SEVERAL = 8  # copies of the smallest size, which follow each other

LEAST_LOOP_SECONDS, LEAST_WORK_SECONDS = 2e-3, 1e-7  # of a loop beside which a copy runs; of what that takes longer

TRIAL_ROUNDS = 20_000

ROUNDS = ((1, 1), (SIZES[0], SEVERAL), *((size, 1) for size in SIZES))  # bytes of a copy, and how many


def describe_hosts(own: Cluster) -> Cluster:
    """Returns the machines of all ranks, of which this one is `own`; all ranks must call it.

    Hosts have their names in the network.
    """
    everyone: list[tuple[str, Cluster]] = [("", own)] * dist.get_world_size()
    dist.all_gather_object(everyone, (socket.gethostname(), own))
    names = host_names([name for name, _ in everyone])
    hosts = [cluster for _, cluster in everyone]
    network = measure_network()
    words = "; ".join(
        f"{name}: {host.description.removeprefix('detected: ')}" for name, host in zip(names, hosts, strict=True)
    )
    return join_hosts(
        "detected-hosts", names, hosts, lambda a, b: network[a, b], f"detected: {words}; links between hosts measured"
    )


def host_names(given: list[str]) -> list[str]:
    """Returns the names of hosts, with the rank where several have the same."""
    counts = Counter(given)
    return [name if counts[name] == 1 else f"{name}-{rank}" for rank, name in enumerate(given)]


def measure_network() -> dict[tuple[int, int], Network]:
    """Returns what a copy from each rank to each other one takes, measured one link at a time; all ranks must call it.

    Tensors of several sizes go from CPU to CPU as in a step (`run/backends/rank_messages.py`), and a small one comes back.
    Between them each side works for a while, as it does in a step: a core that waits for long takes longer to wake up. What
    a copy takes of the CPUs' own time is seen in how much longer some work takes in which a tensor is sent or received.
    """
    let_senders_run_first()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tags = [new_tag() for _ in range(SEVERAL)]
    found: dict[tuple[int, int], tuple[list[float], CopyWork]] = {}
    for ends in permutations(range(ranks), 2):
        dist.barrier()
        if rank in ends:
            is_source, peer = rank == ends[0], ends[1] if rank == ends[0] else ends[0]
            seconds = [_round_trip(size, tags[:count], is_source, peer) for size, count in ROUNDS]
            small = [(size, round_seconds) for size, round_seconds in zip(SIZES, seconds[2:], strict=True) if size <= SMALL]
            works = [_work_of_copy(size, tags, round_seconds, is_source, peer) for size, round_seconds in small]
            found[ends] = seconds, CopyWork(*fit_line([size for size, _ in small], works))
    everyone: list[dict[tuple[int, int], tuple[list[float], CopyWork]]] = [{}] * ranks
    dist.all_gather_object(everyone, found)
    return {
        ends: _network(everyone[ends[0]][ends][0], everyone[ends[0]][ends][1], everyone[ends[1]][ends][1])
        for ends in permutations(range(ranks), 2)
    }


def _network(seconds: list[float], source_work: CopyWork, target_work: CopyWork) -> Network:
    """Returns what the seconds of ROUNDS tell of the link.

    An answer takes half of a round with one byte. Of the latency, what several copies of a round take more than one is what
    the link is busy for.
    """
    byte, several, *sizes = seconds
    latency, speed = fit_line(SIZES, [max(found - byte / 2, found / 2) for found in sizes])
    busy = (several - sizes[0]) / (SEVERAL - 1) - SIZES[0] / speed
    busy = min(max(busy, 0.0), latency)
    return Network(speed, busy, source_work, target_work, latency - busy)


def _round_trip(size: int, tags: list[int], is_source: bool, peer: int) -> float:
    """Returns the seconds until a tensor of this size for each tag is at the peer, and the answer at the source."""
    repeats = REPEATS if size <= SMALL else LARGE_REPEATS
    there, back = _messages(tags if is_source else tags[:1], tags[:1] if is_source else tags, peer)
    tensor, times = torch.zeros(size if is_source else 1, dtype=torch.uint8), list[float]()
    for number in range(WARM_UP + repeats):
        began = time.perf_counter()
        if not is_source:
            _each(back, Incoming.receive)
        if (number or not is_source) and (is_source or number + 1 < WARM_UP + repeats):
            _each(back, Incoming.announce)
        _spin(WORK_SECONDS)
        for outgoing in there:
            outgoing.send(tensor)
        if is_source:
            _each(back, Incoming.receive)
        _each(there, Outgoing.finish)
        times.append(time.perf_counter() - began - 2 * WORK_SECONDS)
    return float(np.median(times[WARM_UP:]))


def _work_of_copy(size: int, tags: list[int], round_seconds: float, is_source: bool, peer: int) -> float:
    """Returns how much longer a loop takes that begins with a send, or that a receive ends; the copy has arrived by then."""
    there, back = _messages(tags[:1], tags[:1], peer)
    (outgoing,), (incoming,) = there, back
    tensor, nothing = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    rounds = round(max(2 * round_seconds, LEAST_LOOP_SECONDS) * _rounds_per_second())
    beside, alone = list[float](), list[float]()
    for number in range(WARM_UP + REPEATS):
        if is_source:
            incoming.receive()  # when the other side has announced its receive
        else:
            if number:
                incoming.announce()
            outgoing.send(nothing)
            outgoing.finish()
        began = time.perf_counter()
        if is_source:
            outgoing.send(tensor)
            _loop(rounds)
        else:
            _loop(rounds)
            incoming.receive()
        beside.append(time.perf_counter() - began)
        outgoing.finish()
        began = time.perf_counter()
        _loop(rounds)
        alone.append(time.perf_counter() - began)
    return max(float(np.median(beside[WARM_UP:]) - np.median(alone[WARM_UP:])), LEAST_WORK_SECONDS)


def _messages(sent: list[int], received: list[int], peer: int) -> tuple[list[Outgoing], list[Incoming]]:
    """Returns both ends of tensors with these tags."""
    group = dist.group.WORLD
    assert group is not None
    return (
        [Outgoing(peer, tag, group, _plainly, "a test") for tag in sent],
        [Incoming(peer, tag, group, _plainly, torch.empty_strided) for tag in received],
    )


def _each(messages: Iterable[Any], do: Callable[[Any], Any]) -> None:
    for message in messages:
        do(message)


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _loop(rounds: int) -> None:
    for _ in range(rounds):
        pass


def _rounds_per_second() -> float:
    """Returns how fast a core is: the rounds of a loop in a second."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        _loop(TRIAL_ROUNDS)
        times.append(time.perf_counter() - began)
    return TRIAL_ROUNDS / min(times)


def _plainly(_: int | None, communicate: Callable[[], Any]) -> Any:
    return communicate()
