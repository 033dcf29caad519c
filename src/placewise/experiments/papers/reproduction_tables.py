"""A reproduction as tables, for a terminal and for a Markdown page."""

import math
import statistics
from collections.abc import Iterator, Sequence

from placewise.experiments.papers.calibration import Calibration
from placewise.experiments.papers.claims import Verdict, found_ratio, judge, reported_ratio
from placewise.experiments.papers.reported_results import BY_FUNCTION, OWN, PAPERS
from placewise.experiments.papers.reproduction import Reproduction
from placewise.experiments.recorded_searches import Found
from placewise.report.markdown_tables import markdown_table

Cells = tuple[list[str], list[list[str]]]  # a header and the lines below it

OOM = "OOM"

RULES = ("single GPU", "expert", "expert (one GPU)")  # what people do without a search

NEAR = 1.05  # times the best

SEARCHED = 20  # evaluations from which on a column is a search


def seconds_table(reproduction: Reproduction) -> Cells:
    """Returns the paper's seconds / ours for every row and column; ours are medians over the seeds."""
    names = [column.name for column in reproduction.paper.columns]
    names += [BY_FUNCTION] if any(BY_FUNCTION in result.found for result in reproduction.results) else []
    lines = []
    for result in reproduction.results:
        row = result.row
        cells = [
            _pair(_reported(row.reported[name]) if name in row.reported else "", _median(result.found.get(name)))
            for name in names
        ]
        lines.append([row.label, *cells, _seconds(result.bound_seconds)])
    return ["paper / ours, s", *names, "bound"], lines


def ratio_table(reproduction: Reproduction) -> Cells:
    """Returns the ratios that the paper's claims are about: its system to other columns, the paper's / ours."""
    paper = reproduction.paper
    lines = [
        [
            result.row.label,
            *(
                _pair(_ratio(reported_ratio(result.row, paper.system, to)), _ratio(found_ratio(result, paper.system, to)))
                for to in paper.compared
            ),
        ]
        for result in reproduction.results
    ]
    return ["paper / ours", *(f"{paper.system} / {to}" for to in paper.compared)], lines


def effort_table(reproduction: Reproduction) -> Cells:
    """Returns what each column cost, and how much its seeds differ: the largest (worst / best - 1) of all rows."""
    lines = []
    for column in reproduction.paper.columns:
        found = [result.found[column.name] for result in reproduction.results if column.name in result.found]
        spreads = [f.times[-1] / f.times[0] - 1 for f in found if f.times and f.times[0] > 0]
        settings = ", ".join(f"{name}={value}" for name, value in column.settings.items())
        lines.append(
            [
                column.name,
                f"{column.strategy} {settings}".strip(),
                str(max([len(f.step_seconds) for f in found], default=0)),
                f"{max([f.evaluations for f in found], default=0):,}",
                f"{max(spreads, default=0.0):.1%}",
                f"{sum(f.search_seconds for f in found):,.0f}",
            ]
        )
    return ["column", "strategy", "seeds", "evaluations", "largest spread", "search s"], lines


def speed_table(reproduction: Reproduction) -> Cells:
    """Returns the evaluations until each search is within 5% of the best that any of them finds, placewise left out.

    Both are medians over the seeds; a search that does not get there in half of them has none.
    """
    searched = [name for name in _searched(reproduction) if name != OWN]
    lines = []
    for result in reproduction.results:
        found = {name: result.found[name] for name in searched if name in result.found}
        least = min([f.median for f in found.values() if f.median is not None], default=None)
        cells = [_until(found.get(name), least) for name in searched]
        lines.append([result.row.label, "-" if least is None else _seconds(least), *cells])
    return ["evaluations", "best, s", *searched], lines


def _until(found: Found | None, least: float | None) -> str:
    if found is None or least is None:
        return "-"
    spent = sorted(
        next((float(count) for count, _, seconds in history if seconds <= least * NEAR), math.inf)
        for history in found.histories
    )
    middle = statistics.median_high(spent) if spent else math.inf
    return "-" if math.isinf(middle) else f"{middle:,.0f}"


def _searched(reproduction: Reproduction) -> list[str]:
    """Returns the columns that search."""
    return [
        column.name
        for column in reproduction.paper.columns
        if any(
            result.found[column.name].evaluations >= SEARCHED
            for result in reproduction.results
            if column.name in result.found
        )
    ]


def payoff_table(reproduction: Reproduction) -> Cells:
    """Returns after how many training steps each search has paid off, against the better of one GPU and the expert.

    On the machine: each judged placement runs the paper's number of steps. Simulated: the time that the search took here.
    """
    paper, searched = reproduction.paper, _searched(reproduction)
    lines = []
    for result in reproduction.results:
        rules = [result.found[name].median for name in RULES if name in result.found]
        before = min([seconds for seconds in rules if seconds is not None], default=None)
        cells = []
        for name in searched:
            found = result.found.get(name)
            if found is None or found.median is None or before is None:
                cells.append("-")
            elif found.median >= before:
                cells.append("never")
            else:
                saved = before - found.median
                on_machine = found.trial_seconds * paper.steps_per_trial / saved
                cells.append(f"{on_machine:,.0f} / {found.search_seconds / len(found.step_seconds) / saved:,.0f}")
        lines.append([result.row.label, _seconds(before), *cells])
    return ["on the machine / simulated, steps", "without, s", *searched], lines


