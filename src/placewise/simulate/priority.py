"""The priority order: the order in which an event-driven list schedule of a placement starts the ops.

A copy starts as soon as its tensor is made and its channels are free. A channel serves tensors in the order in which they
are made (ties go to the lower device, then to the lower tensor), and copies of one tensor in the order of their first
readers. A free device starts, of the ops whose inputs have arrived, the one with the longest remaining path, copies
included; ties go to the lowest index. Devices that start ops at the same moment do so in their order.
"""

from typing import Any, NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.simulate.compile import borrowing, kernel
from placewise.simulate.dependencies import Dependencies
from placewise.simulate.flat_problem import FlatProblem, Int32s
from placewise.simulate.kernels import Workspace, arrival_time, forget_copies, peak_bytes, simulate_order

NEVER = -1.0  # the arrival of a copy that has not been launched


class PriorityWorkspace(NamedTuple):
    """Scratch memory of a list schedule; between schedules all `arrivals` are NEVER."""

    order: Int32s  # [ops], the result
    path: Floats  # [ops], the longest remaining path, or what else says which op is the most urgent
    arrived: Floats  # [ops], when the last input arrived
    pending: Int32s  # [ops], how many values and ops each op still waits for
    arrivals: Floats  # [values * devices]
    launched: Int32s  # [values * devices], the first ones are the copies that were launched
    ready: Int32s  # [ops], a heap for each device, by path: ops whose inputs have arrived
    later: Int32s  # [ops], a heap for each device, by arrival: ops whose inputs are on the way
    heap_starts: Int32s  # [devices + 1], where each device's heaps begin
    num_ready: Int32s  # [devices]
    num_later: Int32s  # [devices]
    running: Int32s  # [devices], an op or -1
    run_end: Floats  # [devices], when that op ends
    busy: Floats  # [channels], when each is free again


def new_priority_workspace(flat: FlatProblem, waits: Dependencies) -> PriorityWorkspace:
    """Returns a workspace for list schedules."""
    num_ops, num_devices = len(flat.op_groups), flat.num_devices
    places = len(waits.value_bytes) * num_devices
    return PriorityWorkspace(
        np.zeros(num_ops, np.int32),
        np.zeros(num_ops, np.float64),
        np.zeros(num_ops, np.float64),
        np.zeros(num_ops, np.int32),
        np.full(places, NEVER, np.float64),
        np.zeros(places, np.int32),
        np.zeros(num_ops, np.int32),
        np.zeros(num_ops, np.int32),
        np.zeros(num_devices + 1, np.int32),
        np.zeros(num_devices, np.int32),
        np.zeros(num_devices, np.int32),
        np.zeros(num_devices, np.int32),
        np.zeros(num_devices, np.float64),
        np.zeros(flat.num_channels, np.float64),
    )


@borrowing
def remaining_paths(flat: FlatProblem, waits: Dependencies, devices: Any, path: Floats) -> None:
    """Writes the longest path from each op's start to the end of the step, copies included: [ops]."""
    num_devices, op_groups, op_seconds = flat.num_devices, flat.op_groups, flat.op_seconds
    latency, bandwidth = flat.latency_seconds, flat.bytes_per_second
    input_ends, input_values, input_makers = waits.input_ends, waits.input_values, waits.input_makers
    value_groups, value_bytes = waits.value_groups, waits.value_bytes
    follower_ends, followers = waits.follower_ends, waits.followers
    path[:] = 0.0
    for n in range(len(op_groups) - 1, -1, -1):
        here = devices[op_groups[n]]
        length = path[n]
        for follower in range(follower_ends[n], follower_ends[n + 1]):
            length = max(length, path[followers[follower]])
        length += op_seconds[n * num_devices + here]
        path[n] = length
        for wait in range(input_ends[n], input_ends[n + 1]):
            maker = input_makers[wait]
            if maker >= 0:
                value = input_values[wait]
                there = devices[value_groups[value]]
                way = length
                if there != here:
                    link = there * num_devices + here
                    way += arrival_time(0.0, value_bytes[value], latency[link], bandwidth[link]) + flat.delay_seconds[link]
                path[maker] = max(path[maker], way)


@borrowing
def _is_before(keys: Floats, a: int, b: int) -> bool:
    return keys[a] < keys[b] or (keys[a] == keys[b] and a < b)


