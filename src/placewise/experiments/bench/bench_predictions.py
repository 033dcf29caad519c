"""How well many models' steps are predicted, on one machine or on several, in one run: `placewise bench predictions`.

Each model is profiled, placed and run. The table at the end says for each model how far off its predictions were, whether
their order was right, and whether what `auto` found was the fastest.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from placewise.core.errors import InputError, PlacewiseError
from placewise.experiments.bench import Benchmark, Findings, option, table_of
from placewise.experiments.bench.prediction_rows import (
    AUTO,
    Asked,
    Record,
    TableMachine,
    measure_all,
    read_records,
    read_tables,
)

if TYPE_CHECKING:
    from placewise.machines.slices import Cut

ZOO = (
    "nmt:layers=4,hidden=2048,batch=640,length=12",
    "gpt:batch=32,length=512,micro_batches=8",
    "inception-v3:batch=128",
    "resnet:batch=128",
)

DIFFER = 0.03  # measured times that are closer than this have no order


@dataclass(frozen=True)
class Predictions(Benchmark):
    """Predicted and measured step times of many models: on CLUSTER, or on the machines of --table."""

    cluster: str | None = option("cluster")
    table: str | None = option("source", "measure the machines and models of this TOML file instead of CLUSTER", "FILE")
    only: tuple[str, ...] = option("repeated", "only this model", "MODEL", default=())
    outside: bool = option("flag", "models of transformers and torchvision, in float32 and with bfloat16", default=False)
    strategies: tuple[str, ...] = option(
        "strategies", "names or families", default=("gpu-only", "expert", "towers", "m-etf", AUTO)
    )
    seconds: float = option("seconds", "time for auto", default=6.0)
    budget: int = option("positive", "evaluations for all others", default=600)
    steps: int = option("positive", "take the median of N steps of a placement", default=5)
    virtual: tuple[tuple[str, "Cut"], ...] = option("virtual", default=())
    processes: int = option("positive", "load and search in N processes while one of them measures", default=1)
    kept: str | None = option("file", "add what is measured to this file, and don't measure again what it has", "FILE")
    page: str | None = option("file", "write the tables to this Markdown file, also those of a run that is stopped", "FILE")

    def run(self) -> Findings:
        """Measures one model after the other; a model that can't be run is reported and left out."""
        machines, jobs = self._jobs()
        records = read_records(self.kept) if self.kept is not None else []
        done = {(record["model"], record["machine"]) for record in records}
        left = [(model, tuple(m for m in on if (model, m.name) not in done)) for model, on in jobs]
        asked = Asked(self.strategies, self.seconds, self.budget, self.steps)
        warnings: list[str] = []
        is_complete = True
        try:
            for record in measure_all([(model, on) for model, on in left if on], asked, self.processes):
                if "failure" in record:
                    if len(left) == len(machines) == 1:
                        raise PlacewiseError(record["failure"])
                    warnings.append(f"{record['model']}: {record['failure']}")
                    continue
                records.append(record)
                _tell(record)
                self._write(machines, records)
        except KeyboardInterrupt:
            is_complete = False
        self._write(machines, records)
        names = [machine.name for machine in machines]
        summary = [
            {"model": _short_name(record["model"]), "machine": record["machine"], **summary_of(record["rows"])}
            for name in names
            for record in records
            if record["machine"] == name
        ]
        text = table_of(summary) if summary else "nothing was measured"
        return Findings({self.name(): records, "summary": summary}, text, tuple(warnings), is_complete=is_complete)

    def _jobs(self) -> tuple[list[TableMachine], list[tuple[str, tuple[TableMachine, ...]]]]:
        """Returns the machines, and each model with those that it runs on."""
        if (self.table is None) == (self.cluster is None):
            raise InputError("bench predictions: needs CLUSTER or --table FILE, which has clusters, but not both")
        if self.cluster is not None:
            from placewise.machines.slices import format_cut

            cuts = [f"{gpu}={format_cut(cut)}" for gpu, cut in self.virtual]
            machine = TableMachine(" ".join([self.cluster, *cuts]), self.cluster, self.virtual)
            machine.check()
            return [machine], [(model, (machine,)) for model in self._models()]
        if self.virtual or self.outside:
            raise InputError("bench predictions: --virtual and --outside need CLUSTER: the file of --table has its own")
        assert self.table is not None
        machines, rows = read_tables(self.table)
        by_name = {machine.name: machine for machine in machines}
        return machines, [
            (model, tuple(by_name[name] for name in on)) for model, on in rows if not self.only or model in self.only
        ]

    def _models(self) -> tuple[str, ...]:
        from placewise.experiments.outside_models import BF16, NAMES

        if self.only:
            return self.only
        outside = (f"placewise.experiments.outside_models:{name}{end}" for end in ("", BF16) for name in NAMES)
        return tuple(outside) if self.outside else ZOO

    def _write(self, machines: Sequence[TableMachine], records: Sequence[Record]) -> None:
        """Writes what is kept, and the page."""
        from placewise.formats.files import write_bytes

        if self.kept is not None:
            write_bytes(self.kept, "".join(f"{json.dumps(record)}\n" for record in records).encode())
        if self.page is not None:
            write_bytes(self.page, page_of(machines, records).encode())


