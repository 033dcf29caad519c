"""The hosts of a process group as one cluster, with the links between them measured."""

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from placewise.core.cluster import Cluster, CopyWork
from placewise.machines.composed import Connection, join_hosts
from placewise.measure.links import fit_line
from placewise.run.backends.rank_messages import Incoming, Outgoing, let_senders_run_first, new_tag

SIZES = (2**10, 2**16, 2**20, 2**22)  # bytes of the copies that a link is measured by

WARM_UP, REPEATS, LARGE_REPEATS, SMALL = 2, 20, 5, 2**16  # the median of the repeats counts; fewer above so many bytes

WORK_SECONDS = 5e-4  # between a receive and the next send

SEVERAL = 8  # copies of the smallest size, which follow each other

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


def measure_network() -> dict[tuple[int, int], Connection]:
    """Returns what a copy from each rank to each other one takes, measured one link at a time; all ranks must call it.

    Tensors of several sizes go from CPU to CPU as in a step (`run/backends/rank_messages.py`), and a small one comes
    back for each. Between them each side works for a while, as it does in a step: a core that waits for long takes
    longer to wake up.
    """
    let_senders_run_first()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tags = [new_tag() for _ in range(SEVERAL)]
    found: dict[tuple[int, int], list[_Round]] = {}
    for ends in permutations(range(ranks), 2):
        dist.barrier()
        if rank in ends:
            peer = ends[1] if rank == ends[0] else ends[0]
            found[ends] = [_round_trips(size, tags[:count], rank == ends[0], peer) for size, count in ROUNDS]
    everyone: list[dict[tuple[int, int], list[_Round]]] = [{}] * ranks
    dist.all_gather_object(everyone, found)
    return {ends: _network(everyone[ends[0]][ends], everyone[ends[1]][ends]) for ends in permutations(range(ranks), 2)}


class _Round(NamedTuple):
    """What a tensor and its answer take on one side: the median of some rounds, in seconds."""

    seconds: float  # until both have arrived
    processor: float  # of all threads
    sending: float  # of the thread that sends


def _network(there: list[_Round], back: list[_Round]) -> Connection:
    """Returns what ROUNDS on the source and on the target tell of the link.

    An answer takes half of a round with one byte. What a round takes of the processor is a send here and a receive there. Of
    the latency, what several copies of a round take more than one is what the link is busy for.
    """
    byte, several, *sizes = zip(there, back, strict=True)
    answer = byte[0].seconds / 2
    latency, speed = fit_line(SIZES, [max(here.seconds - answer, here.seconds / 2) for here, _ in sizes])
    busy = (several[0].seconds - sizes[0][0].seconds) / (SEVERAL - 1) - SIZES[0] / speed
    busy = min(max(busy, 0.0), latency)
    works = []
    for end, other in ((0, byte[0].processor - byte[0].sending), (1, byte[1].sending)):
        seconds, work_speed = fit_line(SIZES, [found[end].processor for found in sizes])
        works.append(CopyWork(max(seconds - other, 0.0), work_speed))
    return Connection(speed, busy, works[0], works[1], latency - busy)


def _round_trips(size: int, tags: list[int], is_source: bool, peer: int) -> _Round:
    """Returns what it takes until a tensor of this size for each tag is at the peer, and the answer is here."""
    group, rounds, repeats = dist.group.WORLD, list[_Round](), REPEATS if size <= SMALL else LARGE_REPEATS
    assert group is not None
    sent, received = (tags, tags[:1]) if is_source else (tags[:1], tags)
    there = [Outgoing(peer, tag, group, _plainly, "a test") for tag in sent]
    back = [Incoming(peer, tag, group, _plainly, torch.empty_strided) for tag in received]
    tensor = torch.zeros(size if is_source else 1, dtype=torch.uint8)
    for number in range(WARM_UP + repeats):
        began, used = time.perf_counter(), time.process_time()
        if not is_source:
            _each(back, Incoming.receive)
        if (number or not is_source) and (is_source or number + 1 < WARM_UP + repeats):
            _each(back, Incoming.announce)
        working = time.thread_time()
        _work()
        working, sending = time.thread_time() - working, time.thread_time()
        for outgoing in there:
            outgoing.send(tensor)
        sending = time.thread_time() - sending
        if is_source:
            _each(back, Incoming.receive)
        _each(there, Outgoing.finish)
        seconds = time.perf_counter() - began - 2 * WORK_SECONDS
        rounds.append(_Round(seconds, time.process_time() - used - working, sending))
    return _Round(*np.median(np.array(rounds[WARM_UP:]), axis=0).tolist())


def _each(messages: Iterable[Any], do: Callable[[Any], Any]) -> None:
    for message in messages:
        do(message)


def _work() -> None:
    until = time.perf_counter() + WORK_SECONDS
    while time.perf_counter() < until:
        pass


def _plainly(_: int | None, communicate: Callable[[], Any]) -> Any:
    return communicate()
