"""Array types, read-only arrays, and ragged arrays."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

Floats = NDArray[np.float64]

Bools = NDArray[np.bool_]

MAX_NUMBER = 1e300  # numbers in graphs and files are below this, so that sums of many are still finite


def frozen(values: Any, dtype: Any) -> NDArray[Any]:
    """Returns the values as a read-only array; one that already is read-only is not copied."""
    array = np.asarray(values, dtype=dtype)
    if array.flags.writeable:
        array = np.array(array, copy=True) if array is values or array.base is not None else array
        array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths: row i is `values[offsets[i]:offsets[i + 1]]`."""

    offsets: Ints  # [rows + 1]
    values: Ints  # [entries]

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", frozen(self.offsets, np.int64))
        object.__setattr__(self, "values", frozen(self.values, np.int64))

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> "Ragged":
        """Returns a ragged array of these rows."""
        rows = list(rows)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(offsets, np.array([value for row in rows for value in row], np.int64))

    @classmethod
    def grouped(cls, keys: Ints, values: Ints, num_rows: int) -> "Ragged":
        """Returns a ragged array whose row k has the values with key k, in their given order."""
        order = np.argsort(keys, kind="stable")
        offsets = np.searchsorted(keys[order], np.arange(num_rows + 1))
        return cls(offsets, values[order])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Ints:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Ints]:
        return (self[row] for row in range(len(self)))

    @property
    def rows(self) -> Ints:
        """The row of each entry: [entries]."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def lists(self) -> list[list[int]]:
        """Returns the rows as lists, which Python iterates over faster than arrays."""
        values, offsets = self.values.tolist(), self.offsets.tolist()
        return [values[a:b] for a, b in pairwise(offsets)]
