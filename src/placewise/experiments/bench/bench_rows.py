"""What every strategy finds for the papers' rows and today's: `placewise bench rows`."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewise.core.errors import InputError, StrategyError
from placewise.experiments.bench import FAST, Benchmark, Findings, fast_strategies, option
from placewise.report.markdown_tables import markdown_table
from placewise.search.budget import DEFAULT_EVALUATIONS, DEFAULT_SECONDS, Budget

if TYPE_CHECKING:
    from placewise.core.problem import Problem
    from placewise.formats.files import Fields

FORMAT, VERSION = "placewise-rows", 1

TODAY_STRATEGIES = ("auto", "pipeline", "towers", "balanced", "gpu-only", "expert", "metis")


@dataclass(frozen=True)
class Row:
    """A model on a machine in one of the tables."""

    table: str
    model: str
    cluster: str

    @property
    def name(self) -> str:
        """The row's title."""
        return f"{self.model} on {self.cluster}"

    @property
    def strategies(self) -> tuple[str, ...]:
        """Those that are compared unless others are named."""
        return TODAY_STRATEGIES if self.table == "today" else fast_strategies()


ROWS = (
    Row("post", "rnnlm:layers=4", "2xK80"),
    Row("post", "resnet", "2xK80"),
    Row("post", "resnet:depth=200", "2xK80"),
    Row("post", "resnet", "4xK80"),
    Row("post", "resnet:depth=101", "8xK80"),
    *(Row("post", "inception-v3", f"{gpus}xK80") for gpus in (2, 4, 8)),
    *(Row("post", f"nmt:layers={gpus}", f"{gpus}xK80") for gpus in (2, 4, 8)),
    *(Row("hdp", model, "2xK40") for model in ("inception-v3", "resnet:depth=152", "rnnlm")),
    *(Row("hdp", f"nmt:layers={gpus}", f"{gpus}xK40") for gpus in (2, 4, 8)),
    *(
        Row("today", model, cluster)
        for model in ("gpt:micro_batches=8", "gpt:size=xl,micro_batches=8", "bert:micro_batches=8")
        for cluster in ("4xV100-nvlink", "8xA100-nvlink", "4090+3060")
    ),
)

TABLES = tuple(dict.fromkeys(row.table for row in ROWS))


@dataclass(frozen=True)
class RowBudget:
    """What each search may spend; a file of results has only one such budget."""

    evaluations: int = DEFAULT_EVALUATIONS  # for all strategies but auto
    seconds: float = DEFAULT_SECONDS  # for auto
    bound_seconds: float | None = None  # None: the quick bounds
    seed: int = 0

    def of(self, strategy: str) -> Budget:
        """Returns what a strategy may spend."""
        from placewise.strategies import STRATEGIES

        is_own = STRATEGIES[strategy].family == "own"
        return Budget(seconds=self.seconds) if is_own else Budget(evaluations=self.evaluations)


QUICK = RowBudget(evaluations=100, seconds=1.0)

RowResult = dict[str, Any]  # table, model, cluster, ops, ..., strategies: name -> what it found

_FIELDS = ("table", "model", "cluster", "ops", "groups", "bound", "bound_seconds", "pipelined_seconds", "strategies")

_FOUND = ("step_seconds", "evaluations", "search_seconds", "problem")  # of a strategy


@dataclass(frozen=True)
class StrategyRows(Benchmark):
    """What every strategy finds for the papers' models and machines and for today's, with the bound."""

    models: tuple[str, ...] = option("models", "only these models", default=())
    rows: str = option("choice", "which table", default="all", choices=("post", "hdp", "today", "all"))
    quick: bool = option("flag", "100 evaluations, 1 second", default=False)
    strategies: tuple[str, ...] = option("strategies", f"names or families ({FAST})", default=())
    seconds: float | None = option("seconds", "time for auto (default: 10)")
    budget: int | None = option("positive", "evaluations for all others (default: 2400)")
    bound_seconds: float | None = option("seconds", "time for the bound (default: only the quick bounds)")
    output: str | None = option("file", "keep each result when it is found; what the file has is not searched", "ROWS.JSON")
    markdown: bool = option("flag", "print Markdown tables", default=False)

    def run(self) -> Findings:
        """Searches what the output file does not have yet."""
        from placewise.report.terminal_text import table

        usual = QUICK if self.quick else RowBudget()
        budget = RowBudget(self.budget or usual.evaluations, self.seconds or usual.seconds, self.bound_seconds)
        known = [row for row in ROWS if self.rows in (row.table, "all")]
        rows = tuple(row for row in known if not self.models or row.model in self.models)
        if not rows:
            models = ", ".join(dict.fromkeys(row.model for row in known))
            raise InputError(f"no row has one of these models; the models of --rows {self.rows} are {models}")
        results = search_rows(rows, budget, self.strategies, self.output, _show)
        if self.markdown:
            text = "\n".join(rows_page(results))
        else:
            parts = {name: [result for result in results if result["table"] == name] for name in TABLES}
            text = "\n".join(f"{name}\n{table(*summarise_rows(part))}\n" for name, part in parts.items() if part)
        return Findings({"rows": results}, text)


