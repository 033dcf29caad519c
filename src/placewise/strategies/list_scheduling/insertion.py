"""The ranks and the insertion-based schedule of HEFT and CPoP (Topcuoglu, Hariri, Wu 2002), compiled."""

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.simulate.compile import inner, kernel
from placewise.simulate.kernels import arrival_time
from placewise.strategies.list_scheduling.tasks import Tasks


@kernel
def upward_ranks(tasks: Tasks, op_seconds: Floats, output_seconds: Floats) -> Floats:
    """Returns each op's longest path to the end of the step, its own time included (the paper's rank_u): [ops].

    Op times [ops] and copy times [edges, as `output_ops`] are means over the devices.
    """
    ranks = np.zeros(len(op_seconds))
    for n in range(len(op_seconds) - 1, -1, -1):
        longest = 0.0
        for edge in range(tasks.output_ends[n], tasks.output_ends[n + 1]):
            longest = max(longest, output_seconds[edge] + ranks[tasks.output_ops[edge]])
        ranks[n] = op_seconds[n] + longest
    return ranks


@kernel
def downward_ranks(tasks: Tasks, op_seconds: Floats, input_seconds: Floats, with_own: bool) -> Floats:
    """Returns each op's longest path from the start of the step, without its own time (rank_d): [ops].

    `with_own` counts, as SAGA does, each op's own time on the path instead of that of the op before it.
    """
    ranks = np.zeros(len(op_seconds))
    for n in range(len(op_seconds)):
        for edge in range(tasks.input_ends[n], tasks.input_ends[n + 1]):
            maker = tasks.input_ops[edge]
            counted = op_seconds[n] if with_own else op_seconds[maker]
            ranks[n] = max(ranks[n], ranks[maker] + counted + input_seconds[edge])
    return ranks


@inner
def _inputs_ready(tasks: Tasks, placement: Ints, ends: Floats, n: int, device: int) -> float:
    """Returns when all inputs of an op are on a device if copies never wait (the paper's EST without the device)."""
    ready = 0.0
    for edge in range(tasks.input_ends[n], tasks.input_ends[n + 1]):
        maker = tasks.input_ops[edge]
        arrival = ends[maker]
        there = placement[tasks.op_groups[maker]]
        if there != device and tasks.input_bytes[edge] >= 0.0:
            latency, bandwidth = tasks.latency_seconds[there, device], tasks.bytes_per_second[there, device]
            arrival += arrival_time(0.0, tasks.input_bytes[edge], latency, bandwidth)
        ready = max(ready, arrival)
    return ready


@inner
def first_gap(begins: Floats, ends: Floats, count: int, ready: float, seconds: float) -> tuple[int, float]:
    """Returns the first gap of a device that has room for an op, and when the op starts in it.

    Gap i comes before the i-th of `count` busy times, which are disjoint and sorted; the last gap has no end. An op that
    takes no time needs no gap.
    """
    gap, beyond, start = 0, count, ready
    while gap < beyond:  # find the first busy time that ends after `ready`
        middle = (gap + beyond) // 2
        if ends[middle] > ready:
            beyond = middle
        else:
            gap = middle + 1
    while seconds > 0.0 and gap < count and begins[gap] - start < seconds:
        start = ends[gap]
        gap += 1
    return gap, start


@inner
def fill_gap(begins: Floats, ends: Floats, count: int, gap: int, start: float, end: float) -> int:
    """Puts a busy time into a gap, joins it with those that it touches, and returns how many there are now."""
    if start == end:
        return count
    left = gap > 0 and ends[gap - 1] == start
    right = gap < count and begins[gap] == end
    if left and right:
        ends[gap - 1] = ends[gap]
        for i in range(gap, count - 1):
            begins[i], ends[i] = begins[i + 1], ends[i + 1]
        return count - 1
    if left:
        ends[gap - 1] = end
    elif right:
        begins[gap] = start
    else:
        for i in range(count, gap, -1):
            begins[i], ends[i] = begins[i - 1], ends[i - 1]
        begins[gap], ends[gap] = start, end
        return count + 1
    return count


@kernel
def schedule_by_insertion(tasks: Tasks, sequence: Ints, wanted: Ints) -> tuple[Ints, Floats, Floats]:
    """Returns each group's device and each op's start and end when ops go into the gap in which they end first.

    `sequence` [ops] is the order in which ops choose, and `wanted` [ops] the device of those that have no choice, or
    -1. The first op of a group chooses for all of it; ties go to the lowest device. A group without ops stays at -1.
    """
    num_ops, num_devices = tasks.op_seconds.shape
    placement = np.full(len(tasks.allowed), -1, np.int64)
    op_starts, op_ends = np.zeros(num_ops), np.zeros(num_ops)
    begins, ends = np.zeros((num_devices, num_ops)), np.zeros((num_devices, num_ops))  # of busy times
    counts = np.zeros(num_devices, np.int64)
    for n in sequence:
        group = tasks.op_groups[n]
        fixed = placement[group] if placement[group] >= 0 else wanted[n]
        best, best_gap, best_start, best_end = -1, 0, 0.0, np.inf
        for device in range(num_devices):
            if device == fixed or (fixed < 0 and tasks.allowed[group, device]):
                seconds = tasks.op_seconds[n, device]
                ready = _inputs_ready(tasks, placement, op_ends, n, device)
                gap, start = first_gap(begins[device], ends[device], counts[device], ready, seconds)
                if start + seconds < best_end:
                    best, best_gap, best_start, best_end = device, gap, start, start + seconds
        placement[group], op_starts[n], op_ends[n] = best, best_start, best_end
        counts[best] = fill_gap(begins[best], ends[best], counts[best], best_gap, best_start, best_end)
    return placement, op_starts, op_ends
