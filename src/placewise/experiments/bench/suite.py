"""Every strategy on many models and machines with equal budgets: `placewise bench suite`."""

import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from placewise import zoo
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.evaluate import open_evaluator
from placewise.experiments.bench.rows import PAPERS
from placewise.experiments.papers.figures import write_figure
from placewise.experiments.papers.recorded_searches import Contest, Found, find, recorded
from placewise.experiments.papers.result_tables import markdown_table
from placewise.formats.files import write_bytes
from placewise.machines.presets import preset_names
from placewise.models import load_graph

FORMAT, VERSION = "placewise-suite", 1

MODELS = ("cifar-cnn", "resnet", "inception-v3", "rnnlm", "nmt:layers=2", "bert")  # where none are named

CLUSTERS = ("2xK80", "4xV100-nvlink", "4090+3060")

ALL_MODELS, ALL_CLUSTERS = tuple(zoo.MODELS), preset_names()

NEAR = 0.05  # above the best of a problem: a solution

TIE = 1e-9  # relative: as good as the best


@dataclass(frozen=True)
class Suite:
    """What is compared: every model on every machine by every strategy, each with the same number of evaluations."""

    models: tuple[str, ...] = MODELS
    clusters: tuple[str, ...] = CLUSTERS
    strategies: tuple[str, ...] = PAPERS
    evaluations: int = 240
    seeds: int = 1


@dataclass(frozen=True)
class Judged:
    """A model on a machine, and what each strategy found."""

    model: str
    cluster: str
    num_ops: int
    found: dict[str, Found]  # by strategy

    @property
    def best(self) -> float | None:
        """The lowest median of all strategies."""
        return min((found.median for found in self.found.values() if found.median is not None), default=None)

    def ratio(self, strategy: str) -> float | None:
        """Returns a strategy's median over the best one; None where it found nothing that fits."""
        median = self.found[strategy].median if strategy in self.found else None
        return None if median is None or not self.best else median / self.best

    def solved_after(self, strategy: str) -> float | None:
        """Returns the seconds until a strategy was within 5% of the best, the median of its seeds; None: half never were."""
        limit = (self.best or 0.0) * (1 + NEAR)
        histories = self.found[strategy].histories if strategy in self.found else ()
        moments = [next((t for _, t, step in history if step <= limit), math.inf) for history in histories]
        middle = statistics.median(moments) if moments else math.inf
        return middle if math.isfinite(middle) else None


Told = Callable[[Judged, str], None]


def bench_suite(
    suite: Suite,
    *,
    run_file: str | Path | None = None,
    workers: int | None = None,
    ray: str | None = None,
    on_found: Told = lambda judged, strategy: None,
) -> tuple[list[Judged], bool]:
    """Returns what was found for each problem, and whether that is all: Ctrl-C ends it with what there is.

    With a run file every evaluation is kept there, and the same call goes on where the file ends.
    """
    done: list[Judged] = []
    graphs = lru_cache(maxsize=1)(load_graph)
    _check(suite)
    try:
        with recorded(run_file) as file:
            for model in suite.models:
                for cluster in suite.clusters:
                    problem = Problem.of(graphs(model), Cluster.load(cluster))
                    judged = Judged(model, cluster, problem.num_ops, {})
                    done.append(judged)
                    with open_evaluator(problem, workers=workers, ray=ray) as evaluator:
                        contest = Contest(problem, evaluator, model, cluster, file)
                        for name in suite.strategies:
                            judged.found[name] = find(contest, name, {}, suite.evaluations, suite.seeds)
                            on_found(judged, name)
    except KeyboardInterrupt:
        return done, False
    return done, True


def _check(suite: Suite) -> None:
    """Refuses names that are wrong before any work."""
    for cluster in suite.clusters:
        Cluster.load(cluster)
    for model in suite.models:
        if model.partition(":")[0] in zoo.MODELS:
            zoo.parse_model(model)
        else:
            load_graph(model)


def scores(suite: Suite, done: list[Judged]) -> list[dict[str, Any]]:
    """Returns a line for each strategy, most wins first: wins, how often it fits and is near, mean ratio, times.

    A tie is a win for all. The mean ratio to the best is geometric, over the problems in which something fits.
    """
    rows: list[dict[str, Any]] = []
    for name in suite.strategies:
        ratios = [ratio for judged in done if (ratio := judged.ratio(name)) is not None]
        moments = [moment for judged in done if (moment := judged.solved_after(name)) is not None]
        row: dict[str, Any] = {
            "strategy": name,
            "wins": sum(ratio <= 1 + TIE for ratio in ratios),
            "near": sum(ratio <= 1 + NEAR for ratio in ratios),
            "fits": len(ratios),
            "problems": sum(name in judged.found for judged in done),
            "mean_ratio": statistics.geometric_mean(ratios) if ratios else None,
            "seconds_to_near": statistics.median(moments) if moments else None,
            "search_seconds": sum(judged.found[name].search_seconds for judged in done if name in judged.found),
        }
        rows.append(row)
    rows.sort(key=lambda row: (-row["wins"], row["mean_ratio"] or math.inf))
    return rows


def score_table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Returns the scores as cells."""
    header = ["strategy", "wins", f"within {NEAR:.0%}", "fits", "mean ratio to best", f"s to {NEAR:.0%}", "search s"]
    lines = [
        [
            *(row["strategy"], str(row["wins"]), str(row["near"]), f"{row['fits']}/{row['problems']}"),
            "-" if row["mean_ratio"] is None else f"{row['mean_ratio']:.3f}",
            "-" if row["seconds_to_near"] is None else f"{row['seconds_to_near']:.2f}",
            f"{row['search_seconds']:,.1f}",
        ]
        for row in rows
    ]
    return header, lines


def problem_table(suite: Suite, done: list[Judged]) -> tuple[list[str], list[list[str]]]:
    """Returns the step of every strategy in every problem as cells, in milliseconds."""
    lines = []
    for judged in done:
        medians = [judged.found[name].median if name in judged.found else None for name in suite.strategies]
        cells = ["-" if median is None else f"{median * 1e3:,.1f}" for median in medians]
        lines.append([f"{judged.model} on {judged.cluster}", f"{judged.num_ops:,}", *cells])
    return ["ms a step", "ops", *suite.strategies], lines


def markdown(suite: Suite, done: list[Judged]) -> Iterator[str]:
    """Yields the lines of a page."""
    yield from markdown_table(*score_table(scores(suite, done)))
    yield ""
    yield from markdown_table(*problem_table(suite, done))


def to_json(suite: Suite, done: list[Judged], is_complete: bool) -> dict[str, Any]:
    """Returns all that was found, as JSON has it."""
    head = {"format": FORMAT, "version": VERSION, "suite": asdict(suite), "is_complete": is_complete}
    return {**head, "scores": scores(suite, done), "problems": [asdict(judged) for judged in done]}


def write_results(suite: Suite, done: list[Judged], is_complete: bool, path: str | Path) -> None:
    """Writes all that was found as one JSON file."""
    write_bytes(path, (json.dumps(to_json(suite, done, is_complete), indent=1, allow_nan=False) + "\n").encode())


def write_pictures(suite: Suite, done: list[Judged], folder: str | Path) -> None:
    """Writes a picture of the searches of each problem into a folder."""
    for judged in done:
        title = f"{Path(judged.model).name} on {Path(judged.cluster).name}"
        write_figure(folder, f"suite {title}", title, judged.found, suite.evaluations)
