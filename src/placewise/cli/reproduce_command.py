"""The papers' tables reproduced: reproduce."""

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from placewise.cli.outputs import check_folder, check_writable, how_to_continue, print_json, warn
from placewise.cli.shared_options import add_command, number_argument, positive_argument
from placewise.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from placewise.experiments.papers.reported_results import Paper, PaperRow
    from placewise.experiments.papers.reproduction import Effort, Reproduction
    from placewise.experiments.recorded_searches import Found

CALIBRATE = "calibrate"

CHANGES = "changes"

WHAT = ("post", "post-parts", "post-appendix", "spotlight", "hdp", "colocrl", CHANGES, CALIBRATE)


def add_reproduce(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "reproduce", _reproduce, "compute the papers' tables again, next to what they reported")
    parser.add_argument(
        "what",
        choices=WHAT,
        help="a paper; changes: what plans lose when their machine changes, and how fast each system recovers; "
        "calibrate: fit machines to the papers' single-device columns",
    )
    parser.add_argument("--quick", action="store_true", help="small models, few evaluations, two seeds (takes minutes)")
    parser.add_argument("--seeds", metavar="K", type=positive_argument, help="searches with each strategy (default: 5)")
    parser.add_argument("--budget", metavar="N", type=positive_argument, help="evaluations of a search (default: 2400)")
    parser.add_argument(
        "--own-budget", metavar="N", type=positive_argument, help="evaluations of placewise's own search (default: 240)"
    )
    parser.add_argument("--models", metavar="A,B", help="only these models, by the paper's names: NMT-2,RNNLM")
    parser.add_argument("--columns", metavar="A,B", help="only these columns of the table: Post,expert")
    parser.add_argument("--calibrated", action="store_true", help="use machines fitted to the paper instead of presets")
    parser.add_argument("--slower-links", metavar="F", type=_factor, default=1.0, help="slow copies down by F (default: 1)")
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="do not search: show for each claim how much slower copies or launches must be for it to hold",
    )
    parser.add_argument("--run-file", metavar="RUNS.DB", help="record every search, and continue an interrupted one")
    parser.add_argument("-o", "--output", metavar="RESULTS.JSON", help="write all results")
    parser.add_argument("--plots", metavar="DIR", help="write a picture (SVG) of each row's searches into this folder")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")


def _factor(text: str) -> float:
    """Returns a factor above 0."""
    return number_argument(text, "a number above 0 and below a million", lambda value: 0 < value < 1e6)


def _reproduce(options: argparse.Namespace) -> None:
    if options.what in (CALIBRATE, CHANGES):
        (_calibrate if options.what == CALIBRATE else _recover)(options)
        return
    from placewise.core.quantities import format_seconds
    from placewise.experiments.papers.calibration import calibrate
    from placewise.experiments.papers.claims import judge
    from placewise.experiments.papers.reported_results import PAPERS
    from placewise.experiments.papers.reproduction import (
        Machines,
        reproduce,
        reproduction_data,
        write_reproduction,
        write_reproduction_figures,
    )
    from placewise.experiments.search_figures import check_drawing

    paper = PAPERS[options.what]
    if options.what_if:
        _what_if(paper, options)
        return
    effort = _effort(paper, options)
    families = _families(paper, effort, options.models)
    named = _chosen(paper.name, "column", [column.name for column in paper.columns], options.columns)
    if named:
        paper = replace(paper, columns=tuple(column for column in paper.columns if column.name in named))
    check_writable(options.output, options.run_file)
    check_folder(options.plots)
    if options.plots:
        check_drawing()
    machines = Machines(calibrate(_calibrating(paper)) if options.calibrated else None, options.slower_links)
    show = _progress()

    def tell(row: "PaperRow", column: str, found: "Found") -> None:
        step = found.problem or ("nothing fits" if found.median is None else format_seconds(found.median))
        show(f"{row.label}: {column} {step}")

    done = reproduce(paper, effort, families=families, machines=machines, run_file=options.run_file, on_found=tell)
    verdicts = [asdict(verdict) for verdict in judge(done)]
    if options.output:
        write_reproduction(done, verdicts, options.output)
    if options.plots:
        write_reproduction_figures(done, options.plots)
    if options.json:
        print_json(reproduction_data(done, verdicts))
    else:
        _print(done, options)
    if not done.is_complete:
        warn(f"stopped: these are the results so far; {how_to_continue(options)}")


