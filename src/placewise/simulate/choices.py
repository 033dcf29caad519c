"""The step's time and memory for any choice of optional ops, by one compiled pass over the whole graph.

`Problem.present` makes the graph that is left and flattens it, which is right for many placements with one choice. A search
for the choice itself judges thousands, each with another choice: this pass looks up what is read instead as it goes. It
computes what `reference` defines, in a launch order that is given.
"""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.problem import Problem
from placewise.simulate.compile import kernel
from placewise.simulate.flat_problem import Int32s, cluster_columns, row_ends, unique_reads
from placewise.simulate.kernels import arrival_time, take_work


class FlatChoices(NamedTuple):
    """A problem with optional ops, as flat arrays."""

    num_devices: int
    op_groups: Int32s  # [ops]
    op_seconds: Floats  # [ops * devices]
    read_ends: Int32s  # [ops + 1], op n reads `reads[read_ends[n] : read_ends[n + 1]]`
    reads: Int32s  # tensors, each once for an op
    write_ends: Int32s  # [ops + 1]
    writes: Int32s  # tensors
    after_ends: Int32s  # [ops + 1]
    after_ops: Int32s  # ops
    producer: Int32s  # [tensors], -1: resident
    stands_for: Int32s  # [tensors], or -1
    storage: Int32s  # [tensors]
    nbytes: Ints  # [tensors]
    homes: Int32s  # [tensors], the group that a tensor is with: its producer's or its home; -1: its first reader's
    homeless: bool  # whether a resident tensor is with its first reader
    kept: Int32s  # outputs, as the graph has them
    memory_bytes: Ints  # [devices]
    latency_seconds: Floats  # [devices * devices]
    bytes_per_second: Floats  # [devices * devices]
    delay_seconds: Floats  # [devices * devices]
    channels: Int32s  # [devices * devices]
    second_channels: Int32s  # [devices * devices]
    host_waits: Bools  # [devices * devices]
    copies_take_work: bool
    source_seconds: Floats  # [devices * devices], this and the next ones as in FlatProblem
    source_seconds_per_byte: Floats  # [devices * devices]
    target_seconds: Floats  # [devices * devices]
    target_seconds_per_byte: Floats  # [devices * devices]
    num_channels: int
    hosts: Int32s  # [devices]
    num_hosts: int
    dispatch_seconds: float
    copy_dispatch_seconds: float


class Scratch(NamedTuple):
    """What a pass writes; between passes `given` is 0 and `launch_at` is -1."""

    places: Int32s  # [tensors], the device that each tensor is on, -1: not made
    ends: Floats  # [ops]
    starts: Floats  # [ops]
    launch_at: Int32s  # [tensors * devices], position of the copy's launch, or -1
    arrivals: Floats  # [tensors * devices]
    launched: Int32s  # [tensors * devices], the first ones are the copies that were launched
    copy_last_use: Int32s  # [tensors * devices], position
    last_use: Int32s  # [tensors], position, for those that own their storage
    taken: Ints  # [ops], bytes at each position, on its op's device
    given: Ints  # [ops * devices], bytes given back at each position
    free: Floats  # [devices]
    busy: Floats  # [channels]
    host_free: Floats  # [hosts]
    used: Ints  # [devices]
    peak: Ints  # [devices], the result
    area: Floats  # [1], the result: bytes over the devices' memories, added up over the launches