def search_rows(
    rows: tuple[Row, ...],
    budget: RowBudget,
    strategies: tuple[str, ...] = (),
    output: str | Path | None = None,
    on_search: Callable[[Row, str, RowResult], None] = lambda row, strategy, found: None,
) -> list[RowResult]:
    """Returns a result for each row: the bound, and what each strategy finds.

    With an output file every search is kept there as soon as it is done, and what is in the file is not searched again.
    """
    from placewise.core.cluster import Cluster
    from placewise.core.problem import Problem
    from placewise.models import load_graph

    known = {} if output is None or not Path(output).exists() else _read(output, budget)
    graphs = lru_cache(maxsize=4)(load_graph)
    for row in rows:
        result = known.get(row.name)
        missing = [n for n in strategies or row.strategies if result is None or n not in result["strategies"]]
        if not missing:
            continue
        problem = Problem.of(graphs(row.model), Cluster.load(row.cluster))
        if result is None:
            result = known[row.name] = _facts(row, problem, budget)
        for name in missing:
            result["strategies"][name] = _search(row, problem, name, budget)
            on_search(row, name, result["strategies"][name])
            if output is not None:
                _write(output, budget, list(known.values()))
    return [known[row.name] for row in rows]


def _facts(row: Row, problem: "Problem", budget: RowBudget) -> RowResult:
    from placewise.search.planner import find_bound

    limit = find_bound(problem, budget.bound_seconds)
    return {
        **asdict(row),
        "ops": problem.num_ops,
        "groups": problem.num_groups,
        "bound": None if limit is None else limit.name,
        "bound_seconds": None if limit is None else limit.seconds,
        "pipelined_seconds": pipelined_seconds(problem),
        "strategies": {},
    }


def _search(row: Row, problem: "Problem", name: str, budget: RowBudget) -> RowResult:
    """Returns what a strategy finds; one whose schedule depends on its number of evaluations gets the budget's."""
    from placewise.search.driver import unless_stopped
    from placewise.search.planner import Planner
    from placewise.search.request import Request
    from placewise.simulate.simulator import Simulator
    from placewise.strategies import parameters

    settings = {"evaluations": str(budget.evaluations)} if "evaluations" in parameters(name) else {}
    request = Request(name, settings, budget.of(name), budget.seed, model=row.model, cluster=row.cluster)
    try:
        outcome = unless_stopped(Planner(problem, request).search(evaluator=Simulator(problem)))
    except StrategyError as rule:  # it can't be used here; the others can
        return {"step_seconds": None, "evaluations": 0, "search_seconds": 0.0, "problem": str(rule)}
    fits = outcome.placement is not None
    return {
        "step_seconds": outcome.step_seconds if fits else None,
        "evaluations": outcome.evaluations,
        "search_seconds": outcome.seconds,
        "problem": "" if fits else "nothing fits",
    }


def pipelined_seconds(problem: "Problem") -> float | None:
    """Returns the step of a perfect pipeline over all GPUs, without copies, memory or host; None without micro-batches.

    GPipe (Huang et al. 2019): with M micro-batches on S equal devices a step takes T (M + S - 1) / (M S), T being its time
    on one of them. If they differ, the sum of their speeds 1 / T[d] replaces S / T.
    """
    import numpy as np

    from placewise.simulate.simulator import Simulator

    batches = int(problem.graph.ops.micro_batches.max(initial=0)) + 1
    gpus = [d for d, device in enumerate(problem.cluster.devices) if device.kind == "gpu"]
    if batches < 2 or not gpus:
        return None
    elsewhere = problem.allowed.argmax(axis=1)  # [groups], the first device that can
    alone = np.stack([np.where(problem.allowed[:, gpu], gpu, elsewhere) for gpu in gpus])  # [gpus, groups]
    times = Simulator(problem)(alone).step_seconds  # [gpus]
    return float((batches + len(gpus) - 1) / batches / (1 / times).sum())


