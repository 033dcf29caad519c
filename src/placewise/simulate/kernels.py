"""The step's time and memory by one pass over the launch order, compiled. The kernels release the GIL.

They compute what `reference` defines. An *order* is the ops in launch order, a *position* an index into it. A copied tensor
on a device has the *place* `copied tensor * devices + device`.
"""

from typing import Any, NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.simulate.compile import inlined, kernel
from placewise.simulate.flat_problem import FlatProblem, Int32s

UNLAUNCHED = np.int32(2**31 - 1)  # in `launch_at`: the copy was not launched


class Workspace(NamedTuple):
    """What a pass reads and writes: the placement, and the state of the machine.

    A pass that begins at a position finds the state there: `ends` of the ops before it, `free`, `busy`, `hosts`, and the
    copies whose `launch_at` is below it. For a copy that it launches itself, it writes position - number of ops into
    `launch_at`, which is below every position.
    """

    devices: Any  # [groups], the placement, as int16 to stay in the cache
    ends: Floats  # [ops]
    launch_at: Int32s  # [places], the position at which a copy was launched, or UNLAUNCHED
    arrivals: Floats  # [places]
    launched: Int32s  # [places], the first ones are those that the pass launched, in launch order
    free: Floats  # [devices], when each is free again
    busy: Floats  # [channels], when each is free again
    hosts: Floats  # [hosts], when each has launched what it launched so far


class MemoryWorkspace(NamedTuple):
    """Scratch memory for the part of a pass that counts bytes; between passes `given` is 0 and `crossing` is -1."""

    places: Any  # [ops], the device of the op at each position
    last_use: Int32s  # [storages], a position, or ~position if that is the launch of a copy to another device
    copy_last_use: Int32s  # [places], a position
    taken: Ints  # [ops], bytes that the launch at each position takes on its device
    given: Ints  # [ops], bytes that it gives back there
    crossing: Int32s  # [ops], the last storage that it gives back on another device, or -1
    next_crossing: Int32s  # [storages], the one before that, or -1
    used: Ints  # [devices], bytes in use


def new_workspace(flat: FlatProblem, num_groups: int) -> Workspace:
    """Returns a workspace for passes over this problem."""
    places = len(flat.copy_bytes) * flat.num_devices
    return Workspace(
        np.zeros(num_groups, np.int16),
        np.zeros(len(flat.op_groups), np.float64),
        np.full(places, UNLAUNCHED, np.int32),
        np.zeros(places, np.float64),
        np.zeros(places, np.int32),
        np.zeros(flat.num_devices, np.float64),
        np.zeros(flat.num_channels, np.float64),
        np.zeros(flat.num_hosts, np.float64),
    )


def new_memory_workspace(flat: FlatProblem) -> MemoryWorkspace:
    """Returns a workspace for passes that count bytes."""
    num_ops = len(flat.op_groups)
    return MemoryWorkspace(
        np.zeros(num_ops, np.int16),
        np.zeros(len(flat.storage_bytes), np.int32),
        np.zeros(len(flat.copy_bytes) * flat.num_devices, np.int32),
        np.zeros(num_ops, np.int64),
        np.zeros(num_ops, np.int64),
        np.full(num_ops, -1, np.int32),
        np.zeros(len(flat.storage_bytes), np.int32),
        np.zeros(flat.num_devices, np.int64),
    )


class Cutoff(NamedTuple):
    """Ends a pass early: as soon as an op ends more than `seconds` after its `latest` end."""

    latest: Floats  # [ops]
    seconds: float


class Snapshots(NamedTuple):
    """The state of the machine at every `stride`-th position."""

    stride: int
    free: Floats  # [snapshots, devices]
    busy: Floats  # [snapshots, channels]
    hosts: Floats  # [snapshots, hosts]


@inlined
def arrival_time(begin: float, nbytes: int, latency_seconds: float, bytes_per_second: float) -> float:
    """Returns when a copy that begins at a time ends; for 0, how long it takes (`core.cluster.copy_seconds`, compiled)."""
    return begin + latency_seconds + nbytes / bytes_per_second


@inlined
def departure_time(end: float, nbytes: int, latency_seconds: float, bytes_per_second: float) -> float:
    """Returns when a copy that ends at a time begins."""
    return -arrival_time(-end, nbytes, latency_seconds, bytes_per_second)


