"""A walk from placement to placement, compiled: simulated annealing whose trials simulate only what a move can change.

A trial begins at the last saved state before the first op that the move touches. It ends early once the move can't be taken
any more: when an op ends too late, by the `latest` ends or by the least time from that op to the end of the step.
"""

from typing import Any, NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.simulate.compile import borrowing, kernel
from placewise.simulate.flat_problem import FlatProblem, Int32s
from placewise.simulate.kernels import (
    UNLAUNCHED,
    Cutoff,
    MemoryWorkspace,
    Snapshots,
    Workspace,
    departure_time,
    forget_copies,
    new_memory_workspace,
    new_workspace,
    peak_bytes,
    simulate_from,
    simulate_order,
)
from placewise.strategies.auto.moves import (
    DELAY,
    HASTEN,
    Moves,
    Picked,
    Randomness,
    Undone,
    draw_kind,
    draw_move,
    draw_op,
    first_position,
    new_picked,
    new_undone,
    put_back,
    reorder,
    unit,
)

STRIDE = 32  # positions between saved states
SMALL = 64  # groups of a move whose trial may end early by the latest ends; larger moves change these too much
FAR = 1024.0  # seconds that are added to the latest ends of ops in a move, so that they do not end its trial
STALE = 16  # moves that are taken before the latest ends are computed again


class Trail(NamedTuple):
    """The times of the placement that a walk is at, from its last pass."""

    ends: Floats  # [ops]
    launch_at: Int32s  # [places]
    arrivals: Floats  # [places]
    launched: Int32s  # [places], in launch order
    num_launched: Ints  # [1], of `launched`
    restored: Ints  # [1], the workspace's ends are those of the trail before this position
    latest: Floats  # [ops], the latest end with which the step takes no longer
    copy_latest: Floats  # [places], the same for copies
    next_free: Floats  # [devices + channels], scratch memory for `latest`


class Walker(NamedTuple):
    """What a walk works on. Between trials `work` agrees with the trail, except for ends after the last trial's start."""

    order: Int32s  # [ops]
    positions: Int32s  # [ops], each op's position in the order
    work: Workspace
    snapshots: Snapshots  # of the trail
    trial: Snapshots  # of the last trial
    trail: Trail
    picked: Picked
    undone: Undone
    random: Randomness
    whole: Workspace  # for whole passes, which count memory
    memory: MemoryWorkspace
    peak: Ints  # [devices]
    copy_prices: Floats  # [places], what each copy costs besides its time, in units of the pace's price
    best: Any  # [groups], the best placement of the walk
    best_order: Int32s  # [ops]


class Pace(NamedTuple):
    """How a walk goes: its length, temperatures and moves."""

    trials: int
    first: int  # the number of the first trial: no two trials of a walker have the same
    hot: float  # seconds, the first temperature; a step longer by x is taken with probability exp(-x / temperature)
    cold: float  # seconds, the last temperature
    weights: Ints  # [kinds], how often each kind of move is drawn
    longest: int  # ops of a slice or a window
    focus: float  # share of moves that are drawn where there is little slack
    checks_memory: bool
    price: float  # seconds that a byte over a device's memory costs, if memory is checked
    copy_price: float = 0.0  # seconds; the walker says how many times it each copy costs


def new_walker(flat: FlatProblem, num_groups: int) -> Walker:
    """Returns a walker that has not started yet."""
    num_ops, places = len(flat.op_groups), len(flat.copy_bytes) * flat.num_devices
    trail = Trail(
        ends=np.zeros(num_ops),
        launch_at=np.full(places, UNLAUNCHED, np.int32),
        arrivals=np.zeros(places),
        launched=np.zeros(places, np.int32),
        num_launched=np.zeros(1, np.int64),
        restored=np.zeros(1, np.int64),
        latest=np.zeros(num_ops),
        copy_latest=np.zeros(places),
        next_free=np.zeros(flat.num_devices + flat.num_channels),
    )
    return Walker(
        order=np.zeros(num_ops, np.int32),
        positions=np.zeros(num_ops, np.int32),
        work=new_workspace(flat, num_groups),
        snapshots=_new_snapshots(flat),
        trial=_new_snapshots(flat),
        trail=trail,
        picked=new_picked(num_groups),
        undone=new_undone(num_ops),
        random=np.zeros(1, np.uint64),
        whole=new_workspace(flat, num_groups),
        memory=new_memory_workspace(flat),
        peak=np.zeros(flat.num_devices, np.int64),
        copy_prices=np.ones(places),
        best=np.zeros(num_groups, np.int16),
        best_order=np.zeros(num_ops, np.int32),
    )


