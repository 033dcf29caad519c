"""What simple plans cost: `placewise bench simple`."""

import json
import math
import os
import statistics
import sys
from dataclasses import dataclass
from functools import lru_cache
from textwrap import fill
from typing import TYPE_CHECKING, Any

from placewise.experiments.bench import Benchmark, Findings, Rows, option

if TYPE_CHECKING:
    from placewise.core.plan import Plan
    from placewise.core.problem import Problem

PAGE = "docs/results/simple.md"

MODELS = (
    "cifar-cnn", "resnet", "inception-v3", "rnnlm", "nmt:layers=2", "gpt:micro_batches=8", "bert",
    *(f"placewise.experiments.outside_models:{name}" for name in ("wide_llama", "llama", "wide_bert", "t5", "mamba")),
)  # fmt: skip

CLUSTERS = ("2xK80", "4xK80", "4xV100-nvlink", "8xA100-nvlink", "4090+3060", "laptop")

TOLERANCE = 0.02

MANY = 5.0  # times fewer cuts

WIDTH = 124  # of the page's text

COLUMNS = ("model", "cluster", "fastest ms", "simple ms", "cost", "copies", "cuts", "devices", "if 10% off")

ABOUT = """\
# What simple plans cost
    {command}

writes this page. Each model is placed twice: `--simple 0` answers with the fastest plan that a search finds, and
`--simple {tolerance}` with the simplest one that takes at most {tolerance} longer than the fastest plan of its own search
([searching](../search.md)). So `cost` can be above {tolerance}, or negative: searches that end by the clock differ. A
**cut** is a pair of modules between which tensors are copied from one device to another. "If 10% off" is how far the 90th
percentile of the step under 32 [disturbances](../simulator.md) is above the predicted step.

"""


@dataclass(frozen=True)
class SimplePlans(Benchmark):
    """The fastest and the simple plan of each model on each machine: copies, cuts, devices, and times that are off."""

    models: tuple[str, ...] = option("models", "default: the zoo, and five models of transformers", default=MODELS)
    clusters: tuple[str, ...] = option("list", f"presets or files (default: {','.join(CLUSTERS)})", default=CLUSTERS)
    seconds: float = option("seconds", "of each search", "S", default=10.0)
    simple: float = option("percent", "how much longer the simple plan may take, as in 5%%", default=TOLERANCE)
    seed: int = option("count", "of each search", default=0)
    output: str | None = option(
        "file", f"write the page of the docs ({PAGE}), also that of a run that is stopped", "PAGE.MD"
    )
    rows_file: str | None = option("file", "keep the rows here; the same command then continues", "ROWS.JSON")

    def run(self) -> Findings:
        """Places every model on every machine twice: for the fastest plan, and for a simple one."""
        from placewise.core.cluster import Cluster
        from placewise.core.problem import Problem
        from placewise.formats.files import write_bytes
        from placewise.models import load_graph
        from placewise.report.terminal_text import table

        clusters = {name: Cluster.load(name) for name in self.clusters}
        graphs = lru_cache(maxsize=1)(load_graph)
        rows = self._kept_rows()
        done = {(row["model"], row["cluster"]) for row in rows}
        is_complete = True
        try:
            for model in self.models:
                for name, cluster in clusters.items():
                    if (_short(model), name) in done:
                        continue
                    rows.append(self._compare(Problem.of(graphs(model), cluster), model, name))
                    print(" ".join(_cells(rows[-1])), file=sys.stderr, flush=True)
                    if self.rows_file is not None:
                        write_bytes(self.rows_file, json.dumps({"options": self._measured(), "rows": rows}).encode())
                    if self.output is not None:
                        write_bytes(self.output, self._page(rows).encode())
        except KeyboardInterrupt:
            is_complete = False
        cells = [_cells(row) for row in rows]
        text = f"{table(list(COLUMNS), cells)}\n\n{_summary(rows)}"
        return Findings({self.name(): rows}, text, is_complete=is_complete)

    def _measured(self) -> dict[str, float]:
        """Returns the options that rows depend on."""
        return {"seconds": self.seconds, "simple": self.simple, "seed": self.seed}

    def _kept_rows(self) -> Rows:
        """Returns the rows of earlier runs with the same options."""
        from placewise.core.errors import InputError
        from placewise.formats.files import Fields, read_json

        if self.rows_file is None or not os.path.lexists(self.rows_file):
            return []
        kept = Fields(self.rows_file, read_json(self.rows_file, InputError), ("options", "rows"), InputError)
        if kept.mapping("options") != self._measured():
            raise kept.wrong(f"its rows were measured with {kept.mapping('options')}, not with {self._measured()}")
        return kept.entries("rows")

    def _page(self, rows: Rows) -> str:
        from placewise.report.markdown_tables import markdown_table

        command = ["placewise bench simple", *(self.models if self.models != MODELS else ())]
        if self.clusters != CLUSTERS:
            command.append(f"--clusters {','.join(self.clusters)}")
        if self.simple != TOLERANCE:
            command.append(f"--simple {self.simple:.0%}")
        command += [f"--seconds {self.seconds:g}", *([f"--seed {self.seed}"] if self.seed else []), f"-o {PAGE}"]
        about = ABOUT.format(command=" ".join(command), tolerance=f"{self.simple:.0%}")
        return (
            f"{about}{fill(_summary(rows), WIDTH)}.\n\n"
            + "\n".join(markdown_table(COLUMNS, [_cells(row) for row in rows]))
            + "\n"
        )

    def _compare(self, problem: "Problem", model: str, cluster: str) -> dict[str, Any]:
        from placewise.core.errors import NothingFits
        from placewise.search.planner import place

        row: dict[str, Any] = {"model": _short(model), "cluster": cluster}
        for name, simple in (("fastest", 0.0), ("simple", self.simple)):
            try:
                plan = place(problem.graph, problem.cluster, seconds=self.seconds, seed=self.seed, simple=simple)
            except NothingFits:
                return row
            row[name] = _figures(problem, plan)
        return row


def _short(model: str) -> str:
    """Returns a model's name in the table."""
    return model.rpartition(":")[2] if "outside_models" in model else model


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
        return "No plan uses more than one device"

    def fewer(name: str) -> list[float]:
        return [row["fastest"][name] / row["simple"][name] if row["simple"][name] else math.inf for row in split]

    cost = statistics.median(row["simple"]["step_seconds"] / row["fastest"]["step_seconds"] - 1 for row in split)
    above = [statistics.median(_above(row[name]) for row in split) for name in ("fastest", "simple")]
    ratios = " and ".join(
        f"{ratio:.3g} times fewer {name}" if math.isfinite(ratio := statistics.median(fewer(name))) else f"no {name}"
        for name in ("cuts", "copies")
    )
    many = sum(ratio >= MANY for ratio in fewer("cuts"))
    return (
        f"{len(split)} of {len(rows)} fastest plans use several devices. In the median the simple one has {ratios}, and "
        f"takes {cost:+.1%}; {many} have at least {MANY:g} times fewer cuts. If times are off by 10%, the 90th percentile "
        f"is {above[0]:.1%} above the predicted step for the fastest plan, {above[1]:.1%} for the simple one, in the median"
    )