@inlined
def take_work(flat: Any, free: Floats, there: int, here: int, link: int, nbytes: int) -> None:
    """Makes the devices at both ends of a copy free so much later as it takes of their own time.

    `flat` has the cluster's columns.
    """
    free[there] += flat.source_seconds[link] + nbytes * flat.source_seconds_per_byte[link]
    free[here] += flat.target_seconds[link] + nbytes * flat.target_seconds_per_byte[link]


@kernel
def simulate_order(flat: FlatProblem, order: Int32s, work: Workspace, memory: Any) -> tuple[float, int]:
    """Returns the step's seconds and the number of copies of the placement in `work.devices`.

    With a MemoryWorkspace it also notes what takes memory and the last uses; with None it computes the time alone.
    """
    work.free[:] = 0.0
    work.busy[:] = 0.0
    work.hosts[:] = 0.0
    return simulate_from(flat, order, 0, work, memory, None, None)


@kernel
def simulate_from(
    flat: FlatProblem, order: Int32s, first: int, work: Workspace, memory: Any, snapshots: Any, cutoff: Any
) -> tuple[float, int]:
    """Returns what `simulate_order` returns, for a pass that begins at position `first` with the workspace's state.

    Snapshots, or None, get the states on the way. A Cutoff, or None, may end the pass early: its seconds are then infinite.
    """
    # Arrays are taken out of their tuples first: inside the loops that would count references.
    num_devices, dispatch, copy_dispatch = flat.num_devices, flat.dispatch_seconds, flat.copy_dispatch_seconds
    op_groups, op_seconds = flat.op_groups, flat.op_seconds
    read_ends, read_groups, read_copies = flat.read_ends, flat.read_groups, flat.read_copies
    read_storages, copy_bytes, copy_makers = flat.read_storages, flat.copy_bytes, flat.copy_makers
    after_ends, after_ops = flat.after_ends, flat.after_ops
    latency, bandwidth, delay, host_of = flat.latency_seconds, flat.bytes_per_second, flat.delay_seconds, flat.hosts
    channels, second_channels, host_waits = flat.channels, flat.second_channels, flat.host_waits
    copies_take_work = flat.copies_take_work
    devices, ends, free, busy, hosts = work.devices, work.ends, work.free, work.busy, work.hosts
    launch_at, arrivals, launched = work.launch_at, work.arrivals, work.launched
    if memory is not None:
        made_bytes, touch_ends, touch_storages = flat.made_bytes, flat.touch_ends, flat.touch_storages
        last_use, copy_last_use, taken, places = memory.last_use, memory.copy_last_use, memory.taken, memory.places
    num_ops, num_copies = len(order), 0
    for position in range(first, num_ops):
        if snapshots is not None:
            if position % snapshots.stride == 0:
                save(snapshots, position // snapshots.stride, free, busy, hosts)
        n = order[position]
        here = devices[op_groups[n]]
        start, host = 0.0, host_of[here]
        if memory is not None:
            bytes_here = made_bytes[n]
            for touch in range(touch_ends[n], touch_ends[n + 1]):
                last_use[touch_storages[touch]] = position
        for read in range(read_ends[n], read_ends[n + 1]):
            there = devices[read_groups[read]]
            if there != here:
                copy = read_copies[read]
                place = copy * num_devices + here
                if launch_at[place] < first:
                    arrival = arrivals[place]
                else:
                    maker, link = copy_makers[copy], there * num_devices + here
                    if host_waits[link] and maker >= 0:
                        hosts[host] = max(hosts[host], ends[maker])
                    hosts[host] += copy_dispatch
                    begin = hosts[host]
                    sender = host_of[there]
                    if sender != host:
                        hosts[sender] += copy_dispatch
                        begin = max(begin, hosts[sender])
                    if maker >= 0:
                        begin = max(begin, ends[maker])
                    channel, second = channels[link], second_channels[link]
                    begin = max(begin, busy[channel], busy[second])
                    left = arrival_time(begin, copy_bytes[copy], latency[link], bandwidth[link])
                    arrival = left + delay[link]
                    launch_at[place] = position - num_ops
                    arrivals[place] = arrival
                    busy[channel] = left
                    busy[second] = left
                    if copies_take_work:
                        take_work(flat, free, there, here, link, copy_bytes[copy])
                    launched[num_copies] = place
                    num_copies += 1
                    if memory is not None:
                        bytes_here += copy_bytes[copy]
                        if read_storages[read] >= 0:
                            last_use[read_storages[read]] = ~position
                start = max(start, arrival)
                if memory is not None:
                    copy_last_use[place] = position
            elif memory is not None:
                if read_storages[read] >= 0:
                    last_use[read_storages[read]] = position
        for after in range(after_ends[n], after_ends[n + 1]):
            start = max(start, ends[after_ops[after]])
        hosts[host] += dispatch
        end = max(start, free[here], hosts[host]) + op_seconds[n * num_devices + here]
        ends[n] = end
        free[here] = end
        if cutoff is not None:
            if end > cutoff.latest[n] + cutoff.seconds:
                return np.inf, num_copies
        if memory is not None:
            taken[position] = bytes_here
            places[position] = here
    return free.max(), num_copies


@kernel
def forget_copies(work: Workspace, num_copies: int) -> None:
    """Makes the workspace ready for the next pass from the start."""
    for i in range(num_copies):
        work.launch_at[work.launched[i]] = UNLAUNCHED


@kernel
def save(snapshots: Snapshots, number: int, free: Floats, busy: Floats, hosts: Floats) -> None:
    """Saves the state of the machine."""
    snapshots.free[number] = free
    snapshots.busy[number] = busy
    snapshots.hosts[number] = hosts


@kernel
def peak_bytes(flat: FlatProblem, work: Workspace, memory: MemoryWorkspace, num_copies: int, peak: Ints, usage: Any) -> None:
    """Writes the most bytes in use on each device into `peak` [devices], from what a pass noted.

    `usage` [ops, devices], or None, gets the bytes in use at each launch.
    """
    num_devices, devices, used = flat.num_devices, work.devices, memory.used
    storage_bytes, storage_groups = flat.storage_bytes, flat.storage_groups
    resident_bytes, copy_bytes, launched = flat.resident_bytes, flat.copy_bytes, work.launched
    last_use, copy_last_use, places = memory.last_use, memory.copy_last_use, memory.places
    taken, given, crossing, next_crossing = memory.taken, memory.given, memory.crossing, memory.next_crossing
    used[:] = 0
    used[0] = flat.floating_bytes
    for g in range(len(resident_bytes)):
        used[devices[g]] += resident_bytes[g]
    for storage in range(len(storage_bytes)):
        position = last_use[storage]
        if position >= 0:
            given[position] += storage_bytes[storage]
        else:
            next_crossing[storage] = crossing[~position]
            crossing[~position] = storage
    for i in range(num_copies):
        place = launched[i]
        given[copy_last_use[place]] += copy_bytes[place // num_devices]
    peak[:] = used
    for position in range(len(places)):
        here = places[position]
        now = used[here] + taken[position]
        if now > peak[here]:
            peak[here] = now
        if usage is not None:
            usage[position] = used
            usage[position, here] = now
        used[here] = now - given[position]
        given[position] = 0
        storage = crossing[position]
        while storage >= 0:
            used[devices[storage_groups[storage]]] -= storage_bytes[storage]
            storage = next_crossing[storage]
        crossing[position] = -1


@kernel
def simulate_batch(
    flat: FlatProblem, placements: Ints, orders: Int32s, work: Workspace, memory: Any, step_seconds: Floats, peaks: Ints
) -> None:
    """Writes the step's seconds [batch] and peak bytes [batch, devices] of placements [batch, groups].

    `orders` has a row for each placement, or one for all. Without a MemoryWorkspace the peaks are left as they are.
    """
    for row in range(len(placements)):
        order = orders[row if len(orders) > 1 else 0]
        for g in range(placements.shape[1]):
            work.devices[g] = placements[row, g]
        step_seconds[row], num_copies = simulate_order(flat, order, work, memory)
        if memory is not None:
            peak_bytes(flat, work, memory, num_copies, peaks[row], None)
        forget_copies(work, num_copies)
