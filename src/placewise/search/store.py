"""The run file (SQLite): each run with its specification and every evaluation, so that a killed run resumes without loss."""

import fcntl
import gzip
import json
import os
import sqlite3
import time
import tomllib
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.contracts import Evaluation
from placewise.core.errors import StoreError
from placewise.core.graph import Graph, digest_of
from placewise.core.problem import Problem
from placewise.formats.cluster_file import format_cluster, parse_cluster
from placewise.formats.graph_file import format_graph, parse_graph
from placewise.search.budget import Budget
from placewise.search.driver import JudgedBatch, Outcome

APPLICATION_ID, VERSION = 0x504C5753, 1  # mark the file as ours, in SQLite's own fields

SLOW_SECONDS = 0.05  # a batch that took longer is flushed to the disk before the next one

SCHEMA = """
create table if not exists problems (
    digest text primary key, graph blob not null, cluster text not null, grouping text not null
);
create table if not exists runs (
    id integer primary key, key text not null, specification text not null, created real not null,
    status text not null, outcome text
);
create table if not exists steps (
    run integer not null references runs, number integer not null, digest blob not null, cost blob not null,
    step_seconds blob not null, overflow_bytes blob not null, notes text not null, seconds real not null,
    placement blob, launch_order blob, primary key (run, number)
) without rowid;
"""


@dataclass(frozen=True)
class Specification:
    """Everything that a run's history depends on, and the names of its model and cluster."""

    model: str
    cluster: str
    problem_digest: str
    order: str
    strategy: str
    parameters: dict[str, Any]
    seed: int
    budget: Budget
    versions: dict[str, str] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)  # how placements are measured; empty: they are simulated

    @property
    def key(self) -> str:
        """The identity of a run: all fields but the names of the model and the cluster."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("model", "cluster")}
        if self.measured:
            fields["model"] = self.model  # the process that measures loads it by this name
        else:
            del fields["measured"]  # older files do not have it
        return digest_of(fields)


@dataclass(frozen=True)
class RunInfo:
    """A run as `placewise runs` lists it."""

    number: int
    specification: Specification
    created: float
    status: str  # running, or why the search ended
    evaluations: int
    step_seconds: float | None  # of the best placement; None: nothing fits yet


class RunFile:
    """A run file. Many processes can read it while others write; each run has one writer at a time."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = Path(path)
        if not create and not self.path.exists():
            raise StoreError(f"{path}: there is no such file")
        try:
            self._connection = sqlite3.connect(self.path, timeout=30, isolation_level=None)
            self._prepare()
        except sqlite3.Error as problem:
            raise StoreError(f"{path}: is not a run file, or is damaged: {problem}") from None

    def _prepare(self) -> None:
        connection = self._connection
        is_empty = connection.execute("select count(*) from sqlite_master").fetchone()[0] == 0
        found = connection.execute("pragma application_id").fetchone()[0]
        if not is_empty and found != APPLICATION_ID:
            raise StoreError(f"{self.path}: is not a run file, but a SQLite file of another program")
        version = connection.execute("pragma user_version").fetchone()[0]
        if not is_empty and version != VERSION:
            raise StoreError(f"{self.path}: has version {version}, this placewise reads version {VERSION}")
        connection.execute("pragma journal_mode = wal")
        connection.execute("pragma synchronous = normal")
        if is_empty:
            marks = f"pragma application_id = {APPLICATION_ID}; pragma user_version = {VERSION};"
            connection.executescript(f"begin immediate; {SCHEMA} {marks} commit;")

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def __enter__(self) -> "RunFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Executes a statement and returns its cursor; an SQLite error becomes a StoreError."""
        try:
            return self._connection.execute(statement, values)
        except sqlite3.Error as problem:
            raise StoreError(f"{self.path}: is damaged, or can't be written: {problem}") from None

    def find(self, specification: Specification) -> int | None:
        """Returns the number of the run with this specification, or None."""
        row = self.execute("select id from runs where key = ? order by id", (specification.key,)).fetchone()
        return None if row is None else int(row[0])

    def create(self, specification: Specification, problem: Problem) -> "Run":
        """Returns a new run, open for writing."""
        graph = gzip.compress(format_graph(problem.graph).encode(), compresslevel=1, mtime=0)
        values = (problem.digest, graph, format_cluster(problem.cluster), problem.grouping)
        self.execute("insert or ignore into problems values (?, ?, ?, ?)", values)
        fields = (specification.key, json.dumps(asdict(specification)), time.time(), "running")
        cursor = self.execute("insert into runs (key, specification, created, status) values (?, ?, ?, ?)", fields)
        assert cursor.lastrowid is not None
        return Run(self, cursor.lastrowid)

    def runs(self) -> list[RunInfo]:
        """Returns all runs, oldest first."""
        return [self.info(int(row[0])) for row in self.execute("select id from runs order by id").fetchall()]

    def info(self, number: int) -> RunInfo:
        """Returns one run as `placewise runs` lists it."""
        row = self.execute("select specification, created, status from runs where id = ?", (number,)).fetchone()
        if row is None:
            known = ", ".join(str(entry[0]) for entry in self.execute("select id from runs order by id"))
            raise StoreError(f"{self.path}: there is no run {number}; the runs are: {known or 'none'}")
        evaluations, best = 0, None
        query = "select cost, step_seconds, overflow_bytes, placement is null from steps where run = ? order by number"
        for cost, seconds, overflow, is_worse in self.execute(query, (number,)):
            evaluations += len(cost) // 8
            if not is_worse:
                best = _best_seconds(_evaluation(cost, seconds, overflow))
        return RunInfo(number, _specification(row[0]), row[1], row[2], evaluations, best)

    def problem(self, number: int) -> Problem:
        """Returns the problem of a run."""
        digest = self.info(number).specification.problem_digest
        row = self.execute("select graph, cluster, grouping from problems where digest = ?", (digest,)).fetchone()
        if row is None:
            raise StoreError(f"{self.path}: the problem of run {number} is missing")
        graph: Graph = parse_graph(json.loads(gzip.decompress(row[0])), str(self.path))
        cluster: Cluster = parse_cluster(tomllib.loads(row[1]), str(self.path))
        problem = Problem.of(graph, cluster, row[2])
        if problem.digest != digest:
            raise StoreError(f"{self.path}: the problem of run {number} has changed: was it recorded by another version?")
        return problem

    def batches(self, number: int) -> Iterator[JudgedBatch]:
        """Returns the batches recorded for a run, even while another process writes it."""
        query = """select cost, step_seconds, overflow_bytes, notes, digest, seconds, placement, launch_order
                   from steps where run = ? order by number"""
        for cost, seconds, overflow, notes, digest, elapsed, placement, order in self.execute(query, (number,)):
            best = None if placement is None else (_unpack(placement, np.int16), _unpack(order, np.int32) if order else None)
            yield JudgedBatch(_evaluation(cost, seconds, overflow), json.loads(notes), digest, elapsed, best)


