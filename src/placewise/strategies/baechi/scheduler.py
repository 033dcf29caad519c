"""The scheduler of m-ETF and m-SCT (Jeon et al., SoCC 2020), compiled.

Again and again it starts the op that can start earliest where it fits. Every device has queues of the ops that wait for no
other op: `ready` ones could start now, `later` ones are sorted by a guess of their start, which is a lower bound as devices
and channels only get busier, and `blocked` ones do not fit.
"""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.simulate.compile import inner, kernel
from placewise.simulate.dependencies import Dependencies
from placewise.simulate.flat_problem import FlatProblem
from placewise.simulate.kernels import arrival_time

NEVER = -1.0  # the arrival of a copy, or the end of an op, that is not scheduled yet
NOBODY = -1  # no op


class Case(NamedTuple):
    """What to schedule, and where it may run.

    A copy waits for the machine's channels and takes both of its link at once; or, with `device_queues`, it waits in
    Baechi's one queue of each device for all that it sends and receives, first the sender's and then the receiver's, and an
    estimate takes the copies of an op for independent.
    """

    flat: FlatProblem
    device_queues: bool
    waits: Dependencies
    allowed: Bools  # [groups, devices]
    favourites: Ints  # [ops], the favourite child of each op, which its device waits for, or -1
    member_ends: Ints  # [groups + 1], group g has the ops member_ends[g] .. member_ends[g + 1] of `members`
    members: Ints  # [ops]
    ranks: Ints  # [ops], a topological order that decides ties: the lowest rank comes first
    by_rank: Ints  # [ops], the op of each rank


class State(NamedTuple):
    """What has been scheduled so far."""

    devices: Ints  # [groups], or -1
    order: Ints  # [ops], as they were scheduled
    ends: Floats  # [ops], or NEVER
    released: Floats  # [ops], the end of the last op that each op must come after
    pending: Ints  # [ops], how many values and ops each op still waits for
    arrivals: Floats  # [values * devices], or NEVER
    free: Floats  # [devices]
    busy: Floats  # [channels], or [devices] with device queues
    trial: Floats  # as `busy`, scratch memory for a trial of it
    used: Ints  # [devices], bytes
    uses: Ints  # [storages], how many uses of each are still to come
    last: Ints  # [devices], the op that a device ran last, or -1


class Heaps(NamedTuple):
    """A heap for each device; the op with the smallest key is on top, at index 0; ties go to the lowest rank."""

    keys: Floats  # [devices, capacity]
    ranks: Ints  # [devices, capacity], of the ops
    counts: Ints  # [devices]


class Queues(NamedTuple):
    """The ops that wait for no other op, by device. An op may be in several; it counts while `_is_here` is true."""

    later: Heaps  # by a guess of the start
    ready: Heaps  # by rank: those that could start now
    blocked: Ints  # [devices, capacity], ops without room
    num_blocked: Ints  # [devices]


@kernel
def schedule_earliest(case: Case) -> State:
    """Returns the schedule that always starts the op that can start earliest where it fits.

    Ties go to the lowest rank and then to the lowest device. If nothing fits, `_forced_pair` decides.
    """
    num_ops, num_devices = len(case.members), case.flat.num_devices
    state = _new_state(case)
    capacity = 2 * num_ops + 1  # an op is queued when it waits for no other op, and when its group is bound
    queues = Queues(
        _new_heaps(num_devices, capacity),
        _new_heaps(num_devices, capacity),
        np.zeros((num_devices, capacity), np.int64),
        np.zeros(num_devices, np.int64),
    )
    for value in case.waits.residents:
        for wait in range(case.waits.reader_ends[value], case.waits.reader_ends[value + 1]):
            state.pending[case.waits.readers[wait]] -= 1
    for n in range(num_ops):
        if state.pending[n] == 0:
            _queue_op(case, state, queues, n)
    for position in range(num_ops):
        start, n, device = _best_pair(case, state, queues)
        if n < 0:
            start, n, device = _forced_pair(case, state, queues)
        _schedule(case, state, queues, n, device, start)
        state.order[position] = n
        _release_followers(case, state, queues, n)
    return state


