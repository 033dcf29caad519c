"""Recorded runs, and the plans that come out of them: runs, resume."""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from placewise.cli.common import (
    add_result_options,
    add_worker_options,
    check_writable,
    command,
    how_to_go_on,
    positive_argument,
    print_json,
)
from placewise.cli.progress import Ticker
from placewise.core.quantities import counted

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.core.plan import Plan
    from placewise.report.search_curves import Curve, Point
    from placewise.search.driver import Outcome
    from placewise.search.planner import Planner
    from placewise.simulate.schedule import Schedule

_SHOWN = ("model", "cluster", "strategy", "parameters", "seed")


def conclude(planner: "Planner", outcome: "Outcome", options: argparse.Namespace, points: "Sequence[Point]" = ()) -> None:
    """Writes and prints the plan of an outcome; `points` are how the search went, for its page."""
    from placewise.cli.reporting import write_report
    from placewise.formats.plan_file import plan_fields

    if outcome.status == "stopped" and outcome.placement is None:
        raise KeyboardInterrupt
    schedule, limit = planner.schedule(outcome), planner.bound
    plan = planner.plan(outcome, schedule)
    if options.output:
        plan.save(options.output)
    if options.report:
        write_report(plan, schedule, limit, _curve(planner, points, options), options.report)
    if options.json:
        print_json(plan_fields(plan))
    elif not options.quiet:
        _print_plan(plan, schedule, limit)
        if options.report:
            print(f"\n{options.report} shows it: open it in a browser")
        if outcome.status == "stopped":
            spent = counted(outcome.evaluations, "evaluation")
            print(f"\nstopped after {spent}: this is the best so far; {how_to_go_on(options)}")


def _print_plan(plan: "Plan", schedule: "Schedule", limit: "Bound | None") -> None:
    from placewise.report.terminal_picture import device_table, terminal_picture
    from placewise.report.text_tables import bold, wrapped
    from placewise.report.words import explain

    said = [] if plan.predicted_seconds is None else ["what follows is as simulated:"]
    print(bold(str(plan).splitlines()[0]), "", *said, *map(wrapped, explain(schedule.problem, schedule, limit)), sep="\n")
    print("", device_table(schedule), sep="\n")
    if drawn := terminal_picture(schedule):
        print("", drawn, sep="\n")


def _curve(planner: "Planner", points: "Sequence[Point]", options: argparse.Namespace) -> "Curve":
    """Returns how a search went: from its record where there is one, for that knows most."""
    from placewise.report.search_curves import curve_of_batches, curve_of_progress
    from placewise.search.request import specify
    from placewise.search.store import RunFile

    if options.run_file is None:
        return curve_of_progress(points)
    with RunFile(options.run_file) as file:
        number = file.find(specify(planner.problem, planner.request))
        return curve_of_batches(() if number is None else file.batches(number))


def add_runs(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "runs", _runs, "list the runs of a run file")
    parser.add_argument("run_file", metavar="RUNS.DB")


def _runs(options: argparse.Namespace) -> None:
    from placewise.core.quantities import seconds
    from placewise.report.text_tables import table
    from placewise.search.store import RunFile

    with RunFile(options.run_file, create=False) as file:
        runs = file.runs()
    if options.json:
        said = [
            {
                "run": run.number,
                "status": run.status,
                "evaluations": run.evaluations,
                "step_seconds": run.step_seconds,
                **{name: getattr(run.specification, name) for name in _SHOWN},
                "measured": run.specification.measured or None,
                "created": run.created,
            }
            for run in runs
        ]
        print_json({"runs": said})
        return
    rows = [
        (
            *(run.number, run.specification.model, run.specification.cluster, run.specification.strategy),
            *(run.specification.seed, "unfinished" if run.status == "running" else run.status, f"{run.evaluations:,}"),
            "-" if run.step_seconds is None else seconds(run.step_seconds),
            "measured" if run.specification.measured else "simulated",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created)),
        )
        for run in runs
    ]
    header = ("run", "model", "cluster", "strategy", "seed", "status", "evaluations", "best", "times", "begun")
    print(table(header, rows, left=4))


def add_resume(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "resume", _resume, "go on with a run that was stopped or killed")
    parser.add_argument("run", metavar="RUN", type=positive_argument, help="its number, as `placewise runs` shows it")
    parser.add_argument("--run-file", metavar="RUNS.DB", required=True, help="the file that it is recorded in")
    add_result_options(parser)
    add_worker_options(parser)


def _resume(options: argparse.Namespace) -> None:
    from placewise.cli.profiling import report_failure
    from placewise.search.planner import Planner, find_bound
    from placewise.search.request import requested
    from placewise.search.store import Run, RunFile

    check_writable(options.output, options.report, reads=(options.run_file,))
    with RunFile(options.run_file, create=False) as file, Run(file, options.run) as record:
        problem, request = file.problem(options.run), requested(record.info.specification)
        planner = Planner(
            problem, request, find_bound(problem), workers=options.workers, ray=options.ray, on_failure=report_failure
        )
        ticker = Ticker.of(planner, options)
        try:
            outcome = planner.search(ticker, record=record)
        finally:
            ticker.clear()
    conclude(planner, outcome, options)
