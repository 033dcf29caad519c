"""Joining numbered things into sets, and adding up over them."""

from collections.abc import Iterable, Sequence

import numpy as np

from placewise.core.arrays import Floats, Ints


def merge_sets(count: int, pairs: Iterable[Sequence[int]]) -> Ints:
    """Returns the set of each of `count` elements when the pairs are joined: [count], numbered by first element."""
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for a, b in pairs:
        a, b = root(a), root(b)
        if a != b:
            parent[max(a, b)] = min(a, b)
    return numbered(np.array([root(i) for i in range(count)], np.int64))


def numbered(labels: Ints) -> Ints:
    """Returns the labels as numbers from 0, in the order in which they first stand."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def sums(labels: Ints, weights: Floats, count: int) -> Floats:
    """Returns the sum of the weights of each label: [count]."""
    return np.bincount(labels, weights=weights, minlength=count).astype(np.float64, copy=False)
