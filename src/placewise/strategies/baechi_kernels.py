"""The scheduler behind m-ETF and m-SCT (Jeon et al., SoCC 2020), compiled.

It starts one op after the other: always that which can start earliest on some device. Copies queue on their channels, in
the order in which the ops that need them are started. *Later* is a heap for each device of ops by the time at which
their inputs would be there, *ready* one by index of those that wait only for the device. A time in a heap is a guess
from when it was put there, because copies of other ops come between; it is renewed when it comes to the top.
"""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints
from placewise.simulate.kernels import kernel
from placewise.strategies.baechi_heaps import Heaps, new_heaps, pop, push
from placewise.strategies.baechi_state import (
    NEVER,
    NOBODY,
    Case,
    State,
    earliest_start,
    has_room,
    inputs_ready,
    is_here,
    new_state,
)
from placewise.strategies.list_compile import inner


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
    places = case.allowed[case.tables.op_groups[child]]
    if not places[device] or not has_room(case, state, child, device):
        return np.inf, NOBODY
    start = earliest_start(case, state, child, device)
    for other in range(case.tables.num_devices):
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
        group, time = case.tables.op_groups[n], state.free[device]
        for other in range(case.tables.num_devices):
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
    for device in range(case.tables.num_devices):
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
    tables, n = case.tables, len(case.members)
    for device in range(tables.num_devices):
        for i in range(queues.num_blocked[device]):
            if is_here(case, state, queues.blocked[device, i], device):
                n = min(n, queues.blocked[device, i])
    most, best = 0, NOBODY
    for device in range(tables.num_devices):
        room = tables.memory_bytes[device] - state.used[device]
        if case.allowed[tables.op_groups[n], device] and (best < 0 or room > most):
            most, best = room, device
    return 0.0, n, best


@inner
def queue_op(case: Case, state: State, queues: Queues, n: int) -> None:
    """Puts an op that waits for nothing more into the heaps of the devices where it can run."""
    for device in range(case.tables.num_devices):
        if case.allowed[case.tables.op_groups[n], device] and is_here(case, state, n, device):
            push(queues.later, device, earliest_start(case, state, n, device), n)


@inner
def bind(case: Case, state: State, queues: Queues, group: int, device: int) -> None:
    """Puts a group on a device with its resident tensors, if it has none; its ops are no longer blocked there."""
    if state.devices[group] < 0 and case.allowed[group, device]:
        state.devices[group] = device
        state.used[device] += case.tables.resident_bytes[group]
        for member in range(case.member_ends[group], case.member_ends[group + 1]):
            n = case.members[member]
            if state.pending[n] == 0 and state.ends[n] < 0.0:
                push(queues.later, device, 0.0, n)


@inner
def release(case: Case, state: State, queues: Queues, storage: int) -> None:
    """Counts a use of a storage; the last one gives its memory back, and ops that now fit are no longer blocked."""
    state.uses[storage] -= 1
    if state.uses[storage] > 0 or case.tables.storage_bytes[storage] == 0:
        return
    device = state.devices[case.tables.storage_groups[storage]]
    state.used[device] -= case.tables.storage_bytes[storage]
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
    tables, waits = case.tables, case.waits
    bind(case, state, queues, tables.op_groups[n], device)
    for entry in range(waits.input_ends[n], waits.input_ends[n + 1]):
        bind(case, state, queues, waits.value_groups[waits.input_values[entry]], device)
    ready = inputs_ready(case, state, n, device, state.busy, True)
    start = max(ready, state.free[device], not_before)
    state.ends[n] = start + tables.op_seconds[n * tables.num_devices + device]
    state.free[device], state.last[device] = state.ends[n], n
    state.used[device] += tables.made_bytes[n]
    for touch in range(tables.touch_ends[n], tables.touch_ends[n + 1]):
        release(case, state, queues, tables.touch_storages[touch])
    for read in range(tables.read_ends[n], tables.read_ends[n + 1]):
        if tables.read_storages[read] >= 0:
            release(case, state, queues, tables.read_storages[read])


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
    num_ops, num_devices = len(case.members), case.tables.num_devices
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