class Run:
    """A run that is open for writing: a second writer is refused until this one is closed or its process ends."""

    def __init__(self, file: RunFile, number: int) -> None:
        self.file, self.number = file, number
        self.info = file.info(number)
        self._lock_path = file.path.with_name(f"{file.path.name}.run-{number}.lock")
        self._lock = self._lock_path.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._lock.fileno()).st_ino != os.stat(self._lock_path).st_ino:
                raise OSError  # the last writer deleted the lock file meanwhile: another process may hold a new one
        except OSError:
            self._lock.close()
            raise StoreError(f"{file.path}: run {number} is being written by another process") from None
        self._count = int(file.execute("select count(*) from steps where run = ?", (number,)).fetchone()[0])
        self._last = time.monotonic()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets another process write the run."""
        self._lock_path.unlink(missing_ok=True)
        self._lock.close()

    def batches(self) -> Iterator[JudgedBatch]:
        """Returns the batches recorded so far."""
        return self.file.batches(self.number)

    def add(self, batch: JudgedBatch) -> None:
        """Commits a batch; one that took long is on the disk when this returns."""
        is_slow = time.monotonic() - self._last > SLOW_SECONDS
        evaluation, best = batch.evaluation, batch.best
        values = (
            self.number,
            self._count,
            batch.digest,
            *(np.asarray(column, kind).tobytes() for column, kind in zip(evaluation, _COLUMNS, strict=True)),
            json.dumps(batch.notes, default=float),
            batch.seconds,
            None if best is None else _pack(best[0], np.int16),
            None if best is None or best[1] is None else _pack(best[1], np.int32),
        )
        self.file.execute(f"pragma synchronous = {'full' if is_slow else 'normal'}")
        self.file.execute("insert into steps values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        self._count += 1
        self._last = time.monotonic()

    def outcome(self) -> Outcome | None:
        """Returns what a finished run found; None if it can continue, or if nothing fits: then the search is replayed."""
        row = self.file.execute("select status, outcome from runs where id = ?", (self.number,)).fetchone()
        if row[1] is None:
            return None
        best: tuple[Ints, Ints | None] | None = None
        spent, step_seconds, history = 0, np.inf, []
        for batch in self.batches():
            spent += len(batch.evaluation.cost)
            if batch.best is not None:
                best, step_seconds = batch.best, _best_seconds(batch.evaluation)
            history.append((spent, step_seconds))
        seconds = json.loads(row[1])["seconds"]
        return None if best is None else Outcome(row[0], *best, step_seconds, spent, seconds, tuple(history))

    def finish(self, outcome: Outcome) -> None:
        """Records how the run ended; a run that was stopped stays unfinished."""
        if outcome.status != "stopped":
            summary = json.dumps({"evaluations": outcome.evaluations, "seconds": outcome.seconds})
            self.file.execute("update runs set status = ?, outcome = ? where id = ?", (outcome.status, summary, self.number))


_COLUMNS = (np.float64, np.float64, np.int64)  # of an Evaluation


def _best_seconds(evaluation: Evaluation) -> float:
    """Returns the step seconds of the best placement that fits."""
    return float(evaluation.step_seconds[np.where(evaluation.overflow_bytes == 0, evaluation.cost, np.inf).argmin()])


def _evaluation(cost: bytes, seconds: bytes, overflow: bytes) -> Evaluation:
    return Evaluation(np.frombuffer(cost, np.float64), np.frombuffer(seconds, np.float64), np.frombuffer(overflow, np.int64))


def _pack(column: Ints, kind: Any) -> bytes:
    return zlib.compress(np.asarray(column, kind).tobytes(), 1)


def _unpack(data: bytes, kind: Any) -> Ints:
    return np.frombuffer(zlib.decompress(data), kind).astype(np.int64)


def _specification(text: str) -> Specification:
    fields = json.loads(text)
    return Specification(**{**fields, "budget": Budget(**fields["budget"])})
