"""What changes to a placement are judged with: who uses what, the placement that is changed, and a workspace."""

from typing import Any, NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints, Ragged
from placewise.simulate.tables import Small, Tables


class Uses(NamedTuple):
    """Who uses what, in launch order; made for one order."""

    positions: Small  # [ops], each op's place in the order
    first_positions: Small  # [groups], of the ops that a move of the group can touch
    op_ends: Small  # [groups + 1]
    ops: Small  # of each group
    storage_ends: Small  # [groups + 1]
    storages: Small  # of each group
    copy_ends: Small  # [groups + 1]
    copies: Small  # copied tensors that are with each group
    use_ends: Small  # [storages + 1]
    use_ops: Small  # ops that use each storage, in launch order
    use_copies: Small  # the copied tensor that they read, or -1: they are of the storage's own group
    reader_ends: Small  # [copied tensors + 1]
    readers: Small  # ops of other groups that read each copied tensor, in launch order
    copy_groups: Small  # [copied tensors], the group that each is with
    makers: Small  # [storages], the op that makes it
    sizes: Ints  # [storages], bytes
    kept: Any  # [storages], whether it lives to the end


class Base(NamedTuple):
    """The placement that changes start from, and what it makes."""

    devices: Any  # [groups]
    step_seconds: float
    ends: Floats  # [ops]
    launch_at: Small  # [places]
    arrivals: Floats  # [places]
    last_use: Small  # [storages], a position
    copy_last_use: Small  # [places], a position
    resident: Ints  # [devices], bytes in use before the first launch
    peak: Ints  # [devices]
    usage: Ints  # [devices, ops], bytes in use at each launch
    block_peaks: Ints  # [devices, blocks]


class ChangeWorkspace(NamedTuple):
    """What judging a change writes on."""

    group_seen: Ints  # [groups], the last change that looked at it
    storage_seen: Ints  # [storages]
    copy_seen: Ints  # [copied tensors]
    place_seen: Ints  # [places]
    event_device: Small  # [events]
    event_at: Small  # [events], a position from which usage differs by event_bytes
    event_bytes: Ints  # [events]
    copy_first: Small  # [devices]
    copy_last: Small  # [devices]


def build_uses(tables: Tables, order: Small, num_groups: int) -> Uses:
    """Returns who uses what when the ops are launched in this order."""
    num_ops, num_storages, num_copied = len(order), len(tables.storage_bytes), len(tables.copy_bytes)
    positions = np.empty(num_ops, np.int32)
    positions[order] = np.arange(num_ops, dtype=np.int32)
    reading = np.repeat(np.arange(num_ops), np.diff(tables.read_ends))
    touching = np.repeat(np.arange(num_ops), np.diff(tables.touch_ends))
    copy_groups = np.zeros(num_copied, np.int64)
    copy_groups[tables.read_copies] = tables.read_groups

    first = np.full(num_groups, num_ops, np.int64)
    np.minimum.at(first, tables.op_groups, positions)
    np.minimum.at(first, tables.read_groups, positions[reading])

    of_step = tables.read_storages >= 0
    users = np.concatenate([reading[of_step], touching])
    used = np.concatenate([tables.read_storages[of_step], tables.touch_storages]).astype(np.int64)
    of_copy = np.concatenate([tables.read_copies[of_step], np.full(len(touching), -1)])
    in_order = np.argsort(positions[users], kind="stable")
    uses = Ragged.grouped(used[in_order], in_order, num_storages)
    by_position = np.argsort(positions[reading], kind="stable")
    readers = Ragged.grouped(tables.read_copies[by_position].astype(np.int64), reading[by_position], num_copied)
    ops, storages, copies = (
        Ragged.grouped(groups.astype(np.int64), np.arange(len(groups)), num_groups)
        for groups in (tables.op_groups, tables.storage_groups, copy_groups)
    )
    return Uses(
        positions=positions,
        first_positions=small(first),
        op_ends=small(ops.offsets),
        ops=small(ops.values),
        storage_ends=small(storages.offsets),
        storages=small(storages.values),
        copy_ends=small(copies.offsets),
        copies=small(copies.values),
        use_ends=small(uses.offsets),
        use_ops=small(users[uses.values]),
        use_copies=small(of_copy[uses.values]),
        reader_ends=small(readers.offsets),
        readers=small(readers.values),
        copy_groups=small(copy_groups),
        makers=tables.storage_makers,
        sizes=tables.storage_sizes,
        kept=tables.storage_bytes < tables.storage_sizes,
    )


def small(column: Any) -> Small:
    """Returns a column in 32 bits."""
    return np.ascontiguousarray(column, np.int32)


def new_change_workspace(tables: Tables, uses: Uses) -> ChangeWorkspace:
    """Returns a workspace for judging changes."""
    places = len(tables.copy_bytes) * tables.num_devices
    most_events = 4 * (len(tables.storage_bytes) + places + 2 * len(uses.first_positions)) + 16
    return ChangeWorkspace(
        np.zeros(len(uses.first_positions), np.int64),
        np.zeros(len(tables.storage_bytes), np.int64),
        np.zeros(len(tables.copy_bytes), np.int64),
        np.zeros(places, np.int64),
        np.zeros(most_events, np.int32),
        np.zeros(most_events, np.int32),
        np.zeros(most_events, np.int64),
        np.zeros(tables.num_devices, np.int32),
        np.zeros(tables.num_devices, np.int32),
    )
