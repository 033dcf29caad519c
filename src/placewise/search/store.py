"""The run file (SQLite): each run with its specification and every evaluation, so that a killed run resumes without loss."""

import fcntl
import gzip
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.errors import InputError, ProblemError, StoreError, one_line
from placewise.core.problem import Problem
from placewise.formats.cluster_file import format_cluster, parse_cluster
from placewise.formats.files import check_regular, parse_json, parse_toml, unpack
from placewise.formats.graph_file import format_graph, parse_graph
from placewise.search.driver import JudgedBatch, Outcome
from placewise.search.run_rows import (
    STEP_COLUMNS,
    Row,
    RunHead,
    SimplerPlan,
    Specification,
    best_seconds,
    pack_batch,
    pack_finding,
    pack_specification,
    require_text,
    unpack_batch,
    unpack_evaluation,
    unpack_head,
)

APPLICATION_ID, VERSION = 0x504C5753, 1  # mark the file as ours, in SQLite's own fields

DISCARDED = 2**31 - 1  # the version of a file that is about to be deleted

SLOW_SECONDS = 0.05  # a batch that took longer is flushed to the disk before the next one

CHECKED_BYTES = 2**26  # a file of up to this size is checked as a whole before it is written, which takes 0.2 s at most

MAX_VALUE_BYTES = 2**28  # of one value in the file

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

TABLES = {
    "problems": ("digest", "graph", "cluster", "grouping"),
    "runs": ("id", "key", "specification", "created", "status", "outcome"),
    "steps": (
        "run", "number", "digest", "cost", "step_seconds", "overflow_bytes", "notes", "seconds", "placement", "launch_order",
    ),
}  # fmt: skip

FAILURES = (sqlite3.Error, OverflowError, UnicodeDecodeError)  # SQLite's messages may quote bytes that are no text

UNWRITABLE = (
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PERM,
)


@dataclass(frozen=True)
class RunInfo:
    """A run as `placewise runs` lists it."""

    number: int
    specification: Specification
    created: float
    status: str  # running, or why the search ended
    batches: int
    evaluations: int
    step_seconds: float | None  # of the best placement; None: nothing fits yet