def flatten_choices(problem: Problem) -> FlatChoices:
    """Returns a problem, with or without optional ops, as flat arrays."""
    graph, cluster = problem.graph, problem.cluster
    ops, tensors = graph.ops, graph.tensors
    reading, read = unique_reads(ops.reads)
    at_home = (graph.producer < 0) & (tensors.home >= 0)
    homes = np.where(graph.producer >= 0, np.append(problem.op_groups, -1)[graph.producer], -1)
    homes = np.where(at_home, np.append(problem.merged, -1)[tensors.home], homes)
    return FlatChoices(
        num_devices=problem.num_devices,
        op_groups=problem.op_groups.astype(np.int32),
        op_seconds=np.ascontiguousarray(problem.op_seconds).reshape(-1),
        read_ends=row_ends(reading, len(ops)),
        reads=read.astype(np.int32),
        write_ends=ops.writes.offsets.astype(np.int32),
        writes=ops.writes.values.astype(np.int32),
        after_ends=ops.after.offsets.astype(np.int32),
        after_ops=ops.after.values.astype(np.int32),
        producer=graph.producer.astype(np.int32),
        stands_for=tensors.stands_for.astype(np.int32),
        storage=graph.storage.astype(np.int32),
        nbytes=np.array(tensors.nbytes),
        homes=homes.astype(np.int32),
        homeless=bool((homes < 0).any()),
        kept=graph.outputs.astype(np.int32),
        **cluster_columns(cluster),
    )


def new_scratch(flat: FlatChoices) -> Scratch:
    """Returns scratch memory for passes."""
    num_ops, num_tensors, devices = len(flat.op_groups), len(flat.producer), flat.num_devices
    return Scratch(
        places=np.zeros(num_tensors, np.int32),
        ends=np.zeros(num_ops),
        starts=np.zeros(num_ops),
        launch_at=np.full(num_tensors * devices, -1, np.int32),
        arrivals=np.zeros(num_tensors * devices),
        launched=np.zeros(num_tensors * devices, np.int32),
        copy_last_use=np.zeros(num_tensors * devices, np.int32),
        last_use=np.zeros(num_tensors, np.int32),
        taken=np.zeros(num_ops, np.int64),
        given=np.zeros(num_ops * devices, np.int64),
        free=np.zeros(devices),
        busy=np.zeros(flat.num_channels),
        host_free=np.zeros(flat.num_hosts),
        used=np.zeros(devices, np.int64),
        peak=np.zeros(devices, np.int64),
        area=np.zeros(1),
    )


