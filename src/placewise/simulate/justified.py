"""The justified order: a list schedule whose priorities come from a list schedule of the step in reverse.

The priority order looks at the longest chain behind an op. It does not see that much work waits behind a short chain, and
so it begins what can wait, such as sums of gradients, before what many devices wait for. Here the step is scheduled
backwards, from its end: an op can take its place when all its readers have theirs, and the one that ended last in the
schedule before goes first. How long before the end an op begins there counts the queues of devices and channels; it is
its priority in a second list schedule (Li and Willis, EJOR 1992; Valls, Ballestín and Quintanilla, EJOR 2005).
"""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.simulate.compile import borrowing, kernel
from placewise.simulate.dependencies import Dependencies
from placewise.simulate.flat_problem import FlatProblem, Int32s
from placewise.simulate.kernels import (
    MemoryWorkspace,
    Workspace,
    arrival_time,
    forget_copies,
    new_memory_workspace,
    new_workspace,
    peak_bytes,
    simulate_order,
)
from placewise.simulate.priority import (
    PriorityWorkspace,
    list_order,
    new_priority_workspace,
    pop,
    priority_order,
    push,
    queue,
)
from placewise.simulate.simulator import Simulator, missing_bytes


class ReverseWorkspace(NamedTuple):
    """What a schedule in reverse reads and writes besides a list schedule's workspace."""

    after_ends: Int32s  # [ops + 1], of `after_ops`
    after_ops: Int32s  # the ops that each op comes after
    waiting: Int32s  # [values * devices], readers there that have no place yet
    ends: Floats  # [ops], when each op ended in the schedule before


class Justified(NamedTuple):
    """What judging a placement in its justified order gives."""

    seconds: float
    overflow_bytes: int


class Justifier:
    """Judges placements in their justified orders, or in their priority orders where these are faster; for one thread."""

    def __init__(self, model: Simulator) -> None:
        flat, waits, after = model.flat, model.dependencies, model.problem.graph.ops.after
        num_ops, num_devices = model.problem.num_ops, model.problem.num_devices
        self._flat, self._waits = flat, waits
        self._work, self._memory = new_workspace(flat, model.problem.num_groups), new_memory_workspace(flat)
        self._schedule = new_priority_workspace(flat, waits)
        self._reverse = ReverseWorkspace(
            after.offsets.astype(np.int32),
            after.values.astype(np.int32),
            np.zeros(len(waits.value_bytes) * num_devices, np.int32),
            np.zeros(num_ops, np.float64),
        )
        self._peak = np.zeros(num_devices, np.int64)
        self.order = np.zeros(num_ops, np.int32)  # [ops], of the placement that was judged last

    def judge(self, placement: Ints) -> Justified:
        """Returns the step's seconds and the bytes that do not fit; its order is in `order`."""
        self._work.devices[:] = placement
        seconds = justify(
            self._flat, self._waits, self._work, self._memory, self._schedule, self._reverse, self.order, self._peak
        )
        return Justified(float(seconds), int(missing_bytes(self._peak, self._flat.memory_bytes)))


