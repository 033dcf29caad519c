"""The scheduler behind m-ETF and m-SCT (Jeon et al., SoCC 2020), compiled."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.simulate.compile import inner, kernel
from placewise.simulate.dependencies import Dependencies
from placewise.simulate.flat_problem import FlatProblem
from placewise.simulate.kernels import arrival_time

NEVER = -1.0  # the arrival of a copy, or the end of an op, that is not there yet

NOBODY = -1


class Case(NamedTuple):
    """What is to be scheduled, and where it may run."""

    flat: FlatProblem
    waits: Dependencies
    allowed: Bools  # [groups, devices]
    favourites: Ints  # [ops], the child for which a device waits after an op, or -1
    member_ends: Ints  # [groups + 1], group g has the ops member_ends[g] .. member_ends[g + 1] of `members`
    members: Ints  # [ops]


class State(NamedTuple):
    """What has been scheduled so far."""

    devices: Ints  # [groups], or -1
    order: Ints  # [ops], as they were scheduled
    ends: Floats  # [ops], or NEVER
    released: Floats  # [ops], the end of the last op that an op must stay behind
    pending: Ints  # [ops], how many values and ops each op waits for
    arrivals: Floats  # [values * devices], or NEVER
    free: Floats  # [devices]
    busy: Floats  # [channels]
    trial: Floats  # [channels], to write on
    used: Ints  # [devices], bytes
    uses: Ints  # [storages], how often each will still be used
    last: Ints  # [devices], the op that a device ran last, or -1


@kernel
def new_state(case: Case) -> State:
    """Returns the state before the first op."""
    flat, waits = case.flat, case.waits
    num_ops, num_devices = len(flat.op_groups), flat.num_devices
    uses = np.zeros(len(flat.storage_bytes), np.int64)
    for storage in flat.touch_storages:
        uses[storage] += 1
    for storage in flat.read_storages:
        if storage >= 0:
            uses[storage] += 1
    return State(
        np.full(len(flat.resident_bytes), -1, np.int64),
        np.zeros(num_ops, np.int64),
        np.full(num_ops, NEVER),
        np.zeros(num_ops),
        waits.pending.astype(np.int64),
        np.full(len(waits.value_bytes) * num_devices, NEVER),
        np.zeros(num_devices),
        np.zeros(flat.num_channels),
        np.zeros(flat.num_channels),
        np.zeros(num_devices, np.int64),
        uses,
        np.full(num_devices, NOBODY, np.int64),
    )


@inner
def _inputs_ready(case: Case, state: State, n: int, device: int, busy: Floats, keep: bool) -> float:
    """Returns when all inputs of an op are on a device; `busy` [channels] is written, and if `keep` also the arrivals.

    A resident tensor whose home has no device yet is there at once.
    """
    flat, waits = case.flat, case.waits
    ready: float = state.released[n]
    for entry in range(waits.input_ends[n], waits.input_ends[n + 1]):
        value, maker = waits.input_values[entry], waits.input_makers[entry]
        there = state.devices[waits.value_groups[value]]
        made = state.ends[maker] if maker >= 0 else 0.0
        if there < 0 or there == device:
            ready = max(ready, made)
            continue
        arrival = state.arrivals[value * flat.num_devices + device]
        if arrival < 0.0:
            link = there * flat.num_devices + device
            channel = flat.channels[link]
            seconds = arrival_time(0.0, waits.value_bytes[value], flat.latency_seconds[link], flat.bytes_per_second[link])
            arrival = max(made, busy[channel]) + seconds
            busy[channel] = arrival
            if keep:
                state.arrivals[value * flat.num_devices + device] = arrival
        ready = max(ready, arrival)
    return ready


@inner
def earliest_start(case: Case, state: State, n: int, device: int) -> float:
    """Returns when an op could start on a device, after all that is scheduled."""
    for channel in range(len(state.busy)):
        state.trial[channel] = state.busy[channel]
    free: float = state.free[device]
    return max(_inputs_ready(case, state, n, device, state.trial, False), free)


@inner
def is_here(case: Case, state: State, n: int, device: int) -> bool:
    """Returns whether an op is still to be scheduled, and not bound to another device."""
    bound: int = state.devices[case.flat.op_groups[n]]
    waits: bool = state.ends[n] < 0.0
    return waits and (bound < 0 or bound == device)


@inner
def needed_bytes(case: Case, state: State, n: int, device: int) -> int:
    """Returns what an op takes on a device: what it makes, and the resident tensors that come there with it."""
    flat, waits = case.flat, case.waits
    group = flat.op_groups[n]
    needed: int = flat.made_bytes[n] + (flat.resident_bytes[group] if state.devices[group] < 0 else 0)
    for entry in range(waits.input_ends[n], waits.input_ends[n + 1]):
        home = waits.value_groups[waits.input_values[entry]]
        counted = home == group or state.devices[home] >= 0 or not case.allowed[home, device]
        for before in range(waits.input_ends[n], entry):
            counted = counted or waits.value_groups[waits.input_values[before]] == home
        if not counted:
            needed += flat.resident_bytes[home]
    return needed


@inner
def has_room(case: Case, state: State, n: int, device: int) -> bool:
    """Returns whether an op may run on a device; one that is bound to it must."""
    if state.devices[case.flat.op_groups[n]] == device:
        return True
    room: int = case.flat.memory_bytes[device] - state.used[device]
    return needed_bytes(case, state, n, device) <= room


class Heaps(NamedTuple):
    """A heap for each device: the op of the smallest key is on top, at place 0; ties go to the lowest op."""

    keys: Floats  # [devices, capacity]
    ops: Ints  # [devices, capacity]
    counts: Ints  # [devices]


@kernel
def new_heaps(num_devices: int, capacity: int) -> Heaps:
    """Returns empty heaps."""
    shape = (num_devices, capacity)
    return Heaps(np.zeros(shape), np.zeros(shape, np.int64), np.zeros(num_devices, np.int64))


@inner
def push(heaps: Heaps, device: int, key: float, op: int) -> None:
    """Adds an op to a device's heap."""
    keys, ops, i = heaps.keys[device], heaps.ops[device], heaps.counts[device]
    heaps.counts[device] += 1
    while i > 0:
        parent = (i - 1) // 2
        if keys[parent] < key or (keys[parent] == key and ops[parent] <= op):
            break
        keys[i], ops[i] = keys[parent], ops[parent]
        i = parent
    keys[i], ops[i] = key, op