@kernel
def _new_state(case: Case) -> State:
    """Returns the state before the first op."""
    flat, waits = case.flat, case.waits
    num_ops, num_devices = len(flat.op_groups), flat.num_devices
    num_queues = num_devices if case.device_queues else flat.num_channels
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
        np.zeros(num_queues),
        np.zeros(num_queues),
        np.zeros(num_devices, np.int64),
        uses,
        np.full(num_devices, NOBODY, np.int64),
    )


@inner
def _best_pair(case: Case, state: State, queues: Queues) -> tuple[float, int, int]:
    """Returns the start, op and device of what can start earliest, or (inf, -1, -1) if nothing fits."""
    best_start, best, best_device = np.inf, NOBODY, NOBODY
    for device in range(case.flat.num_devices):
        start, n = _awaited_op(case, state, device)
        if n < 0:
            start, n = _next_op(case, state, queues, device)
        elif start > state.free[device]:
            sooner, other = _urgent_op(case, state, queues, device, start)
            if other >= 0:
                start, n = sooner, other
        if n >= 0 and (start < best_start or (start == best_start and case.ranks[n] < case.ranks[best])):
            best_start, best, best_device = start, n, device
    return best_start, best, best_device


@inner
def _next_op(case: Case, state: State, queues: Queues, device: int) -> tuple[float, int]:
    """Returns the start of the op that can start earliest on a device, and the op, or (inf, -1); ties go to the lowest rank.

    Ops that do not fit become blocked.
    """
    later, ready, free = queues.later, queues.ready, state.free[device]
    while later.counts[device] > 0 or ready.counts[device] > 0:
        guess = later.keys[device, 0] if later.counts[device] > 0 else np.inf
        from_later = guess <= free or ready.counts[device] == 0
        queue = later if from_later else ready
        n = case.by_rank[queue.ranks[device, 0]]
        start = _earliest_start(case, state, n, device) if _is_here(case, state, n, device) else NEVER
        fits = start >= 0.0 and _has_room(case, state, n, device)
        if fits and guess > free and start <= (guess if from_later else free):
            return start, n
        _pop(queue, device)
        if fits and start <= free:
            _push(ready, device, float(case.ranks[n]), case.ranks[n])
        elif fits:
            _push(later, device, start, case.ranks[n])
        elif start >= 0.0:
            queues.blocked[device, queues.num_blocked[device]] = n
            queues.num_blocked[device] += 1
    return np.inf, NOBODY


@inner
def _awaited_op(case: Case, state: State, device: int) -> tuple[float, int]:
    """Returns the start of the favourite child that a device waits for, and the child, or (inf, -1).

    It waits if all that the child needs is scheduled, and the child fits and can't start earlier elsewhere.
    """
    child = case.favourites[state.last[device]] if state.last[device] >= 0 else NOBODY
    if child < 0 or state.pending[child] > 0 or not _is_here(case, state, child, device):
        return np.inf, NOBODY
    places = case.allowed[case.flat.op_groups[child]]
    if not places[device] or not _has_room(case, state, child, device):
        return np.inf, NOBODY
    start = _earliest_start(case, state, child, device)
    for other in range(case.flat.num_devices):
        elsewhere = other != device and places[other] and _is_here(case, state, child, other)
        if elsewhere and _earliest_start(case, state, child, other) < start:
            return np.inf, NOBODY
    return start, child


@inner
def _urgent_op(case: Case, state: State, queues: Queues, device: int, before: float) -> tuple[float, int]:
    """Returns the earliest time at which an op could start on each of its devices, and that op, or (inf, -1).

    The time must be before `before`; ties go to the lowest rank.
    """
    num_later = queues.later.counts[device]
    best, chosen = before, NOBODY
    for i in range(num_later + queues.ready.counts[device]):
        rank = queues.later.ranks[device, i] if i < num_later else queues.ready.ranks[device, i - num_later]
        n = case.by_rank[rank]
        if not _is_here(case, state, n, device) or not _has_room(case, state, n, device):
            continue
        group, time = case.flat.op_groups[n], state.free[device]
        for other in range(case.flat.num_devices):
            is_place = other == device or (state.devices[group] < 0 and case.allowed[group, other])
            if is_place and time <= best:  # a later time can't be the best
                time = max(time, _earliest_start(case, state, n, other))
        if time < best or (time == best and chosen >= 0 and rank < case.ranks[chosen]):
            best, chosen = time, n
    return (best, chosen) if chosen >= 0 else (np.inf, NOBODY)


