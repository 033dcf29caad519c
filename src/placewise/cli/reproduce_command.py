"""The papers' tables reproduced: reproduce."""

import argparse
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from placewise.cli.outputs import check_folder, check_writable, how_to_continue, print_json, warn
from placewise.cli.shared_options import add_command, number_argument, positive_argument
from placewise.core.errors import InputError

if TYPE_CHECKING:
    from placewise.experiments.papers.reported_results import Paper, PaperRow
    from placewise.experiments.papers.reproduction import Effort, Reproduction
    from placewise.experiments.recorded_searches import Found

CALIBRATE = "calibrate"

WHAT = ("post", "post-appendix", "spotlight", "hdp", "colocrl", CALIBRATE)


def add_reproduce(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "reproduce", _reproduce, "compute the papers' tables again, next to what they reported")
    parser.add_argument(
        "what", choices=WHAT, help="a paper; or calibrate, to fit machines to the papers' single-device columns"
    )
    parser.add_argument("--quick", action="store_true", help="small models, few evaluations, two seeds (takes minutes)")
    parser.add_argument("--seeds", metavar="K", type=positive_argument, help="searches with each strategy (default: 5)")
    parser.add_argument("--budget", metavar="N", type=positive_argument, help="evaluations of a search (default: 2400)")
    parser.add_argument(
        "--own-budget", metavar="N", type=positive_argument, help="evaluations of placewise's own search (default: 240)"
    )
    parser.add_argument("--models", metavar="A,B", help="only these models, by the paper's names: NMT-2,RNNLM")
    parser.add_argument("--calibrated", action="store_true", help="use machines fitted to the paper instead of presets")
    parser.add_argument("--slower-links", metavar="F", type=_factor, default=1.0, help="slow copies down by F (default: 1)")
    parser.add_argument("--run-file", metavar="RUNS.DB", help="record every search, and continue an interrupted one")
    parser.add_argument("-o", "--output", metavar="RESULTS.JSON", help="write all results")
    parser.add_argument("--plots", metavar="DIR", help="write a picture (SVG) of each row's searches into this folder")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")


def _factor(text: str) -> float:
    """Returns a factor above 0."""
    return number_argument(text, "a number above 0 and below a million", lambda value: 0 < value < 1e6)


def _reproduce(options: argparse.Namespace) -> None:
    if options.what == CALIBRATE:
        _calibrate(options)
        return
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
    effort = _effort(paper, options)
    families = _families(paper, effort, options.models)
    check_writable(options.output, options.run_file)
    check_folder(options.plots)
    if options.plots:
        check_drawing()
    machines = Machines(calibrate(_calibrating(paper)) if options.calibrated else None, options.slower_links)
    done = reproduce(paper, effort, families=families, machines=machines, run_file=options.run_file, on_found=_ShowFound())
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

    known = tuple(dict.fromkeys(row.family for row in rows_of(paper, effort)))
    wanted = tuple(text.split(",")) if text else ()
    for name in wanted:
        if name not in known:
            raise InputError(
                f"--models: {paper.name} has no model {name!r}{' in its quick version' if effort.is_quick else ''}; "
                f"its models are {', '.join(known)}"
            )
    return wanted


class _ShowFound:
    """Shows each finished column on a terminal."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, row: "PaperRow", column: str, found: "Found") -> None:
        from placewise.core.quantities import format_seconds

        if sys.stderr.isatty():
            step = found.problem or ("nothing fits" if found.median is None else format_seconds(found.median))
            print(f"{time.monotonic() - self._started:6.0f} s  {row.label}: {column} {step}", file=sys.stderr)


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
    )
    from placewise.report.terminal_text import bold, table, wrapped

    if options.markdown:
        print(*reproduction_page(done), sep="\n")
        return
    print(bold(done.paper.title), heading(done), "", sep="\n")
    for cells in (seconds_table(done), ratio_table(done), effort_table(done), payoff_table(done)):
        print(table(*cells), "", sep="\n")
    print(*(wrapped(line) for line in (*claim_lines(judge(done)), "", *done.paper.notes)), sep="\n")


def _calibrate(options: argparse.Namespace) -> None:
    from placewise.experiments.papers.calibration import calibrate
    from placewise.experiments.papers.reported_results import PAPERS
    from placewise.experiments.papers.reproduction_tables import calibration_tables
    from placewise.report.markdown_tables import markdown_table
    from placewise.report.terminal_text import bold, table

    calibrations = [calibrate(paper) for paper in PAPERS.values() if paper.fitted]
    if options.json:
        print_json({calibration.paper: asdict(calibration) for calibration in calibrations})
        return
    for calibration in calibrations:
        print(f"## {calibration.paper}" if options.markdown else bold(calibration.paper))
        for cells in calibration_tables(calibration):
            print(*(markdown_table(*cells) if options.markdown else [table(*cells)]), "", sep="\n")
