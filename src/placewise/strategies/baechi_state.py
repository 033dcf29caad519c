"""What m-ETF and m-SCT know while they schedule: when each op could start on each device, and whether it fits there."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.simulate.dependencies import Dependencies
from placewise.simulate.kernels import kernel
from placewise.simulate.tables import Tables
from placewise.strategies.list_compile import inner

NEVER = -1.0  # the arrival of a copy, or the end of an op, that is not there yet
NOBODY = -1


class Case(NamedTuple):
    """What is to be scheduled, and where it may run."""

    tables: Tables
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
    tables, waits = case.tables, case.waits
    num_ops, num_devices = len(tables.op_groups), tables.num_devices
    uses = np.zeros(len(tables.storage_bytes), np.int64)
    for storage in tables.touch_storages:
        uses[storage] += 1
    for storage in tables.read_storages:
        if storage >= 0:
            uses[storage] += 1
    return State(
        np.full(len(tables.resident_bytes), -1, np.int64),
        np.zeros(num_ops, np.int64),
        np.full(num_ops, NEVER),
        np.zeros(num_ops),
        waits.pending.astype(np.int64),
        np.full(len(waits.value_bytes) * num_devices, NEVER),
        np.zeros(num_devices),
        np.zeros(tables.num_channels),
        np.zeros(tables.num_channels),
        np.zeros(num_devices, np.int64),
        uses,
        np.full(num_devices, NOBODY, np.int64),
    )


@inner
def inputs_ready(case: Case, state: State, n: int, device: int, busy: Floats, keep: bool) -> float:
    """Returns when all inputs of an op are on a device; `busy` [channels] is written, and if `keep` also the arrivals.

    A resident tensor whose home has no device yet is there at once.
    """
    tables, waits = case.tables, case.waits
    ready: float = state.released[n]
    for entry in range(waits.input_ends[n], waits.input_ends[n + 1]):
        value, maker = waits.input_values[entry], waits.input_makers[entry]
        there = state.devices[waits.value_groups[value]]
        made = state.ends[maker] if maker >= 0 else 0.0
        if there < 0 or there == device:
            ready = max(ready, made)
            continue
        arrival = state.arrivals[value * tables.num_devices + device]
        if arrival < 0.0:
            link = there * tables.num_devices + device
            channel = tables.channels[link]
            seconds = tables.latency_seconds[link] + waits.value_bytes[value] / tables.bytes_per_second[link]
            arrival = max(made, busy[channel]) + seconds
            busy[channel] = arrival
            if keep:
                state.arrivals[value * tables.num_devices + device] = arrival
        ready = max(ready, arrival)
    return ready


@inner
def earliest_start(case: Case, state: State, n: int, device: int) -> float:
    """Returns when an op could start on a device, after all that is scheduled."""
    for channel in range(len(state.busy)):
        state.trial[channel] = state.busy[channel]
    free: float = state.free[device]
    return max(inputs_ready(case, state, n, device, state.trial, False), free)


@inner
def is_here(case: Case, state: State, n: int, device: int) -> bool:
    """Returns whether an op is still to be scheduled, and not bound to another device."""
    bound: int = state.devices[case.tables.op_groups[n]]
    waits: bool = state.ends[n] < 0.0
    return waits and (bound < 0 or bound == device)


@inner
def needed_bytes(case: Case, state: State, n: int, device: int) -> int:
    """Returns what an op takes on a device: what it makes, and the resident tensors that come there with it."""
    tables, waits = case.tables, case.waits
    group = tables.op_groups[n]
    needed: int = tables.made_bytes[n] + (tables.resident_bytes[group] if state.devices[group] < 0 else 0)
    for entry in range(waits.input_ends[n], waits.input_ends[n + 1]):
        home = waits.value_groups[waits.input_values[entry]]
        counted = home == group or state.devices[home] >= 0 or not case.allowed[home, device]
        for before in range(waits.input_ends[n], entry):
            counted = counted or waits.value_groups[waits.input_values[before]] == home
        if not counted:
            needed += tables.resident_bytes[home]
    return needed


@inner
def has_room(case: Case, state: State, n: int, device: int) -> bool:
    """Returns whether an op may run on a device; one that is bound to it must."""
    if state.devices[case.tables.op_groups[n]] == device:
        return True
    room: int = case.tables.memory_bytes[device] - state.used[device]
    return needed_bytes(case, state, n, device) <= room
