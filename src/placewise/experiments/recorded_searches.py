"""Recorded searches with several seeds: what a strategy finds, how reliably and how fast."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from placewise.core.arrays import Floats
from placewise.core.contracts import Evaluator
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.search.budget import Budget
from placewise.search.driver import JudgedBatch, unless_stopped
from placewise.search.planner import Planner
from placewise.search.request import Request, specify
from placewise.search.store import RunFile
from placewise.strategies import parameters

Improvement = tuple[int, float, float]  # evaluations spent, seconds since the search began, step seconds


@dataclass(frozen=True)
class Contest:
    """A problem with its evaluator, the names of its model and cluster, and the file that records its searches."""

    problem: Problem
    evaluator: Evaluator
    model: str
    cluster: str
    run_file: Path


@dataclass(frozen=True)
class Found:
    """What a strategy found with each seed."""

    strategy: str
    step_seconds: tuple[float | None, ...]  # by seed; None: nothing that fits
    evaluations: int = 0  # of the seed that took most
    search_seconds: float = 0.0  # of all seeds together
    settings: Mapping[str, str] = field(default_factory=dict)
    histories: tuple[tuple[Improvement, ...], ...] = ()  # by seed: every improvement
    trial_seconds: float = 0.0  # the sum of the step times of all that was judged, the mean of the seeds
    problem: str = ""  # why the strategy can't be used

    @property
    def times(self) -> list[float]:
        """The step seconds of the seeds that found something, lowest first."""
        return sorted(seconds for seconds in self.step_seconds if seconds is not None)

    @property
    def median(self) -> float | None:
        """The median over the seeds that found something."""
        return statistics.median(self.times) if self.times else None


@dataclass(frozen=True, eq=False)
class SampledCosts:
    """All that one search had judged, in its order, and the notes of its last update."""

    seconds: Floats  # [samples], the costs
    best: Floats  # [samples], the best step so far; infinite until one fits
    notes: Mapping[str, Any]

    @classmethod
    def of(cls, batches: Sequence[JudgedBatch]) -> "SampledCosts":
        """Returns the samples of judged batches."""
        cost = np.concatenate([batch.evaluation.cost for batch in batches])
        misfits = np.concatenate([batch.evaluation.overflow_bytes for batch in batches]) > 0
        return cls(cost, np.minimum.accumulate(np.where(misfits, np.inf, cost)), batches[-1].notes)

    def mean_of_tenth(self, number: int) -> float:
        """Returns the mean of a tenth of the samples: 0 is the first, -1 the last."""
        return float(np.array_split(self.seconds, min(10, len(self.seconds)))[number].mean())


@contextmanager
def recorded(run_file: str | Path | None) -> Iterator[Path]:
    """Gives the file that records searches: the one that is named, or a temporary one."""
    if run_file is not None:
        yield Path(run_file)
        return
    with TemporaryDirectory(prefix="placewise-") as folder:
        yield Path(folder) / "runs.db"


def find(contest: Contest, strategy: str, settings: Mapping[str, str], evaluations: int, seeds: int) -> Found:
    """Returns what a strategy finds with the seeds 0 to `seeds` - 1; raises KeyboardInterrupt if it is stopped.

    A strategy whose schedule depends on its number of evaluations gets the budget's. If it can't be used, the result says
    why.
    """
    if "evaluations" in parameters(strategy):
        settings = {"evaluations": str(evaluations), **settings}
    times: list[float | None] = []
    histories: list[tuple[Improvement, ...]] = []
    trials: list[float] = []
    most, seconds = 0, 0.0
    for seed in range(seeds):
        request = Request(strategy, settings, Budget(evaluations), seed, model=contest.model, cluster=contest.cluster)
        try:
            outcome = unless_stopped(
                Planner(contest.problem, request).search(record=contest.run_file, evaluator=contest.evaluator)
            )
        except StrategyError as rule:
            return Found(strategy, (), settings=settings, problem=str(rule))
        times.append(None if outcome.placement is None else outcome.step_seconds)
        improvements, judged_seconds = _improvements(contest, request)
        histories.append(improvements)
        trials.append(judged_seconds)
        most, seconds = max(most, outcome.evaluations), seconds + outcome.seconds
    return Found(strategy, tuple(times), most, seconds, settings, tuple(histories), statistics.fmean(trials))


def _improvements(contest: Contest, request: Request) -> tuple[tuple[Improvement, ...], float]:
    """Returns every improvement of a recorded search, and the sum of all its step times."""
    found: list[Improvement] = []
    spent, judged_seconds = 0, 0.0
    for batch in judged_batches(contest, request):
        spent += len(batch.evaluation.cost)
        judged_seconds += float(batch.evaluation.step_seconds.sum())
        if batch.best is not None:
            fits = batch.evaluation.overflow_bytes == 0
            found.append((spent, batch.seconds, float(batch.evaluation.step_seconds[fits].min())))
    return tuple(found), judged_seconds


def judged_searches(
    contest: Contest, strategy: str, settings: Mapping[str, str], evaluations: int, seeds: int
) -> list[list[JudgedBatch]]:
    """Returns all that a strategy had judged with the seeds 0 to `seeds` - 1; raises KeyboardInterrupt if it is stopped."""
    found = []
    for seed in range(seeds):
        request = Request(strategy, settings, Budget(evaluations), seed, model=contest.model, cluster=contest.cluster)
        unless_stopped(Planner(contest.problem, request).search(record=contest.run_file, evaluator=contest.evaluator))
        found.append(judged_batches(contest, request))
    return found


def judged_batches(contest: Contest, request: Request) -> list[JudgedBatch]:
    """Returns the batches of a recorded search, in their order."""
    with RunFile(contest.run_file, read_only=True) as file:
        number = file.find(specify(contest.problem, request))
        assert number is not None
        return list(file.batches(number))
