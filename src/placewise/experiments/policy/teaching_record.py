"""What teaching has done so far, in one SQLite file: labels and the last epoch, so that it continues after kill -9."""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Ints
from placewise.core.errors import StoreError
from placewise.formats.safetensors_file import Arrays, from_safetensors, to_safetensors

APPLICATION = 0x504C5450  # "PLTP", which says whose database it is

TABLES = (
    "CREATE TABLE IF NOT EXISTS labels (key TEXT PRIMARY KEY, devices BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS states (name TEXT, stage TEXT, epoch INTEGER, state BLOB, PRIMARY KEY (name, stage))",
)


class TeachingRecord:
    """Labels by lesson, and the last epoch of each stage by name. Every change is committed at once."""

    def __init__(self, path: str | Path | None) -> None:
        self.source = str(path)
        try:
            self._database = sqlite3.connect(":memory:" if path is None else path)
            (known,) = self._database.execute("PRAGMA application_id").fetchone()
            (count,) = self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if known != APPLICATION and count:
                raise StoreError(f"{path}: is not a record of `placewise train-policy`")
            self._database.execute(f"PRAGMA application_id = {APPLICATION}")
            for table in TABLES:
                self._database.execute(table)
            self._database.commit()
        except sqlite3.Error as problem:
            raise StoreError(f"{path}: is not a record of `placewise train-policy`: {problem}") from None

    def label(self, key: str) -> Ints | None:
        """Returns the label of a lesson, None if it has none yet: [blocks]."""
        row = self._execute("SELECT devices FROM labels WHERE key = ?", key)
        return None if row is None else np.frombuffer(row[0], "<i2").astype(np.int64)

    def add_label(self, key: str, placement: Ints) -> None:
        """Records the label of a lesson: [blocks]."""
        self._execute("INSERT OR REPLACE INTO labels VALUES (?, ?)", key, placement.astype("<i2").tobytes())

    def state(self, name: str, stage: str) -> tuple[int, Arrays]:
        """Returns after how many epochs the last state of a stage was recorded, and that state: 0 without one."""
        row = self._execute("SELECT epoch, state FROM states WHERE name = ? AND stage = ?", name, stage)
        return (0, {}) if row is None else (int(row[0]), from_safetensors(row[1], self.source, StoreError)[0])

    def keep(self, name: str, stage: str, epoch: int, state: Mapping[str, NDArray[Any]]) -> None:
        """Records the state after an epoch in place of the one before."""
        self._execute("INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)", name, stage, epoch, to_safetensors(state))

    def _execute(self, statement: str, *values: Any) -> Any:
        """Runs and commits a statement, and returns its first row; a StoreError says that the file is locked or full."""
        try:
            with self._database:
                return self._database.execute(statement, values).fetchone()
        except sqlite3.Error as problem:
            raise StoreError(f"{self.source}: can't be read or written: {problem}") from None

    def close(self) -> None:
        """Closes the file."""
        self._database.close()


@contextmanager
def opened_record(path: str | Path | None) -> Iterator[TeachingRecord]:
    """Opens a record; without a path it is kept in memory."""
    record = TeachingRecord(path)
    try:
        yield record
    finally:
        record.close()
