"""What small changes to one placement cost, exact to the last bit, without simulating all of it again.

Time: nothing before the first op that a change touches can differ, so the pass begins there, from a saved state. Memory: a
change moves, lengthens or shortens the lives of a few storages and copies; the peak is then the largest over the pieces
between their ends, each the old peak of that piece (kept by blocks) plus what changed in it.
"""

from typing import Any

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.simulate.change_tables import Base, ChangeWorkspace, Uses
from placewise.simulate.kernels import (
    UNLAUNCHED,
    MemoryWorkspace,
    Snapshots,
    Workspace,
    borrowing,
    kernel,
    peak_bytes,
    run_from,
)
from placewise.simulate.tables import Small, Tables

STRIDE = 32  # positions between saved states
BLOCK = 64  # positions that share one kept peak


@kernel
def make_base(tables: Tables, order: Small, work: Workspace, memory: MemoryWorkspace, snapshots: Snapshots) -> Base:
    """Returns the base of the placement in `work.devices`, fills the snapshots, and leaves the base in the workspace."""
    num_ops, num_devices = len(order), tables.num_devices
    work.free[:] = 0.0
    work.busy[:] = 0.0
    work.launch_at[:] = UNLAUNCHED
    step, num_copies = run_from(tables, order, 0, 0.0, work, memory, snapshots, None)
    timeline = np.zeros((num_ops, num_devices), np.int64)
    peak = np.zeros(num_devices, np.int64)
    last_use = memory.last_use.copy()
    for storage in range(len(last_use)):
        if last_use[storage] < 0:
            last_use[storage] = ~last_use[storage]
    peak_bytes(tables, work, memory, num_copies, peak, timeline)
    for i in range(num_copies):
        work.launch_at[work.launched[i]] += num_ops
    usage = np.zeros((num_devices, num_ops), np.int64)
    block_peaks = np.zeros((num_devices, num_ops // BLOCK + 1), np.int64)
    for device in range(num_devices):
        for position in range(num_ops):
            usage[device, position] = timeline[position, device]
            block = position // BLOCK
            block_peaks[device, block] = max(block_peaks[device, block], usage[device, position])
    resident = np.zeros(num_devices, np.int64)
    resident[0] = tables.floating_bytes
    for g in range(len(tables.resident_bytes)):
        resident[work.devices[g]] += tables.resident_bytes[g]
    return Base(
        work.devices.copy(), step, work.ends.copy(), work.launch_at.copy(), work.arrivals.copy(),
        last_use, memory.copy_last_use.copy(),
        resident, peak, usage, block_peaks,
    )  # fmt: skip


@kernel
def run_changes(
    tables: Tables, uses: Uses, order: Small, base: Base, snapshots: Snapshots, work: Workspace, changes: ChangeWorkspace,
    ends: Small, groups: Small, devices: Small, rows: Small, stamp: int, step_seconds: Floats, peaks: Any,
) -> None:  # fmt: skip
    """Writes the step's seconds [changes] and, unless None, the peak bytes [changes, devices] of changes to a base.

    Change c puts `groups[ends[c]:ends[c + 1]]` on `devices[...]`. `rows` are the changes, those that touch the latest ops
    first: then what is before the first op that a change touches is always as in the base. The workspace holds the base
    before and after. `stamp` must be larger than that of any call before, by the number of changes then.
    """
    for i in range(len(rows)):
        row, first, is_moved = rows[i], len(order), False
        for entry in range(ends[row], ends[row + 1]):
            work.devices[groups[entry]] = devices[entry]
            first = min(first, uses.first_positions[groups[entry]])
            is_moved |= base.devices[groups[entry]] != devices[entry]
        if first == len(order) or not is_moved:
            step_seconds[row] = base.step_seconds
        else:
            number = first // snapshots.stride
            work.free[:] = snapshots.free[number]
            work.busy[:] = snapshots.busy[number]
            step_seconds[row], num_copies = run_from(
                tables, order, number * snapshots.stride, snapshots.host[number], work, None, None, None
            )
            for c in range(num_copies):
                place = work.launched[c]
                work.launch_at[place] = base.launch_at[place]
                work.arrivals[place] = base.arrivals[place]
        if peaks is not None:
            change_peaks(
                tables, uses, base, work.devices, changes, groups[ends[row] : ends[row + 1]], stamp + i + 1, peaks[row]
            )
        for entry in range(ends[row], ends[row + 1]):
            work.devices[groups[entry]] = base.devices[groups[entry]]
    work.ends[:] = base.ends


@borrowing
def change_peaks(
    tables: Tables, uses: Uses, base: Base, devices: Any, changes: ChangeWorkspace, moved: Small, stamp: int, peak: Ints
) -> None:
    """Writes the peak bytes [devices] when the `moved` groups are where `devices` says, all others as in the base."""
    count = 0
    for entry in range(len(moved)):
        g = moved[entry]
        if base.devices[g] == devices[g] or changes.group_seen[g] == stamp:
            continue
        changes.group_seen[g] = stamp
        for i in range(uses.storage_ends[g], uses.storage_ends[g + 1]):
            count = _storage_events(tables, uses, base, devices, changes, uses.storages[i], stamp, count)
        for i in range(uses.copy_ends[g], uses.copy_ends[g + 1]):
            count = _copy_events(tables, uses, base, devices, changes, uses.copies[i], stamp, count)
        for i in range(uses.op_ends[g], uses.op_ends[g + 1]):
            n = uses.ops[i]
            for read in range(tables.read_ends[n], tables.read_ends[n + 1]):
                if tables.read_storages[read] >= 0:
                    storage = tables.read_storages[read]
                    count = _storage_events(tables, uses, base, devices, changes, storage, stamp, count)
                count = _copy_events(tables, uses, base, devices, changes, tables.read_copies[read], stamp, count)
        if tables.resident_bytes[g] > 0:
            count = _add_event(changes, count, base.devices[g], -1, -tables.resident_bytes[g])
            count = _add_event(changes, count, devices[g], -1, tables.resident_bytes[g])
    for device in range(len(peak)):
        peak[device] = base.peak[device]
    if count:
        _sort_events(changes, count)
        _sweep(base, changes, count, peak)


@borrowing
def _add_event(changes: ChangeWorkspace, count: int, device: int, position: int, nbytes: int) -> int:
    """Notes that from a position on (-1: before the first launch) a device's usage differs by so many bytes."""
    changes.event_device[count] = device
    changes.event_at[count] = position
    changes.event_bytes[count] = nbytes
    return count + 1


@borrowing
def _add_life(changes: ChangeWorkspace, count: int, device: int, first: int, last: int, nbytes: int) -> int:
    """Notes that a device has more (or fewer) bytes in use from one launch to another, both included."""
    return _add_event(changes, _add_event(changes, count, device, first, nbytes), device, last + 1, -nbytes)


@borrowing
def _storage_events(
    tables: Tables, uses: Uses, base: Base, devices: Any, changes: ChangeWorkspace, storage: int, stamp: int, count: int
) -> int:
    """Notes how the life of a storage differs, once for each change."""
    if changes.storage_seen[storage] == stamp:
        return count
    changes.storage_seen[storage] = stamp
    g = tables.storage_groups[storage]
    here, first = devices[g], uses.positions[uses.makers[storage]]
    last, old_last = first, base.last_use[storage]
    for use in range(uses.use_ends[storage], uses.use_ends[storage + 1]):
        n, copy = uses.use_ops[use], uses.use_copies[use]
        reader = devices[tables.op_groups[n]]
        if copy < 0 or reader == here:
            last = uses.positions[n]
        else:
            place = copy * tables.num_devices + reader
            if changes.place_seen[place] != stamp:  # the first reader there makes the copy
                changes.place_seen[place] = stamp
                last = uses.positions[n]
    if uses.kept[storage]:
        last = old_last = len(uses.positions) - 1
    if here != base.devices[g] or last != old_last:
        count = _add_life(changes, count, base.devices[g], first, old_last, -uses.sizes[storage])
        count = _add_life(changes, count, here, first, last, uses.sizes[storage])
    return count


@borrowing
def _copy_events(
    tables: Tables, uses: Uses, base: Base, devices: Any, changes: ChangeWorkspace, copy: int, stamp: int, count: int
) -> int:
    """Notes how the lives of a tensor's copies differ, once for each change."""
    if changes.copy_seen[copy] == stamp:
        return count
    changes.copy_seen[copy] = stamp
    there, nbytes, firsts, lasts = (
        devices[uses.copy_groups[copy]],
        tables.copy_bytes[copy],
        changes.copy_first,
        changes.copy_last,
    )
    for device in range(tables.num_devices):
        firsts[device] = UNLAUNCHED
    for i in range(uses.reader_ends[copy], uses.reader_ends[copy + 1]):
        n = uses.readers[i]
        reader = devices[tables.op_groups[n]]
        if reader != there:
            lasts[reader] = uses.positions[n]
            if firsts[reader] == UNLAUNCHED:
                firsts[reader] = uses.positions[n]
    for device in range(tables.num_devices):
        place = copy * tables.num_devices + device
        old_first, old_last = base.launch_at[place], base.copy_last_use[place]
        if old_first != firsts[device] or (old_first != UNLAUNCHED and old_last != lasts[device]):
            if old_first != UNLAUNCHED:
                count = _add_life(changes, count, device, old_first, old_last, -nbytes)
            if firsts[device] != UNLAUNCHED:
                count = _add_life(changes, count, device, firsts[device], lasts[device], nbytes)
    return count


@borrowing
def _sort_events(changes: ChangeWorkspace, count: int) -> None:
    """Sorts events by device and position: by insertion, there are few."""
    for i in range(1, count):
        device, position, nbytes = changes.event_device[i], changes.event_at[i], changes.event_bytes[i]
        j = i - 1
        while j >= 0 and (
            changes.event_device[j] > device or (changes.event_device[j] == device and changes.event_at[j] > position)
        ):
            changes.event_device[j + 1] = changes.event_device[j]
            changes.event_at[j + 1] = changes.event_at[j]
            changes.event_bytes[j + 1] = changes.event_bytes[j]
            j -= 1
        changes.event_device[j + 1], changes.event_at[j + 1], changes.event_bytes[j + 1] = device, position, nbytes


@borrowing
def _sweep(base: Base, changes: ChangeWorkspace, count: int, peak: Ints) -> None:
    """Writes the new peaks of the devices that have events, sorted by device and position."""
    num_ops, i = base.usage.shape[1], 0
    while i < count:
        device, difference, position = changes.event_device[i], 0, -1
        highest = -1
        while i < count and changes.event_device[i] == device:
            at = changes.event_at[i]
            if at > position:
                highest = max(highest, difference + _highest(base, device, position, min(at, num_ops)))
                position = at
            difference += changes.event_bytes[i]
            i += 1
        if position < num_ops:
            highest = max(highest, difference + _highest(base, device, position, num_ops))
        peak[device] = highest


@borrowing
def _highest(base: Base, device: int, first: int, last: int) -> int:
    """Returns the most bytes in use on a device from one position (-1: before the first launch) to before another."""
    usage, block_peaks = base.usage, base.block_peaks
    highest = 0
    position = first
    if position < 0:
        highest = base.resident[device]
        position = 0
    while position < last:
        if position % BLOCK == 0 and position + BLOCK <= last:
            highest = max(highest, block_peaks[device, position // BLOCK])
            position += BLOCK
        else:
            highest = max(highest, usage[device, position])
            position += 1
    return highest
