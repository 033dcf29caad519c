"""A paper's table reproduced: every column with the same budget on simulated machines, every search recorded."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from placewise import __version__
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.experiments.papers.calibration import Calibration, calibrated
from placewise.experiments.papers.function_split import split_by_function
from placewise.experiments.papers.reported_results import (
    BY_FUNCTION,
    HEFT_EXPECTS,
    OWN,
    Paper,
    PaperColumn,
    PaperRow,
)
from placewise.experiments.recorded_searches import Contest, Found, find, recorded
from placewise.experiments.search_figures import write_figure
from placewise.formats.files import write_bytes
from placewise.models import load_graph
from placewise.search.budget import DEFAULT_EVALUATIONS
from placewise.search.planner import find_bound
from placewise.simulate.simulator import Simulator
from placewise.strategies import make

FORMAT, VERSION = "placewise-reproduction", 1


@dataclass(frozen=True)
class Effort:
    """What each search may spend, in evaluations, so that results are the same on every computer."""

    evaluations: int = DEFAULT_EVALUATIONS
    own_evaluations: int = 240  # for auto, which judges most placements with its own model: about 10 s
    seeds: int = 5
    is_quick: bool = False


def quick(paper: Paper) -> Effort:
    """Returns the effort for the quick version of a table."""
    return Effort(paper.quick_evaluations, own_evaluations=40, seeds=2, is_quick=True)


@dataclass(frozen=True)
class Machines:
    """How the papers' machines are simulated."""

    calibration: Calibration | None = None  # None: the presets' devices
    slower_links: float = 1.0  # what if every copy took this many times as long
    launch_seconds: float | None = None  # what if the host took so long for a launch; None: the presets' time

    def named(self, name: str) -> Cluster:
        """Returns the machine for a preset's name."""
        cluster = Cluster.load(name)
        if self.calibration is not None:
            cluster = calibrated(cluster, self.calibration)
        if self.launch_seconds is not None:
            cluster = replace(cluster, dispatch_seconds=self.launch_seconds)
        return cluster if self.slower_links == 1.0 else slowed(cluster, self.slower_links)


def slowed(cluster: Cluster, factor: float) -> Cluster:
    """Returns the cluster with slower links: every copy takes `factor` times as long."""
    links = tuple(
        replace(link, bytes_per_second=link.bytes_per_second / factor, latency_seconds=link.latency_seconds * factor)
        for link in cluster.links
    )
    return replace(cluster, name=f"{cluster.name}, links {factor:g} times slower", links=links)


@dataclass(frozen=True)
class ReproducedRow:
    """A row of a paper, and what we found for it."""

    row: PaperRow
    num_ops: int
    num_groups: int
    bound_seconds: float | None
    found: dict[str, Found]  # by column; those that were not started are missing


@dataclass(frozen=True)
class Reproduction:
    """A paper's table and ours."""

    paper: Paper
    effort: Effort
    results: tuple[ReproducedRow, ...]
    machines: Machines = Machines()
    is_complete: bool = True


Told = Callable[[PaperRow, str, Found], None]


def reproduce(
    paper: Paper,
    effort: Effort,
    *,
    families: tuple[str, ...] = (),
    machines: Machines = Machines(),  # noqa: B008 - frozen
    run_file: str | Path | None = None,
    on_found: Told = lambda row, column, found: None,
) -> Reproduction:
    """Returns a paper's table and ours; Ctrl-C ends it with the rows so far.

    `families` restricts it to these models. With a run file every evaluation is recorded, and the next call continues.
    """
    results: list[ReproducedRow] = []
    is_complete = False
    try:
        with recorded(run_file) as file:
            for row in rows_of(paper, effort, families):
                for result in _searches(paper, row, effort, machines, file, on_found):
                    results[:] = [*(other for other in results if other.row != row), result]
            is_complete = True
    except KeyboardInterrupt:
        pass
    return Reproduction(paper, effort, tuple(results), machines, is_complete)


