"""What simple plans cost: `placewise bench simple`."""

import math
import statistics
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from placewise.experiments.bench import Benchmark, Findings, Rows, option

if TYPE_CHECKING:
    from placewise.core.plan import Plan
    from placewise.core.problem import Problem

MODELS = ("cifar-cnn", "resnet", "inception-v3", "rnnlm", "nmt:layers=2", "gpt", "bert")

CLUSTERS = ("2xK80", "4xV100-nvlink", "4090+3060")

COLUMNS = ("model", "cluster", "fastest ms", "simple ms", "cost", "copies", "cuts", "devices", "if 10% off")


@dataclass(frozen=True)
class SimplePlans(Benchmark):
    """The fastest and the simple plan of each model on each machine: copies, cuts, devices, and times that are off."""

    models: tuple[str, ...] = option("models", "zoo names, files or functions, or 'all' (default: the zoo)", default=MODELS)
    clusters: tuple[str, ...] = option(
        "list", f"presets or files, or 'all' (default: {','.join(CLUSTERS)})", default=CLUSTERS
    )
    seconds: float = option("seconds", "of each search", "S", default=10.0)
    seed: int = option("count", "of each search", default=0)
    markdown: bool = option("flag", "print a Markdown table", default=False)

    def run(self) -> Findings:
        """Places every model on every machine twice: for the fastest plan, and for a simple one."""
        from placewise import zoo
        from placewise.core.cluster import Cluster
        from placewise.core.problem import Problem
        from placewise.machines.presets import PRESETS
        from placewise.models import load_graph
        from placewise.report.markdown_tables import markdown_table
        from placewise.report.terminal_text import table

        clusters = tuple(PRESETS) if self.clusters == ("all",) else self.clusters
        for cluster in clusters:
            Cluster.load(cluster)
        graphs = lru_cache(maxsize=1)(load_graph)
        rows: Rows = []
        is_complete = True
        try:
            for model in tuple(zoo.MODELS) if self.models == ("all",) else self.models:
                for cluster in clusters:
                    rows.append(self._compare(Problem.of(graphs(model), Cluster.load(cluster)), model, cluster))
                    _show(rows[-1])
        except KeyboardInterrupt:
            is_complete = False
        cells = [_cells(row) for row in rows]
        text = "\n".join(markdown_table(list(COLUMNS), cells)) if self.markdown else table(list(COLUMNS), cells)
        return Findings({self.name(): rows}, f"{text}\n\n{_summary(rows)}", is_complete=is_complete)

    def _compare(self, problem: "Problem", model: str, cluster: str) -> dict[str, Any]:
        from placewise.core.errors import NothingFits
        from placewise.search.planner import place

        row: dict[str, Any] = {"model": model, "cluster": cluster, "ops": problem.num_ops}
        for name, simple in (("fastest", 0.0), ("simple", None)):
            try:
                plan = place(problem.graph, problem.cluster, seconds=self.seconds, seed=self.seed, simple=simple)
            except NothingFits:
                return row
            row[name] = _figures(problem, plan)
        return row


def _figures(problem: "Problem", plan: "Plan") -> dict[str, Any]:
    from placewise.core.problem import Problem
    from placewise.rewrite.memory_options import graph_of_plan
    from placewise.simulate.cuts import Crossings

    whole = Problem.of(graph_of_plan(problem.graph, plan), problem.cluster)
    placement, _ = plan.resolve(whole)
    if whole.graph.has_options:
        present = whole.present(placement)
        whole, placement = present.problem, placement[present.groups]
    crossings = Crossings.of(whole)
    return {
        "step_seconds": plan.step_seconds,
        "bound_seconds": plan.bound_seconds,
        "copies": crossings.count_copies(placement),
        "cuts": crossings.count_cuts(placement),
        "devices": len({name for name in plan.placement if name is not None}),
        "interval_seconds": plan.interval_seconds,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    if "simple" not in row:
        return [row["model"], row["cluster"], "nothing fits", *[""] * 6]
    fastest, simple = row["fastest"], row["simple"]
    times = [f"{one['step_seconds'] * 1e3:,.4g}" for one in (fastest, simple)]
    cost = f"{simple['step_seconds'] / fastest['step_seconds'] - 1:+.1%}"
    counts = [f"{fastest[name]:,} → {simple[name]:,}" for name in ("copies", "cuts", "devices")]
    spread = " → ".join(f"+{share:.1%}" for share in (_above(fastest), _above(simple)))
    return [row["model"], row["cluster"], *times, cost, *counts, spread]


def _above(one: dict[str, Any]) -> float:
    """Returns how far the 90th percentile under disturbances is above the predicted step."""
    interval = one["interval_seconds"]
    return interval[1] / one["step_seconds"] - 1 if interval and one["step_seconds"] else 0.0


def _summary(rows: Rows) -> str:
    """Returns the medians in words."""
    rows = [row for row in rows if "simple" in row]
    split = [row for row in rows if row["fastest"]["cuts"]]
    if not split:
        return "no plan uses more than one device"

    def fewer(name: str) -> float:
        return statistics.median(
            row["fastest"][name] / row["simple"][name] if row["simple"][name] else math.inf for row in split
        )

    cost = statistics.median(row["simple"]["step_seconds"] / row["fastest"]["step_seconds"] - 1 for row in split)
    nearer = [statistics.median(_above(row[name]) for row in split) for name in ("fastest", "simple")]
    ratios = [f"{ratio:.3g} times fewer {name}" if math.isfinite(ratio) else f"no {name}" for name, ratio in (
        ("cuts", fewer("cuts")), ("copies", fewer("copies")),
    )]  # fmt: skip
    return (
        f"{len(split)} of {len(rows)} fastest plans use several devices; in the median the simple one has "
        f"{' and '.join(ratios)}, and takes {cost:+.1%}; if times are off by 10%, the 90th percentile is "
        f"{nearer[0]:.1%} above the predicted step for the fastest, {nearer[1]:.1%} for the simple one"
    )


def _show(row: dict[str, Any]) -> None:
    """Shows a row on a terminal."""
    if sys.stderr.isatty():
        print(" ".join(_cells(row)), file=sys.stderr)