def _tell(record: Record) -> None:
    """Prints a line of progress for each placement, and one with the times that it took."""
    from placewise.report.terminal_text import printable

    about = f"{record['model']} on {record['machine']}"
    for row in record["rows"]:
        print(printable(f"{about}: {', '.join(_cells(row))}"), file=sys.stderr, flush=True)
    parts = ", ".join(f"{part} {seconds:g} s" for part, seconds in record["seconds"].items())
    print(printable(f"{about}: {record['ops']:,} ops; {parts}"), file=sys.stderr, flush=True)


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a model's median and largest error, whether the order was right, and how auto compares with the fastest.

    Only placements whose measured times differ by more than 3% have an order: `order` is the share of such pairs that was
    predicted the right way round.
    """
    ran = [(row["placements"], row["predicted"], median(row["measured"])) for row in rows if row["measured"]]
    errors = [(predicted / measured - 1) * 100 for names, predicted, measured in ran for _ in names]
    pairs = list(_pairs([(predicted, measured) for _, predicted, measured in ran]))
    auto = next((measured for names, _, measured in ran if AUTO in names), None)
    fastest = min((measured for _, _, measured in ran), default=None)
    return {
        "median error %": median(map(abs, errors)) if errors else "-",
        "largest error %": max(errors, key=abs, default="-"),
        "order": round(sum(pairs) / len(pairs), 3) if pairs else "-",
        "auto / fastest": "-" if auto is None or fastest is None else auto / fastest,
    }


def _pairs(times: list[tuple[float, float]]) -> Iterator[bool]:
    """Yields for each pair of placements that differ whether its order was predicted."""
    for i, (predicted, measured) in enumerate(times):
        for other_predicted, other_measured in times[:i]:
            if abs(measured / other_measured - 1) > DIFFER:
                yield (predicted < other_predicted) == (measured < other_measured)


# --- the page ---


def page_of(machines: Sequence[TableMachine], records: Sequence[Record]) -> str:
    """Returns the tables in Markdown: a summary for each machine, then all placements."""
    from placewise.report.markdown_tables import markdown_table
    from placewise.report.terminal_text import printable

    lines: list[str] = []
    for machine in machines:
        own = [record for record in records if record["machine"] == machine.name]
        if not own:
            continue
        lines += [f"## {printable(machine.title or machine.name)}", ""]
        header = ("model", "ops", "median error", "largest error", "order", "auto / fastest")
        lines += [*markdown_table(header, [_summary_cells(record) for record in own]), ""]
        rows = [
            (f"`{_short_name(record['model'])}`" if i == 0 else "", *_cells(row))
            for record in own
            for i, row in enumerate(record["rows"])
        ]
        lines += [*markdown_table(("model", "placement", "predicted", "measured", "error", "spread"), rows), ""]
    return "\n".join(lines)


def _summary_cells(record: Record) -> tuple[str, ...]:
    found = summary_of(record["rows"])
    errors = [
        f"{value:{sign}.1f}%" if value != "-" else "-"
        for value, sign in zip(list(found.values())[:2], ("", "+"), strict=True)
    ]
    others = [f"{found[name]:.2f}" if found[name] != "-" else "-" for name in ("order", "auto / fastest")]
    return (f"`{_short_name(record['model'])}`", f"{record['ops']:,}", *errors, *others)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Returns a row as text."""
    names, predicted = ", ".join(row["placements"]), row["predicted"]
    if not row["measured"]:
        return names, f"{_short(predicted * 1e3)} ms", "out of memory", "-", "-"
    measured = median(row["measured"])
    spread = (max(row["measured"]) - min(row["measured"])) / measured
    error = predicted / measured - 1
    return names, f"{_short(predicted * 1e3)} ms", f"{_short(measured * 1e3)} ms", f"{error:+.1%}", f"{spread:.0%}"


def _short_name(model: str) -> str:
    return model.rpartition(":")[2] if "outside_models" in model else model


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