@borrowing
def reverse_starts(
    flat: FlatProblem, waits: Dependencies, work: Workspace, schedule: PriorityWorkspace, reverse: ReverseWorkspace
) -> None:
    """Writes how long before the end of the reversed step each op begins into `schedule.path`.

    Of the ops whose readers have their places, the one with the largest of `reverse.ends` comes next on a device; ties go
    to the lowest index. Copies of resident tensors are left out.
    """
    num_devices, num_ops = flat.num_devices, len(flat.op_groups)
    op_groups, op_seconds = flat.op_groups, flat.op_seconds
    channels, second_channels = flat.channels, flat.second_channels
    latency, bandwidth, delay = flat.latency_seconds, flat.bytes_per_second, flat.delay_seconds
    value_groups, value_bytes = waits.value_groups, waits.value_bytes
    reader_ends, readers = waits.reader_ends, waits.readers
    follower_ends = waits.follower_ends
    input_ends, input_values, input_makers = waits.input_ends, waits.input_values, waits.input_makers
    after_ends, after_ops, waiting, urgency = reverse.after_ends, reverse.after_ops, reverse.waiting, reverse.ends
    devices, path, arrived, pending = work.devices, schedule.path, schedule.arrived, schedule.pending
    ready, later, heap_starts = schedule.ready, schedule.later, schedule.heap_starts
    num_ready, num_later = schedule.num_ready, schedule.num_later
    running, run_end, busy = schedule.running, schedule.run_end, schedule.busy

    heap_starts[:] = 0
    waiting[:] = 0
    for n in range(num_ops):
        pending[n] = follower_ends[n + 1] - follower_ends[n]
    for n in range(num_ops):
        urgency[n] = -urgency[n]  # so that the largest end is on top of a heap
        arrived[n] = 0.0
        here = devices[op_groups[n]]
        heap_starts[here + 1] += 1
        for wait in range(input_ends[n], input_ends[n + 1]):
            if input_makers[wait] >= 0:
                pending[input_makers[wait]] += 1
                waiting[input_values[wait] * num_devices + here] += 1
    for device in range(num_devices):
        heap_starts[device + 1] += heap_starts[device]
        num_ready[device], num_later[device], running[device] = 0, 0, -1
    busy[:] = 0.0
    for n in range(num_ops):
        if pending[n] == 0:
            here = devices[op_groups[n]]
            queue(n, here, 0.0, arrived, urgency, heap_starts, ready, num_ready, later, num_later)

    now, placed, finished = 0.0, 0, -1
    while True:
        # 1. What the op read lets its makers take their places; a copy to this device when its last reader there has its.
        if finished >= 0:
            here = devices[op_groups[finished]]
            for wait in range(input_ends[finished], input_ends[finished + 1]):
                maker = input_makers[wait]
                if maker < 0:
                    continue
                value = input_values[wait]
                there = devices[value_groups[value]]
                place = value * num_devices + here
                waiting[place] -= 1
                if there == here:
                    pending[maker] -= 1
                elif waiting[place] == 0:
                    link = there * num_devices + here
                    begin = max(now + delay[link], busy[channels[link]], busy[second_channels[link]])
                    arrival = arrival_time(begin, value_bytes[value], latency[link], bandwidth[link])
                    busy[channels[link]] = arrival
                    busy[second_channels[link]] = arrival
                    arrived[maker] = max(arrived[maker], arrival)
                    for entry in range(reader_ends[value], reader_ends[value + 1]):
                        if devices[op_groups[readers[entry]]] == here:
                            pending[maker] -= 1
                else:
                    continue
                if pending[maker] == 0:
                    queue(maker, there, now, arrived, urgency, heap_starts, ready, num_ready, later, num_later)
            for entry in range(after_ends[finished], after_ends[finished + 1]):
                n = after_ops[entry]
                pending[n] -= 1
                if pending[n] == 0:
                    here = devices[op_groups[n]]
                    queue(n, here, now, arrived, urgency, heap_starts, ready, num_ready, later, num_later)
        # 2. If another op's place ends at this moment, what it read comes next.
        finished = -1
        for device in range(num_devices):
            if running[device] >= 0 and run_end[device] <= now:
                finished = running[device]
                running[device] = -1
                break
        if finished >= 0:
            continue
        # 3. Every free device places its most urgent op, and time moves to the next end or arrival.
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
                    placed += 1
                    running[device] = n
                    run_end[device] = now + op_seconds[n * num_devices + device]
                    path[n] = run_end[device]
                elif num_later[device] > 0:
                    upcoming = min(upcoming, arrived[later[first]])
            if running[device] >= 0:
                upcoming = min(upcoming, run_end[device])
        if placed == num_ops:
            break
        now = upcoming


@kernel
def justify(
    flat: FlatProblem, waits: Dependencies, work: Workspace, memory: MemoryWorkspace, schedule: PriorityWorkspace,
    reverse: ReverseWorkspace, order: Int32s, peak: Ints,
) -> float:  # fmt: skip
    """Returns the step's seconds in the faster of the priority order and the justified order, which `order` gets.

    `peak` [devices] gets its peak bytes; ties go to the priority order.
    """
    priority_order(flat, waits, work, schedule)
    order[:] = schedule.order
    seconds, num_copies = simulate_order(flat, order, work, None)
    forget_copies(work, num_copies)
    reverse.ends[:] = work.ends
    reverse_starts(flat, waits, work, schedule, reverse)
    list_order(flat, waits, work, schedule)
    justified, num_copies = simulate_order(flat, schedule.order, work, None)
    forget_copies(work, num_copies)
    if justified < seconds:
        order[:] = schedule.order
    seconds, num_copies = simulate_order(flat, order, work, memory)
    peak_bytes(flat, work, memory, num_copies, peak, None)
    forget_copies(work, num_copies)
    return seconds
