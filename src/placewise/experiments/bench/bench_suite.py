"""All strategies on many models and machines with equal budgets, and their scores: `placewise bench suite`."""

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewise import zoo
from placewise.experiments.bench import FAST, Benchmark, Findings, fast_strategies, option
from placewise.report.markdown_tables import markdown_table

if TYPE_CHECKING:
    from placewise.experiments.recorded_searches import Found

MODELS = ("cifar-cnn", "resnet", "inception-v3", "rnnlm", "nmt:layers=2", "bert")

CLUSTERS = ("2xK80", "4xV100-nvlink", "4090+3060")

FORMAT, VERSION = "placewise-suite", 1

NEAR = 0.05  # above the best step of a problem: what counts as a solution

TIE = 1e-9  # relative difference from the best that counts as equal


@dataclass(frozen=True)
class Suite:
    """What is compared: every strategy on every model and machine, each with the same number of evaluations."""

    models: tuple[str, ...]
    clusters: tuple[str, ...]
    strategies: tuple[str, ...]
    evaluations: int = 240
    seeds: int = 1


@dataclass(frozen=True)
class SuiteProblem:
    """A model on a machine, and what each strategy found."""

    model: str
    cluster: str
    num_ops: int
    found: "dict[str, Found]"  # by strategy

    @property
    def best(self) -> float | None:
        """The lowest median of all strategies."""
        return min((found.median for found in self.found.values() if found.median is not None), default=None)

    def ratio(self, strategy: str) -> float | None:
        """Returns a strategy's median divided by the best one; None if it found nothing that fits."""
        median = self.found[strategy].median if strategy in self.found else None
        return None if median is None or not self.best else median / self.best

    def solved_after(self, strategy: str) -> float | None:
        """Returns the seconds until a strategy was within 5% of the best, median over seeds; None if half never were."""
        limit = (self.best or 0.0) * (1 + NEAR)
        histories = self.found[strategy].histories if strategy in self.found else ()
        moments = [next((t for _, t, step in history if step <= limit), math.inf) for history in histories]
        middle = statistics.median(moments) if moments else math.inf
        return middle if math.isfinite(middle) else None


@dataclass(frozen=True)
class StrategySuite(Benchmark):
    """All strategies on many models and machines with equal budgets: wins, mean ratio to the best, time to solution."""

    models: tuple[str, ...] = option("models", "zoo names or files, or 'all' (default: six of the zoo)", default=MODELS)
    clusters: tuple[str, ...] = option(
        "list", f"presets or files, or 'all' (default: {','.join(CLUSTERS)})", default=CLUSTERS
    )
    strategies: tuple[str, ...] = option("strategies", f"names or families ({FAST})", default=())
    budget: int = option("positive", "evaluations of each search", default=240)
    seeds: int = option("positive", "searches with each strategy", "K", default=1)
    run_file: str | None = option("file", "record every search, and continue an interrupted one", "RUNS.DB")
    output: str | None = option("file", "write all results", "SUITE.JSON")
    plots: str | None = option("folder", "write a picture (SVG) of each problem's searches into this folder", "DIR")
    markdown: bool = option("flag", "print Markdown tables", default=False)
    workers: int | None = option("workers")
    ray: str | None = option("ray")

    def run(self) -> Findings:
        """Searches every problem with every strategy, and writes and returns the scores."""
        from placewise.experiments.search_figures import check_drawing
        from placewise.machines.presets import PRESETS
        from placewise.report.terminal_text import table

        suite = Suite(
            tuple(zoo.MODELS) if self.models == ("all",) else self.models,
            tuple(PRESETS) if self.clusters == ("all",) else self.clusters,
            self.strategies or fast_strategies(),
            self.budget,
            self.seeds,
        )
        if self.plots:
            check_drawing()
        done, is_complete = search_suite(suite, run_file=self.run_file, workers=self.workers, ray=self.ray, on_found=_show)
        if self.output:
            write_suite(suite, done, is_complete, self.output)
        if self.plots:
            write_suite_figures(suite, done, self.plots)
        text = "\n".join(suite_page(suite, done)) if self.markdown else table(*score_table(suite, done))
        reasons = {name: found.problem for one in done for name, found in one.found.items() if found.problem}
        warnings = tuple(f"{name}: {reason}" for name, reason in reasons.items())
        return Findings(suite_data(suite, done, is_complete), text, warnings, is_complete)


def search_suite(
    suite: Suite,
    *,
    run_file: str | Path | None = None,
    workers: int | None = None,
    ray: str | None = None,
    on_found: Callable[[SuiteProblem, str], None] = lambda one, strategy: None,
) -> tuple[list[SuiteProblem], bool]:
    """Returns what was found for each problem, and whether these are all: Ctrl-C ends it with the problems so far.

    With a run file every evaluation is recorded, and the same call continues where the file ends.
    """
    from placewise.core.cluster import Cluster
    from placewise.core.problem import Problem
    from placewise.evaluate import open_evaluator
    from placewise.experiments.recorded_searches import Contest, find, recorded
    from placewise.models import load_graph

    done: list[SuiteProblem] = []
    graphs = lru_cache(maxsize=1)(load_graph)
    _check(suite)
    try:
        with recorded(run_file) as file:
            for model in suite.models:
                for cluster in suite.clusters:
                    problem = Problem.of(graphs(model), Cluster.load(cluster))
                    one = SuiteProblem(model, cluster, problem.num_ops, {})
                    done.append(one)
                    with open_evaluator(problem, workers=workers, ray=ray) as evaluator:
                        contest = Contest(problem, evaluator, model, cluster, file)
                        for name in suite.strategies:
                            one.found[name] = find(contest, name, {}, suite.evaluations, suite.seeds)
                            on_found(one, name)
    except KeyboardInterrupt:
        return done, False
    return done, True


