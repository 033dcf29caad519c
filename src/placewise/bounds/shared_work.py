"""What devices must share: work within a window of time, and memory.

In a step of T seconds, device d can run the ops of a set U only between their least head a[d] there and T less their least
tail b[d], so it has at most T - a[d] - b[d] for them. With prices p[d] >= 0 for its seconds and m[d] >= 0 for its bytes,

    sum_d p[d] max(0, T - a[d] - b[d]) + sum_d m[d] memory[d]  >=  sum_g min_d (p[d] work[g, d] + m[d] bytes[g])

holds for every placement, so the least T that it allows is a bound. All prices are valid; the best ones are the dual
solution of the linear program that spreads the groups over the devices.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from placewise.core.arrays import Floats, Ints
from placewise.core.labels import sum_by_label
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import tensor_groups

ROUNDING = 1e-12  # relative error of a sum of many products
MERGED_GROUPS = 4000  # of the linear program for the prices
GRID = 96  # thresholds that are tried for the heads, and as many for the tails


class Prices(NamedTuple):
    """What a second and a byte of each device cost."""

    seconds: Floats  # [devices]
    memory: Floats  # [devices]


class Window(NamedTuple):
    """Thresholds: ops whose heads and tails reach them run between `head` and T - `tail`."""

    head: float
    tail: float


@dataclass(frozen=True, eq=False)
class Shared:
    """The work and the memory that the devices of a problem share."""

    problem: Problem
    classes: Ints  # [devices], of devices with the same times and memory
    resident_bytes: Floats  # [groups]

    @classmethod
    def of(cls, problem: Problem, classes: Ints) -> "Shared":
        """Returns what the devices of a problem share."""
        return cls(problem, classes, _resident_bytes(problem))

    @cached_property
    def firsts(self) -> Ints:
        """The first device of each class: [classes]."""
        return np.unique(self.classes, return_index=True)[1]

    def work(self, ops: Ints) -> Floats:
        """Returns how long those of each group's ops that are in `ops` take on a device of each class: [groups, classes]."""
        work = np.zeros((self.problem.num_groups, len(self.firsts)))
        groups = self.problem.op_groups[ops]
        for c, first in enumerate(self.firsts.tolist()):
            work[:, c] = sum_by_label(groups, self.problem.op_seconds[ops, first], self.problem.num_groups)
        return np.where(self.problem.allowed[:, self.firsts], work, np.inf)

    def prices(self, ops: Ints, starts: Floats) -> Prices:
        """Returns the best prices for a set of ops that each device has T - `starts` [devices] seconds for."""
        work = self.work(ops)
        starts = np.where(starts < 1e299, starts, 0.0)  # a device that can run none of them needs no start
        used = np.flatnonzero((np.where(np.isinf(work), 0.0, work).sum(axis=1) > 0) | (self.resident_bytes > 0))
        merged, nbytes = _merge(work[used], self.resident_bytes[used])
        return _solve(self, merged, nbytes, starts[self.firsts])

    def least_time(self, prices: Prices, starts: Floats, work: Floats) -> float:
        """Returns the least T that the prices allow, from starts [devices] and work [groups, classes].

        It is infinite where no time is enough because the memory is not.
        """
        with np.errstate(invalid="ignore"):
            cost = prices.seconds[self.firsts] * work + prices.memory[self.firsts] * self.resident_bytes[:, None]
        cost[np.isinf(work)] = np.inf
        paid, room = float(cost.min(axis=1, initial=np.inf).sum()), float(prices.memory @ self.problem.cluster.memory_bytes)
        needed = paid - room - ROUNDING * (paid + room)
        return _reach(prices.seconds, starts, needed) if needed > 0.0 else 0.0


def _merge(work: Floats, nbytes: Floats) -> tuple[Floats, Floats]:
    """Returns work [groups, classes] and bytes [groups] of at most about `MERGED_GROUPS` groups, which are sums of many.

    Prices for these are valid for all, and nearly the best if the groups of a sum are alike: each has groups that can run on
    the same classes and have nearly the same times there, relative to one another.
    """
    if len(work) <= MERGED_GROUPS:
        return work, nbytes
    can = ~np.isinf(work)
    times = np.where(can, work, 0.0)
    shares = times / np.maximum(times.sum(axis=1, keepdims=True), 1e-300)
    kinds = np.unique(can, axis=0, return_inverse=True)[1].ravel()
    order = np.lexsort((nbytes, *shares.T, kinds))
    bucket = np.arange(len(order)) * MERGED_GROUPS // len(order) + kinds[order] * MERGED_GROUPS
    label = np.empty(len(order), np.int64)
    label[order] = np.unique(bucket, return_inverse=True)[1]
    count = int(label.max()) + 1
    merged = np.stack([sum_by_label(label, times[:, c], count) for c in range(work.shape[1])], axis=1)
    allowed = np.zeros(merged.shape, np.bool_)
    allowed[label] = can
    return np.where(allowed, merged, np.inf), sum_by_label(label, nbytes, count)