def _read(path: str | Path, budget: RowBudget) -> dict[str, RowResult]:
    """Returns the results of a file by row; a file made with another budget is refused."""
    from placewise.formats.files import Fields, parse_json, read_bytes

    data = parse_json(path, read_bytes(path, InputError), InputError)
    fields = Fields(str(path), data, ("format", "version", "effort", "rows"), InputError)
    fields.check_format(FORMAT, VERSION)
    made, rows = fields.get("effort", None), fields.entries("rows")
    for name, value in asdict(budget).items():
        if not isinstance(made, dict) or made.get(name, ...) != value:
            raise fields.wrong(f"was made with another {name} than {value}: use another file, or the same options")
    for number, row in enumerate(rows):
        _check_row(Fields(f"{path}: rows[{number}]", row, _FIELDS, InputError))
    return {_name(row): row for row in rows}


def _check_row(row: "Fields") -> None:
    """Refuses a result that the tables can't show."""
    from placewise.formats.files import Fields

    for name in ("table", "model", "cluster"):
        row.text(name)
    for name in ("ops", "groups"):
        row.integer(name)
    for name in ("bound_seconds", "pipelined_seconds"):
        if row.get(name) is not None:
            row.number(name)
    for name, given in row.mapping("strategies").items():
        found = Fields(f"{row.element}: strategies: {name!r}", given, _FOUND, InputError)
        found.text("problem")
        found.integer("evaluations")
        found.number("search_seconds")
        if found.get("step_seconds") is not None:
            found.number("step_seconds")


def _write(path: str | Path, budget: RowBudget, results: list[RowResult]) -> None:
    from placewise.formats.files import write_bytes

    data = {"format": FORMAT, "version": VERSION, "effort": asdict(budget), "rows": results}
    write_bytes(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())


# --- tables ---


def summarise_rows(results: list[RowResult]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the cells of a table with a line for each row; times are milliseconds."""
    header = ["row", "ops", "bound", "auto", "gap", "best other", "by", "auto / other", "one GPU"]
    lines = [_line(result) for result in results]
    if any(result["pipelined_seconds"] is not None for result in results):
        header.append("GPipe")
        for cells, result in zip(lines, results, strict=True):
            cells.append(_ms(result["pipelined_seconds"]))
    return header, lines


def _line(result: RowResult) -> list[str]:
    from placewise.search.planner import gap_of

    times = {name: _found(result, name) for name in result["strategies"]}
    others = {name: seconds for name, seconds in times.items() if seconds is not None and name != "auto"}
    auto, bound = times.get("auto"), result["bound_seconds"]
    best = min(others, key=lambda name: others[name], default="-")  # ties go to the first of the table
    gap = None if auto is None or bound is None else gap_of(auto, bound)
    return [
        _name(result),
        f"{result['ops']:,}",
        _ms(bound),
        _ms(auto),
        "-" if gap is None else f"{gap:.1%}",
        _ms(others.get(best)),
        best,
        "-" if auto is None or not others.get(best) else f"{auto / others[best]:.3f}",
        _ms(times.get("gpu-only")),
    ]


def rows_page(results: list[RowResult]) -> Iterator[str]:
    """Yields the lines of a Markdown page: for each table the summary, and the times of every strategy."""
    for table in dict.fromkeys(result["table"] for result in results):
        rows = [result for result in results if result["table"] == table]
        yield f"## {table}"
        yield from markdown_table(*summarise_rows(rows))
        yield ""
        names = dict.fromkeys(name for row in rows for name in row["strategies"])
        times = [[name, *(_ms(_found(row, name)) for row in rows)] for name in names]
        yield from markdown_table(["strategy", *map(_name, rows)], times)
        yield ""


def _name(result: RowResult) -> str:
    return Row(result["table"], result["model"], result["cluster"]).name


def _found(row: RowResult, name: str) -> float | None:
    seconds: float | None = row["strategies"].get(name, {}).get("step_seconds")
    return seconds


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _show(row: Row, strategy: str, found: dict[str, Any]) -> None:
    """Shows a finished search on a terminal."""
    from placewise.core.quantities import format_seconds

    if sys.stderr.isatty():
        step = found["problem"] or format_seconds(found["step_seconds"])
        print(f"{row.name}: {strategy} {step}, {found['search_seconds']:.1f} s", file=sys.stderr)
