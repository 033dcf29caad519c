"""Multilevel coarsening of an acyclic graph that keeps it acyclic.

Follows Herrmann et al., "Multilevel algorithms for acyclic partitioning of directed acyclic graphs" (SIAM J. Sci. Comput.
41, 2019): each round contracts heavy edges between neighbouring levels of the graph. Ours contracts stars (a node and
several of its successors) instead of pairs, and orders the stars of a level so that edges between them point one way. When
no edge is left to contract, it joins neighbours in a topological order, which can't make a cycle either.
"""

from itertools import cycle

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.labels import renumber, sum_by_label

BALANCE = 1.5  # the most work of a group, as a multiple of the average


def coarsen(work: Floats, position: Ints, source: Ints, target: Ints, nbytes: Floats, num_groups: int) -> Ints:
    """Returns the coarse group of each node, with about `num_groups` groups: [nodes].

    `position` [nodes] orders the nodes; edges that point back in it (from a group of early and late ops) are ignored.
    Ties go to the first edge.
    """
    merged = np.arange(len(work))
    cap = BALANCE * float(work.sum()) / num_groups
    forward = position[source] < position[target]
    source, target, nbytes = source[forward], target[forward], nbytes[forward]
    stalled = 0
    for parity in cycle((0, 1)):
        if int(merged.max(initial=-1)) + 1 <= num_groups:
            break
        coarse = _quotient(merged, work, source, target, nbytes)
        joined = _contract_edges(*coarse, cap, num_groups, parity)
        stalled = stalled + 1 if int(joined.max()) + 1 > 0.98 * len(joined) else 0
        if stalled == 2:  # neither parity has edges left to contract
            joined, stalled = _join_neighbours(*coarse[:3], num_groups), 0
        merged = joined[merged]
    return renumber(merged)


def _quotient(merged: Ints, work: Floats, source: Ints, target: Ints, nbytes: Floats) -> tuple[Floats, Ints, Ints, Floats]:
    """Returns the work of each group, and the edges between groups: sources, targets and bytes, each pair once."""
    count = int(merged.max()) + 1
    keys, inverse = np.unique(merged[source] * count + merged[target], return_inverse=True)
    weights = sum_by_label(inverse, nbytes, len(keys))
    a, b = keys // count, keys % count
    between = a != b
    return sum_by_label(merged, work, count), a[between], b[between], weights[between]


def _levels(count: int, source: Ints, target: Ints) -> Ints:
    """Returns the length of the longest path to each node, counted in edges: [nodes]."""
    levels = np.zeros(count, np.int64)
    waiting = np.bincount(target, minlength=count)
    by_source = np.argsort(source, kind="stable")
    offsets = np.searchsorted(source[by_source], np.arange(count + 1)).tolist()
    targets, left, level = target[by_source].tolist(), waiting.tolist(), levels.tolist()
    ready = np.flatnonzero(waiting == 0).tolist()
    for node in ready:  # grows during the loop
        for edge in range(offsets[node], offsets[node + 1]):
            reader = targets[edge]
            level[reader] = max(level[reader], level[node] + 1)
            left[reader] -= 1
            if not left[reader]:
                ready.append(reader)
    return np.array(level, np.int64)


def _contract_edges(
    work: Floats, source: Ints, target: Ints, nbytes: Floats, cap: float, num_groups: int, parity: int
) -> Ints:
    """Returns the star of each node after contracting heavy edges from levels of this parity to the next: [nodes]."""
    count = len(work)
    levels = _levels(count, source, target)
    usable = (levels[source] % 2 == parity) & (levels[target] == levels[source] + 1)
    a, b, weights = source[usable], target[usable], nbytes[usable]
    heads: list[list[int]] = [[] for _ in range(count)]  # [nodes] -> nodes with an edge to it
    leaves: list[list[int]] = [[] for _ in range(count)]  # [nodes] -> nodes that it has an edge to
    for u, v in zip(a.tolist(), b.tolist(), strict=True):
        heads[v].append(u)
        leaves[u].append(v)
    star = [-1] * count  # the head of each node's star
    born = [-1] * count  # when the star of a head was started
    load = work.tolist()
    remaining, clock = count, 0
    for edge in np.argsort(-weights, kind="stable").tolist():
        u, v = int(a[edge]), int(b[edge])
        if remaining <= num_groups:
            break
        if star[v] >= 0 or load[u] + load[v] > cap:
            continue
        if born[u] < 0 and any(star[leaf] >= 0 for leaf in leaves[u]):
            continue  # a younger star must not point to an older one
        started = born[u] if born[u] >= 0 else clock
        if any(born[head] > started for head in heads[v]):
            continue
        born[u], star[u], star[v] = started, u, u
        load[u] += load[v]
        clock += 1
        remaining -= 1
    return renumber(np.array([node if head < 0 else head for node, head in enumerate(star)], np.int64))


def _join_neighbours(work: Floats, source: Ints, target: Ints, num_groups: int) -> Ints:
    """Returns the group of each node after joining pairs of neighbours in a topological order, lightest first: [nodes]."""
    order = np.lexsort((np.arange(len(work)), _levels(len(work), source, target)))
    pairs = work[order][:-1] + work[order][1:]
    surplus = min(len(work) - num_groups, max(1, len(work) // 3))
    joins = np.zeros(len(work), np.bool_)  # [nodes in order], whether it joins the one before it
    for i in np.argsort(pairs, kind="stable").tolist():
        if surplus == 0:
            break
        if not joins[i] and not joins[i + 1] and (i + 2 >= len(work) or not joins[i + 2]):
            joins[i + 1] = True
            surplus -= 1
    run = np.cumsum(~joins)
    joined = np.empty(len(work), np.int64)
    joined[order] = run
    return renumber(joined)