@borrowing
def push(heap: Int32s, first: int, count: int, keys: Floats, op: int) -> None:
    """Adds an op to the heap of `count` ops that begins at `first`; the smallest key is on top."""
    i = count
    while i > 0:
        parent = (i - 1) >> 1
        other = heap[first + parent]
        if not _is_before(keys, op, other):
            break
        heap[first + i] = other
        i = parent
    heap[first + i] = op


@borrowing
def pop(heap: Int32s, first: int, count: int, keys: Floats) -> int:
    """Removes the op with the smallest key from a heap of `count` ops, and returns it."""
    top: int = heap[first]
    last = heap[first + count - 1]
    i, size = 0, count - 1
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and _is_before(keys, heap[first + child + 1], heap[first + child]):
            child += 1
        if not _is_before(keys, heap[first + child], last):
            break
        heap[first + i] = heap[first + child]
        i = child
    heap[first + i] = last
    return top


@borrowing
def queue(
    n: int, here: int, now: float, arrived: Floats, urgency: Floats, heap_starts: Int32s,
    ready: Int32s, num_ready: Int32s, later: Int32s, num_later: Int32s,
) -> None:  # fmt: skip
    """Puts an op that waits for no other op into the heap of ops that can start now, or of those that can start later."""
    if arrived[n] <= now:
        push(ready, heap_starts[here], num_ready[here], urgency, n)
        num_ready[here] += 1
    else:
        push(later, heap_starts[here], num_later[here], arrived, n)
        num_later[here] += 1


@borrowing
def priority_order(flat: FlatProblem, waits: Dependencies, work: Workspace, schedule: PriorityWorkspace) -> None:
    """Writes the priority order of the placement in `work.devices` into `schedule.order`."""
    remaining_paths(flat, waits, work.devices, schedule.path)
    list_order(flat, waits, work, schedule)


