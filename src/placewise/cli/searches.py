"""Searches, as place, compare and resume share them: from options to a planner, from its outcome to a plan on the screen."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from placewise.cli.outputs import how_to_continue, print_json, warn
from placewise.cli.progress import Line, describe_search
from placewise.core.quantities import format_count

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.core.plan import Plan
    from placewise.core.problem import Problem
    from placewise.report.page.live_page import LivePage
    from placewise.report.page.page_data import ShownPlan
    from placewise.report.search_curves import Curve, Point
    from placewise.search.driver import Outcome, Progress
    from placewise.search.planner import Planner
    from placewise.search.request import Request
    from placewise.search.store import Run
    from placewise.simulate.schedule import Schedule


def planner_of(options: argparse.Namespace, problem: "Problem", request: "Request", bound: "Bound | None") -> "Planner":
    """Returns a planner that evaluates with --workers or --ray, and prints a line for each measurement that fails."""
    from placewise.search.planner import Planner

    return Planner(problem, request, bound, workers=options.workers, ray=options.ray, on_failure=warn)


def bounded_planner(options: argparse.Namespace, problem: "Problem", request: "Request") -> "Planner":
    """Returns the planner with the bound; the time that finding it takes is a part of the budget."""
    from placewise.search.planner import find_bound

    begun = time.monotonic()
    bound = find_bound(problem)
    return replace(planner_of(options, problem, request, bound), spent_seconds=time.monotonic() - begun)


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
    planner: "Planner",
    outcome: "Outcome",
    options: argparse.Namespace,
    points: "Sequence[Point]" = (),
    live: "LivePage | None" = None,
) -> None:
    """Writes and prints the plan of an outcome; `points` are how the search went, for its page; `live` shows that, too."""
    from placewise.formats.plan_file import plan_fields
    from placewise.report.page.html import write_page
    from placewise.report.terminal_text import wrapped

    if outcome.status == "stopped" and outcome.placement is None:
        raise KeyboardInterrupt
    schedule = planner.schedule(outcome)
    plan = planner.plan(outcome, schedule)
    if outcome.status == "stopped":
        spent = format_count(outcome.evaluations, "evaluation")
        warn(f"stopped after {spent}: this is the best so far; {how_to_continue(options)}")
    if options.output:
        plan.save(options.output)
    shown = []
    if options.report or live is not None:
        shown = shown_plans(planner, plan, schedule, outcome, _curve(planner, points, options))
    if options.report:
        write_page(shown, options.report)
    if options.json:
        print_json(plan_fields(plan))
    elif not options.quiet:
        _print_plan(plan, schedule, planner.bound)
        if options.report:
            print("", wrapped(f"{options.report} shows it: open it in a browser"), sep="\n")
    if live is not None:
        live.finish(shown)


def _print_plan(plan: "Plan", schedule: "Schedule", bound: "Bound | None") -> None:
    from placewise.report.chosen_options import options_in_words
    from placewise.report.explanation import explain
    from placewise.report.terminal_picture import device_table, terminal_picture
    from placewise.report.terminal_text import bold, wrapped
    from placewise.search.advice import advice_in_words

    explained = [*explain(schedule.problem, schedule, bound), *advice_in_words(schedule)]
    headline = bold(wrapped(str(plan).splitlines()[0]))
    is_simulated = [] if plan.predicted_seconds is None else ["simulated:"]
    lines = [*plan.trust(), *options_in_words(schedule), *explained]
    print(headline, "", *is_simulated, *map(wrapped, lines), sep="\n")
    print("", device_table(schedule), sep="\n")
    if drawn := terminal_picture(schedule):
        print("", drawn, sep="\n")


def shown_plans(
    planner: "Planner", plan: "Plan", schedule: "Schedule", outcome: "Outcome", curve: "Curve"
) -> "list[ShownPlan]":
    """Returns what a plan's page shows: the plan, and others of the same step: one device, the expert's, the fastest."""
    from placewise.report.comparisons import other_plans, simulate_comparisons
    from placewise.report.page.page_data import ShownPlan, measured_seconds
    from placewise.report.search_curves import curve_of
    from placewise.search.advice import advice_in_words

    comparisons = simulate_comparisons(schedule.problem)
    gave = "" if plan.simplicity is None else plan.simplicity.in_words(schedule.step_seconds)
    shown = ShownPlan(
        "plan" if plan.simplicity is None else "this plan",
        schedule,
        planner.bound,
        comparisons,
        curve,
        plan.strategy,
        plan.seed,
        plan.evaluations,
        measured_seconds=measured_seconds(plan),
        trust=(gave,) if gave else (),
        advice=advice_in_words(schedule),
        interval_seconds=plan.interval_seconds,
    )
    others = other_plans(schedule.problem, None if schedule.present is not None else outcome.fastest)
    return [
        shown,
        *(ShownPlan(name, one, planner.bound, comparisons, curve_of(()), is_other=True) for name, one in others),
    ]


def _curve(planner: "Planner", points: "Sequence[Point]", options: argparse.Namespace) -> "Curve":
    """Returns how a search went: from its record if it has one, which knows more."""
    from placewise.report.search_curves import curve_of_batches, curve_of_progress
    from placewise.search.request import specify
    from placewise.search.store import RunFile

    if options.run_file is None:
        return curve_of_progress(points)
    with RunFile(options.run_file, read_only=True) as file:
        number = getattr(options, "run", None) or file.find(specify(planner.problem, planner.request))  # resume names it
        return curve_of_batches(() if number is None else file.batches(number))
