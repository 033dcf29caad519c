"""Run files that a disk or a stranger has changed: one line, the file as it was, and what is intact can be saved."""

import json
import os
import random
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_cluster, tiny_graph
from command_line import refused

from placewise.cli import main
from placewise.core.errors import InputError, StoreError
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.planner import Planner
from placewise.search.recovery import recover
from placewise.search.request import Request, requested
from placewise.search.store import Run, RunFile

NOT_OURS = b"somebody else's file"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run file with a finished run and one that was stopped after half of its batches."""
    problem, path = Problem.of(tiny_graph(), tiny_cluster()), tmp_path / "runs.db"

    def stop(progress: Any) -> None:
        if progress.evaluations >= 12:
            raise KeyboardInterrupt

    settings = {"batch": "4"}
    for seed, listen in enumerate((None, stop)):
        request = Request("random", settings, Budget(24), seed, "program", "m", "c")
        Planner(problem, request).search(listen, record=path)
    return path


@contextmanager
def changing(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that may write what RunFile never would; the file has no log afterwards."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        yield connection
    finally:
        connection.close()


def read_all(path: Path) -> None:
    """Reads everything that a command reads."""
    with RunFile(path, read_only=True) as file:
        for run in file.runs():
            file.problem(run.number)
            list(file.batches(run.number))
            requested(run.specification)
    with RunFile(path, create=False) as file, Run(file, 1) as first:
        first.outcome()


PACKED = zlib.compress(bytes(6), 1)

CHANGES = {  # what a stranger may have written, and the rule that refuses it
    "update steps set cost = 'text' where number = 1": "run 1, batch 1: cost: must be float64 in bytes, got 'text'",
    "update steps set cost = x'00' where number = 0": "batch 0: cost: must be float64 in bytes",
    "update steps set cost = x'0000000000000000'": "cost, step_seconds and overflow_bytes must be equally long",
    "update steps set notes = '[' where number = 2": "batch 2: notes: is not JSON",
    "update steps set notes = '[1]'": "batch 0: notes must be a dict, got a list",
    "update steps set notes = 7.5": "batch 0: notes must be a dict, got 7.5",
    "update steps set digest = 'short'": "batch 0: digest must be 16 bytes, got 'short'",
    "update steps set seconds = 'soon'": "must have a time of at least 0 seconds, got 'soon'",
    "update steps set seconds = -1": "must have a time of at least 0 seconds, got -1.0",
    "update steps set seconds = 9e999": "must have a time of at least 0 seconds, got inf",
    "update steps set placement = x'1234' where placement is not null": "placement: can't be unpacked",
    "update steps set placement = 7 where placement is not null": "placement: must be packed bytes, got 7",
    "update steps set number = -1 - number": "run 1 has batch -6 where 0 should be",
    "update steps set number = 10 + number where number > 1": "run 1 has batch 12 where 2 should be",
    "update steps set number = 'x' where number = 5 and run = 1": "run 1 has batch 'x' where 5 should be",
    "delete from steps where run = 1 and number = 0": "run 1 has batch 1 where 0 should be",
    "delete from steps where run = 1 and number = 5": "run 1 has 20 of its 24 evaluations",
    "update runs set specification = '{}'": "run 1: needs the field 'budget'",
    "update runs set specification = 'nothing'": "run 1: is not JSON",
    "update runs set specification = replace(specification, '24', '\"many\"')": "budget: evaluations must be a number",
    "update runs set specification = replace(specification, '24', '-24')": "evaluations must be at least 1, got -24",
    "update runs set specification = replace(specification, '24', '25')": "its specification is another one than was",
    "update runs set specification = replace(specification, '\"seed\"', '\"sead\"')": "run 1: unknown field 'sead'",
    "update runs set created = 'then'": "must have a time of at least 0 seconds, got 'then'",
    "update runs set created = 1e300": "must have a time of at least 0 seconds, got 1e+300",
    "update runs set status = x'00'": "status: must be text, got b'\\x00'",
    "update runs set outcome = '{\"seconds\": 1}'": "outcome: needs the field 'evaluations'",
    "update runs set outcome = x'00ff'": "run 1: must be text",
    "update problems set graph = x'1f8b'": "the problem of run 1: is not a complete gzip file",
    "update problems set graph = 'text'": "the problem of run 1: its graph must be bytes",
    "update problems set cluster = '['": "the problem of run 1: cluster: is not TOML",
    "update problems set cluster = 'x = 1'": "the problem of run 1: unknown field 'x'",
    "update problems set grouping = 'coarse:0'": "the problem of run 1: unknown grouping 'coarse:0'",
    "update problems set digest = 'other'": "the problem of run 1 is missing",
    "update problems set grouping = 'module'": "the problem of run 1 has changed",
    "create view v as select 1": "it has other tables than a run file",
    "create trigger t after insert on steps begin delete from steps; end": "it has other tables than a run file",
    "create index i on steps (notes)": "it has other tables than a run file",
    "alter table runs add column more": "it has other tables than a run file",
    "drop table problems": "it has other tables than a run file",
    "update sqlite_master set name = x'ff' where name = 'steps'": "is damaged",
}


@pytest.mark.parametrize(("statement", "rule"), CHANGES.items(), ids=CHANGES)
def test_every_column_is_checked(runs: Path, statement: str, rule: str) -> None:
    with changing(runs) as connection:
        connection.execute("pragma writable_schema = 1")
        connection.execute(statement)
    before = runs.read_bytes()
    with pytest.raises(InputError) as caught:
        read_all(runs)
    assert rule in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert runs.name in str(caught.value)
    assert runs.read_bytes() == before
    assert os.listdir(runs.parent) == [runs.name]


def test_a_file_whose_list_of_tables_is_lost_is_not_taken_for_a_new_one(runs: Path) -> None:
    """Its tables would be overwritten."""
    damaged = bytearray(runs.read_bytes())
    damaged[103:105] = bytes(2)  # the number of cells on the first page
    runs.write_bytes(damaged)
    with pytest.raises(StoreError, match="its list of tables is empty, but the file is not"):
        RunFile(runs)
    assert runs.read_bytes() == damaged


def test_a_packed_placement_does_not_fill_the_memory(runs: Path) -> None:
    bomb = zlib.compress(bytes(2**27), 9)
    with changing(runs) as connection:
        connection.execute("update steps set placement = ? where placement is not null", (bomb,))
    with pytest.raises(StoreError, match="is not complete, or unpacks to more than 67,108,864 bytes"):
        read_all(runs)


def test_a_placement_of_another_problem_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole numbers, but not one for each group, or a device that does not exist."""
    for values, rule in (([0], "placements must be whole numbers of shape"), ([0, 9, 0], "Expected 0 <= device < 2")):
        packed = zlib.compress(np.array(values, np.int16).tobytes())
        with changing(runs) as connection:
            connection.execute("update steps set placement = ? where placement is not null", (packed,))
        for command in (["resume", "1", "--run-file"], ["report", "-o", str(runs.parent / "page.html")]):
            assert f"run 1: is damaged: {rule}" in refused([*command, str(runs)], capsys)