@kernel
def simulate_choice(flat: FlatChoices, devices: Ints, order: Ints, scratch: Scratch, usage: Ints) -> float:
    """Returns the step's seconds of a placement [groups], -1: nowhere, launched in an order [ops] of all ops.

    `scratch.peak` gets the peak bytes, `scratch.area` how much does not fit, and for how many launches; `starts` and `ends`
    the times of the ops that run. `usage` [ops, devices] gets the bytes in use at each position; without rows it is left.
    """
    num_devices, dispatch, num_ops = flat.num_devices, flat.dispatch_seconds, len(order)
    op_groups, op_seconds, producer, stands_for = flat.op_groups, flat.op_seconds, flat.producer, flat.stands_for
    read_ends, reads, write_ends, writes = flat.read_ends, flat.reads, flat.write_ends, flat.writes
    after_ends, after_ops, storage, nbytes = flat.after_ends, flat.after_ops, flat.storage, flat.nbytes
    latency, bandwidth, host_of, memory = flat.latency_seconds, flat.bytes_per_second, flat.hosts, flat.memory_bytes
    places, ends, starts, launch_at = scratch.places, scratch.ends, scratch.starts, scratch.launch_at
    arrivals, launched, last_use, copy_last_use = (
        scratch.arrivals, scratch.launched, scratch.last_use, scratch.copy_last_use,
    )  # fmt: skip
    taken, given, free, busy = scratch.taken, scratch.given, scratch.free, scratch.busy
    hosts, used, peak = scratch.host_free, scratch.used, scratch.peak
    free[:] = 0.0
    busy[:] = 0.0
    hosts[:] = 0.0
    for t in range(len(places)):
        home = flat.homes[t]
        places[t] = devices[home] if home >= 0 else -1
        last_use[t] = -1
    if flat.homeless:
        for n in range(num_ops):
            if devices[op_groups[n]] >= 0:
                for read in range(read_ends[n], read_ends[n + 1]):
                    t = reads[read]
                    while producer[t] >= 0 and devices[op_groups[producer[t]]] < 0:
                        t = stands_for[t]
                    if places[t] < 0:
                        places[t] = devices[op_groups[n]]
        for t in range(len(places)):
            if places[t] < 0 and producer[t] < 0:
                places[t] = 0
    num_copies = 0
    for position in range(num_ops):
        n = order[position]
        here = devices[op_groups[n]]
        taken[position] = 0
        if here < 0:
            continue
        start, host, bytes_here = 0.0, host_of[here], 0
        for read in range(read_ends[n], read_ends[n + 1]):
            t = reads[read]
            while producer[t] >= 0 and devices[op_groups[producer[t]]] < 0:
                t = stands_for[t]
            there = places[t]
            if there == here:
                last_use[storage[t]] = position
                continue
            place = t * num_devices + here
            if launch_at[place] < 0:
                link = there * num_devices + here
                if flat.host_waits[link] and producer[t] >= 0:
                    hosts[host] = max(hosts[host], ends[producer[t]])
                hosts[host] += flat.copy_dispatch_seconds
                begin = hosts[host]
                sender = host_of[there]
                if sender != host:
                    hosts[sender] += flat.copy_dispatch_seconds
                    begin = max(begin, hosts[sender])
                if producer[t] >= 0:
                    begin = max(begin, ends[producer[t]])
                channel, second = flat.channels[link], flat.second_channels[link]
                begin = max(begin, busy[channel], busy[second])
                left = arrival_time(begin, nbytes[t], latency[link], bandwidth[link])
                arrivals[place] = left + flat.delay_seconds[link]
                busy[channel] = left
                busy[second] = left
                if flat.copies_take_work:
                    take_work(flat, free, there, here, link, nbytes[t])
                launch_at[place] = position
                launched[num_copies] = place
                num_copies += 1
                bytes_here += nbytes[t]
                last_use[storage[t]] = position
            start = max(start, arrivals[place])
            copy_last_use[place] = position
        for after in range(after_ends[n], after_ends[n + 1]):
            other = after_ops[after]
            if devices[op_groups[other]] >= 0:
                start = max(start, ends[other])
        hosts[host] += dispatch
        start = max(start, free[here], hosts[host])
        starts[n] = start
        ends[n] = start + op_seconds[n * num_devices + here]
        free[here] = ends[n]
        for write in range(write_ends[n], write_ends[n + 1]):
            t = writes[write]
            last_use[storage[t]] = position
            if storage[t] == t:
                bytes_here += nbytes[t]
        taken[position] = bytes_here
    for output in flat.kept:
        t = output
        while producer[t] >= 0 and devices[op_groups[producer[t]]] < 0:
            t = stands_for[t]
        last_use[storage[t]] = -1
    used[:] = 0
    for t in range(len(places)):
        if storage[t] != t:
            continue
        if producer[t] < 0:
            used[places[t]] += nbytes[t]
        elif last_use[t] >= 0 and devices[op_groups[producer[t]]] >= 0:
            given[last_use[t] * num_devices + places[t]] += nbytes[t]
    for c in range(num_copies):
        place = launched[c]
        given[copy_last_use[place] * num_devices + place % num_devices] += nbytes[place // num_devices]
        launch_at[place] = -1
    peak[:] = used
    area = 0.0
    for position in range(num_ops):
        here = devices[op_groups[order[position]]]
        if here >= 0:
            now = used[here] + taken[position]
            used[here] = now
            peak[here] = max(peak[here], now)
        for d in range(num_devices):
            if used[d] > memory[d] and here >= 0:
                area += used[d] - memory[d]
            if len(usage):
                usage[position, d] = used[d]
        if here >= 0:
            for d in range(num_devices):
                used[d] -= given[position * num_devices + d]
                given[position * num_devices + d] = 0
    scratch.area[0] = area
    return free.max() if num_devices else 0.0
