"""The run file: recorded, read back, locked, damaged, killed."""

import dataclasses
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import wired
from search.test_driver import Endless, chain

from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.errors import StoreError
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import JudgedBatch, search
from placewise.search.run_rows import Specification
from placewise.search.store import Run, RunFile
from placewise.simulate.simulator import Simulator


def specification(problem: Problem, seed: int = 0) -> Specification:
    return Specification("m", "c", problem.digest, "program", "endless", {"a": 1.5, "b": True}, seed, Budget(evaluations=9))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    problem, evaluation = chain(), Evaluation(np.array([2.0, 1.0]), np.array([2.0, 1.0]), np.array([7, 0]))
    with RunFile(tmp_path / "runs.db") as file, file.create(specification(problem), problem) as run:
        best = (np.array([0, 1, 1]), np.array([0, 1, 2]))
        run.add(JudgedBatch(evaluation, {"loss": 0.5}, b"d" * 16, 0.25, best))
        run.add(JudgedBatch(evaluation, {}, b"e" * 16, 0.5, None))
        first, second = run.batches()
        assert [column.tolist() for column in first.evaluation] == [column.tolist() for column in evaluation]
        assert (first.notes, first.digest, first.seconds, second.best) == ({"loss": 0.5}, b"d" * 16, 0.25, None)
        assert first.best is not None
        assert [column.tolist() for column in first.best if column is not None] == [[0, 1, 1], [0, 1, 2]]
        info = file.info(run.number)
        assert (info.status, info.evaluations, info.step_seconds) == ("running", 4, 1.0)
        assert info.specification == specification(problem)
        assert file.problem(run.number).digest == problem.digest
    with RunFile(tmp_path / "runs.db", create=False) as file:
        assert file.find(specification(problem)) == 1
        assert file.find(specification(problem, seed=1)) is None


def test_a_file_that_others_have_open_is_not_discarded(tmp_path: Path) -> None:
    problem = chain()
    with RunFile(tmp_path / "runs.db") as other:
        RunFile(tmp_path / "runs.db").discard()
        other.create(specification(problem), problem).close()
    with RunFile(tmp_path / "runs.db", create=False) as file:
        assert list(file.numbers()) == [1]
        file.discard()  # it has a run
    assert (tmp_path / "runs.db").exists()