def test_random_damage_is_one_line_and_changes_nothing(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, rng = runs.read_bytes(), random.Random(3)
    refusals = 0
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 8, 64))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        runs.write_bytes(data)
        for command in (["runs", str(runs)], ["resume", "1", "--run-file", str(runs), "--quiet"]):
            code = main(command)
            error = capsys.readouterr().err
            assert (code, error.count("\n")) in ((0, 0), (2, 1)), error
            refusals += code == 2
        assert runs.read_bytes() == bytes(data)
        assert os.listdir(runs.parent) == [runs.name]
    assert refusals > 10


@pytest.mark.parametrize("damage", ["orphans", "pages"])
def test_a_search_does_not_write_to_a_damaged_file(runs: Path, damage: str) -> None:
    """Batches without their run would become those of the next one; a damaged page may show only when it is written."""
    if damage == "orphans":
        with changing(runs) as connection:
            connection.execute("delete from runs")
    else:
        data = bytearray(runs.read_bytes())
        for page in range(4096, len(data), 4096):
            data[page + 8 : page + 12] = b"\xff" * 4  # where its first two rows are
        runs.write_bytes(data)
    before = runs.read_bytes()
    planner = Planner(Problem.of(tiny_graph(), tiny_cluster()), Request("random", {}, Budget(8), 7, "program", "m", "c"))
    with pytest.raises(StoreError, match=r"runs\.db: is damaged: "):
        planner.search(record=runs)
    assert runs.read_bytes() == before
    assert os.listdir(runs.parent) == [runs.name]


# --- recovery ---


