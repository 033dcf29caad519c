"""Judging changes of optional ops, and a walk through them: compiled, exact in time and memory."""

from typing import Any, NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints, Ragged
from placewise.core.problem import Problem
from placewise.simulate.choices import FlatChoices, Scratch, flatten_choices, new_scratch, simulate_choice
from placewise.simulate.compile import kernel
from placewise.simulate.simulator import missing_bytes
from placewise.strategies.auto.moves import below, unit
from placewise.strategies.options.changes import Changes
from placewise.strategies.options.launch_order import needs

TOGGLE, SWAP, SHIFT, MOVE = range(4)  # kinds of moves


class Orders(NamedTuple):
    """What an op's place in the launch order depends on."""

    before_ends: Ints  # [ops + 1]
    before: Ints  # ops that come before each op
    behind_ends: Ints  # [ops + 1]
    behind: Ints  # ops that come after each op
    optional_ops: Ints  # the ops that may be nowhere


class Result(NamedTuple):
    """What a pass found."""

    seconds: float
    overflow_bytes: int
    area: float  # bytes over the memories, added up over the launches


class Tempo(NamedTuple):
    """How a walk goes."""

    trials: int
    hot: float  # seconds, the first temperature
    cold: float  # seconds, the last one
    price: float  # seconds that a byte over a device's memory costs
    weights: Ints  # [kinds]