@inner
def _forced_pair(case: Case, state: State, queues: Queues) -> tuple[float, int, int]:
    """Returns the lowest blocked op, and of its devices the one with the most memory left; ties go to the lowest."""
    flat, n = case.flat, len(case.members)
    for device in range(flat.num_devices):
        for i in range(queues.num_blocked[device]):
            if _is_here(case, state, queues.blocked[device, i], device):
                n = min(n, queues.blocked[device, i])
    most, best = 0, NOBODY
    for device in range(flat.num_devices):
        room = flat.memory_bytes[device] - state.used[device]
        if case.allowed[flat.op_groups[n], device] and (best < 0 or room > most):
            most, best = room, device
    return 0.0, n, best


@inner
def _schedule(case: Case, state: State, queues: Queues, n: int, device: int, not_before: float) -> None:
    """Schedules an op on a device with the copies that it needs; resident inputs without a device are bound there too."""
    flat, waits = case.flat, case.waits
    _bind(case, state, queues, flat.op_groups[n], device)
    for entry in range(waits.input_ends[n], waits.input_ends[n + 1]):
        _bind(case, state, queues, waits.value_groups[waits.input_values[entry]], device)
    ready = _inputs_ready(case, state, n, device, state.busy, True)
    start = max(ready, state.free[device], not_before)
    state.ends[n] = start + flat.op_seconds[n * flat.num_devices + device]
    state.free[device], state.last[device] = state.ends[n], n
    state.used[device] += flat.made_bytes[n]
    for touch in range(flat.touch_ends[n], flat.touch_ends[n + 1]):
        _use(case, state, queues, flat.touch_storages[touch])
    for read in range(flat.read_ends[n], flat.read_ends[n + 1]):
        if flat.read_storages[read] >= 0:
            _use(case, state, queues, flat.read_storages[read])


@inner
def _bind(case: Case, state: State, queues: Queues, group: int, device: int) -> None:
    """Binds a group without a device to this one, with its resident tensors; its ops are no longer blocked there."""
    if state.devices[group] < 0 and case.allowed[group, device]:
        state.devices[group] = device
        state.used[device] += case.flat.resident_bytes[group]
        for member in range(case.member_ends[group], case.member_ends[group + 1]):
            n = case.members[member]
            if state.pending[n] == 0 and state.ends[n] < 0.0:
                _push(queues.later, device, 0.0, case.ranks[n])


@inner
def _use(case: Case, state: State, queues: Queues, storage: int) -> None:
    """Counts a use of a storage; the last one frees its memory, and ops that fit now are no longer blocked."""
    state.uses[storage] -= 1
    if state.uses[storage] > 0 or case.flat.storage_bytes[storage] == 0:
        return
    device = state.devices[case.flat.storage_groups[storage]]
    state.used[device] -= case.flat.storage_bytes[storage]
    blocked, kept = queues.blocked[device], 0
    for i in range(queues.num_blocked[device]):
        n = blocked[i]
        if _is_here(case, state, n, device):
            if _has_room(case, state, n, device):
                _push(queues.later, device, 0.0, case.ranks[n])
            else:
                blocked[kept] = n
                kept += 1
    queues.num_blocked[device] = kept


@inner
def _release_followers(case: Case, state: State, queues: Queues, n: int) -> None:
    """Queues the ops that only waited for this one."""
    waits = case.waits
    for follower in range(waits.follower_ends[n], waits.follower_ends[n + 1]):
        behind = int(waits.followers[follower])
        state.released[behind] = max(state.released[behind], state.ends[n])
        state.pending[behind] -= 1
        if state.pending[behind] == 0:
            _queue_op(case, state, queues, behind)
    for output in range(waits.output_ends[n], waits.output_ends[n + 1]):
        value = waits.outputs[output]
        for wait in range(waits.reader_ends[value], waits.reader_ends[value + 1]):
            behind = int(waits.readers[wait])
            state.pending[behind] -= 1
            if state.pending[behind] == 0:
                _queue_op(case, state, queues, behind)


@inner
def _queue_op(case: Case, state: State, queues: Queues, n: int) -> None:
    """Puts an op that waits for no other op into the queues of the devices where it can run."""
    for device in range(case.flat.num_devices):
        if case.allowed[case.flat.op_groups[n], device] and _is_here(case, state, n, device):
            _push(queues.later, device, _earliest_start(case, state, n, device), case.ranks[n])