def test_no_run_is_created_in_a_file_that_is_being_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process opens it between the last look and the mark, or before it is gone: one line, and no lost run."""
    problem, other = chain(), list[RunFile]()
    execute = RunFile.execute

    def open_then_execute(file: RunFile, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        if statement == "begin immediate" and not other:
            other.append(RunFile(tmp_path / "runs.db"))
        return execute(file, statement, values)

    def look_then_unlink(path: Path, missing_ok: bool) -> None:
        with pytest.raises(StoreError, match="another process has just deleted it"):
            RunFile(tmp_path / "runs.db")

    file = RunFile(tmp_path / "runs.db")
    monkeypatch.setattr(RunFile, "execute", open_then_execute)
    monkeypatch.setattr(Path, "unlink", look_then_unlink)
    file.discard()
    with other[0], pytest.raises(StoreError, match="another process has just deleted it"):
        other[0].create(specification(problem), problem)


class Pausing:
    """Proposes a placement, nothing, and another one."""

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        yield Proposal(np.zeros((1, problem.num_groups), np.int64))
        yield Proposal(np.zeros((0, problem.num_groups), np.int64), np.zeros((0, problem.num_ops), np.int64))
        yield Proposal(np.ones((1, problem.num_groups), np.int64))


@pytest.mark.parametrize("first", [1, 2])
def test_a_proposal_of_nothing_is_recorded_and_replayed(tmp_path: Path, first: int) -> None:
    """A search that is stopped before or after it goes on as if it had not been."""
    problem, budgets = chain(), (Budget(evaluations=first), Budget(evaluations=9))
    whole = search(problem, Pausing(), Simulator(problem), budget=budgets[1], seed=0)
    assert whole.evaluations == 2
    with RunFile(tmp_path / "runs.db") as file:
        with file.create(specification(problem), problem) as run:
            number = run.number
        for budget in budgets:
            with Run(file, number) as run:
                found = search(problem, Pausing(), Simulator(problem), budget=budget, seed=0, record=run)
    assert (found.evaluations, found.step_seconds, found.history) == (2, whole.step_seconds, whole.history)


def test_batches_are_numbered_without_a_gap(tmp_path: Path) -> None:
    """From 0 on, in the file itself, also by the writer that goes on with the run."""
    problem, evaluation = chain(), Evaluation(np.ones(1), np.ones(1), np.zeros(1, np.int64))
    for _ in range(2):
        with RunFile(tmp_path / "runs.db") as file:
            number = file.find(specification(problem))
            run = file.create(specification(problem), problem) if number is None else Run(file, number)
            with run:
                for _ in range(3):
                    run.add(JudgedBatch(evaluation, {}, b"d" * 16, 0.25, None))
    with closing(sqlite3.connect(tmp_path / "runs.db")) as connection:
        assert connection.execute("select run, number from steps").fetchall() == [(1, number) for number in range(6)]


def test_the_names_that_people_gave_do_not_tell_runs_apart() -> None:
    one = specification(chain())
    assert dataclasses.replace(one, model="x", cluster="y").key == one.key
    changes: list[dict[str, Any]] = [{"seed": 1}, {"order": "priority"}, {"parameters": {}}, {"budget": Budget(8)}]
    assert all(dataclasses.replace(one, **change).key != one.key for change in changes)


def test_a_second_writer_is_refused_until_the_first_has_closed(tmp_path: Path) -> None:
    problem = chain()
    with RunFile(tmp_path / "runs.db") as file, RunFile(tmp_path / "runs.db") as other:
        with file.create(specification(problem), problem) as run:
            with pytest.raises(StoreError, match="run 1 is being written by another process"):
                Run(other, run.number)
            assert other.info(1).status == "running"  # reading is still possible
        Run(other, 1).close()


def test_unknown_runs_and_files(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no\.db: there is no such file"):
        RunFile(tmp_path / "no.db", create=False)
    with RunFile(tmp_path / "runs.db") as file, pytest.raises(StoreError, match="there is no run 3; the runs are: none"):
        file.info(3)


def use(path: Path, problem: Problem) -> None:
    """Reads all runs of a file, and begins one."""
    with RunFile(path) as file:
        file.runs()
        file.create(specification(problem, 1), problem).close()


@pytest.mark.parametrize("kind", ["text", "truncated", "other program", "other version"])
def test_a_damaged_file_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "runs.db"
    problem = chain()
    with RunFile(path) as file, file.create(specification(problem), problem):
        pass
    if kind == "text":
        path.write_text("this is not a database, but a text that is long enough to be read as one" * 20)
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:5000])
    else:
        connection = sqlite3.connect(path)
        connection.execute(f"pragma {'application_id' if kind == 'other program' else 'user_version'} = 77")
        connection.commit()
        connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError) as caught:
        use(path, problem)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert path.read_bytes() == before


def test_a_large_batch_is_one_row(tmp_path: Path) -> None:
    problem = chain()
    columns = (np.arange(1000.0), np.arange(1000.0), np.zeros(1000, np.int64))
    with RunFile(tmp_path / "runs.db") as file, file.create(specification(problem), problem) as run:
        for number in range(50):
            run.add(JudgedBatch(Evaluation(*columns), {}, bytes([number]) * 16, 0.0, None))
        assert file.info(1).evaluations == 50_000
    assert len(recorded(tmp_path / "runs.db")) == 50


KILLED = """
import os, sys
from placewise.search.planner import Planner
from placewise.search.request import Request
from placewise.search.budget import Budget
from placewise.simulate.simulator import Simulator
from search.test_store import big_problem
problem = big_problem()
request = Request("annealing", {}, Budget(evaluations=4000), 5, "program")
def search(path, listen):
    Planner(problem, request).search(listen, record=path, evaluator=Simulator(problem, "program", 1))
search(sys.argv[1], lambda progress: None)
for path in sys.stdin:
    if not (child := os.fork()):
        print(os.getpid(), flush=True)
        search(path.strip(), lambda progress: print("batch", flush=True))
        os._exit(0)
    print("ended", os.waitpid(child, 0)[1], flush=True)
"""


def big_problem() -> Problem:
    """A chain of 200 ops, for a search of many batches."""
    graph = wired([(i, i + 1) for i in range(199)], 200, seconds=[{"gpu": 1.0}] * 200)
    return Problem.of(graph, chain(10**9).cluster)


def recorded(path: Path) -> list[tuple[bytes, bytes]]:
    connection = sqlite3.connect(path)
    rows = connection.execute("select digest, cost from steps order by number").fetchall()
    connection.close()
    return rows


def test_a_run_that_is_killed_twenty_times_is_the_same_as_one_that_is_not(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    whole, killed = tmp_path / "whole.db", tmp_path / "killed.db"
    moments, endings = random.Random(1), []
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(whole)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as parent:  # fmt: skip
        assert parent.stdin is not None
        assert parent.stdout is not None
        for batches in (*(moments.randrange(4) for _ in range(20)), None):  # that it prints after they are recorded
            print(killed, file=parent.stdin)
            child = int(parent.stdout.readline())
            if batches is not None:
                lines = [parent.stdout.readline() for _ in range(batches)]
                os.kill(child, signal.SIGKILL)
                assert lines == ["batch\n"] * batches
            endings.append(next(line for line in parent.stdout if line != "batch\n"))
        parent.stdin.close()
    assert endings == [*["ended 9\n"] * 20, "ended 0\n"]
    assert recorded(killed) == recorded(whole)
    assert len(recorded(whole)) > 20


def test_a_search_can_be_recorded_and_answered_from_the_record(tmp_path: Path) -> None:
    problem = chain()
    with RunFile(tmp_path / "runs.db") as file, file.create(specification(problem), problem) as run:
        simulator = Simulator(problem, "program", 1)
        outcome = search(problem, Endless(), simulator, budget=Budget(evaluations=9), seed=0, record=run)
        run.finish(outcome)
        assert file.info(1).status == "evaluations"