class ChoiceModel:
    """A problem with optional ops, ready to judge placements of all its groups in orders of all its ops."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.flat: FlatChoices = flatten_choices(problem)
        self.scratch: Scratch = new_scratch(self.flat)
        earlier, later = needs(problem)
        before, behind = Ragged.grouped(later, earlier, problem.num_ops), Ragged.grouped(earlier, later, problem.num_ops)
        optional = np.flatnonzero(problem.graph.ops.optional)
        self.orders = Orders(
            np.array(before.offsets), np.array(before.values), np.array(behind.offsets), np.array(behind.values), optional
        )
        self._no_usage = np.zeros((0, problem.num_devices), np.int64)

    def judge(self, placement: Ints, order: Ints) -> Result:
        """Returns the result of a placement [groups] in an order [ops]."""
        seconds = simulate_choice(self.flat, placement, order, self.scratch, self._no_usage)
        over = int(missing_bytes(self.scratch.peak, self.flat.memory_bytes))
        return Result(float(seconds), over, float(self.scratch.area[0]))

    def judge_changes(self, placement: Ints, order: Ints, changes: Changes, which: Ints) -> tuple[Floats, Floats]:
        """Returns the seconds and the area with each of some changes made alone: both [which]."""
        seconds, areas = np.zeros(len(which)), np.zeros(len(which))
        _judge_changes(self.flat, placement.copy(), order, changes, which, self.scratch, seconds, areas, self._no_usage)
        return seconds, areas

    def walk(self, placement: Ints, order: Ints, changes: Changes, pace: Tempo, seed: int) -> tuple[Ints, Ints, Result]:
        """Returns the best placement and order that a walk finds, which may be its start; least overflow counts first."""
        movable = np.flatnonzero(self.problem.allowed.sum(axis=1) > 1)
        best, best_order = placement.copy(), order.copy()
        random = np.array([seed or 1], np.uint64)
        seconds, overflow = _walk(
            self.flat, placement.copy(), order.copy(), changes, self.orders, movable, self.problem.allowed,
            self.problem.optional, self.scratch, pace, random, best, best_order, self._no_usage,
        )  # fmt: skip
        return best, best_order, Result(float(seconds), int(overflow), 0.0)


@kernel
def _judge_changes(
    flat: FlatChoices, devices: Ints, order: Ints, changes: Changes, which: Ints, scratch: Scratch,
    seconds: Floats, areas: Floats, usage: Ints,
) -> None:  # fmt: skip
    old = np.zeros(len(devices), np.int64)
    for i in range(len(which)):
        first, last = changes.ends[which[i]], changes.ends[which[i] + 1]
        for c in range(first, last):
            old[c - first] = devices[changes.groups[c]]
            devices[changes.groups[c]] = changes.targets[c]
        seconds[i] = simulate_choice(flat, devices, order, scratch, usage)
        areas[i] = scratch.area[0]
        for c in range(last - 1, first - 1, -1):
            devices[changes.groups[c]] = old[c - first]


@kernel
def _overflow(flat: FlatChoices, scratch: Scratch) -> int:
    overflow = 0
    for d in range(flat.num_devices):
        overflow += max(scratch.peak[d] - flat.memory_bytes[d], 0)
    return overflow


@kernel
def _apply(changes: Changes, change: int, devices: Ints, undo: Ints, count: int, toggles: bool) -> int:
    """Makes a change and notes in `undo` what was there; one that is made already is taken back if it `toggles`."""
    first, last = changes.ends[change], changes.ends[change + 1]
    is_made = toggles
    for c in range(first, last):
        is_made &= devices[changes.groups[c]] == changes.targets[c]
    for c in range(first, last):
        undo[2 * count], undo[2 * count + 1] = changes.groups[c], devices[changes.groups[c]]
        devices[changes.groups[c]] = changes.origins[c] if is_made else changes.targets[c]
        count += 1
    return count


@kernel
def _shift(orders: Orders, order: Ints, positions: Ints, n: int, random: Any) -> tuple[int, int]:
    """Moves an op to another position that its neighbours in the graph allow; returns from where to where."""
    at, low, high = positions[n], 0, len(order) - 1
    for i in range(orders.before_ends[n], orders.before_ends[n + 1]):
        low = max(low, positions[orders.before[i]] + 1)
    for i in range(orders.behind_ends[n], orders.behind_ends[n + 1]):
        high = min(high, positions[orders.behind[i]] - 1)
    to = at
    if below(random, 2) and low < at:
        to = at - min(int((at - low) ** unit(random)), at - low)
    elif high > at:
        to = at + min(int((high - at) ** unit(random)), high - at)
    return at, to


@kernel
def _rotate(order: Ints, positions: Ints, at: int, to: int) -> None:
    n = order[at]
    step = 1 if to > at else -1
    position = at
    while position != to:
        order[position] = order[position + step]
        positions[order[position]] = position
        position += step
    order[to] = n
    positions[n] = to


@kernel
def _walk(
    flat: FlatChoices, devices: Ints, order: Ints, changes: Changes, orders: Orders, movable: Ints, allowed: Bools,
    optional: Bools, scratch: Scratch, pace: Tempo, random: Any, best: Ints, best_order: Ints, usage: Ints,
) -> tuple[float, int]:  # fmt: skip
    """Simulated annealing over changes, places in the order, and single groups; the best is left in `best`, `best_order`."""
    num_changes, num_ops = len(changes.ends) - 1, len(order)
    positions = np.zeros(num_ops, np.int64)
    for position in range(num_ops):
        positions[order[position]] = position
    undo = np.zeros(2 * (2 * len(changes.groups) + 2), np.int64)
    seconds = simulate_choice(flat, devices, order, scratch, usage)
    overflow = _overflow(flat, scratch)
    current = seconds + pace.price * overflow
    best_seconds, best_overflow = seconds, overflow
    best[:], best_order[:] = devices, order
    total = pace.weights.sum()
    for trial in range(pace.trials):
        temperature = pace.hot * (pace.cold / pace.hot) ** (trial / pace.trials)
        lot, kind = below(random, total), 0
        while lot >= pace.weights[kind]:
            lot -= pace.weights[kind]
            kind += 1
        count, at, to = 0, 0, 0
        if kind == SHIFT:
            n = below(random, num_ops)
            if len(orders.optional_ops) and below(random, 4):
                n = orders.optional_ops[below(random, len(orders.optional_ops))]
                for _ in range(8):
                    if devices[flat.op_groups[n]] >= 0:
                        break
                    n = orders.optional_ops[below(random, len(orders.optional_ops))]
            at, to = _shift(orders, order, positions, n, random)
            if at == to:
                continue
            _rotate(order, positions, at, to)
        elif kind == MOVE:
            if not len(movable):
                continue
            group = movable[below(random, len(movable))]
            target = below(random, flat.num_devices + (1 if optional[group] else 0))
            target = -1 if target == flat.num_devices else target
            if target == devices[group] or (target >= 0 and not allowed[group, target]):
                continue
            undo[0], undo[1], count = group, devices[group], 1
            devices[group] = target
        else:
            if num_changes == 0:
                continue
            count = _apply(changes, below(random, num_changes), devices, undo, count, True)
            if kind == SWAP:
                count = _apply(changes, below(random, num_changes), devices, undo, count, True)
        seconds = simulate_choice(flat, devices, order, scratch, usage)
        overflow = _overflow(flat, scratch)
        cost = seconds + pace.price * overflow
        if cost <= current or unit(random) < np.exp((current - cost) / temperature):
            current = cost
            if overflow < best_overflow or (overflow == best_overflow and seconds < best_seconds):
                best_seconds, best_overflow = seconds, overflow
                best[:], best_order[:] = devices, order
        else:
            if kind == SHIFT:
                _rotate(order, positions, to, at)
            for entry in range(count - 1, -1, -1):
                devices[undo[2 * entry]] = undo[2 * entry + 1]
    return best_seconds, best_overflow
