"""Saves what can still be read of a damaged run file to a new one."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from placewise.core.errors import StoreError
from placewise.search.store import RunFile

MOST_HIDDEN = 10_000  # numbers that are tried after the last run that a damaged table lists


class SavedRun(NamedTuple):
    """What was saved of a run."""

    number: int
    batches: int
    evaluations: int
    lost: str  # why the rest, or all of it, is lost; "" if nothing is


def recover(damaged: str | Path, new: str | Path) -> list[SavedRun]:
    """Writes the runs of a damaged file that can still be read to a new one, and returns what was saved of each.

    A run is saved up to its first batch that can't be read, and then it is unfinished: resuming it evaluates the rest
    again. A StoreError if nothing can be saved; then there is no new file.
    """
    if os.path.lexists(new):
        raise StoreError(f"{new}: refusing to overwrite a file: name a new one")
    if os.path.abspath(new) in [os.path.abspath(f"{damaged}{ending}") for ending in ("-wal", "-shm", "-journal", ".lock")]:
        raise StoreError(f"{new}: a file of this name would be a part of {damaged}: choose another name")
    saved: list[SavedRun] = []
    try:
        with RunFile(damaged, read_only=True) as file, RunFile(new) as target:
            saved.extend(_save(file, number, target) for number in _numbers(file))
            target.execute("pragma wal_checkpoint(truncate)")
        if not any(run.batches for run in saved):
            reasons = "; ".join(run.lost for run in saved[:3] if run.lost)
            raise StoreError(f"{damaged}: nothing can be saved" + (f": {reasons}" if reasons else ": it has no evaluations"))
    except BaseException:
        for ending in ("", "-wal", "-shm"):
            Path(f"{new}{ending}").unlink(missing_ok=True)
        raise
    return saved


def _numbers(file: RunFile) -> Iterator[int]:
    """Yields the numbers of all runs that can be found; past a damaged part of the table, by trying."""
    last = 0
    try:
        for last in file.numbers():
            yield last
        return
    except StoreError:
        pass
    for number in range(last + 1, last + 1 + MOST_HIDDEN):
        try:
            if next(file.rows("select 1 from runs where id = ?", (number,)), None) is None:
                continue
        except StoreError:
            continue
        yield number


def _save(file: RunFile, number: int, target: RunFile) -> SavedRun:
    try:
        head, problem = file.head(number), file.problem(number)
    except StoreError as reason:
        return SavedRun(number, 0, 0, str(reason))
    batches, count, evaluations, lost = file.batches(number), 0, 0, ""
    with target.create(head.specification, problem, saved=(head.created, number)) as run:
        while True:
            try:
                batch = next(batches, None)
            except StoreError as reason:
                batch, lost = None, str(reason)
            if batch is None:
                break
            run.add(batch)
            count, evaluations = count + 1, evaluations + len(batch.evaluation.cost)
        if head.finding is not None and not lost:
            if head.finding[0] == evaluations:
                run.end(head.status, *head.finding)
            else:
                lost = f"{file.path}: run {number} had {head.finding[0]:,} evaluations"
    return SavedRun(number, count, evaluations, lost)
