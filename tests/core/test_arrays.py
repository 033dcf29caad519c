"""Read-only and ragged arrays."""

import numpy as np

from placewise.core.arrays import Ragged, frozen


def test_a_callers_array_is_copied_and_stays_writable() -> None:
    mine = np.array([1, 2, 3])
    ours = frozen(mine, np.int64)
    mine[0] = 7
    assert ours.tolist() == [1, 2, 3]
    part = frozen(mine[1:], np.int64)
    mine[1] = 8
    assert part.tolist() == [2, 3]
    assert frozen(ours, np.int64) is ours


def test_ragged_rows() -> None:
    ragged = Ragged.of([[3, 1], [], [2]])
    assert len(ragged) == 3
    assert ragged.rows.tolist() == [0, 0, 2]
    assert [row.tolist() for row in ragged] == ragged.lists() == [[3, 1], [], [2]]
    assert Ragged.of([]).lists() == []
    assert Ragged.grouped(np.array([2, 0, 2]), np.array([5, 6, 4]), 3).lists() == [[6], [], [5, 4]]
