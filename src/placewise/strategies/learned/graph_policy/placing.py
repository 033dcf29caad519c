"""Blocks are placed one after another, each on the device that a small network likes best; compiled.

Before each decision the block is scheduled on every device by insertion, as HEFT does with ops, so the network reads where
the block would end, what it would copy and how full the devices are: figures of the placement so far, all of them relative.
"""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.simulate.compile import inner, kernel
from placewise.simulate.kernels import arrival_time
from placewise.strategies.list_scheduling.insertion import fill_gap, first_gap
from placewise.strategies.list_scheduling.tasks import Tasks

FEATURES = 25  # of a block on a device, for the placement so far
FULL = 3.0  # how much more than full a memory is counted at most
SLOWEST = 6.0  # the largest logarithm of a slowdown that is told apart
SMALL = 1e-6  # share of the step that replaces times of nothing


class Between(NamedTuple):
    """What each block shares with others: entries `ends[b] .. ends[b + 1]` belong to block b."""

    ends: Ints  # [blocks + 1]
    others: Ints  # [entries], blocks
    nbytes: Floats  # [entries]


class BlockTasks(NamedTuple):
    """A problem whose blocks are placed one after another."""

    tasks: Tasks  # with blocks as groups
    sequence: Ints  # [blocks], the order in which they are placed
    ops: Ints  # [ops], by block and then in program order
    op_ends: Ints  # [blocks + 1]
    inputs: Between  # bytes that a block reads from others
    outputs: Between  # the same by the block that is read from
    residents: Between  # resident bytes that a block reads from the homes in others
    visitors: Between  # the same by the block with the home
    block_seconds: Floats  # [blocks, devices]
    fastest_seconds: Floats  # [blocks]
    resident_bytes: Floats  # [blocks]
    other_bytes: Floats  # [blocks], what its ops make, as far as it is there at the peak of a single device
    memory_bytes: Floats  # [devices]
    classes: Ints  # [devices], devices of a class can be swapped
    total_seconds: float  # of all blocks, each on its fastest device


class Scorer(NamedTuple):
    """A network with two hidden layers that scores a block on a device."""

    of_block: Floats  # [blocks, width], what the first layer gets from a block
    of_device: Floats  # [devices, width], from a device
    of_features: Floats  # [FEATURES, width], weights
    second: Floats  # [width, width]
    second_bias: Floats  # [width]
    last: Floats  # [width]
    direct: Floats  # [FEATURES], weights that need no hidden layer


class Placed(NamedTuple):
    """A placement of blocks, with what was read before each decision; rows are in the order of the decisions."""

    placement: Ints  # [blocks]
    features: Floats  # [blocks, devices, FEATURES]
    is_open: Bools  # [blocks, devices], whether the device could be chosen


@inner
def _squash(x: float) -> float:
    return x / (1.0 + abs(x))


@inner
def _try(
    p: BlockTasks, placement: Ints, op_finish: Floats, block: int, device: int, begins: Floats, ends: Floats, count: int,
    finish: Floats,
) -> tuple[float, float, int]:  # fmt: skip
    """Returns when a block starts and ends on a device, and how many busy times the device then has.

    `begins` and `ends` are the device's busy times, which are changed; `finish` gets the ends of the block's ops.
    """
    tasks = p.tasks
    first, last = p.op_ends[block], p.op_ends[block + 1]
    start, end = np.inf, 0.0
    for k in range(first, last):
        n = p.ops[k]
        ready = 0.0
        for edge in range(tasks.input_ends[n], tasks.input_ends[n + 1]):
            maker = tasks.input_ops[edge]
            other = tasks.op_groups[maker]
            if other == block:
                arrival = finish[maker]
            else:
                there = placement[other]
                if there < 0:
                    continue
                arrival = op_finish[maker]
                if there != device and tasks.input_bytes[edge] >= 0.0:
                    latency, bandwidth = tasks.latency_seconds[there, device], tasks.bytes_per_second[there, device]
                    arrival = arrival_time(arrival, tasks.input_bytes[edge], latency, bandwidth)
            ready = max(ready, arrival)
        seconds = tasks.op_seconds[n, device]
        gap, begin = first_gap(begins, ends, count, ready, seconds)
        count = fill_gap(begins, ends, count, gap, begin, begin + seconds)
        finish[n] = begin + seconds
        start = min(start, begin)
        end = max(end, begin + seconds)
    return (start if first < last else 0.0), end, count