def _check(suite: Suite) -> None:
    """Refuses wrong names before any work."""
    from placewise.core.cluster import Cluster
    from placewise.models import load_graph

    for cluster in suite.clusters:
        Cluster.load(cluster)
    for model in suite.models:
        if model.partition(":")[0] in zoo.MODELS:
            zoo.parse_model(model)
        else:
            load_graph(model)


def scores(suite: Suite, done: list[SuiteProblem]) -> list[dict[str, Any]]:
    """Returns a line for each strategy, most wins first: wins, how often it fits and is near the best, mean ratio, times.

    A tie is a win for all. The mean ratio to the best is geometric, over the problems for which the strategy fits.
    """
    rows: list[dict[str, Any]] = []
    for name in suite.strategies:
        ratios = [ratio for one in done if (ratio := one.ratio(name)) is not None]
        moments = [moment for one in done if (moment := one.solved_after(name)) is not None]
        row: dict[str, Any] = {
            "strategy": name,
            "wins": sum(ratio <= 1 + TIE for ratio in ratios),
            "near": sum(ratio <= 1 + NEAR for ratio in ratios),
            "fits": len(ratios),
            "problems": sum(name in one.found for one in done),
            "mean_ratio": statistics.geometric_mean(ratios) if ratios else None,
            "seconds_to_near": statistics.median(moments) if moments else None,
            "search_seconds": sum(one.found[name].search_seconds for one in done if name in one.found),
        }
        rows.append(row)
    rows.sort(key=lambda row: (-row["wins"], row["mean_ratio"] or math.inf))
    return rows


def score_table(suite: Suite, done: list[SuiteProblem]) -> tuple[list[str], list[list[str]]]:
    """Returns the scores as a header and cells."""
    header = ["strategy", "wins", f"within {NEAR:.0%}", "fits", "mean ratio to best", f"s to {NEAR:.0%}", "search s"]
    lines = [
        [
            row["strategy"],
            str(row["wins"]),
            str(row["near"]),
            f"{row['fits']}/{row['problems']}",
            "-" if row["mean_ratio"] is None else f"{row['mean_ratio']:.3f}",
            "-" if row["seconds_to_near"] is None else f"{row['seconds_to_near']:.2f}",
            f"{row['search_seconds']:,.1f}",
        ]
        for row in scores(suite, done)
    ]
    return header, lines


def problem_table(suite: Suite, done: list[SuiteProblem]) -> tuple[list[str], list[list[str]]]:
    """Returns the step of every strategy for every problem in milliseconds, as a header and cells."""
    lines = []
    for one in done:
        medians = [one.found[name].median if name in one.found else None for name in suite.strategies]
        cells = ["-" if median is None else f"{median * 1e3:,.1f}" for median in medians]
        lines.append([f"{one.model} on {one.cluster}", f"{one.num_ops:,}", *cells])
    return ["ms a step", "ops", *suite.strategies], lines


def suite_page(suite: Suite, done: list[SuiteProblem]) -> Iterator[str]:
    """Yields the lines of a Markdown page."""
    yield from markdown_table(*score_table(suite, done))
    yield ""
    yield from markdown_table(*problem_table(suite, done))


def suite_data(suite: Suite, done: list[SuiteProblem], is_complete: bool) -> dict[str, Any]:
    """Returns all results as plain data."""
    head = {"format": FORMAT, "version": VERSION, "suite": asdict(suite), "is_complete": is_complete}
    return {**head, "scores": scores(suite, done), "problems": [asdict(one) for one in done]}


def write_suite(suite: Suite, done: list[SuiteProblem], is_complete: bool, path: str | Path) -> None:
    """Writes all results as one JSON file."""
    from placewise.formats.files import write_bytes

    write_bytes(path, (json.dumps(suite_data(suite, done, is_complete), indent=1, allow_nan=False) + "\n").encode())


def write_suite_figures(suite: Suite, done: list[SuiteProblem], folder: str | Path) -> None:
    """Writes a picture of each problem's searches into a folder."""
    from placewise.experiments.search_figures import write_figure

    for one in done:
        title = f"{Path(one.model).name} on {Path(one.cluster).name}"
        write_figure(folder, f"suite {title}", title, one.found, suite.evaluations)


def _show(one: SuiteProblem, strategy: str) -> None:
    """Shows what a strategy has found on a terminal."""
    from placewise.core.quantities import format_seconds

    if sys.stderr.isatty():
        found = one.found[strategy]
        step = found.problem or ("nothing fits" if found.median is None else format_seconds(found.median))
        print(f"{one.model} on {one.cluster}: {strategy} {step}, {found.search_seconds:.1f} s", file=sys.stderr)