def test_what_is_intact_is_saved(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run 1 has lost its fourth batch: the three before it are saved, and resuming it gives the same history."""
    with RunFile(runs, read_only=True) as file:
        whole = list(file.batches(1))
    with changing(runs) as connection:
        connection.execute("update steps set cost = x'00' where run = 1 and number = 3")
    new = runs.with_name("new.db")
    before = runs.read_bytes()
    assert main(["runs", str(runs), "--recover", str(new), "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["number"], run["batches"], run["evaluations"]) for run in saved] == [(1, 3, 12), (2, 3, 12)]
    assert "run 1, batch 3: cost: must be float64" in saved[0]["lost"]
    assert saved[1]["lost"] == ""
    assert runs.read_bytes() == before
    assert sorted(os.listdir(runs.parent)) == ["new.db", "runs.db"]
    with RunFile(new, read_only=True) as file:
        assert [run.status for run in file.runs()] == ["running", "running"]
    assert main(["resume", "1", "--run-file", str(new), "--quiet"]) == 0
    with RunFile(new, read_only=True) as file:
        again = list(file.batches(1))
    assert [batch.digest for batch in again] == [batch.digest for batch in whole]
    assert [batch.evaluation.cost.tolist() for batch in again] == [batch.evaluation.cost.tolist() for batch in whole]


def test_a_whole_file_is_saved_whole(runs: Path) -> None:
    new = runs.with_name("new.db")
    assert [run.lost for run in recover(runs, new)] == ["", ""]
    with RunFile(runs, read_only=True) as old, RunFile(new, read_only=True) as file:
        assert file.runs() == old.runs()


def test_a_finished_run_without_its_last_batch_is_saved_unfinished(runs: Path) -> None:
    with changing(runs) as connection:
        connection.execute("delete from steps where run = 1 and number = (select max(number) from steps where run = 1)")
    first, second = recover(runs, runs.with_name("new.db"))
    assert first.lost.endswith(f"run 1 had {first.evaluations + 4:,} evaluations")
    assert second.lost == ""
    with RunFile(runs.with_name("new.db"), read_only=True) as file:
        assert [run.status for run in file.runs()] == ["running", "running"]


def test_runs_behind_a_damaged_one_are_saved(runs: Path) -> None:
    with changing(runs) as connection:
        connection.execute("update runs set specification = 'lost' where id = 1")
    first, second = recover(runs, runs.with_name("new.db"))
    assert (first.batches, second.batches) == (0, 3)
    assert "run 1: is not JSON" in first.lost
    with RunFile(runs.with_name("new.db"), read_only=True) as file:
        assert [run.number for run in file.runs()] == [2]


def test_nothing_is_written_if_nothing_can_be_saved(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = runs.with_name("new.db")
    new.write_bytes(NOT_OURS)
    assert "refusing to overwrite a file" in refused(["runs", str(runs), "--recover", str(new)], capsys)
    assert new.read_bytes() == NOT_OURS
    new.unlink()
    new.symlink_to("elsewhere.db")
    assert "refusing to overwrite a file" in refused(["runs", str(runs), "--recover", str(new)], capsys)
    new.unlink()
    for ending in ("-wal", "-shm", "-journal", ".lock"):
        assert "would be a part of" in refused(["runs", str(runs), "--recover", f"{runs}{ending}"], capsys)
    with changing(runs) as connection:
        connection.execute("update steps set cost = 1.5")
    assert "nothing can be saved" in refused(["runs", str(runs), "--recover", str(new)], capsys)
    runs.write_bytes(runs.read_bytes()[:3000])
    assert "is damaged" in refused(["runs", str(runs), "--recover", str(new)], capsys)
    assert os.listdir(runs.parent) == ["runs.db"]


# --- what is no run file ---


@pytest.mark.parametrize("kind", ["empty", "pipe", "device", "folder"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "runs.db"
    if kind == "empty":
        path.touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    for command in (["runs", str(path)], ["resume", "1", "--run-file", str(path)]):
        message = refused(command, capsys)
        assert ("is empty" if kind == "empty" else "can't be read") in message


def test_a_log_that_a_killed_writer_left_is_read_and_left(runs: Path) -> None:
    """Listing runs must not change a file; SQLite would merge the log into it."""
    code = "import sys, os, sqlite3; c = sqlite3.connect(sys.argv[1]); c.execute('update runs set status = \"x\"'); "
    subprocess.run([sys.executable, "-c", code + "c.commit(); os._exit(1)", str(runs)], check=False)
    before, log = runs.read_bytes(), runs.with_name("runs.db-wal").read_bytes()
    assert log
    with RunFile(runs, read_only=True) as file:
        assert {run.status for run in file.runs()} == {"x"}
    assert runs.read_bytes() == before
    assert runs.with_name("runs.db-wal").read_bytes() == log


# --- lock files ---


def test_a_lock_file_that_is_a_link_is_not_followed(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.write_bytes(NOT_OURS)
    lock = runs.with_name("runs.db.run-2.lock")
    lock.symlink_to(other)
    assert "can't be used as a lock file: Too many levels" in refused(["resume", "2", "--run-file", str(runs)], capsys)
    assert other.read_bytes() == NOT_OURS
    assert lock.is_symlink()


@pytest.mark.parametrize("kind", ["file", "hard link", "pipe"])
def test_a_lock_file_that_is_not_ours_is_left(runs: Path, kind: str) -> None:
    other, lock = runs.with_name("other"), runs.with_name("runs.db.run-2.lock")
    other.write_bytes(NOT_OURS)
    if kind == "file":
        lock.write_bytes(NOT_OURS)
    elif kind == "hard link":
        os.link(other, lock)
    else:
        os.mkfifo(lock)
    with RunFile(runs) as file:
        if kind == "pipe":
            with pytest.raises(StoreError, match="can't be used as a lock file: it is a device or a pipe"):
                Run(file, 2)
        else:
            Run(file, 2).close()
            assert lock.read_bytes() == NOT_OURS
    assert other.read_bytes() == NOT_OURS


def test_a_lock_file_is_deleted_and_taken_again(runs: Path) -> None:
    with RunFile(runs) as file:
        with Run(file, 2):
            assert runs.with_name("runs.db.run-2.lock").exists()
        assert not runs.with_name("runs.db.run-2.lock").exists()
        Run(file, 2).close()