@inner
def _earliest_start(case: Case, state: State, n: int, device: int) -> float:
    """Returns when an op could start on a device, after everything that is scheduled."""
    flat, waits = case.flat, case.waits
    for entry in range(waits.input_ends[n], waits.input_ends[n + 1]):  # only the channels that its copies can take
        there = state.devices[waits.value_groups[waits.input_values[entry]]]
        if there >= 0 and case.device_queues:
            state.trial[there], state.trial[device] = state.busy[there], state.busy[device]
        elif there >= 0 and there != device:
            link = there * flat.num_devices + device
            channel, second = flat.channels[link], flat.second_channels[link]
            state.trial[channel], state.trial[second] = state.busy[channel], state.busy[second]
    free: float = state.free[device]
    return max(_inputs_ready(case, state, n, device, state.trial, False), free)


@inner
def _inputs_ready(case: Case, state: State, n: int, device: int, busy: Floats, keep: bool) -> float:
    """Returns when all inputs of an op are on a device; writes `busy` [channels], and with `keep` also the arrivals.

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
            seconds = arrival_time(0.0, waits.value_bytes[value], flat.latency_seconds[link], flat.bytes_per_second[link])
            if case.device_queues:
                sent = max(made, busy[there])
                arrival = max(sent, busy[device]) + seconds
                if keep:
                    busy[there], busy[device] = sent + seconds, arrival
            else:
                channel, second = flat.channels[link], flat.second_channels[link]
                arrival = max(made, busy[channel], busy[second]) + seconds
                busy[channel] = arrival
                busy[second] = arrival
                arrival += flat.delay_seconds[link]
            if keep:
                state.arrivals[value * flat.num_devices + device] = arrival
        ready = max(ready, arrival)
    return ready


@inner
def _is_here(case: Case, state: State, n: int, device: int) -> bool:
    """Returns whether an op is not scheduled yet, and not bound to another device."""
    bound: int = state.devices[case.flat.op_groups[n]]
    waits: bool = state.ends[n] < 0.0
    return waits and (bound < 0 or bound == device)


@inner
def _has_room(case: Case, state: State, n: int, device: int) -> bool:
    """Returns whether a device has memory for an op; an op that is bound to it has to run there."""
    if state.devices[case.flat.op_groups[n]] == device:
        return True
    room: int = case.flat.memory_bytes[device] - state.used[device]
    return _needed_bytes(case, state, n, device) <= room


@inner
def _needed_bytes(case: Case, state: State, n: int, device: int) -> int:
    """Returns the bytes that an op takes on a device: what it makes, and the resident tensors that come with it."""
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


@kernel
def _new_heaps(num_devices: int, capacity: int) -> Heaps:
    """Returns empty heaps."""
    shape = (num_devices, capacity)
    return Heaps(np.zeros(shape), np.zeros(shape, np.int64), np.zeros(num_devices, np.int64))


@inner
def _push(heaps: Heaps, device: int, key: float, rank: int) -> None:
    """Adds an op, by its rank, to a device's heap."""
    keys, ranks, i = heaps.keys[device], heaps.ranks[device], heaps.counts[device]
    heaps.counts[device] += 1
    while i > 0:
        parent = (i - 1) // 2
        if keys[parent] < key or (keys[parent] == key and ranks[parent] <= rank):
            break
        keys[i], ranks[i] = keys[parent], ranks[parent]
        i = parent
    keys[i], ranks[i] = key, rank


@inner
def _pop(heaps: Heaps, device: int) -> None:
    """Removes the top of a device's heap."""
    keys, ranks, size = heaps.keys[device], heaps.ranks[device], heaps.counts[device] - 1
    heaps.counts[device] = size
    key, rank, i = keys[size], ranks[size], 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        other = child + 1
        if other < size and (keys[other] < keys[child] or (keys[other] == keys[child] and ranks[other] < ranks[child])):
            child = other
        if key < keys[child] or (key == keys[child] and rank <= ranks[child]):
            break
        keys[i], ranks[i] = keys[child], ranks[child]
        i = child
    keys[i], ranks[i] = key, rank