def _resident_bytes(problem: Problem) -> Floats:
    """Returns the bytes of the resident tensors that are at home with each group: [groups]."""
    graph = problem.graph
    own = np.flatnonzero((graph.producer < 0) & (graph.tensors.alias_of < 0))
    home = tensor_groups(problem)[own]
    nbytes = graph.tensors.nbytes[own].astype(np.float64)
    return sum_by_label(home[home >= 0], nbytes[home >= 0], problem.num_groups)


def _reach(prices: Floats, starts: Floats, needed: float) -> float:
    """Returns the least T whose seconds after starts [devices] are worth what is needed; infinite if no T is enough."""
    order = np.argsort(starts, kind="stable")
    price = 0.0  # sum_d p[d] max(0, T - starts[d]) is piecewise linear: each device joins at its start
    weighted = 0.0
    for rank, d in enumerate(order.tolist()):
        price += float(prices[d])
        weighted += float(prices[d] * starts[d])
        following = starts[order[rank + 1]] if rank + 1 < len(order) else np.inf
        if price > 0.0 and (needed + weighted) / price <= following:
            return (needed + weighted) / price
    return float(np.inf)


def _solve(shared: Shared, work: Floats, nbytes: Floats, starts: Floats) -> Prices:
    """Returns the linear program's prices, the same for all devices of a class: work is [groups, classes]."""
    counts = np.bincount(shared.classes).astype(np.float64)
    num_groups, num_classes = work.shape
    memory = np.array([shared.problem.cluster.memory_bytes[shared.classes == c].sum() for c in range(num_classes)])
    can = ~np.isinf(work)
    group, kind = np.nonzero(can)
    columns = np.arange(len(group))
    scale = max(float(np.where(can, work, 0.0).max(initial=0.0)), 1e-300)
    top = max(float(nbytes.max(initial=0.0)), 1.0)
    binds = [float(nbytes.sum()) > m for m in memory.tolist()]
    rows = [kind, np.arange(num_classes)]  # sum_g work x - count T <= - count start
    values = [work[can] / scale, -counts]
    places = [columns, np.full(num_classes, len(group))]
    with np.errstate(over="ignore"):
        limits = [*(-counts * starts / scale)]
    if not np.isfinite(limits).all():
        return _equal_prices(shared)
    for c in range(num_classes):
        if binds[c]:
            inside = kind == c
            rows.append(np.full(int(inside.sum()), len(limits)))
            values.append(nbytes[group[inside]] / top)
            places.append(columns[inside])
            limits.append(memory[c] / top)
    shape = (len(limits), len(group) + 1)
    upper = coo_array((np.concatenate(values), (np.concatenate(rows), np.concatenate(places))), shape)
    equal = coo_array((np.ones(len(group)), (group, columns)), (num_groups, len(group) + 1))
    objective = np.zeros(len(group) + 1)
    objective[-1] = 1.0
    found = linprog(objective, upper.tocsr(), limits, equal.tocsr(), np.ones(num_groups), method="highs")
    if found.status != 0:  # too little memory, or numbers too far apart: equal prices are valid too
        return _equal_prices(shared)
    dual = np.maximum(-np.asarray(found.ineqlin.marginals), 0.0)
    price_of_class, rest = dual[:num_classes], iter(dual[num_classes:].tolist())
    memory_of_class = np.array([next(rest) if bound else 0.0 for bound in binds]) * scale / top
    return Prices(price_of_class[shared.classes], memory_of_class[shared.classes])


def _equal_prices(shared: Shared) -> Prices:
    return Prices(np.ones(len(shared.classes)), np.zeros(len(shared.classes)))


def best_window(weights: Floats, heads: Floats, tails: Floats, per_second: float) -> Window:
    """Returns the thresholds for which head + tail + weight of the ops that reach both / per_second is largest.

    Weights, heads and tails are [ops]; the thresholds are quantiles of the heads and the tails. Ties go to the lower ones.
    """
    if not len(weights):
        return Window(0.0, 0.0)
    a = np.unique(np.quantile(heads, np.linspace(0, 1, GRID), method="lower"))
    b = np.unique(np.quantile(tails, np.linspace(0, 1, GRID), method="lower"))
    row = np.searchsorted(a, heads, side="right") - 1
    column = np.searchsorted(b, tails, side="right") - 1
    table = np.zeros((len(a), len(b)))
    np.add.at(table, (row, column), weights)
    inside = table[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]  # weight at or above both thresholds
    value = np.where(inside > 0.0, a[:, None] + b[None, :] + inside / per_second, -np.inf)
    i, j = np.unravel_index(int(value.argmax()), value.shape)
    return Window(float(a[i]), float(b[j]))