def _new_snapshots(flat: FlatProblem) -> Snapshots:
    count = len(flat.op_groups) // STRIDE + 1
    return Snapshots(STRIDE, *(np.zeros((count, size)) for size in (flat.num_devices, flat.num_channels, flat.num_hosts)))


@kernel
def walk(flat: FlatProblem, moves: Moves, early: Floats, walker: Walker, pace: Pace) -> tuple[float, int]:
    """Walks from the placement in `work.devices` and the order in `order`; returns the best's cost and overflow bytes.

    The cost is the step's seconds and the prices of its copies. The best has the least overflow and then the least cost;
    the walk leaves it in `best` and `best_order`. `early` [ops] is minus the least time from each op's end to the step's.
    """
    order, work, trail = walker.order, walker.work, walker.trail
    num_ops, devices = len(order), walker.work.devices
    current = _start(flat, walker)
    overflow = _overflow(flat, walker) if pace.checks_memory else 0
    paid = _price_from(walker, 0) if pace.copy_price > 0 else 0.0  # for all copies, in units of the price
    best_cost, best_overflow, stale = current + pace.copy_price * paid, overflow, 0
    _keep(walker)
    for i in range(pace.trials):
        temperature = pace.hot * (pace.cold / pace.hot) ** (i / pace.trials)
        kind = draw_kind(pace.weights, walker.random)
        size, first, last = _move(moves, flat.op_groups, walker, pace, kind, pace.first + i + 1)
        if first == num_ops:
            continue
        limit = current + pace.price * overflow - temperature * np.log(unit(walker.random))
        start, later = first // STRIDE * STRIDE, 0.0
        if pace.copy_price > 0:
            later = _price_from(walker, start)
            limit += pace.copy_price * later
        is_small = (size if size else last - first) <= SMALL
        if is_small:
            _excuse(moves, walker, size, first, last, FAR)
            seconds, num_copies = _try(flat, walker, start, Cutoff(trail.latest, limit - current))
            _excuse(moves, walker, size, first, last, -FAR)
        else:
            seconds, num_copies = _try(flat, walker, start, Cutoff(early, limit))
        if pace.copy_price > 0:
            later = _price_of_trial(walker, num_copies)
        is_taken, new_overflow = seconds + pace.copy_price * later <= limit, 0
        if is_taken and pace.checks_memory:
            new_overflow = _overflow(flat, walker)
            is_taken = seconds + pace.copy_price * later + pace.price * new_overflow <= limit
        if is_taken:
            _adopt(walker, start, num_copies)
            stale += 1
            if stale == STALE or seconds < current:
                _find_latest(flat, order, devices, seconds, trail)
                stale = 0
            current, overflow = seconds, new_overflow
            paid = _price_from(walker, 0) if pace.copy_price > 0 else 0.0
            cost = current + pace.copy_price * paid
            if overflow < best_overflow or (overflow == best_overflow and cost < best_cost):
                best_cost, best_overflow = cost, overflow
                _keep(walker)
        else:
            for c in range(num_copies):
                place = work.launched[c]
                work.launch_at[place] = trail.launch_at[place]
                work.arrivals[place] = trail.arrivals[place]
            if size == 0:
                put_back(order, walker.positions, first, last, walker.undone)
            _undo(walker, size)
    return best_cost, best_overflow


@borrowing
def _price_from(walker: Walker, start: int) -> float:
    """Returns what the trail's copies cost that are launched at a position or later, in units of the price."""
    trail, price = walker.trail, 0.0
    count = trail.num_launched[0]
    while count > 0 and trail.launch_at[trail.launched[count - 1]] >= start:
        count -= 1
        price += walker.copy_prices[trail.launched[count]]
    return price


