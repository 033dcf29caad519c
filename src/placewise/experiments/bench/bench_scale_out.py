"""How a search with slow evaluations scales over Ray workers: `placewise bench scale-out`."""

import os
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewise.core.errors import InputError
from placewise.experiments.bench import Benchmark, Findings, Rows, option

if TYPE_CHECKING:
    from placewise.core.arrays import Ints
    from placewise.core.contracts import Evaluation, Evaluator
    from placewise.core.problem import Problem
    from placewise.evaluate.pool import MakeEvaluator
    from placewise.evaluate.ray import RayPool
    from placewise.search.driver import Progress
    from placewise.search.request import Request


@dataclass(frozen=True)
class ScaleOut(Benchmark):
    """Wall time of a search with slow evaluations on 1 to 12 Ray workers, some of which are killed."""

    model: str = option("model", default="nmt:layers=2,length=5")
    cluster: str = option("cluster", default="2xK80")
    budget: int = option("positive", "evaluations of each search", default=48)
    delay: float = option("seconds", "how long an evaluation takes", default=0.5)
    counts: tuple[str, ...] = option(
        "list", "numbers of workers to try (default: 1,2,4,8,12)", default=("1", "2", "4", "8", "12")
    )
    kills: int = option("count", "workers to kill during one more search with the most workers", default=2)

    def run(self) -> Findings:
        """Returns a row for each number of workers: wall time, ideal time, and whether the history is that of the simulator.

        The search is Post, which proposes 12 placements at a time: its authors had 12 machines to judge them.
        """
        from placewise.core.cluster import Cluster
        from placewise.core.problem import Problem
        from placewise.models import load_graph
        from placewise.search.budget import Budget
        from placewise.search.planner import Planner
        from placewise.search.request import Request
        from placewise.simulate.simulator import Simulator

        counts = self._worker_counts()
        problem = Problem.of(load_graph(self.model), Cluster.load(self.cluster))
        request = Request("post", {"evaluations": str(self.budget)}, Budget(self.budget), 0, "program")
        expected = Planner(problem, request).search(evaluator=Simulator(problem, "program")).history
        rows: Rows = []
        for workers, kills in (*((count, 0) for count in counts), *([(max(counts), self.kills)] if self.kills else [])):
            row = self._measure(problem, request, workers, kills, expected)
            first = rows[0]["wall s"] * rows[0]["workers"] if rows else row["wall s"] * workers
            rows.append({**row, "speed-up": first / row["wall s"]})
        return self.findings(rows)

    def _worker_counts(self) -> list[int]:
        for word in self.counts:
            if not word.isdecimal() or len(word) > 4 or not 0 < int(word) <= 1000:
                raise InputError(f"--counts: must be whole numbers from 1 to 1000, one is {word!r}")
        return [int(word) for word in self.counts]

    def _measure(
        self, problem: "Problem", request: "Request", workers: int, kills: int, expected: tuple[tuple[int, float], ...]
    ) -> dict[str, Any]:
        from placewise.evaluate.ray import RayPool
        from placewise.search.planner import Planner
        from placewise.simulate.simulator import Simulator

        planner = Planner(problem, request)

        with tempfile.TemporaryDirectory(prefix="placewise-") as name:
            folder = Path(name)
            started = time.monotonic()
            make = Delayed(partial(Simulator, problem, request.order, threads=1), self.delay, folder)
            with RayPool(make, workers) as evaluator:
                _warm_up(evaluator, problem, folder)
                killer = Killer(folder, kills, self.budget, self.delay)
                begun = time.monotonic()
                outcome = planner.search(killer, record=folder / "runs.db", evaluator=evaluator)
                wall = time.monotonic() - begun
            again = planner.search(record=folder / "runs.db", evaluator=evaluator)  # answered from the record
        return {
            "workers": workers,
            "killed": killer.killed,
            "evaluations": outcome.evaluations,
            "start s": begun - started,
            "wall s": wall,
            "ideal s": self.budget * self.delay / workers,
            "same history": "yes" if outcome.history == expected == again.history else "NO",
        }


@dataclass(frozen=True)
class Delayed:
    """Makes evaluators that take a fixed time for each placement; each process that has one leaves its id in a folder."""

    make: "MakeEvaluator"
    delay_seconds: float
    folder: Path

    def __call__(self) -> "Evaluator":
        """Returns the evaluator."""
        (self.folder / f"{os.getpid()}.pid").touch()
        simulator = self.make()

        def evaluate(placements: "Ints", orders: "Ints | None" = None) -> "Evaluation":
            time.sleep(self.delay_seconds * len(placements))
            return simulator(placements, orders)

        return evaluate


def _warm_up(evaluator: "RayPool", problem: "Problem", folder: Path) -> None:
    """Waits until every worker has started and compiled: this is timed separately."""
    placements = problem.allowed.argmax(axis=1)[None].repeat(2 * evaluator.workers, axis=0)  # [batch, groups]
    while len(list(folder.glob("*.pid"))) < evaluator.workers:
        evaluator(placements)


class Killer:
    """Kills workers in the middle of an evaluation, at moments that are spread evenly over a search."""

    def __init__(self, folder: Path, kills: int, evaluations: int, delay_seconds: float) -> None:
        self.killed = 0
        self._folder, self._delay_seconds = folder, delay_seconds
        self._moments = [evaluations * (i + 1) // (kills + 1) for i in range(kills)]

    def __call__(self, progress: "Progress") -> None:
        """If a moment has come, kills a worker when the next batch is half done."""
        if self._moments and progress.evaluations >= self._moments[0]:
            self._moments.pop(0)
            threading.Timer(self._delay_seconds / 2, self._kill).start()

    def _kill(self) -> None:
        worker = min(self._folder.glob("*.pid"))
        worker.unlink()
        os.kill(int(worker.stem), signal.SIGKILL)
        self.killed += 1
