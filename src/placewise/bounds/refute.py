"""Refuting a time: a proof that some ops take longer than T seconds on any devices.

For a given T, every op keeps only the devices on which the longest path through it takes at most T, and the ops of a group
keep the same devices; with fewer devices paths get longer, and so on (Klein and Scholl 1999: destructive improvement). T is
refuted

- if an op has no device left,
- if ops that can only be on some devices have more work than these devices have time between the ops' least head and least
  tail there,
- or if it is refuted for every device that one op can be on.
"""

from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, NamedTuple

import numpy as np

from placewise.bounds.dag import Dag, restrict
from placewise.core.arrays import Bools, Floats, Ints

Proof = dict[str, Any]  # {}, {"ops", "devices"} or {"op", "on": [[device, proof], ...]}

ROUNDS = 8  # of ruling out devices
THRESHOLDS = 10  # of tails, for sets of ops that may be an overload


class _State(NamedTuple):
    """What is left after ruling out devices; heads and tails are infinite where an op is not allowed."""

    allowed: Bools  # [ops, devices]
    heads: Floats  # [ops, devices]
    tails: Floats  # [ops, devices]


def refute(dag: Dag, counts: Ints, seconds: float, num_branchings: int) -> Proof | None:
    """Returns a proof that all ops of a graph take longer than `seconds`; None if `num_branchings` do not find one.

    Each device of the graph stands for `counts` [devices] devices that are alike.
    """
    return _Refutation(dag, counts, seconds, num_branchings).of(~np.isinf(dag.seconds))


@dataclass(eq=False)
class _Refutation:
    dag: Dag
    counts: Ints  # [devices]
    seconds: float
    num_branchings: int  # that are left

    def of(self, allowed: Bools) -> Proof | None:
        """Returns a proof for ops that can only be on some devices [ops, devices]."""
        state = self._narrow(allowed)
        if state is None:
            return {}
        if (proof := self._overload(state)) is not None or self.num_branchings <= 0:
            return proof
        op = self._undecided(state)
        if op < 0:
            return None
        self.num_branchings -= 1
        children = []
        for device in np.flatnonzero(state.allowed[op]).tolist():
            only = state.allowed.copy()
            only[op] = False
            only[op, device] = True
            child = self.of(only)
            if child is None:
                return None
            children.append([device, child])
        return {"op": op, "on": children}

    def _narrow(self, allowed: Bools) -> _State | None:
        """Returns the devices that are left for each op, or None if an op has none left."""
        for _ in range(ROUNDS):
            times = restrict(self.dag.seconds, allowed)
            heads, tails = self.dag.heads(times), self.dag.tails(times)
            left = allowed & (heads + times + tails <= self.seconds)
            shared = np.ones((int(self.dag.groups.max()) + 1, left.shape[1]), np.bool_)
            np.logical_and.at(shared, self.dag.groups, left)
            left = shared[self.dag.groups]
            if not left.any(axis=1).all():
                return None
            if np.array_equal(left, allowed):
                break
            allowed = left
        return _State(left, np.where(left, heads, np.inf), np.where(left, tails, np.inf))

    def _overload(self, state: _State) -> Proof | None:
        """Returns ops with more work than the devices that they can be on have time for, or None."""
        num_devices = len(self.counts)
        first, last = state.heads.min(axis=1), state.tails.min(axis=1)
        least = restrict(self.dag.seconds, state.allowed).min(axis=1)
        subsets = chain.from_iterable(combinations(range(num_devices), size + 1) for size in range(num_devices))
        for subset in subsets:
            outside = np.ones(num_devices, np.bool_)
            outside[list(subset)] = False
            ops = np.flatnonzero(~state.allowed[:, outside].any(axis=1) & (least > 0.0))
            if not len(ops):
                continue
            ops = ops[np.argsort(-first[ops], kind="stable")]
            inside = last[ops] >= _spread(last[ops])[:, None]  # [thresholds, ops]
            work = np.where(inside, least[ops], 0.0).cumsum(axis=1)
            room = np.zeros_like(work)
            for d in subset:
                begin, rest = (
                    np.minimum.accumulate(np.where(inside, times[ops, d], np.inf), axis=1)
                    for times in (state.heads, state.tails)
                )
                room += self.counts[d] * np.maximum(self.seconds - begin - rest, 0.0)
            over = np.flatnonzero(work > room * (1 + 1e-12))
            if len(over):
                row, column = divmod(int(over[0]), len(ops))
                return {"ops": sorted(ops[: column + 1][inside[row, : column + 1]].tolist()), "devices": list(subset)}
        return None

    def _undecided(self, state: _State) -> int:
        """Returns the longest op that can still be on several devices, or -1 if there is none."""
        open_ops = state.allowed.sum(axis=1) > 1
        least = restrict(self.dag.seconds, state.allowed).min(axis=1)
        return int(np.where(open_ops, least, -1.0).argmax()) if open_ops.any() else -1


def _spread(values: Floats) -> Floats:
    """Returns up to `THRESHOLDS` of the values, the lowest and the highest among them."""
    distinct = np.unique(values)
    return distinct[np.linspace(0, len(distinct) - 1, min(THRESHOLDS, len(distinct))).astype(np.int64)]
