"""One pass that records everything: when each op and copy runs, and what it waits for."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.simulate.compile import kernel
from placewise.simulate.flat_problem import FlatProblem, Int32s
from placewise.simulate.kernels import (
    MemoryWorkspace,
    Workspace,
    arrival_time,
    forget_copies,
    peak_bytes,
    simulate_order,
    take_work,
)

NOTHING, HOST, DEVICE, COPY, AFTER, MAKER, CHANNEL = range(7)  # what an op or a copy waited for last
WAITS = ("nothing", "host", "device", "copy", "after", "maker", "channel")


class Timeline(NamedTuple):
    """When every op and every copy runs, and what it waits for last; copies are in launch order.

    An op waits for nothing, for the host to launch it, for its device (the op before it there), for a copy, or for an op
    that it must come after. A copy waits for nothing, the host, the op that makes its tensor, or one of its channels
    (the copy before it there). With the host comes the op that the host itself waited for last, or -1.
    """

    start: Floats  # [ops]
    end: Floats  # [ops]
    wait: Int32s  # [ops], index into WAITS
    wait_for: Int32s  # [ops], the op or the copy, or -1
    copy_tensor: Int32s  # [copies], the number of the copied tensor
    copy_source: Int32s  # [copies], device
    copy_target: Int32s  # [copies], device
    copy_reader: Int32s  # [copies], the op that each was launched for
    copy_start: Floats  # [copies]
    copy_end: Floats  # [copies]
    copy_wait: Int32s  # [copies], index into WAITS
    copy_wait_for: Int32s  # [copies], the op or the copy, or -1
    device_end: Floats  # [devices], when each has ended its last op, and what copies take of its time


@kernel
def record_timeline(
    flat: FlatProblem, order: Int32s, work: Workspace, memory: MemoryWorkspace, peak: Ints, usage: Ints
) -> Timeline:
    """Returns the timeline of the placement in `work.devices`, and writes the memory in use.

    `peak` [devices] gets the most bytes in use, `usage` [ops, devices] those in use at each launch.
    """
    _, num_copies = simulate_order(flat, order, work, memory)
    peak_bytes(flat, work, memory, num_copies, peak, usage)
    forget_copies(work, num_copies)
    return _timeline(flat, order, work)


@kernel
def _timeline(flat: FlatProblem, order: Int32s, work: Workspace) -> Timeline:
    """Returns the timeline of the placement in `work.devices`, by the same arithmetic as `simulate_order`.

    If an op waits for several things that end at the same moment, the device comes first, then the first input.
    """
    num_ops, num_devices, dispatch = len(order), flat.num_devices, flat.dispatch_seconds
    devices, free, busy, hosts = work.devices, work.free, work.busy, work.hosts
    start, end = np.zeros(num_ops), np.zeros(num_ops)
    wait, wait_for = np.zeros(num_ops, np.int32), np.full(num_ops, -1, np.int32)
    size = len(flat.copy_bytes) * num_devices
    copy_at = np.full(size, -1, np.int32)
    copy_tensor, copy_source = np.zeros(size, np.int32), np.zeros(size, np.int32)
    copy_target, copy_reader = np.zeros(size, np.int32), np.zeros(size, np.int32)
    copy_start, copy_end = np.zeros(size), np.zeros(size)
    copy_wait, copy_wait_for = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    last_op, last_copy = np.full(num_devices, -1, np.int32), np.full(flat.num_channels, -1, np.int32)
    awaited = np.full(flat.num_hosts, -1, np.int32)  # the op that each host waited for last
    free[:] = 0.0
    busy[:] = 0.0
    hosts[:] = 0.0
    num_copies = 0
    for position in range(num_ops):
        n = order[position]
        here = devices[flat.op_groups[n]]
        begin, why, what = free[here], DEVICE, last_op[here]
        for read in range(flat.read_ends[n], flat.read_ends[n + 1]):
            there = devices[flat.read_groups[read]]
            if there == here:
                continue
            tensor = flat.read_copies[read]
            copy = copy_at[tensor * num_devices + here]
            if copy < 0:
                copy = copy_at[tensor * num_devices + here] = num_copies
                num_copies += 1
                receiver, sender = flat.hosts[here], flat.hosts[there]
                link, maker = there * num_devices + here, flat.copy_makers[tensor]
                if flat.host_waits[link] and maker >= 0 and end[maker] > hosts[receiver]:
                    hosts[receiver], awaited[receiver] = end[maker], maker
                hosts[receiver] += flat.copy_dispatch_seconds
                if sender != receiver:
                    hosts[sender] += flat.copy_dispatch_seconds
                later = sender if hosts[sender] > hosts[receiver] else receiver
                leaves, reason, cause = hosts[later], HOST, awaited[later]
                if maker >= 0 and end[maker] >= leaves:
                    leaves, reason, cause = end[maker], MAKER, maker
                for channel in (flat.channels[link], flat.second_channels[link]):
                    if busy[channel] > leaves:
                        leaves, reason, cause = busy[channel], CHANNEL, last_copy[channel]
                latency, bandwidth = flat.latency_seconds[link], flat.bytes_per_second[link]
                left = arrival_time(leaves, flat.copy_bytes[tensor], latency, bandwidth)
                arrives = left + flat.delay_seconds[link]
                copy_tensor[copy], copy_source[copy], copy_target[copy], copy_reader[copy] = tensor, there, here, n
                copy_start[copy], copy_end[copy] = leaves, arrives
                copy_wait[copy], copy_wait_for[copy] = (reason, cause) if leaves > 0.0 else (NOTHING, -1)
                for channel in (flat.channels[link], flat.second_channels[link]):
                    busy[channel], last_copy[channel] = left, copy
                if flat.copies_take_work:
                    take_work(flat, free, there, here, link, flat.copy_bytes[tensor])
            if copy_end[copy] > begin:
                begin, why, what = copy_end[copy], COPY, copy
        for after in range(flat.after_ends[n], flat.after_ends[n + 1]):
            if end[flat.after_ops[after]] > begin:
                begin, why, what = end[flat.after_ops[after]], AFTER, flat.after_ops[after]
        if free[here] > begin:  # later than above: copies that this op needs take time of its device
            begin, why, what = free[here], DEVICE, last_op[here]
        if why == DEVICE and what < 0:
            why = NOTHING
        hosts[flat.hosts[here]] += dispatch
        if hosts[flat.hosts[here]] > begin:
            begin, why, what = hosts[flat.hosts[here]], HOST, awaited[flat.hosts[here]]
        start[n], end[n] = begin, begin + flat.op_seconds[n * num_devices + here]
        wait[n], wait_for[n] = (why, what) if begin > 0.0 else (NOTHING, -1)
        free[here], last_op[here] = end[n], n
    return Timeline(
        start, end, wait, wait_for,
        copy_tensor[:num_copies], copy_source[:num_copies], copy_target[:num_copies], copy_reader[:num_copies],
        copy_start[:num_copies], copy_end[:num_copies], copy_wait[:num_copies], copy_wait_for[:num_copies],
        free.copy(),
    )  # fmt: skip