@borrowing
def _price_of_trial(walker: Walker, num_copies: int) -> float:
    """Returns what the copies cost that the last trial has launched, in units of the price."""
    price = 0.0
    for c in range(num_copies):
        price += walker.copy_prices[walker.work.launched[c]]
    return price


@kernel
def _start(flat: FlatProblem, walker: Walker) -> float:
    """Simulates the walker's placement and order, and makes them its trail; returns their seconds."""
    work, trail, order = walker.work, walker.trail, walker.order
    for position in range(len(order)):
        walker.positions[order[position]] = position
    work.launch_at[:] = UNLAUNCHED
    trail.launch_at[:] = UNLAUNCHED
    trail.num_launched[0] = 0
    work.free[:] = 0.0
    work.busy[:] = 0.0
    work.hosts[:] = 0.0
    seconds, num_copies = simulate_from(flat, order, 0, work, None, walker.trial, None)
    _adopt(walker, 0, num_copies)
    _find_latest(flat, order, work.devices, seconds, trail)
    return seconds


@borrowing
def _keep(walker: Walker) -> None:
    """Keeps the walker's placement and order as the best."""
    for group in range(len(walker.best)):
        walker.best[group] = walker.work.devices[group]
    for position in range(len(walker.order)):
        walker.best_order[position] = walker.order[position]


@borrowing
def _move(moves: Moves, op_groups: Int32s, walker: Walker, pace: Pace, kind: int, number: int) -> tuple[int, int, int]:
    """Draws a move and makes it; returns the number of its groups, and the first and the last position of its window.

    A move without groups has reordered its window. If the first position is the number of ops, nothing was done.
    """
    order, positions, devices, picked = walker.order, walker.positions, walker.work.devices, walker.picked
    latest, ends, random, num_ops = walker.trail.latest, walker.trail.ends, walker.random, len(walker.order)
    if kind in (HASTEN, DELAY):
        at = draw_op(order, random, latest, ends, pace.focus if kind == HASTEN else 0.0)
        length = int(pace.longest ** unit(random))
        first, last = (max(at - length, 0), at) if kind == HASTEN else (at, min(at + length, num_ops - 1))
        is_new = reorder(moves, order, positions, first, last, kind == HASTEN, walker.undone, number)
        return 0, first if is_new else num_ops, last
    size = draw_move(moves, op_groups, order, devices, random, latest, ends, pace.focus, kind, pace.longest, picked, number)
    first = num_ops - 1 if size else num_ops  # a group that no op reads from still takes memory
    for entry in range(size):
        first = min(first, first_position(moves, positions, picked.groups[entry]))
        devices[picked.groups[entry]] = picked.targets[entry]
    return size, first, first


@borrowing
def _undo(walker: Walker, size: int) -> None:
    """Puts the groups of a move back on their devices."""
    for entry in range(size):
        walker.work.devices[walker.picked.groups[entry]] = walker.picked.devices[entry]


@borrowing
def _excuse(moves: Moves, walker: Walker, size: int, first: int, last: int, seconds: float) -> None:
    """Adds to the latest ends of the ops in a move or a reordered window, which are in other places of the queues now."""
    latest = walker.trail.latest
    for entry in range(size):
        group = walker.picked.groups[entry]
        for i in range(moves.op_ends[group], moves.op_ends[group + 1]):
            latest[moves.ops[i]] += seconds
    if size == 0:
        for position in range(first, last + 1):
            latest[walker.order[position]] += seconds


@kernel
def _try(flat: FlatProblem, walker: Walker, start: int, cutoff: Cutoff) -> tuple[float, int]:
    """Returns the seconds of a pass from a position, and the number of copies that it launches."""
    order, work, trail, snapshots = walker.order, walker.work, walker.trail, walker.snapshots
    number = start // STRIDE
    for position in range(trail.restored[0], start):  # restores what the last trial wrote
        work.ends[order[position]] = trail.ends[order[position]]
    trail.restored[0] = start
    work.free[:] = snapshots.free[number]
    work.busy[:] = snapshots.busy[number]
    work.hosts[:] = snapshots.hosts[number]
    return simulate_from(flat, order, start, work, None, walker.trial, cutoff)