def _refuse(options: argparse.Namespace, names: tuple[str, ...], what: str) -> None:
    """Refuses options that `what` would ignore."""
    for name in names:
        given = getattr(options, name)
        if given not in (None, False) and not (name == "slower_links" and given == 1.0):
            raise InputError(f"--{name.replace('_', '-')} can't be used with {what}")


def _what_if(paper: "Paper", options: argparse.Namespace) -> None:
    from placewise.experiments.papers.calibration import calibrate
    from placewise.experiments.papers.reproduction import Machines
    from placewise.experiments.papers.what_if import FACTORS, LAUNCHES, what_if, what_if_table
    from placewise.report.markdown_tables import markdown_table
    from placewise.report.terminal_text import table

    _refuse(options, ("run_file", "plots", "columns", "budget", "own_budget", "output"), "--what-if, which does not search")
    effort = _effort(paper, options)
    machines = Machines(calibrate(_calibrating(paper)) if options.calibrated else None, options.slower_links)
    show = _progress()
    families = _families(paper, effort, options.models)
    answers = what_if(paper, effort, families, machines, on_row=lambda row: show(row.label))
    if options.json:
        rows = [
            {"claim": a.claim.text, "row": a.row.label, "of": a.of, "to": a.claim.to, "ratios": a.ratios}
            | {"launch_ratios": a.launch_ratios, "holds_from": a.holds_from, "holds_from_launch": a.holds_from_launch}
            | {"least_ratio": a.least_ratio}
            for a in answers
        ]
        print_json({"paper": paper.name, "factors": FACTORS, "launch_seconds": LAUNCHES, "rows": rows})
        return
    cells = what_if_table(answers)
    print(*(markdown_table(*cells) if options.markdown else [table(*cells)]), sep="\n")


def _recover(options: argparse.Namespace) -> None:
    from placewise.experiments.papers.changed_machines import ROWS, SYSTEMS, Recovery, measure_recoveries, recovery_table
    from placewise.experiments.papers.reproduction import Effort
    from placewise.formats.files import write_bytes
    from placewise.report.markdown_tables import markdown_table
    from placewise.report.terminal_text import table

    _refuse(options, ("calibrated", "plots", "slower_links"), CHANGES)
    _refuse(options, ("what_if",), f"{CHANGES}, which has no claims")
    rows = tuple(replace(row, model=row.quick_model) for row in ROWS if row.quick_model) if options.quick else ROWS
    wanted = _chosen(CHANGES, "model", [row.family for row in rows], options.models, options.quick)
    rows = tuple(row for row in rows if not wanted or row.family in wanted)
    named = _chosen(CHANGES, "column", list(SYSTEMS), options.columns)
    systems = {name: strategy for name, strategy in SYSTEMS.items() if not named or name in named}
    usual = Effort(40, own_evaluations=20, seeds=2, is_quick=True) if options.quick else Effort()
    effort = Effort(
        options.budget or usual.evaluations,
        options.own_budget or usual.own_evaluations,
        options.seeds or usual.seeds,
        usual.is_quick,
    )
    check_writable(options.output, options.run_file)
    show = _progress()

    def tell(found: Recovery) -> None:
        show(f"{found.row.family}, {found.change}: {found.system}")

    done = measure_recoveries(effort, rows=rows, systems=systems, run_file=options.run_file, on_found=tell)
    data = {"effort": asdict(effort), "is_complete": done.is_complete, "rows": [asdict(found) for found in done.results]}
    if options.output:
        write_bytes(options.output, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())
    if options.json:
        print_json(data)
    else:
        cells = recovery_table(done)
        print(*(markdown_table(*cells) if options.markdown else [table(*cells)]), sep="\n")
    if not done.is_complete:
        warn(f"stopped: these are the results so far; {how_to_continue(options)}")