@inner
def _moved(
    p: BlockTasks, between: Between, placement: Ints, block: int, device: int, is_source: bool
) -> tuple[float, float, float]:
    """Returns the seconds of copies between a block on a device and placed blocks, and their bytes: there, and all."""
    tasks = p.tasks
    seconds, here, known = 0.0, 0.0, 0.0
    for entry in range(between.ends[block], between.ends[block + 1]):
        there = placement[between.others[entry]]
        if there < 0:
            continue
        nbytes = between.nbytes[entry]
        known += nbytes
        if there == device:
            here += nbytes
        else:
            source, target = (device, there) if is_source else (there, device)
            seconds += arrival_time(
                0.0, nbytes, tasks.latency_seconds[source, target], tasks.bytes_per_second[source, target]
            )
    return seconds, here, known


@inner
def _score(scorer: Scorer, block: int, device: int, features: Floats, hidden: Floats) -> float:
    """Returns the logit of a block on a device."""
    width = len(scorer.last)
    for unit in range(width):
        hidden[unit] = scorer.of_block[block, unit] + scorer.of_device[device, unit]
    for f in range(FEATURES):
        x = features[f]
        if x != 0.0:
            for unit in range(width):
                hidden[unit] += x * scorer.of_features[f, unit]
    for unit in range(width):
        hidden[unit] = max(hidden[unit], 0.0)
    logit = 0.0
    for f in range(FEATURES):
        logit += features[f] * scorer.direct[f]
    for unit in range(width):
        total = scorer.second_bias[unit]
        for before in range(width):
            total += hidden[before] * scorer.second[before, unit]
        logit += max(total, 0.0) * scorer.last[unit]
    return logit


@inner
def _is_usable(p: BlockTasks, usable: Bools, block: int) -> bool:
    """Returns whether a usable device can run the block."""
    found = False
    for device in range(len(usable)):
        found = found or (usable[device] and p.tasks.allowed[block, device])
    return found


@inner
def _has_room(p: BlockTasks, residents: Floats, others: Floats, block: int, room: float, usable: Bools) -> bool:
    """Returns whether a usable device that can run the block has room for it."""
    need = p.resident_bytes[block] + p.other_bytes[block]
    for device in range(len(residents)):
        can = usable[device] and p.tasks.allowed[block, device]
        if can and residents[device] + others[device] + need <= room * p.memory_bytes[device]:
            return True
    return False