@borrowing
def list_order(flat: FlatProblem, waits: Dependencies, work: Workspace, schedule: PriorityWorkspace) -> None:
    """Writes the order in which a list schedule starts the ops into `schedule.order`: those of the longest `path` first.

    It overwrites the paths.
    """
    num_devices, num_ops = flat.num_devices, len(flat.op_groups)
    op_groups, op_seconds = flat.op_groups, flat.op_seconds
    channels, second_channels = flat.channels, flat.second_channels
    latency, bandwidth, delay = flat.latency_seconds, flat.bytes_per_second, flat.delay_seconds
    value_groups, value_bytes = waits.value_groups, waits.value_bytes
    reader_ends, readers, output_ends, outputs = waits.reader_ends, waits.readers, waits.output_ends, waits.outputs
    follower_ends, followers, residents = waits.follower_ends, waits.followers, waits.residents
    devices, order, urgency, arrived = work.devices, schedule.order, schedule.path, schedule.arrived
    pending, arrivals, launched = schedule.pending, schedule.arrivals, schedule.launched
    ready, later, heap_starts = schedule.ready, schedule.later, schedule.heap_starts
    num_ready, num_later = schedule.num_ready, schedule.num_later
    running, run_end, busy = schedule.running, schedule.run_end, schedule.busy

    heap_starts[:] = 0
    for n in range(num_ops):
        urgency[n] = -urgency[n]  # so that the longest path is on top of a heap
        arrived[n] = 0.0
        pending[n] = waits.pending[n]
        heap_starts[devices[op_groups[n]] + 1] += 1
    for device in range(num_devices):
        heap_starts[device + 1] += heap_starts[device]
        num_ready[device], num_later[device], running[device] = 0, 0, -1
    busy[:] = 0.0
    for n in range(num_ops):
        if pending[n] == 0:
            here = devices[op_groups[n]]
            queue(n, here, 0.0, arrived, urgency, heap_starts, ready, num_ready, later, num_later)

    now, started, num_copies, num_values, finished = 0.0, 0, 0, len(residents), -1
    while True:
        # 1. New values go to their readers: at first the resident ones, then those of each op that ends.
        for entry in range(num_values):
            value = residents[entry] if finished < 0 else outputs[output_ends[finished] + entry]
            there = devices[value_groups[value]]
            for wait in range(reader_ends[value], reader_ends[value + 1]):
                n = readers[wait]
                here = devices[op_groups[n]]
                if here != there:
                    place = value * num_devices + here
                    arrival = arrivals[place]
                    if arrival < 0.0:
                        link = there * num_devices + here
                        begin = max(now, busy[channels[link]], busy[second_channels[link]])
                        left = arrival_time(begin, value_bytes[value], latency[link], bandwidth[link])
                        arrival = left + delay[link]
                        arrivals[place] = arrival
                        busy[channels[link]] = left
                        busy[second_channels[link]] = left
                        launched[num_copies] = place
                        num_copies += 1
                    arrived[n] = max(arrived[n], arrival)
                pending[n] -= 1
                if pending[n] == 0:
                    queue(n, here, now, arrived, urgency, heap_starts, ready, num_ready, later, num_later)
        if finished >= 0:
            for follower in range(follower_ends[finished], follower_ends[finished + 1]):
                n = followers[follower]
                pending[n] -= 1
                if pending[n] == 0:
                    here = devices[op_groups[n]]
                    queue(n, here, now, arrived, urgency, heap_starts, ready, num_ready, later, num_later)
        # 2. If another op ends at this moment, its values come next.
        finished, num_values = -1, 0
        for device in range(num_devices):
            if running[device] >= 0 and run_end[device] <= now:
                finished = running[device]
                running[device] = -1
                num_values = output_ends[finished + 1] - output_ends[finished]
                break
        if finished >= 0:
            continue
        # 3. Every free device starts its most urgent op, and time moves to the next end or arrival.
        upcoming = np.inf
        for device in range(num_devices):
            if running[device] < 0:
                first = heap_starts[device]
                while num_later[device] > 0 and arrived[later[first]] <= now:
                    n = pop(later, first, num_later[device], arrived)
                    num_later[device] -= 1
                    push(ready, first, num_ready[device], urgency, n)
                    num_ready[device] += 1
                if num_ready[device] > 0:
                    n = pop(ready, first, num_ready[device], urgency)
                    num_ready[device] -= 1
                    order[started] = n
                    started += 1
                    running[device] = n
                    run_end[device] = now + op_seconds[n * num_devices + device]
                elif num_later[device] > 0:
                    upcoming = min(upcoming, arrived[later[first]])
            if running[device] >= 0:
                upcoming = min(upcoming, run_end[device])
        if started == num_ops:
            break
        now = upcoming
    for i in range(num_copies):
        arrivals[launched[i]] = NEVER


@kernel
def simulate_priority_batch(
    flat: FlatProblem, waits: Dependencies, placements: Ints, program: Int32s, work: Workspace, memory: Any,
    schedule: PriorityWorkspace, step_seconds: Floats, peaks: Ints, orders: Any,
) -> None:  # fmt: skip
    """Writes the step's seconds and peak bytes of placements, each in its priority order or, if better, in program order.

    An order that fits is better than one that does not, then the faster one is better; ties go to the program order.
    `orders` [batch, ops], or None, gets the better order.
    """
    other_peak = np.zeros(flat.num_devices, np.int64)
    for row in range(len(placements)):
        for g in range(placements.shape[1]):
            work.devices[g] = placements[row, g]
        program_seconds, num_copies = simulate_order(flat, program, work, None)
        forget_copies(work, num_copies)
        priority_order(flat, waits, work, schedule)
        seconds, num_copies = simulate_order(flat, schedule.order, work, memory)
        if memory is not None:
            peak_bytes(flat, work, memory, num_copies, peaks[row], None)
        forget_copies(work, num_copies)
        keeps_program = program_seconds <= seconds
        if memory is not None:
            if keeps_program or (peaks[row] > flat.memory_bytes).any():
                _, num_copies = simulate_order(flat, program, work, memory)
                peak_bytes(flat, work, memory, num_copies, other_peak, None)
                forget_copies(work, num_copies)
                fits, other_fits = (peaks[row] <= flat.memory_bytes).all(), (other_peak <= flat.memory_bytes).all()
                if fits != other_fits:
                    keeps_program = bool(other_fits)
                if keeps_program:
                    peaks[row] = other_peak
        step_seconds[row] = program_seconds if keeps_program else seconds
        if orders is not None:
            orders[row] = program if keeps_program else schedule.order