def _calibrating(paper: "Paper") -> "Paper":
    """Returns the paper whose columns the machines are fitted to: this one, or else Post, which has the same machines."""
    from placewise.experiments.papers.reported_results import POST

    return paper if paper.fitted else POST


def _effort(paper: "Paper", options: argparse.Namespace) -> "Effort":
    from placewise.experiments.papers.reproduction import Effort, quick

    usual = quick(paper) if options.quick else Effort()
    return Effort(
        options.budget or usual.evaluations,
        options.own_budget or usual.own_evaluations,
        options.seeds or usual.seeds,
        usual.is_quick,
    )


def _families(paper: "Paper", effort: "Effort", text: str | None) -> tuple[str, ...]:
    from placewise.experiments.papers.reproduction import rows_of

    return _chosen(paper.name, "model", [row.family for row in rows_of(paper, effort)], text, effort.is_quick)


def _chosen(what: str, kind: str, names: list[str], text: str | None, is_quick: bool = False) -> tuple[str, ...]:
    """Returns the names in --models or --columns, all of which must be among the known ones."""
    known = tuple(dict.fromkeys(names))
    wanted = tuple(text.split(",")) if text else ()
    for name in wanted:
        if name not in known:
            raise InputError(
                f"--{kind}s: {what} has no {kind} {name!r}{' in its quick version' if is_quick else ''}; "
                f"its {kind}s are {', '.join(known)}"
            )
    return wanted


def _progress() -> "Callable[[str], None]":
    """Returns what shows each line on a terminal, after the seconds since now."""
    started = time.monotonic()

    def show(line: str) -> None:
        if sys.stderr.isatty():
            print(f"{time.monotonic() - started:6.0f} s  {line}", file=sys.stderr)

    return show


def _print(done: "Reproduction", options: argparse.Namespace) -> None:
    from placewise.experiments.papers.claims import judge
    from placewise.experiments.papers.reproduction_tables import (
        claim_lines,
        effort_table,
        heading,
        payoff_table,
        ratio_table,
        reproduction_page,
        seconds_table,
        speed_table,
    )
    from placewise.report.terminal_text import bold, table, wrapped

    if options.markdown:
        print(*reproduction_page(done), sep="\n")
        return
    print(bold(done.paper.title), heading(done), "", sep="\n")
    for cells in (seconds_table(done), ratio_table(done), effort_table(done), speed_table(done), payoff_table(done)):
        print(table(*cells), "", sep="\n")
    print(*(wrapped(line) for line in (*claim_lines(judge(done)), "", *done.paper.notes)), sep="\n")


def _calibrate(options: argparse.Namespace) -> None:
    from placewise.experiments.papers.calibration import calibrate
    from placewise.experiments.papers.reported_results import PAPERS
    from placewise.experiments.papers.reproduction_tables import calibration_tables
    from placewise.report.markdown_tables import markdown_table
    from placewise.report.terminal_text import bold, table

    searching = ("quick", "seeds", "budget", "own_budget", "models", "columns", "what_if", "run_file", "output", "plots")
    _refuse(options, searching, f"{CALIBRATE}, which does not search")
    _refuse(options, ("calibrated", "slower_links"), CALIBRATE)
    calibrations = [calibrate(paper) for paper in PAPERS.values() if paper.fitted]
    if options.json:
        print_json({calibration.paper: asdict(calibration) for calibration in calibrations})
        return
    for calibration in calibrations:
        print(f"## {calibration.paper}" if options.markdown else bold(calibration.paper))
        for cells in calibration_tables(calibration):
            print(*(markdown_table(*cells) if options.markdown else [table(*cells)]), "", sep="\n")
