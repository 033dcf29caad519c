"""Arrays of labels, such as the group of each op: connected components, renumbering, sums by label."""

from collections.abc import Iterable, Sequence

import numpy as np

from placewise.core.arrays import Floats, Ints


def connected_components(count: int, pairs: Iterable[Sequence[int]]) -> Ints:
    """Returns the component of each of `count` elements that the pairs connect: [count], numbered by first element."""
    parent = list(range(count))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for a, b in pairs:
        a, b = root(a), root(b)
        if a != b:
            parent[max(a, b)] = min(a, b)
    return renumber(np.array([root(i) for i in range(count)], np.int64))


def renumber(labels: Ints) -> Ints:
    """Returns the labels as numbers from 0, in the order of their first occurrence."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def sum_by_label(labels: Ints, weights: Floats, count: int) -> Floats:
    """Returns the sum of the weights of each label from 0 to count - 1: [count]."""
    return np.bincount(labels, weights=weights, minlength=count).astype(np.float64, copy=False)
