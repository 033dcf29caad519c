"""All strategies on many models and machines: `placewise bench suite`."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placewise.experiments.bench import Benchmark, Findings, option
from placewise.experiments.bench.bench_rows import FAST

if TYPE_CHECKING:
    from placewise.experiments.bench.strategy_suite import SuiteProblem

MODELS = ("cifar-cnn", "resnet", "inception-v3", "rnnlm", "nmt:layers=2", "bert")

CLUSTERS = ("2xK80", "4xV100-nvlink", "4090+3060")


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
        from placewise.experiments.bench import strategy_suite as suites
        from placewise.experiments.bench.strategy_rows import FAST_STRATEGIES
        from placewise.experiments.search_figures import check_drawing
        from placewise.report.terminal_text import table

        suite = suites.Suite(
            suites.ALL_MODELS if self.models == ("all",) else self.models,
            suites.ALL_CLUSTERS if self.clusters == ("all",) else self.clusters,
            self.strategies or FAST_STRATEGIES,
            self.budget,
            self.seeds,
        )
        if self.plots:
            check_drawing()
        done, is_complete = suites.search_suite(
            suite, run_file=self.run_file, workers=self.workers, ray=self.ray, on_found=_show
        )
        if self.output:
            suites.write_suite(suite, done, is_complete, self.output)
        if self.plots:
            suites.write_suite_figures(suite, done, self.plots)
        text = "\n".join(suites.suite_page(suite, done)) if self.markdown else table(*suites.score_table(suite, done))
        reasons = {name: found.problem for one in done for name, found in one.found.items() if found.problem}
        warnings = tuple(f"{name}: {reason}" for name, reason in reasons.items())
        return Findings(suites.suite_data(suite, done, is_complete), text, warnings, is_complete)


def _show(one: "SuiteProblem", strategy: str) -> None:
    """Shows what a strategy has found on a terminal."""
    from placewise.core.quantities import format_seconds

    if sys.stderr.isatty():
        found = one.found[strategy]
        step = found.problem or ("nothing fits" if found.median is None else format_seconds(found.median))
        print(f"{one.model} on {one.cluster}: {strategy} {step}, {found.search_seconds:.1f} s", file=sys.stderr)
