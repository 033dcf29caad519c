"""Moves of a walk, drawn in compiled code: changes to a placement or to a launch order.

The kinds: one group to another device; two groups that swap their devices; a group to the device of a neighbour; a chain of
neighbours; a slice of the launch order; a block, i.e. a set of groups that the model's structure suggests; and two that only
change the launch order: an op is launched earlier with all that it needs, or later with all that need it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Floats, Ints, Ragged
from placewise.core.problem import Problem
from placewise.simulate.compile import borrowing
from placewise.simulate.flat_problem import Int32s, tensor_groups, unique_reads

GROUP, SWAP, NEIGHBOUR, CHAIN, SLICE, BLOCK, HASTEN, DELAY = range(8)

Randomness = NDArray[np.uint64]  # [1], the state of a xorshift generator


class Moves(NamedTuple):
    """What moves are drawn from."""

    movable: Int32s  # groups that can run on several devices
    choice_ends: Int32s  # [groups + 1]
    choices: Int32s  # the devices that each group can run on
    allowed: NDArray[np.bool_]  # [groups, devices]
    neighbour_ends: Int32s  # [groups + 1]
    neighbours: Int32s  # groups that exchange a tensor with each group
    block_ends: Int32s  # [blocks + 1]
    blocks: Int32s  # groups
    member_ends: Int32s  # [groups + 1]
    members: Int32s  # the blocks that each group is in
    op_ends: Int32s  # [groups + 1]
    ops: Int32s  # of each group
    touch_ends: Int32s  # [groups + 1]
    touching: Int32s  # the ops whose times a move of each group can change first: its own, and those that read its tensors
    before_ends: Int32s  # [ops + 1]
    before: Int32s  # the ops that must be launched before each op
    behind_ends: Int32s  # [ops + 1]
    behind: Int32s  # the ops that must be launched after each op


class Picked(NamedTuple):
    """A move that was drawn, and how to undo it."""

    groups: Int32s  # [groups], of which the first ones are in the move
    devices: Int32s  # [groups], where they were
    targets: Int32s  # [groups], where they go
    seen: Ints  # [groups], the last move that each group was in


class Undone(NamedTuple):
    """A window of the launch order as it was."""

    order: Int32s  # [ops]
    seen: Ints  # [ops], the last reordering that each op was in


def build_moves(problem: Problem, partitions: Sequence[Ints]) -> Moves:
    """Returns the moves of a problem; each partition [groups] has the block of each group."""
    allowed = np.ascontiguousarray(problem.allowed)
    rows, devices = np.nonzero(allowed)
    choices = Ragged.grouped(rows, devices, problem.num_groups)
    reading, read = unique_reads(problem.graph.ops.reads)
    source, target = tensor_groups(problem)[read], problem.op_groups[reading]
    pairs = np.stack([source, target])[:, (source != target) & (source >= 0)]
    pairs = np.unique(np.concatenate([pairs, pairs[::-1]], axis=1), axis=1)
    neighbours = Ragged.grouped(pairs[0], pairs[1], problem.num_groups)
    blocks = [Ragged.grouped(part, np.arange(len(part)), int(part.max(initial=-1)) + 1) for part in partitions]
    members = [row for block in blocks for row in np.split(block.values, block.offsets[1:-1]) if len(row) > 1]
    ops = problem.graph.ops
    writers, readers, _ = problem.graph.edges
    earlier, later = np.concatenate([writers, ops.after.values]), np.concatenate([readers, ops.after.rows])
    before = Ragged.grouped(later, earlier, problem.num_ops)
    behind = Ragged.grouped(earlier, later, problem.num_ops)
    touched = np.concatenate([problem.op_groups, source[source >= 0]])
    touching = Ragged.grouped(
        touched, np.concatenate([np.arange(problem.num_ops), reading[source >= 0]]), problem.num_groups
    )
    ops_of = Ragged.grouped(problem.op_groups, np.arange(problem.num_ops), problem.num_groups)
    block_of = np.repeat(np.arange(len(members)), [len(row) for row in members])
    membership = Ragged.grouped(
        np.concatenate([*members, np.zeros(0, np.int64)]).astype(np.int64), block_of, problem.num_groups
    )
    return Moves(
        movable=np.flatnonzero(allowed.sum(axis=1) > 1).astype(np.int32),
        choice_ends=choices.offsets.astype(np.int32),
        choices=choices.values.astype(np.int32),
        allowed=allowed,
        neighbour_ends=neighbours.offsets.astype(np.int32),
        neighbours=neighbours.values.astype(np.int32),
        block_ends=np.cumsum([0, *map(len, members)]).astype(np.int32),
        blocks=np.concatenate([*members, np.zeros(0, np.int64)]).astype(np.int32),
        member_ends=membership.offsets.astype(np.int32),
        members=membership.values.astype(np.int32),
        op_ends=ops_of.offsets.astype(np.int32),
        ops=ops_of.values.astype(np.int32),
        touch_ends=touching.offsets.astype(np.int32),
        touching=touching.values.astype(np.int32),
        before_ends=before.offsets.astype(np.int32),
        before=before.values.astype(np.int32),
        behind_ends=behind.offsets.astype(np.int32),
        behind=behind.values.astype(np.int32),
    )


def new_picked(num_groups: int) -> Picked:
    """Returns scratch memory for a move."""
    groups, devices, targets = np.zeros((3, num_groups), np.int32)
    return Picked(groups, devices, targets, np.zeros(num_groups, np.int64))


def new_undone(num_ops: int) -> Undone:
    """Returns scratch memory for a window."""
    return Undone(np.zeros(num_ops, np.int32), np.zeros(num_ops, np.int64))


@borrowing
def below(random: Randomness, limit: int) -> Any:
    """Returns a whole number from 0 to limit - 1, drawn evenly (xorshift64*, Vigna 2016)."""
    x = random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    random[0] = x
    return np.int64((x * np.uint64(2685821657736338717) >> np.uint64(33)) % np.uint64(limit))


@borrowing
def unit(random: Randomness) -> float:
    """Returns a number above 0 and at most 1, drawn evenly."""
    return float(below(random, 1 << 30) + 1) / (1 << 30)


@borrowing
def draw_kind(weights: Ints, random: Randomness) -> int:
    """Returns a kind of move, drawn by its weight [kinds]."""
    lot, kind = below(random, weights.sum()), 0
    while lot >= weights[kind]:
        lot -= weights[kind]
        kind += 1
    return kind


@borrowing
def first_position(moves: Moves, positions: Int32s, group: int) -> int:
    """Returns the first position in the launch order whose time a move of a group can change."""
    first = len(positions)
    for i in range(moves.touch_ends[group], moves.touch_ends[group + 1]):
        first = min(first, positions[moves.touching[i]])
    return first


@borrowing
def draw_op(order: Int32s, random: Randomness, latest: Floats, ends: Floats, focus: float) -> Any:
    """Returns a random position; with probability `focus`, that of the op with the least slack of eight."""
    position = below(random, len(order))
    if unit(random) <= focus:
        for _ in range(7):
            other = below(random, len(order))
            if latest[order[other]] - ends[order[other]] < latest[order[position]] - ends[order[position]]:
                position = other
    return position


@borrowing
def reorder(
    moves: Moves, order: Int32s, positions: Int32s, first: int, last: int, hastens: bool, undone: Undone, stamp: int
) -> bool:
    """Reorders a window of the launch order; returns whether that changes it. `undone` gets the window as it was.

    Either the window's last op, with all that it needs, is launched before all others; or its first op, with all that need
    it, is launched after all others.
    """
    seen, old = undone.seen, undone.order
    for position in range(first, last + 1):
        old[position - first] = order[position]
    num_seen = 0
    for step in range(last - first + 1):
        n = old[last - first - step] if hastens else old[step]
        is_in = step == 0
        if hastens:
            for i in range(moves.behind_ends[n], moves.behind_ends[n + 1]):
                is_in |= seen[moves.behind[i]] == stamp
        else:
            for i in range(moves.before_ends[n], moves.before_ends[n + 1]):
                is_in |= seen[moves.before[i]] == stamp
        if is_in:
            seen[n] = stamp
            num_seen += 1
    if num_seen == last - first + 1:
        return False
    front = first
    back = first + (num_seen if hastens else last - first + 1 - num_seen)
    for entry in range(last - first + 1):
        n = old[entry]
        if (seen[n] == stamp) == hastens:
            order[front] = n
            positions[n] = front
            front += 1
        else:
            order[back] = n
            positions[n] = back
            back += 1
    return True


@borrowing
def put_back(order: Int32s, positions: Int32s, first: int, last: int, undone: Undone) -> None:
    """Restores the window of the launch order."""
    for position in range(first, last + 1):
        n = undone.order[position - first]
        order[position] = n
        positions[n] = position


@borrowing
def draw_move(
    moves: Moves, op_groups: Int32s, order: Int32s, devices: NDArray[np.int16], random: Randomness,
    latest: Floats, ends: Floats, focus: float, kind: int, longest: int, picked: Picked, stamp: int,
) -> int:  # fmt: skip
    """Draws a move of a kind into `picked`; returns how many groups it has.

    A slice has at most `longest` ops. `stamp` is larger than that of any move before.
    """
    count = 0
    group = op_groups[order[draw_op(order, random, latest, ends, focus)]]
    if kind in (GROUP, SWAP) and len(moves.movable) and below(random, 2):  # any group, also one without ops
        group = moves.movable[below(random, len(moves.movable))]
    first, size = moves.choice_ends[group], moves.choice_ends[group + 1] - moves.choice_ends[group]
    target = moves.choices[first + below(random, size)]
    if kind in (NEIGHBOUR, CHAIN):
        for _ in range(8):  # a neighbour that is elsewhere
            begin, end = moves.neighbour_ends[group], moves.neighbour_ends[group + 1]
            if begin < end:
                other = devices[moves.neighbours[begin + below(random, end - begin)]]
                if other != devices[group] and moves.allowed[group, other]:
                    target = other
                    break
            group = op_groups[order[draw_op(order, random, latest, ends, focus)]]
    if kind == BLOCK and len(moves.block_ends) > 1:
        begin, end = moves.member_ends[group], moves.member_ends[group + 1]
        if begin == end:
            return 0
        block = moves.members[begin + below(random, end - begin)]
        only = devices[group] if below(random, 2) else -1  # the whole block, or only its groups on this device
        begin, end = moves.block_ends[block], moves.block_ends[block + 1]
        if below(random, 2):  # only a part of the block
            begin += below(random, end - begin)
            end = min(end, begin + 1 + int((end - begin) ** unit(random)))
        for i in range(begin, end):
            count = _pick(moves, devices, picked, stamp, count, moves.blocks[i], only, target)
    elif kind == SLICE:
        length = int(longest ** unit(random))
        begin = draw_op(order, random, latest, ends, focus)
        only = devices[op_groups[order[begin]]]
        for position in range(begin, min(begin + length, len(order))):
            count = _pick(moves, devices, picked, stamp, count, op_groups[order[position]], only, target)
    else:
        here = devices[group]
        count = _pick(moves, devices, picked, stamp, count, group, here, target)
        if kind == SWAP and count:
            other = op_groups[order[below(random, len(order))]]
            if devices[other] == target:
                count = _pick(moves, devices, picked, stamp, count, other, target, here)
        if kind == CHAIN:
            for _ in range(below(random, 30)):
                begin, end = moves.neighbour_ends[group], moves.neighbour_ends[group + 1]
                if begin == end:
                    break
                group = moves.neighbours[begin + below(random, end - begin)]
                count = _pick(moves, devices, picked, stamp, count, group, here, target)
    return count


@borrowing
def _pick(
    moves: Moves, devices: NDArray[np.int16], picked: Picked, stamp: int, count: int, group: int, only: int, target: int
) -> int:
    """Adds a group to a move if it is on device `only` (-1: any), not yet at the target, and can go there."""
    here = devices[group]
    if here == target or (only >= 0 and here != only) or not moves.allowed[group, target] or picked.seen[group] == stamp:
        return count
    picked.seen[group] = stamp
    picked.groups[count] = group
    picked.devices[count] = here
    picked.targets[count] = target
    return count + 1