@inner
def pop(heaps: Heaps, device: int) -> None:
    """Takes the top off a device's heap."""
    keys, ops, size = heaps.keys[device], heaps.ops[device], heaps.counts[device] - 1
    heaps.counts[device] = size
    key, op, i = keys[size], ops[size], 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        other = child + 1
        if other < size and (keys[other] < keys[child] or (keys[other] == keys[child] and ops[other] < ops[child])):
            child = other
        if key < keys[child] or (key == keys[child] and op <= ops[child]):
            break
        keys[i], ops[i] = keys[child], ops[child]
        i = child
    keys[i], ops[i] = key, op


class Queues(NamedTuple):
    """The ops that wait for nothing more, by device. An op may stand in several; it counts while `is_here` says so."""

    later: Heaps  # by the guessed start
    ready: Heaps  # by index
    blocked: Ints  # [devices, capacity], ops without room
    num_blocked: Ints  # [devices]


@inner
def next_op(case: Case, state: State, queues: Queues, device: int) -> tuple[float, int]:
    """Returns the op that can start earliest on a device and its start, or (inf, -1); ties go to the lowest op.

    Ops without room become blocked.
    """
    later, ready, free = queues.later, queues.ready, state.free[device]
    while later.counts[device] > 0 or ready.counts[device] > 0:
        guess = later.keys[device, 0] if later.counts[device] > 0 else np.inf
        from_later = guess <= free or ready.counts[device] == 0
        queue = later if from_later else ready
        n = queue.ops[device, 0]
        start = earliest_start(case, state, n, device) if is_here(case, state, n, device) else NEVER
        fits = start >= 0.0 and has_room(case, state, n, device)
        if fits and guess > free and start <= (guess if from_later else free):
            return start, n
        pop(queue, device)
        if fits and start <= free:
            push(ready, device, float(n), n)
        elif fits:
            push(later, device, start, n)
        elif start >= 0.0:
            queues.blocked[device, queues.num_blocked[device]] = n
            queues.num_blocked[device] += 1
    return np.inf, NOBODY


