"""What teaching has done so far, in one SQLite file: labels and the last epoch, so that it continues after kill -9."""

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Ints
from placewise.core.errors import StoreError, one_line
from placewise.formats.files import check_regular
from placewise.formats.safetensors_file import Arrays, from_safetensors, to_safetensors

APPLICATION = 0x504C5450  # "PLTP", which says whose database it is

TABLES = {
    "labels": "CREATE TABLE labels (key TEXT PRIMARY KEY, devices BLOB NOT NULL)",
    "states": "CREATE TABLE states (name TEXT, stage TEXT, epoch INTEGER, state BLOB, PRIMARY KEY (name, stage))",
}

DAMAGED = """
SELECT 'a label' FROM labels WHERE typeof(devices) != 'blob' OR length(devices) % 2
UNION ALL SELECT 'a state' FROM states WHERE typeof(epoch) != 'integer' OR epoch < 1 OR typeof(state) != 'blob'
"""

MAX_VALUE_BYTES = 2**28


class TeachingRecord:
    """Labels by lesson, and the last epoch of each stage by name. Every change is committed at once."""

    def __init__(self, path: str | Path | None) -> None:
        self.source = str(path)
        if path is not None:
            _check_file(Path(path))
        try:
            self._database = sqlite3.connect(":memory:" if path is None else path)
        except sqlite3.Error as problem:
            raise StoreError(f"{path}: can't be opened: {problem}") from None
        try:
            self._prepare()
        except sqlite3.OperationalError as problem:  # it is locked, or the disk is full
            self.close()
            raise StoreError(f"{path}: can't be read or written: {one_line(problem)}") from None
        except (sqlite3.Error, UnicodeDecodeError) as problem:
            self.close()
            raise StoreError(f"{path}: is not a record of `placewise train-policy`: {one_line(problem)}") from None
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Makes the tables of a new file; refuses one with others, because a view or a trigger could do anything."""
        database = self._database
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        database.execute("PRAGMA trusted_schema = off")
        found = dict(database.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite!_%' ESCAPE '!'"))
        if not found:
            marks = f"PRAGMA application_id = {APPLICATION};"
            database.executescript(f"BEGIN IMMEDIATE; {' '.join(f'{table};' for table in TABLES.values())} {marks} COMMIT;")
        elif database.execute("PRAGMA application_id").fetchone() != (APPLICATION,):
            raise StoreError(f"{self.source}: is not a record of `placewise train-policy`")
        elif found != TABLES:
            raise StoreError(f"{self.source}: is damaged: it has other tables than a record of `placewise train-policy`")
        if (check := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise StoreError(f"{self.source}: is damaged: {' '.join(str(check).split())}")
        if (damaged := database.execute(DAMAGED).fetchone()) is not None:
            raise StoreError(f"{self.source}: is damaged: {damaged[0]} of it is of another type")

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


def _check_file(path: Path) -> None:
    """Refuses what is there and is not a regular file."""
    try:
        check_regular(path, os.stat(path), StoreError)
    except FileNotFoundError:
        pass  # SQLite makes it
    except (OSError, ValueError) as problem:  # ValueError: a null byte
        raise StoreError(f"{path}: can't be read: {getattr(problem, 'strerror', problem)}") from None


@contextmanager
def opened_record(path: str | Path | None) -> Iterator[TeachingRecord]:
    """Opens a record; without a path it is kept in memory."""
    record = TeachingRecord(path)
    try:
        yield record
    finally:
        record.close()