@borrowing
def _adopt(walker: Walker, start: int, num_copies: int) -> None:
    """Makes a trial that began at `start` the walker's trail."""
    order, work, trail = walker.order, walker.work, walker.trail
    num_ops, count = len(order), trail.num_launched[0]
    while count > 0 and trail.launch_at[trail.launched[count - 1]] >= start:
        count -= 1
        place = trail.launched[count]
        trail.launch_at[place] = UNLAUNCHED
        if work.launch_at[place] >= 0:  # the trial did not launch it
            work.launch_at[place] = UNLAUNCHED
    for c in range(num_copies):
        place = work.launched[c]
        work.launch_at[place] += num_ops
        trail.launch_at[place] = work.launch_at[place]
        trail.arrivals[place] = work.arrivals[place]
        trail.launched[count + c] = place
    trail.num_launched[0] = count + num_copies
    trail.restored[0] = num_ops
    for position in range(start, num_ops):
        trail.ends[order[position]] = work.ends[order[position]]
    trial, snapshots = walker.trial, walker.snapshots
    for number in range(start // STRIDE, (num_ops + STRIDE - 1) // STRIDE):
        for host in range(trial.hosts.shape[1]):
            snapshots.hosts[number, host] = trial.hosts[number, host]
        for device in range(trial.free.shape[1]):
            snapshots.free[number, device] = trial.free[number, device]
        for channel in range(trial.busy.shape[1]):
            snapshots.busy[number, channel] = trial.busy[number, channel]


@borrowing
def _find_latest(flat: FlatProblem, order: Int32s, devices: Any, seconds: float, trail: Trail) -> None:
    """Writes the latest end of each op with which the step takes no longer, if all queues stay as they are."""
    num_devices, op_groups, op_seconds = flat.num_devices, flat.op_groups, flat.op_seconds
    channels, second_channels = flat.channels, flat.second_channels
    read_ends, read_groups, read_copies = flat.read_ends, flat.read_groups, flat.read_copies
    copy_bytes, copy_makers = flat.copy_bytes, flat.copy_makers
    after_ends, after_ops = flat.after_ends, flat.after_ops
    latency, bandwidth, delay = flat.latency_seconds, flat.bytes_per_second, flat.delay_seconds
    latest, copy_latest, next_free, launch_at = trail.latest, trail.copy_latest, trail.next_free, trail.launch_at
    latest[:] = seconds
    next_free[:] = seconds
    for i in range(trail.num_launched[0]):
        copy_latest[trail.launched[i]] = seconds
    for position in range(len(order) - 1, -1, -1):
        n = order[position]
        here = devices[op_groups[n]]
        end = min(latest[n], next_free[here])
        latest[n] = end
        start = end - op_seconds[n * num_devices + here]
        next_free[here] = start
        for after in range(after_ends[n], after_ends[n + 1]):
            latest[after_ops[after]] = min(latest[after_ops[after]], start)
        for read in range(read_ends[n + 1] - 1, read_ends[n] - 1, -1):
            there = devices[read_groups[read]]
            if there != here:
                copy = read_copies[read]
                place = copy * num_devices + here
                copy_latest[place] = min(copy_latest[place], start)
                if launch_at[place] == position:
                    link = there * num_devices + here
                    channel, second = num_devices + channels[link], num_devices + second_channels[link]
                    end = min(copy_latest[place] - delay[link], next_free[channel], next_free[second])
                    begin = departure_time(end, copy_bytes[copy], latency[link], bandwidth[link])
                    next_free[channel] = begin
                    next_free[second] = begin
                    maker = copy_makers[copy]
                    if maker >= 0:
                        latest[maker] = min(latest[maker], begin)


@kernel
def _overflow(flat: FlatProblem, walker: Walker) -> int:
    """Returns the bytes over the devices' memories, added up, from a whole pass."""
    work, peak = walker.whole, walker.peak
    work.devices[:] = walker.work.devices
    _, num_copies = simulate_order(flat, walker.order, work, walker.memory)
    peak_bytes(flat, work, walker.memory, num_copies, peak, None)
    forget_copies(work, num_copies)
    overflow = 0
    for device in range(flat.num_devices):
        overflow += max(peak[device] - flat.memory_bytes[device], 0)
    return overflow
