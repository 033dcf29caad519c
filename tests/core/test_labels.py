"""Arrays of labels, by hand and against a slow oracle."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from placewise.core.labels import connected_components, renumber, sum_by_label


def test_connected_components_by_hand() -> None:
    """0, 3 and 4 are connected, 1 is alone, 2 and 5 are connected: numbered by their first elements 0, 1, 2."""
    assert connected_components(6, [(3, 4), (5, 2), (0, 3), (4, 0)]).tolist() == [0, 1, 2, 0, 0, 2]
    assert connected_components(3, []).tolist() == [0, 1, 2]
    assert connected_components(0, []).tolist() == []
    assert connected_components(2, [(1, 1)]).tolist() == [0, 1]


def test_renumber_by_hand() -> None:
    assert renumber(np.array([7, 3, 7, -1, 3])).tolist() == [0, 1, 0, 2, 1]
    assert renumber(np.zeros(0, np.int64)).tolist() == []


def test_sum_by_label_by_hand() -> None:
    assert sum_by_label(np.array([2, 0, 2]), np.array([1.0, 2.0, 4.0]), 4).tolist() == [2, 0, 5, 0]
    assert sum_by_label(np.zeros(0, np.int64), np.zeros(0), 2).tolist() == [0, 0]


PAIRS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12)


@given(PAIRS)
def test_connected_components_are_what_spreading_labels_finds(pairs: list[tuple[int, int]]) -> None:
    """The slow oracle: the lowest label spreads over pairs until nothing changes."""
    labels = list(range(10))
    while any(labels[a] != labels[b] for a, b in pairs):
        for a, b in pairs:
            labels[a] = labels[b] = min(labels[a], labels[b])
    assert connected_components(10, pairs).tolist() == renumber(np.array(labels)).tolist()
