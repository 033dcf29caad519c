"""A search whose evaluations take as long as real measurements, on 1 to 12 Ray workers: `placewise bench scale-out`."""

import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.contracts import Evaluation, Evaluator
from placewise.core.problem import Problem
from placewise.evaluate.pool import MakeEvaluator
from placewise.evaluate.ray import RayPool
from placewise.models import load_graph
from placewise.search.budget import Budget
from placewise.search.driver import Outcome, Progress
from placewise.search.planner import Planner
from placewise.search.request import Request
from placewise.simulate.simulator import Simulator

MODEL, CLUSTER = "nmt:layers=2,length=5", "2xK80"


@dataclass(frozen=True)
class Trial:
    """A search with Post, which asks for 12 placements at a time, as the paper's 12 machines judged them."""

    workers: tuple[int, ...] = (1, 2, 4, 8, 12)
    delay_seconds: float = 0.5  # of one evaluation
    evaluations: int = 48
    kills: int = 2  # workers that are killed during the search with the most workers, once more


@dataclass(frozen=True)
class Delayed:
    """Makes evaluators that take a fixed time for each placement; each process that has one leaves its id in a folder."""

    make: MakeEvaluator
    delay_seconds: float
    folder: Path

    def __call__(self) -> Evaluator:
        """Returns the evaluator."""
        (self.folder / f"{os.getpid()}.pid").touch()
        simulator = self.make()

        def evaluate(placements: Ints, orders: Ints | None = None) -> Evaluation:
            time.sleep(self.delay_seconds * len(placements))
            return simulator(placements, orders)

        return evaluate


def bench_scale_out(trial: Trial, models: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Returns a row for each number of workers: wall time beside the ideal, and whether the history is that without delay.

    The last row is the largest number again, with workers killed in between.
    """
    problem = Problem.of(load_graph(models[0] if models else MODEL), Cluster.load(models[1] if len(models) > 1 else CLUSTER))
    request = Request("post", {"evaluations": str(trial.evaluations)}, Budget(trial.evaluations), 0, "program")
    expected = Planner(problem, request).search(evaluator=Simulator(problem, "program")).history
    rows: list[dict[str, Any]] = []
    for workers, kills in (*((number, 0) for number in trial.workers), (max(trial.workers), trial.kills)):
        row = _measure(problem, request, trial, workers, kills, expected)
        first = rows[0]["wall s"] * rows[0]["workers"] if rows else row["wall s"] * workers
        rows.append({**row, "speed-up": first / row["wall s"]})
        if not trial.kills and len(rows) == len(trial.workers):
            break
    return rows


def _measure(
    problem: Problem, request: Request, trial: Trial, workers: int, kills: int, expected: tuple[tuple[int, float], ...]
) -> dict[str, Any]:
    planner = Planner(problem, request)
    with tempfile.TemporaryDirectory(prefix="placewise-") as name:
        folder = Path(name)
        started = time.monotonic()
        make = Delayed(partial(Simulator, problem, request.order, threads=1), trial.delay_seconds, folder)
        with RayPool(make, workers) as evaluator:
            _warm_up(evaluator, problem, folder)
            killer = _Killer(folder, trial, kills)
            begun = time.monotonic()
            outcome: Outcome = planner.search(killer, record=folder / "runs.db", evaluator=evaluator)
            wall = time.monotonic() - begun
        again = planner.search(record=folder / "runs.db", evaluator=evaluator)  # answered from the record
    return {
        "workers": workers,
        "killed": killer.killed,
        "evaluations": outcome.evaluations,
        "start s": begun - started,
        "wall s": wall,
        "ideal s": trial.evaluations * trial.delay_seconds / workers,
        "same history": "yes" if outcome.history == expected == again.history else "NO",
    }


def _warm_up(evaluator: RayPool, problem: Problem, folder: Path) -> None:
    """Waits until every worker has started and compiled: starting is measured apart."""
    placements = problem.allowed.argmax(axis=1)[None].repeat(2 * evaluator.workers, axis=0)  # [batch, groups]
    while len(list(folder.glob("*.pid"))) < evaluator.workers:
        evaluator(placements)


class _Killer:
    """Kills workers in the middle of an evaluation, at moments that are spread evenly over a search."""

    def __init__(self, folder: Path, trial: Trial, kills: int) -> None:
        self.killed = 0
        self._folder, self._delay_seconds = folder, trial.delay_seconds
        self._moments = [trial.evaluations * (i + 1) // (kills + 1) for i in range(kills)]

    def __call__(self, progress: Progress) -> None:
        """Has one killed, if a moment has come, when the next batch is half done."""
        if self._moments and progress.evaluations >= self._moments[0]:
            self._moments.pop(0)
            threading.Timer(self._delay_seconds / 2, self._kill).start()

    def _kill(self) -> None:
        worker = min(self._folder.glob("*.pid"))
        worker.unlink()
        os.kill(int(worker.stem), signal.SIGKILL)
        self.killed += 1