def rows_of(paper: Paper, effort: Effort, families: tuple[str, ...] = ()) -> tuple[PaperRow, ...]:
    """Returns the rows to reproduce; in the quick version those that have a smaller model."""
    rows = [row for row in paper.rows if not families or row.family in families]
    if effort.is_quick:
        rows = [replace(row, model=row.quick_model) for row in rows if row.quick_model]
    return tuple(rows)


_graph = lru_cache(maxsize=3)(load_graph)  # rows with the same model follow each other


def _searches(
    paper: Paper, row: PaperRow, effort: Effort, machines: Machines, run_file: Path, on_found: Told
) -> Iterator[ReproducedRow]:
    """Yields the result of a row, each time with one more column."""
    problem = Problem.of(_graph(row.model), machines.named(row.cluster))
    contest = Contest(problem, Simulator(problem), row.model, problem.cluster.name, run_file)
    limit = find_bound(problem)
    result = ReproducedRow(row, problem.num_ops, problem.num_groups, None if limit is None else limit.seconds, {})
    for column in paper.columns:
        if not row.has(column):
            continue
        budget = effort.own_evaluations if column.name == OWN else effort.evaluations
        found = find(_contest_of(contest, row, column), column.strategy, column.settings, budget, effort.seeds)
        result = replace(result, found={**result.found, column.name: found})
        on_found(row, column.name, found)
        yield result
    yield replace(result, found={**result.found, **extra_columns(contest)})


def _contest_of(contest: Contest, row: PaperRow, column: PaperColumn) -> Contest:
    """Returns the row's contest, or for a column in micro-batches one with that model."""
    model = row.model_of(column)
    if model == contest.model:
        return contest
    problem = Problem.of(_graph(model), contest.problem.cluster)
    return replace(contest, problem=problem, evaluator=Simulator(problem), model=model)


def extra_columns(contest: Contest) -> dict[str, Found]:
    """Returns columns that claims need but no strategy has."""
    extras = {}
    placements = split_by_function(contest.problem)
    if len(placements):
        evaluation = contest.evaluator(placements)
        times = evaluation.step_seconds[evaluation.overflow_bytes == 0]
        best = (float(times.min()),) if len(times) else (None,)
        extras[BY_FUNCTION] = Found(BY_FUNCTION, best, evaluations=len(placements))
    proposal = next(make("heft").search(contest.problem, np.random.default_rng(0)))
    extras[HEFT_EXPECTS] = Found(HEFT_EXPECTS, (float(proposal.notes["model_seconds"]),))
    return extras


def write_reproduction(reproduction: Reproduction, verdicts: list[dict[str, Any]], path: str | Path) -> None:
    """Writes all results as one JSON file."""
    write_bytes(path, (json.dumps(reproduction_data(reproduction, verdicts), indent=1, allow_nan=False) + "\n").encode())


def write_reproduction_figures(reproduction: Reproduction, folder: str | Path) -> None:
    """Writes a picture of each row's searches into a folder, named after the paper and the row."""
    for result in reproduction.results:
        title = f"{result.row.label} ({result.row.model} on {result.row.cluster})"
        name = f"{reproduction.paper.name} {result.row.label}"
        write_figure(folder, name, title, result.found, reproduction.effort.evaluations, result.bound_seconds)


def reproduction_data(reproduction: Reproduction, verdicts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns all results as plain data."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "placewise": __version__,
        "paper": reproduction.paper.name,
        "title": reproduction.paper.title,
        "effort": asdict(reproduction.effort),
        "machines": asdict(reproduction.machines),
        "is_complete": reproduction.is_complete,
        "rows": [_row(result) for result in reproduction.results],
        "claims": verdicts,
    }


def _row(result: ReproducedRow) -> dict[str, Any]:
    row = result.row
    return {
        **{name: getattr(row, name) for name in ("label", "family", "num_gpus", "model", "cluster")},
        "reported": dict(row.reported),
        "num_ops": result.num_ops,
        "num_groups": result.num_groups,
        "bound_seconds": result.bound_seconds,
        "found": {name: {**asdict(found), "median": found.median} for name, found in result.found.items()},
    }
