"""Searches, as place, compare and resume share them: from options to a planner, from its outcome to a plan on the screen."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from placewise.cli.outputs import print_json
from placewise.cli.progress import Line, describe_search
from placewise.cli.shared_options import (
    add_measure_options,
    add_profile_options,
    add_worker_options,
    how_to_continue,
    load_timed,
    positive_argument,
    seconds_argument,
    warn,
)
from placewise.core.errors import StrategyError
from placewise.core.quantities import format_count

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.core.plan import Plan
    from placewise.core.problem import Problem
    from placewise.report.search_curves import Curve, Point
    from placewise.search.driver import Outcome, Progress
    from placewise.search.planner import Planner
    from placewise.search.request import Request
    from placewise.search.store import Run
    from placewise.simulate.schedule import Schedule


def add_set_option(parser: argparse.ArgumentParser, form: str, example: str) -> None:
    """Adds --set."""
    text = f"set a parameter, as in {example} (may be repeated; `placewise strategies` lists them)"
    parser.add_argument("--set", metavar=form, action="append", default=[], help=text)


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """Adds --budget and --seconds."""
    parser.add_argument(
        "--budget",
        metavar="N",
        type=positive_argument,
        help="evaluations to spend (default: 2400 without --seconds, 60 with --measure, no limit for auto)",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=seconds_argument,
        help="time to spend (default: no limit, for auto 10 without --budget)",
    )


def add_order_option(parser: argparse.ArgumentParser) -> None:
    """Adds --order."""
    parser.add_argument(
        "--order", choices=("priority", "program"), default="priority", help="launch order (default: priority)"
    )


def add_plan_options(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Adds the options for the plan that a search finds, and returns their group."""
    group = parser.add_argument_group("output")
    group.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this plan.json")
    group.add_argument("--report", metavar="PAGE", help="write an HTML page that shows the plan; it opens offline")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return group


def add_run_file_option(parser: "argparse._ActionsContainer") -> None:
    """Adds --run-file."""
    parser.add_argument("--run-file", metavar="RUNS.DB", help="record the search here; continue it if it was stopped")


def add_evaluation_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose how placements are evaluated."""
    group = parser.add_argument_group("evaluation")
    add_worker_options(group)
    add_profile_options(group)
    add_measure_options(group)


def settings_of(pairs: list[str]) -> dict[str, str]:
    """Returns the settings of --set by name."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise StrategyError(f"--set must be NAME=VALUE, got {pair!r}")
        settings[name] = value
    return settings


def load_problem(options: argparse.Namespace) -> "Problem":
    """Returns the problem of MODEL, --cluster, --profile and --grouping."""
    from placewise.core.problem import Problem

    graph, cluster, _ = load_timed(options)
    return Problem.of(graph, cluster, options.grouping)


def planner_of(options: argparse.Namespace, problem: "Problem", request: "Request", bound: "Bound | None") -> "Planner":
    """Returns a planner that evaluates with --workers or --ray, and prints a line for each measurement that fails."""
    from placewise.search.planner import Planner

    return Planner(problem, request, bound, workers=options.workers, ray=options.ray, on_failure=warn)


def search_with_progress(
    planner: "Planner",
    options: argparse.Namespace,
    *others: "Callable[[Progress], None]",
    record: "Run | str | None" = None,
) -> "Outcome":
    """Returns what a search finds; its progress is shown on a terminal, and passed to others."""
    with Line(options) as line:

        def on_batch(progress: "Progress") -> None:
            if line.is_due:
                line.show(describe_search(planner, progress))
            for listen in others:
                listen(progress)

        return planner.search(on_batch, record=record)


def finish_search(
    planner: "Planner", outcome: "Outcome", options: argparse.Namespace, points: "Sequence[Point]" = ()
) -> None:
    """Writes and prints the plan of an outcome; `points` are how the search went, for its page."""
    from placewise.formats.plan_file import plan_fields
    from placewise.report.terminal_text import wrapped

    if outcome.status == "stopped" and outcome.placement is None:
        raise KeyboardInterrupt
    schedule = planner.schedule(outcome)
    plan = planner.plan(outcome, schedule)
    if options.output:
        plan.save(options.output)
    if options.report:
        _write_page(plan, schedule, planner.bound, _curve(planner, points, options), options.report)
    if options.json:
        print_json(plan_fields(plan))
    elif not options.quiet:
        _print_plan(plan, schedule, planner.bound)
        if options.report:
            print("", wrapped(f"{options.report} shows it: open it in a browser"), sep="\n")
        if outcome.status == "stopped":
            spent = format_count(outcome.evaluations, "evaluation")
            print("", wrapped(f"stopped after {spent}: this is the best so far; {how_to_continue(options)}"), sep="\n")


def _print_plan(plan: "Plan", schedule: "Schedule", bound: "Bound | None") -> None:
    from placewise.report.explanation import explain
    from placewise.report.terminal_picture import device_table, terminal_picture
    from placewise.report.terminal_text import bold, wrapped

    headline = bold(wrapped(str(plan).splitlines()[0]))
    is_simulated = [] if plan.predicted_seconds is None else ["simulated:"]
    print(headline, "", *is_simulated, *map(wrapped, explain(schedule.problem, schedule, bound)), sep="\n")
    print("", device_table(schedule), sep="\n")
    if drawn := terminal_picture(schedule):
        print("", drawn, sep="\n")


def _write_page(plan: "Plan", schedule: "Schedule", bound: "Bound | None", curve: "Curve", path: str) -> None:
    from placewise.report.comparisons import comparisons_of
    from placewise.report.page.html import write_page
    from placewise.report.page.page_data import ShownPlan

    found, measured = (plan.strategy, plan.seed, plan.evaluations), measured_seconds(plan)
    shown = ShownPlan("plan", schedule, bound, comparisons_of(schedule.problem), curve, *found, measured_seconds=measured)
    write_page([shown], path)


def measured_seconds(plan: "Plan") -> float | None:
    """Returns the measured step time of a plan; None if it was only simulated."""
    return None if plan.predicted_seconds is None else plan.step_seconds


def _curve(planner: "Planner", points: "Sequence[Point]", options: argparse.Namespace) -> "Curve":
    """Returns how a search went: from its record if it has one, which knows more."""
    from placewise.report.search_curves import curve_of_batches, curve_of_progress
    from placewise.search.request import specify
    from placewise.search.store import RunFile

    if options.run_file is None:
        return curve_of_progress(points)
    with RunFile(options.run_file) as file:
        number = file.find(specify(planner.problem, planner.request))
        return curve_of_batches(() if number is None else file.batches(number))
