"""How well many models' steps are predicted on one machine, in one run: `placewise bench predictions`.

Each model is profiled, placed and run as by `placewise bench measured`. The table at the end says for each model how far off
its predictions were, whether their order was right, and whether what `auto` found was the fastest.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from placewise.core.errors import PlacewiseError
from placewise.experiments.bench import Benchmark, Findings, Rows, option, required, table_of
from placewise.experiments.bench.bench_measured import Prediction, predict_and_measure, prediction_quality

ZOO = (
    "nmt:layers=4,hidden=2048,batch=640,length=12",
    "gpt:batch=32,length=512,micro_batches=8",
    "inception-v3:batch=128",
    "resnet:batch=128",
)

DIFFER = 0.03  # measured times that are closer than this have no order

AUTO = "auto"


@dataclass(frozen=True)
class Predictions(Benchmark):
    """Predicted and measured step times of many models on one machine: the zoo's, and others with --outside."""

    cluster: str = required("cluster")
    only: tuple[str, ...] = option("repeated", "only this model", "MODEL", default=())
    outside: bool = option("flag", "models of transformers and torchvision, in float32 and with bfloat16", default=False)
    strategies: tuple[str, ...] = option(
        "strategies", "names or families", default=("gpu-only", "expert", "towers", "m-etf", AUTO)
    )
    seconds: float = option("seconds", "time for auto", default=6.0)
    budget: int = option("positive", "evaluations for all others", default=600)
    virtual: tuple[tuple[str, int], ...] = option("virtual", default=())
    page: str | None = option("file", "write the tables to this Markdown file, also those of a run that is stopped", "FILE")

    def run(self) -> Findings:
        """Measures one model after the other; a model that can't be run is reported and left out."""
        from placewise.core.cluster import Cluster
        from placewise.formats.files import write_bytes

        cluster = Cluster.load(self.cluster)
        found: dict[str, Rows] = {}
        warnings: list[str] = []
        is_complete = True
        for model in self._models():
            options = Prediction(
                model, self.cluster, self.strategies, self.seconds, self.budget, self.virtual, measurements=0, steps=5
            )
            try:
                rows, is_complete = predict_and_measure(options, cluster, partial(_tell, model))
            except KeyboardInterrupt:
                is_complete = False
                break
            except PlacewiseError as problem:
                if len(self._models()) == 1:
                    raise
                warnings.append(f"{model}: {problem}")
                continue
            found[model] = rows
            if self.page is not None:
                write_bytes(self.page, _page(found).encode())
            if not is_complete:
                break
        summary = [{"model": model, **summary_of(rows)} for model, rows in found.items()]
        text = table_of(summary) if summary else "nothing was measured"
        return Findings({self.name(): found, "summary": summary}, text, tuple(warnings), is_complete=is_complete)

    def _models(self) -> tuple[str, ...]:
        from placewise.experiments.outside_models import BF16, NAMES

        if self.only:
            return self.only
        outside = (f"placewise.experiments.outside_models:{name}{end}" for end in ("", BF16) for name in NAMES)
        return tuple(outside) if self.outside else ZOO


def _tell(model: str, line: str) -> None:
    """Prints a line of progress."""
    print(f"{model}: {line}", file=sys.stderr, flush=True)


def summary_of(rows: Rows) -> dict[str, Any]:
    """Returns a model's median and largest error, whether the order was right, and how auto compares with the fastest.

    Only placements whose measured times differ by more than 3% have an order: `order` is the share of such pairs that was
    predicted the right way round.
    """
    ran = [row for row in rows if row["measured ms"] != "-"]
    pairs = list(_pairs([(row["together ms"], row["measured ms"]) for row in ran]))
    auto = next((row["measured ms"] for row in ran if row["placement"] == AUTO), None)
    fastest = min((row["measured ms"] for row in ran), default=None)
    return {
        "median error %": prediction_quality(rows)["median error %"] if ran else "-",
        "largest error %": max((row["error %"] for row in ran), key=abs, default="-"),
        "order": round(sum(pairs) / len(pairs), 3) if pairs else "-",
        "auto / fastest": "-" if auto is None or fastest is None else auto / fastest,
    }


def _pairs(times: list[tuple[float, float]]) -> Iterator[bool]:
    """Yields for each pair of placements that differ whether its order was predicted."""
    for i, (predicted, measured) in enumerate(times):
        for other_predicted, other_measured in times[:i]:
            if abs(measured / other_measured - 1) > DIFFER:
                yield (predicted < other_predicted) == (measured < other_measured)


def _page(found: dict[str, Rows]) -> str:
    """Returns the tables in Markdown."""
    from placewise.report.markdown_tables import markdown_table

    lines: list[str] = []
    for model, rows in found.items():
        name = model.rpartition(":")[2] if "outside_models" in model else model
        header = ("placement", "predicted", "measured", "error", "spread")
        lines += [f"**`{name}`**", "", *markdown_table(header, [_cells(row) for row in rows]), ""]
        lines += [", ".join(f"{fact} {_short(value)}" for fact, value in summary_of(rows).items()) + ".", ""]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns a row as text."""
    first = (row["placement"], f"{_short(row['together ms'])} ms")
    if row["measured ms"] == "-":
        return (*first, "out of memory", "-", "-")
    return (*first, f"{_short(row['measured ms'])} ms", f"{row['error %']:+.1f}%", f"{row['spread %']:.0f}%")


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