@kernel
def place_blocks(p: BlockTasks, scorer: Scorer, noise: Floats, wanted: Ints, room: float, usable: Bools) -> Placed:
    """Returns the placement of highest score plus `noise` [blocks, devices], one block after another.

    `wanted` [blocks] are devices that are given, -1 where the network decides. Of unused devices that can be swapped only
    the first is open, and of those that have too little left of a share `room` of their memory only if all have. Devices
    that are not `usable` [devices] are open to blocks that can run nowhere else. Ties go to the lowest device.
    """
    tasks = p.tasks
    num_blocks, num_devices = p.block_seconds.shape
    num_ops = len(p.ops)
    width = len(scorer.last)
    placement = np.full(num_blocks, -1, np.int64)
    features = np.zeros((num_blocks, num_devices, FEATURES))
    is_open = np.zeros((num_blocks, num_devices), np.bool_)
    op_finish, hidden = np.zeros(num_ops), np.zeros(width)
    begins, ends = np.zeros((num_devices, num_ops)), np.zeros((num_devices, num_ops))  # busy times
    counts = np.zeros(num_devices, np.int64)
    try_begins, try_ends = np.zeros((num_devices, num_ops)), np.zeros((num_devices, num_ops))
    try_counts, try_finish = np.zeros(num_devices, np.int64), np.zeros((num_devices, num_ops))
    starts, stops = np.zeros(num_devices), np.zeros(num_devices)
    busy, residents, others = np.zeros(num_devices), np.zeros(num_devices), np.zeros(num_devices)
    is_used = np.zeros(num_devices, np.bool_)
    total = max(p.total_seconds, 1e-30)
    makespan, work, before = 0.0, 0.0, -1
    for i in range(num_blocks):
        block = p.sequence[i]
        own = max(p.fastest_seconds[block], SMALL * total)
        first_start, first_stop, least_busy = np.inf, np.inf, np.inf
        for device in range(num_devices):
            if not tasks.allowed[block, device]:
                continue
            if not is_used[device] and device != wanted[block]:
                is_twin = False
                for lower in range(device):
                    can = usable[lower] and tasks.allowed[block, lower]
                    if p.classes[lower] == p.classes[device] and not is_used[lower] and can:
                        is_twin = True
                if is_twin:
                    continue
            is_closed = not usable[device] and device != wanted[block]
            if is_closed and _is_usable(p, usable, block):
                continue
            expected = residents[device] + others[device] + p.resident_bytes[block] + p.other_bytes[block]
            if (
                expected > room * p.memory_bytes[device]
                and device != wanted[block]
                and _has_room(p, residents, others, block, room, usable)
            ):
                continue
            is_open[i, device] = True
            count = counts[device]
            try_begins[device, :count] = begins[device, :count]
            try_ends[device, :count] = ends[device, :count]
            starts[device], stops[device], try_counts[device] = _try(
                p, placement, op_finish, block, device, try_begins[device], try_ends[device], count, try_finish[device]
            )
            first_start, first_stop = min(first_start, starts[device]), min(first_stop, stops[device])
            least_busy = min(least_busy, busy[device])
        best, best_score = -1, -np.inf
        for device in range(num_devices):
            if not is_open[i, device]:
                continue
            x = features[i, device]
            in_seconds, in_here, in_known = _moved(p, p.inputs, placement, block, device, False)
            out_seconds, _, _ = _moved(p, p.outputs, placement, block, device, True)
            home_seconds, home_here, home_known = _moved(p, p.residents, placement, block, device, False)
            visit_seconds, visit_here, visit_known = _moved(p, p.visitors, placement, block, device, True)
            resident_seconds = home_seconds + visit_seconds
            memory = max(p.memory_bytes[device], 1.0)
            x[0] = _squash((stops[device] - first_stop) / own)
            x[1] = _squash(10.0 * (stops[device] - first_stop) / total)
            x[2] = _squash((starts[device] - first_start) / own)
            x[3] = min(busy[device] / total, FULL)
            x[4] = _squash(10.0 * (busy[device] - least_busy) / total)
            slower = (p.block_seconds[block, device] + SMALL * total) / (p.fastest_seconds[block] + SMALL * total)
            x[5] = min(np.log(slower), SLOWEST) / 3.0
            x[6] = _squash(in_seconds / own)
            x[7] = _squash(10.0 * in_seconds / total)
            x[8] = in_here / in_known if in_known > 0.0 else 0.0
            x[9] = _squash(resident_seconds / own)
            x[10] = _squash(10.0 * resident_seconds / total)
            shared = home_known + visit_known
            x[11] = (home_here + visit_here) / shared if shared > 0.0 else 0.0
            x[12] = _squash(10.0 * out_seconds / total)
            x[13] = min((residents[device] + p.resident_bytes[block]) / memory, FULL)
            x[14] = min((residents[device] + others[device] + p.resident_bytes[block] + p.other_bytes[block]) / memory, FULL)
            x[15] = 1.0 if x[13] > 1.0 else 0.0
            x[16] = 1.0 if device == before else 0.0
            x[17] = 0.0 if is_used[device] else 1.0
            x[18] = 1.0 if stops[device] <= first_stop else 0.0
            x[19] = _squash(10.0 * max(stops[device] - makespan, 0.0) / total)
            last = ends[device, counts[device] - 1] if counts[device] else 0.0
            x[20] = last / makespan if makespan > 0.0 else 0.0
            x[21] = i / num_blocks
            x[22] = work / total
            x[23] = busy[device] / makespan if makespan > 0.0 else 0.0
            x[24] = _squash(5.0 * makespan / total)
            score = noise[block, device] + _score(scorer, block, device, x, hidden)
            if best < 0 or score > best_score:  # a score that is not a number never makes a block homeless
                best, best_score = device, score
        best = wanted[block] if wanted[block] >= 0 else best
        placement[block] = best
        for k in range(p.op_ends[block], p.op_ends[block + 1]):
            op_finish[p.ops[k]] = try_finish[best, p.ops[k]]
        count = try_counts[best]
        begins[best, :count], ends[best, :count], counts[best] = try_begins[best, :count], try_ends[best, :count], count
        busy[best] += p.block_seconds[block, best]
        residents[best] += p.resident_bytes[block]
        others[best] += p.other_bytes[block]
        is_used[best] = True
        work += p.fastest_seconds[block]
        makespan, before = max(makespan, stops[best]), best
    return Placed(placement, features, is_open)
