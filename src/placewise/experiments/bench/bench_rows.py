"""What every strategy finds for the papers' rows and today's: `placewise bench rows`."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placewise.core.errors import InputError
from placewise.experiments.bench import Benchmark, Findings, option

if TYPE_CHECKING:
    from placewise.experiments.bench.strategy_rows import Row

FAST = "default: all but exact and the neural ones"


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
        from placewise.experiments.bench.strategy_rows import (
            QUICK,
            ROWS,
            TABLES,
            RowBudget,
            rows_page,
            search_rows,
            summarise_rows,
        )
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


def _show(row: "Row", strategy: str, found: dict[str, Any]) -> None:
    """Shows a finished search on a terminal."""
    from placewise.core.quantities import format_seconds

    if sys.stderr.isatty():
        step = found["problem"] or format_seconds(found["step_seconds"])
        print(f"{row.name}: {strategy} {step}, {found['search_seconds']:.1f} s", file=sys.stderr)