class RunFile:
    """A run file. Many processes can read it while others write; each run has one writer at a time.

    It is left as it is unless a run is created or written. With `read_only` it can also be on a disk that can't be written.
    """

    def __init__(self, path: str | Path, *, create: bool = True, read_only: bool = False) -> None:
        self.path = Path(path)
        create = create and not read_only
        self._check_file(create)
        try:
            self._connection = _connect(self.path, create, read_only)
        except FAILURES as problem:
            raise self._explained(problem) from None
        try:
            self._prepare(create, read_only)
        except FAILURES as problem:
            self.close()
            raise self._explained(problem) from None
        except BaseException:
            self.close()
            raise

    def _check_file(self, create: bool) -> None:
        """Refuses what is not a regular file, and what does not exist unless it is to be created."""
        try:
            check_regular(self.path, os.stat(self.path), StoreError)
        except FileNotFoundError:
            if not create:
                raise StoreError(f"{self.path}: there is no such file") from None
        except (OSError, ValueError) as problem:  # ValueError: a null byte
            raise StoreError(f"{self.path}: can't be read: {getattr(problem, 'strerror', problem)}") from None

    def _prepare(self, create: bool, is_read: bool) -> None:
        connection = self._connection
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        connection.execute("pragma trusted_schema = off")  # what a hostile file could define is not called
        connection.execute("pragma cell_size_check = on")
        if not connection.execute("select count(*) from sqlite_master").fetchone()[0]:
            if connection.execute("pragma page_count").fetchone()[0] > 1:  # what is there would be overwritten
                raise StoreError(f"{self.path}: is damaged: its list of tables is empty, but the file is not")
            if not create:
                raise StoreError(f"{self.path}: is empty, so it is not a run file")
            connection.execute("pragma journal_mode = wal")
            marks = f"pragma application_id = {APPLICATION_ID}; pragma user_version = {VERSION};"
            connection.executescript(f"begin immediate; {SCHEMA} {marks} commit;")
        if connection.execute("pragma application_id").fetchone()[0] != APPLICATION_ID:
            raise StoreError(f"{self.path}: is not a run file, but a SQLite file of another program")
        self._check_version()
        connection.execute("pragma synchronous = normal")
        self._check_schema()
        if not is_read and self.path.stat().st_size <= CHECKED_BYTES:
            found = next(self.rows("pragma quick_check(1)"), ("nothing",))[0]
            if found != "ok":
                raise self._explained(sqlite3.DatabaseError(str(found)))

    def _check_version(self) -> None:
        version = next(self.rows("pragma user_version"))[0]
        if version == DISCARDED:
            raise StoreError(f"{self.path}: another process has just deleted it, because its search was refused: try again")
        if version != VERSION:
            raise StoreError(f"{self.path}: has version {version}, this placewise reads version {VERSION}")

    def _check_schema(self) -> None:
        """Refuses a file with other tables than ours; a view or a trigger could do anything."""
        names = [row[0] for row in self.rows("select name from sqlite_master where name not like 'sqlite!_%' escape '!'")]
        columns = {name: tuple(row[1] for row in self.rows(f"pragma table_xinfo({name})")) for name in TABLES}
        if len(names) != len(TABLES) or set(names) != set(TABLES) or columns != TABLES:
            raise StoreError(f"{self.path}: is damaged: it has other tables than a run file")

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def discard(self) -> None:
        """Closes the file, and deletes it if it has no run and no other process has it open.

        A process that opens it meanwhile finds its mark before it creates a run: no run is ever in a deleted file.
        """
        is_unused = False
        with suppress(StoreError):  # another process has it open
            self.execute("pragma journal_mode = delete")
            with self._all_or_nothing():
                if is_empty := not list(self.rows("select 1 from runs limit 1")):
                    self.execute(f"pragma user_version = {DISCARDED}")
            is_unused = is_empty
        self.close()
        if is_unused:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> "RunFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Executes a statement that writes, and returns its cursor; an SQLite error becomes a StoreError."""
        try:
            return self._connection.execute(statement, values)
        except FAILURES as problem:
            raise self._explained(problem) from None

    def rows(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[Row]:
        """Yields the rows of a query; an SQLite error, which can come with any row, becomes a StoreError."""
        try:
            yield from self._connection.execute(query, values)
        except FAILURES as problem:
            raise self._explained(problem) from None

    def _explained(self, problem: Exception) -> StoreError:
        code = getattr(problem, "sqlite_errorcode", 0) & 0xFF  # without what details it
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreError(f"{self.path}: another process has locked it")
        if code in UNWRITABLE:
            return StoreError(f"{self.path}: can't be opened or written: {one_line(problem)}")
        if code == sqlite3.SQLITE_NOTADB:
            return StoreError(f"{self.path}: is not a run file, or is damaged: {one_line(problem)}")
        return StoreError(
            f"{self.path}: is damaged: {one_line(problem)}; `placewise runs --recover` saves what can still be read"
        )

    def find(self, specification: Specification) -> int | None:
        """Returns the number of the run with this specification, or None."""
        row = next(self.rows("select id from runs where key = ? order by id", (specification.key,)), None)
        return None if row is None else int(row[0])

    def create(self, specification: Specification, problem: Problem, *, saved: tuple[float, int] | None = None) -> "Run":
        """Returns a new run, open for writing; `saved` is when it was created, and its number, if it was in another file."""
        graph = gzip.compress(format_graph(problem.graph).encode(), compresslevel=1, mtime=0)
        values = (problem.digest, graph, format_cluster(problem.cluster), problem.grouping)
        created, number = (time.time(), None) if saved is None else saved  # SQLite finds a number where there is none
        fields = (number, specification.key, pack_specification(specification), created, "running")
        with self._all_or_nothing():
            self._check_version()  # another process may have discarded the file since it was opened
            self.execute("insert or ignore into problems values (?, ?, ?, ?)", values)
            cursor = self.execute(
                "insert into runs (id, key, specification, created, status) values (?, ?, ?, ?, ?)", fields
            )
            assert cursor.lastrowid is not None
            if self.info(cursor.lastrowid).batches:
                raise StoreError(f"{self.path}: is damaged: it has batches of run {cursor.lastrowid}, but not that run")
        return Run(self, cursor.lastrowid)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Commits what is written, unless something fails: a damaged file may show that only when it is written."""
        self.execute("begin immediate")
        try:
            yield
            self.execute("commit")
        except BaseException:
            with suppress(sqlite3.Error):
                self._connection.execute("rollback")
            raise

    def numbers(self) -> Iterator[int]:
        """Yields the numbers of all runs, oldest first."""
        last = 0
        for (number,) in self.rows("select id from runs order by id"):
            if type(number) is not int or number <= last:  # a damaged tree could give the same ones without end
                raise StoreError(f"{self.path}: is damaged: run {number!r} follows run {last}")
            last = number
            yield number

    def runs(self) -> list[RunInfo]:
        """Returns all runs, oldest first."""
        return [self.info(number) for number in list(self.numbers())]

    def info(self, number: int) -> RunInfo:
        """Returns one run as `placewise runs` lists it."""
        head, count, evaluations, best = self.head(number), 0, 0, None
        query = "cost, step_seconds, overflow_bytes, placement is null"
        for count, (cost, seconds, overflow, is_worse) in enumerate(self._steps(number, query), 1):
            evaluation = unpack_evaluation(cost, seconds, overflow, f"{self.path}: run {number}, batch {count - 1}")
            evaluations += len(evaluation.cost)
            if not is_worse:
                best = best_seconds(evaluation)
        return RunInfo(number, head.specification, head.created, head.status, count, evaluations, best)

    def head(self, number: int) -> RunHead:
        """Returns what is recorded of a run besides its batches."""
        query = "select specification, key, created, status, outcome from runs where id = ?"
        if (row := next(self.rows(query, (number,)), None)) is None:
            known = ", ".join(map(str, self.numbers())) or "none"
            raise StoreError(f"{self.path}: there is no run {number}; the runs are: {known}")
        return unpack_head(row, f"{self.path}: run {number}")

    def problem(self, number: int) -> Problem:
        """Returns the problem of a run."""
        digest, source = self.head(number).specification.problem_digest, f"{self.path}: the problem of run {number}"
        row = next(self.rows("select graph, cluster, grouping from problems where digest = ?", (digest,)), None)
        if row is None:
            raise StoreError(f"{source} is missing")
        try:
            problem = _problem_of(row, source)
        except StoreError:
            raise
        except InputError as rule:
            raise StoreError(f"{source}: {str(rule).removeprefix(f'{source}: ')}") from None
        if problem.digest != digest:
            raise StoreError(f"{source} has changed: was it recorded by another version?")
        return problem

    def batches(self, number: int) -> Iterator[JudgedBatch]:
        """Returns the batches recorded for a run, even while another process writes it."""
        for count, row in enumerate(self._steps(number, ", ".join(STEP_COLUMNS))):
            yield unpack_batch(row, f"{self.path}: run {number}, batch {count}")

    def _steps(self, number: int, columns: str) -> Iterator[Row]:
        """Yields these columns of a run's batches; each must be there."""
        query = f"select number, {columns} from steps where run = ? order by number"
        for expected, (found, *row) in enumerate(self.rows(query, (number,))):
            if found != expected:
                raise StoreError(f"{self.path}: is damaged: run {number} has batch {found!r} where {expected} should be")
            yield tuple(row)


class Run:
    """A run that is open for writing: a second writer is refused until this one is closed or its process ends."""

    def __init__(self, file: RunFile, number: int) -> None:
        self.file, self.number = file, number
        file.head(number)  # there is such a run
        self._lock_path = file.path.with_name(f"{file.path.name}.run-{number}.lock")
        self._lock = _take_lock(self._lock_path, f"{file.path}: run {number}")
        try:
            self.info = file.info(number)  # as the last writer has left it
        except BaseException:
            self.close()
            raise
        self._count, self._last = self.info.batches, time.monotonic()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets another process write the run."""
        if self._lock >= 0:
            if _is_same(self._lock, self._lock_path) and not os.fstat(self._lock).st_size:  # not a file of someone else's
                self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1

    def batches(self) -> Iterator[JudgedBatch]:
        """Returns the batches recorded so far."""
        return self.file.batches(self.number)

    def forget(self) -> None:
        """Deletes the run if it has no batches."""
        if not self._count:
            self.file.execute("delete from runs where id = ?", (self.number,))

    def add(self, batch: JudgedBatch) -> None:
        """Commits a batch; one that took long is on the disk when this returns."""
        is_slow = time.monotonic() - self._last > SLOW_SECONDS
        self.file.execute(f"pragma synchronous = {'full' if is_slow else 'normal'}")
        columns = f"run, number, {', '.join(STEP_COLUMNS)}"
        values = (self.number, self._count, *pack_batch(batch))
        self.file.execute(f"insert into steps ({columns}) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        self._count += 1
        self._last = time.monotonic()

    def outcome(self) -> Outcome | None:
        """Returns what a finished run found; None if it can continue, or if nothing fits: then the search is replayed."""
        head = self.file.head(self.number)
        if head.finding is None:
            return None
        best: tuple[Ints, Ints | None] | None = None
        spent, step_seconds, history = 0, np.inf, []
        for batch in self.batches():
            spent += len(batch.evaluation.cost)
            if batch.best is not None:
                best, step_seconds = batch.best, best_seconds(batch.evaluation)
            history.append((spent, step_seconds))
        evaluations, seconds, answer = head.finding
        if evaluations != spent:
            raise StoreError(
                f"{self.file.path}: is damaged: run {self.number} has {spent:,} of its {evaluations:,} evaluations"
            )
        if best is None:
            return None
        found = Outcome(head.status, *best, step_seconds, spent, seconds, tuple(history))
        if answer is None:
            return found
        known = answer if answer.fastest is not None else answer._replace(fastest=best)
        return replace(found, **known._asdict())

    def finish(self, outcome: Outcome) -> None:
        """Records how the run ended; a run that was stopped stays unfinished."""
        if outcome.status != "stopped":
            answer = None
            if outcome.simplicity is not None and outcome.placement is not None and outcome.order is not None:
                answer = SimplerPlan(
                    outcome.placement, outcome.order, outcome.step_seconds, outcome.simplicity, outcome.fastest
                )
            self.end(outcome.status, outcome.evaluations, outcome.seconds, answer)

    def end(self, status: str, evaluations: int, seconds: float, answer: SimplerPlan | None = None) -> None:
        """Records that the run is finished."""
        values = (status, pack_finding(evaluations, seconds, answer), self.number)
        self.file.execute("update runs set status = ?, outcome = ? where id = ?", values)


def check_recorded(problem: Problem, best: tuple[Ints, Ints | None] | None, source: str) -> None:
    """Refuses a recorded placement or order that is not one of the problem's; errors name `source`."""
    if best is None:
        return
    placement, order = best
    try:
        problem.check_placements(placement[None])
        if order is not None:
            problem.check_plan(placement, order)
    except ProblemError as rule:
        raise StoreError(f"{source}: is damaged: {rule}") from None


def _connect(path: Path, create: bool, read_only: bool) -> sqlite3.Connection:
    """Opens a run file; one that is only read is left as it is.

    SQLite merges a log that a killed writer has left, unless it opens the file as read-only; without a log it would then
    leave files of its own, unless it can't write at all.
    """
    is_writable = os.access(path if path.exists() else path.absolute().parent, os.W_OK)
    is_writable &= os.access(path.absolute().parent, os.W_OK)
    if not is_writable and not read_only:
        raise StoreError(f"{path}: can't be written: the file or its folder is read-only")
    log = path.with_name(f"{path.name}-wal")
    mode = "rwc" if create else "rw"
    if read_only and log.exists() and log.stat().st_size:
        mode = "ro"
        if not is_writable and not path.with_name(f"{path.name}-shm").exists():
            raise StoreError(
                f"{path}: can't be read here: its last writer was killed and left {log.name}; copy both files to a folder "
                "that can be written"
            )
    elif not is_writable:
        mode = "ro&immutable=1"
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, timeout=30, isolation_level=None, uri=True)
    if read_only:
        connection.execute("pragma query_only = on")
    return connection


def _take_lock(path: Path, source: str) -> int:
    """Returns the descriptor of a locked file, which is created if needed, and never followed if it is a link."""
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except OSError as problem:
            raise StoreError(f"{path}: can't be used as a lock file: {problem.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                raise StoreError(f"{path}: can't be used as a lock file: it is a device or a pipe")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(lock, path):
                return lock
            os.close(lock)  # the last writer has deleted it meanwhile
        except BlockingIOError:
            os.close(lock)
            raise StoreError(f"{source} is being written by another process") from None
        except OSError as problem:
            os.close(lock)
            raise StoreError(f"{path}: can't be locked: {problem.strerror}") from None
        except BaseException:
            os.close(lock)
            raise


def _is_same(handle: int, path: Path) -> bool:
    """Returns whether a path still names an open file."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _problem_of(row: Row, source: str) -> Problem:
    packed, text, grouping = row
    if type(packed) is not bytes:
        raise StoreError(f"{source}: its graph must be bytes")
    graph = parse_graph(parse_json(source, unpack(packed, source, StoreError), StoreError), source)
    cluster = parse_cluster(parse_toml(f"{source}: cluster", require_text(text, source), StoreError), source)
    return Problem.of(graph, cluster, require_text(grouping, source))