def claim_lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yields a line for each claim: whether it holds, the figures, and the cause if it does not hold."""
    for verdict in verdicts:
        word = {True: "yes", False: "no", None: "not measured"}[verdict.holds]
        word += (
            f", in {verdict.num_holding} of {len(verdict.ours)} rows"
            if verdict.holds is False and verdict.num_holding
            else ""
        )
        said = f"{word}: {verdict.text}: {_figures(verdict)}" if verdict.ours else f"{word}: {verdict.text}"
        yield said if verdict.holds is not False or not verdict.cause else f"{said}. Cause: {verdict.cause}"


def _figures(verdict: Verdict) -> str:
    ours = ", ".join(f"{ratio:.2f}" for ratio in verdict.ours.values())
    paper = ", ".join(f"{ratio:.2f}" for ratio in verdict.paper.values())
    return f"{ours} (paper {paper})" if paper else ours


def calibration_tables(calibration: Calibration) -> tuple[Cells, Cells]:
    """Returns a table of the presets' and the fitted figures, and one of how well they fit."""
    figures = [
        [
            kind,
            *(
                f"{getattr(calibration.presets[kind], name) * scale:.4g} -> {getattr(fitted, name) * scale:.4g}"
                for name, scale in (("flops", 1e-12), ("bytes_per_second", 1e-9), ("overhead_seconds", 1e6))
            ),
        ]
        for kind, fitted in calibration.figures.items()
    ]
    fits = [
        [
            fit.model,
            fit.kind,
            _reported(fit.reported_seconds),
            _seconds(fit.preset_seconds),
            _seconds(fit.fitted_seconds),
            f"{fit.fitted_seconds / fit.reported_seconds - 1:+.0%}",
        ]
        for fit in calibration.fits
    ]
    header = ["device", "Tflop/s", "GB/s", "overhead, µs"]
    return (header, figures), (["model", "on", "paper, s", "preset, s", "fitted, s", "error"], fits)


def heading(reproduction: Reproduction) -> str:
    """Returns one line on budgets, seeds and machines."""
    effort = reproduction.effort
    version = "quick version (shows that everything works, too small to judge claims)" if effort.is_quick else "full version"
    machines = reproduction.machines
    machine = "presets" if machines.calibration is None else f"fitted to {machines.calibration.paper}"
    machine += "" if machines.slower_links == 1.0 else f", links {machines.slower_links:g} times slower"
    done = "" if reproduction.is_complete else "; interrupted"
    return (
        f"{version}: {effort.evaluations:,} evaluations, {effort.own_evaluations:,} for placewise, "
        f"{effort.seeds} seeds, machines: {machine}{done}"
    )


def reproduction_page(reproduction: Reproduction) -> Iterator[str]:
    """Yields the lines of a Markdown page."""
    yield f"# {reproduction.paper.title}, reproduced"
    yield f"    {reproduce_command(reproduction)}"
    yield ""
    yield heading(reproduction)[0].upper() + heading(reproduction)[1:] + "."
    for title, cells in (
        ("Seconds per step", seconds_table(reproduction)),
        ("Ratios", ratio_table(reproduction)),
        ("Search effort", effort_table(reproduction)),
        ("Evaluations until a search is near the best", speed_table(reproduction)),
        ("Steps until a search has paid off", payoff_table(reproduction)),
    ):
        yield from ("", f"## {title}", *markdown_table(*cells))
    yield from ("", "## Claims", *(f"- {line}" for line in claim_lines(judge(reproduction))))
    if reproduction.paper.notes:
        yield from ("", *reproduction.paper.notes)


def reproduce_command(reproduction: Reproduction) -> str:
    """Returns the command that makes this table."""
    effort = reproduction.effort
    words = ["placewise reproduce", reproduction.paper.name, *(["--quick"] if effort.is_quick else [])]
    machines = reproduction.machines
    words += ["--calibrated"] if machines.calibration is not None else []
    words += [f"--slower-links {machines.slower_links:g}"] if machines.slower_links != 1.0 else []
    everything = PAPERS[reproduction.paper.name].columns
    chosen = reproduction.paper.columns
    words += [] if len(chosen) == len(everything) else [f'--columns "{",".join(column.name for column in chosen)}"']
    return " ".join([*words, f"--seeds {effort.seeds} --budget {effort.evaluations} --own-budget {effort.own_evaluations}"])


def _pair(paper: str, ours: str) -> str:
    return f"{paper or '-'} / {ours or '-'}" if paper or ours else "-"


def _reported(seconds: float | None) -> str:
    return OOM if seconds is None else f"{seconds:.2f}"


def _median(found: Found | None) -> str:
    if found is None:
        return ""
    if found.problem:
        return "can't"
    return OOM if found.median is None else _seconds(found.median)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.4f}" if seconds < 0.1 else f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