@inner
def awaited_op(case: Case, state: State, device: int) -> tuple[float, int]:
    """Returns the favourite child that a device waits for and its start, or (inf, -1).

    It waits if all that the child needs is scheduled, and the child fits and can start nowhere earlier.
    """
    child = case.favourites[state.last[device]] if state.last[device] >= 0 else NOBODY
    if child < 0 or state.pending[child] > 0 or not is_here(case, state, child, device):
        return np.inf, NOBODY
    places = case.allowed[case.flat.op_groups[child]]
    if not places[device] or not has_room(case, state, child, device):
        return np.inf, NOBODY
    start = earliest_start(case, state, child, device)
    for other in range(case.flat.num_devices):
        elsewhere = other != device and places[other] and is_here(case, state, child, other)
        if elsewhere and earliest_start(case, state, child, other) < start:
            return np.inf, NOBODY
    return start, child


@inner
def urgent_op(case: Case, state: State, queues: Queues, device: int, before: float) -> tuple[float, int]:
    """Returns the op that could start by the earliest time on whichever of its devices, and that time, or (inf, -1).

    The time must be before `before`; ties go to the lowest op.
    """
    num_later = queues.later.counts[device]
    best, chosen = before, NOBODY
    for i in range(num_later + queues.ready.counts[device]):
        n = queues.later.ops[device, i] if i < num_later else queues.ready.ops[device, i - num_later]
        if not is_here(case, state, n, device) or not has_room(case, state, n, device):
            continue
        group, time = case.flat.op_groups[n], state.free[device]
        for other in range(case.flat.num_devices):
            is_place = other == device or (state.devices[group] < 0 and case.allowed[group, other])
            if is_place and time <= best:  # a later one can't be chosen
                time = max(time, earliest_start(case, state, n, other))
        if time < best or (time == best and n < chosen):
            best, chosen = time, n
    return (best, chosen) if chosen >= 0 else (np.inf, NOBODY)


@inner
def best_pair(case: Case, state: State, queues: Queues) -> tuple[float, int, int]:
    """Returns the start, the op and the device of what can start earliest, or (inf, -1, -1) if nothing fits."""
    best_start, best, best_device = np.inf, NOBODY, NOBODY
    for device in range(case.flat.num_devices):
        start, n = awaited_op(case, state, device)
        if n < 0:
            start, n = next_op(case, state, queues, device)
        elif start > state.free[device]:
            sooner, other = urgent_op(case, state, queues, device, start)
            if other >= 0:
                start, n = sooner, other
        if n >= 0 and (start < best_start or (start == best_start and n < best)):
            best_start, best, best_device = start, n, device
    return best_start, best, best_device


@inner
def forced_pair(case: Case, state: State, queues: Queues) -> tuple[float, int, int]:
    """Returns the lowest blocked op, and the device with most memory left where it may run; ties go to the lowest."""
    flat, n = case.flat, len(case.members)
    for device in range(flat.num_devices):
        for i in range(queues.num_blocked[device]):
            if is_here(case, state, queues.blocked[device, i], device):
                n = min(n, queues.blocked[device, i])
    most, best = 0, NOBODY
    for device in range(flat.num_devices):
        room = flat.memory_bytes[device] - state.used[device]
        if case.allowed[flat.op_groups[n], device] and (best < 0 or room > most):
            most, best = room, device
    return 0.0, n, best


@inner
def queue_op(case: Case, state: State, queues: Queues, n: int) -> None:
    """Puts an op that waits for nothing more into the heaps of the devices where it can run."""
    for device in range(case.flat.num_devices):
        if case.allowed[case.flat.op_groups[n], device] and is_here(case, state, n, device):
            push(queues.later, device, earliest_start(case, state, n, device), n)


@inner
def bind(case: Case, state: State, queues: Queues, group: int, device: int) -> None:
    """Puts a group on a device with its resident tensors, if it has none; its ops are no longer blocked there."""
    if state.devices[group] < 0 and case.allowed[group, device]:
        state.devices[group] = device
        state.used[device] += case.flat.resident_bytes[group]
        for member in range(case.member_ends[group], case.member_ends[group + 1]):
            n = case.members[member]
            if state.pending[n] == 0 and state.ends[n] < 0.0:
                push(queues.later, device, 0.0, n)


@inner
def release(case: Case, state: State, queues: Queues, storage: int) -> None:
    """Counts a use of a storage; the last one gives its memory back, and ops that now fit are no longer blocked."""
    state.uses[storage] -= 1
    if state.uses[storage] > 0 or case.flat.storage_bytes[storage] == 0:
        return
    device = state.devices[case.flat.storage_groups[storage]]
    state.used[device] -= case.flat.storage_bytes[storage]
    blocked, kept = queues.blocked[device], 0
    for i in range(queues.num_blocked[device]):
        n = blocked[i]
        if is_here(case, state, n, device):
            if has_room(case, state, n, device):
                push(queues.later, device, 0.0, n)
            else:
                blocked[kept] = n
                kept += 1
    queues.num_blocked[device] = kept


@inner
def run_op(case: Case, state: State, queues: Queues, n: int, device: int, not_before: float) -> None:
    """Schedules an op on a device with the copies that it needs; what is resident and has no device comes there too."""
    flat, waits = case.flat, case.waits
    bind(case, state, queues, flat.op_groups[n], device)
    for entry in range(waits.input_ends[n], waits.input_ends[n + 1]):
        bind(case, state, queues, waits.value_groups[waits.input_values[entry]], device)
    ready = _inputs_ready(case, state, n, device, state.busy, True)
    start = max(ready, state.free[device], not_before)
    state.ends[n] = start + flat.op_seconds[n * flat.num_devices + device]
    state.free[device], state.last[device] = state.ends[n], n
    state.used[device] += flat.made_bytes[n]
    for touch in range(flat.touch_ends[n], flat.touch_ends[n + 1]):
        release(case, state, queues, flat.touch_storages[touch])
    for read in range(flat.read_ends[n], flat.read_ends[n + 1]):
        if flat.read_storages[read] >= 0:
            release(case, state, queues, flat.read_storages[read])


@inner
def tell_waiting(case: Case, state: State, queues: Queues, n: int) -> None:
    """Queues the ops that waited for this one alone."""
    waits = case.waits
    for follower in range(waits.follower_ends[n], waits.follower_ends[n + 1]):
        behind = int(waits.followers[follower])
        state.released[behind] = max(state.released[behind], state.ends[n])
        state.pending[behind] -= 1
        if state.pending[behind] == 0:
            queue_op(case, state, queues, behind)
    for output in range(waits.output_ends[n], waits.output_ends[n + 1]):
        value = waits.outputs[output]
        for wait in range(waits.reader_ends[value], waits.reader_ends[value + 1]):
            behind = int(waits.readers[wait])
            state.pending[behind] -= 1
            if state.pending[behind] == 0:
                queue_op(case, state, queues, behind)


@kernel
def schedule_earliest(case: Case) -> State:
    """Returns the schedule that starts, again and again, the op that can start earliest where it fits.

    Ties go to the lowest op and then to the lowest device. Where nothing fits, `forced_pair` says what is next.
    """
    num_ops, num_devices = len(case.members), case.flat.num_devices
    state = new_state(case)
    capacity = 2 * num_ops + 1  # an op is queued when it waits for nothing more, and when its group is bound
    queues = Queues(
        new_heaps(num_devices, capacity),
        new_heaps(num_devices, capacity),
        np.zeros((num_devices, capacity), np.int64),
        np.zeros(num_devices, np.int64),
    )
    for value in case.waits.residents:
        for wait in range(case.waits.reader_ends[value], case.waits.reader_ends[value + 1]):
            state.pending[case.waits.readers[wait]] -= 1
    for n in range(num_ops):
        if state.pending[n] == 0:
            queue_op(case, state, queues, n)
    for position in range(num_ops):
        start, n, device = best_pair(case, state, queues)
        if n < 0:
            start, n, device = forced_pair(case, state, queues)
        run_op(case, state, queues, n, device, start)
        state.order[position] = n
        tell_waiting(case, state, queues, n)
    return state
