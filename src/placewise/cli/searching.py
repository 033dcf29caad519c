"""Searching for placements: place, compare, strategies."""

import argparse
import statistics
import sys
from typing import TYPE_CHECKING, Any

from placewise.cli.common import (
    CLUSTER_HELP,
    MODEL_HELP,
    add_result_options,
    add_worker_options,
    check_folder,
    check_writable,
    command,
    count_argument,
    gap_argument,
    positive_argument,
    print_json,
    seconds_argument,
)
from placewise.cli.profiling import (
    add_measure_options,
    add_profile_options,
    check_devices,
    load_timed,
    measure_of,
    report_failure,
)
from placewise.cli.progress import Ticker
from placewise.cli.recording import conclude
from placewise.cli.tensorboard_curves import curves
from placewise.core.errors import StrategyError
from placewise.core.quantities import counted

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.core.problem import Problem
    from placewise.report.search_curves import Point
    from placewise.search.driver import Outcome, Progress
    from placewise.search.planner import Planner


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--cluster", metavar="C", required=True, help=CLUSTER_HELP)
    parser.add_argument(
        "--budget",
        metavar="N",
        type=positive_argument,
        help="evaluations to spend (2400 if no --seconds is given; auto: none)",
    )
    parser.add_argument(
        "--seconds", metavar="S", type=seconds_argument, help="time to spend (auto: 10 if no --budget is given)"
    )
    parser.add_argument("--order", choices=("priority", "program"), default="priority", help="launch order (priority)")
    parser.add_argument("--grouping", default="colocated", help="what is placed together (colocated); see docs/concepts.md")
    parser.add_argument("--run-file", metavar="RUNS.DB", help="record the search, and go on with one that was left")
    add_worker_options(parser)
    add_profile_options(parser)
    add_measure_options(parser)


def _add_set(parser: argparse.ArgumentParser, form: str, text: str) -> None:
    text += "; may be repeated (`placewise strategies` lists them)"
    parser.add_argument("--set", metavar=form, action="append", default=[], help=text)


# --- place ---


def add_place(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "place", _place, "search for the placement with the shortest step that fits")
    _add_search_options(parser)
    parser.add_argument(
        "--strategy", metavar="S", default=None, help="how to search (auto); `placewise strategies` lists them"
    )
    _add_set(parser, "NAME=VALUE", "a parameter of the strategy: crossover=uniform")
    parser.add_argument(
        "--target-gap", metavar="G", type=gap_argument, help="stop when found / bound - 1 is at most this: 0.05"
    )
    parser.add_argument("--seed", metavar="N", type=count_argument, default=0, help="of all randomness (0)")
    add_result_options(parser)
    parser.add_argument("--tensorboard", metavar="DIR", help="write learning curves for TensorBoard")


def _problem(options: argparse.Namespace) -> "Problem":
    from placewise.core.problem import Problem

    graph, cluster, _ = load_timed(options)
    return Problem.of(graph, cluster, options.grouping)


def _settings(pairs: list[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise StrategyError(f"--set must be NAME=VALUE, it is {pair!r}")
        settings[name] = value
    return settings


def _place(options: argparse.Namespace) -> None:
    from placewise.search.budget import budget_of
    from placewise.search.planner import Planner, find_bound
    from placewise.search.request import DEFAULT_STRATEGY, Request
    from placewise.strategies import make

    reads = (options.model, options.cluster, options.profile)
    check_writable(options.output, options.report, options.run_file, reads=reads)
    check_folder(options.tensorboard)
    strategy = options.strategy or DEFAULT_STRATEGY
    measure = measure_of(options)
    budget = budget_of(strategy, options.budget, options.seconds, options.target_gap, is_measured=measure is not None)
    names = (options.model, options.cluster)
    request = Request(strategy, _settings(options.set), budget, options.seed, options.order, *names, measure)
    make(strategy, dict(request.settings))  # wrong names, and devices that are not here, are refused before any work
    check_devices(options, measure)
    problem = _problem(options)
    planner = Planner(
        problem, request, find_bound(problem), workers=options.workers, ray=options.ray, on_failure=report_failure
    )
    points: list[Point] = []
    outcome = _search(planner, options, points)
    conclude(planner, outcome, options, points)


def _search(planner: "Planner", options: argparse.Namespace, points: "list[Point] | None" = None) -> "Outcome":
    """Returns what a search finds; `points` get how it went."""
    from placewise.report.search_curves import Point

    ticker = Ticker.of(planner, options)
    try:
        with curves(getattr(options, "tensorboard", None)) as write:

            def on_batch(progress: "Progress") -> None:
                ticker(progress)
                write(progress)
                if points is not None:
                    points.append(Point(progress.evaluations, progress.seconds, progress.step_seconds))

            return planner.search(on_batch, record=options.run_file)
    finally:
        ticker.clear()


# --- compare ---


def add_compare(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "compare", _compare, "compare strategies on one problem with equal budgets")
    _add_search_options(parser)
    parser.add_argument("--strategies", metavar="A,B", default="classical", help="names, classical, learned, or all")
    _add_set(parser, "STRATEGY.NAME=VALUE", "a parameter of one of the strategies: genetic.crossover=uniform")
    parser.add_argument("--seeds", metavar="K", type=positive_argument, default=1, help="searches with each strategy (1)")


def _compare(options: argparse.Namespace) -> None:
    from placewise.search.budget import budget_of
    from placewise.search.planner import Planner, find_bound
    from placewise.search.request import Request
    from placewise.strategies import make, names_of

    check_writable(options.run_file, reads=(options.model, options.cluster, options.profile))
    names, settings, measure = names_of(options.strategies), _settings(options.set), measure_of(options)
    own = {name: {k.partition(".")[2]: v for k, v in settings.items() if k.partition(".")[0] == name} for name in names}
    for key, value in settings.items():
        if "." not in key:
            raise StrategyError(f"--set must be STRATEGY.NAME=VALUE here, it is {f'{key}={value}'!r}")
        if (whose := key.partition(".")[0]) not in names:
            raise StrategyError(f"--set {key}={value}: {whose!r} is not compared, these are: {', '.join(names)}")
    for name in names:
        make(name, own[name])
    check_devices(options, measure)
    problem = _problem(options)
    limit, rows, stopped = None if measure else find_bound(problem), [], ""  # a bound holds for simulated times
    for name in names:
        budget = budget_of(name, options.budget, options.seconds, is_measured=measure is not None)
        planners = [
            Planner(
                problem,
                Request(name, own[name], budget, seed, options.order, options.model, options.cluster, measure),
                limit,
                workers=options.workers,
                ray=options.ray,
                on_failure=report_failure,
            )
            for seed in range(options.seeds)
        ]
        outcomes, trouble = _searches(planners, options)
        rows.append(_row(name, outcomes, trouble))
        if outcomes and outcomes[-1].status == "stopped":
            stopped = name
            break
    _print_comparison(problem, rows, limit, options)
    if stopped:
        others = f"; not begun: {', '.join(names[len(rows) :])}" if len(rows) < len(names) else ""
        print(f"placewise: stopped: {stopped} had less than the others{others}", file=sys.stderr)


def _searches(planners: "list[Planner]", options: argparse.Namespace) -> "tuple[list[Outcome], str]":
    """Returns what one strategy finds with each seed, up to one that is stopped; and why it can't be used, or ''."""
    outcomes: list[Outcome] = []
    for planner in planners:
        try:
            outcomes.append(_search(planner, options))
        except StrategyError as rule:  # this strategy can't: the others go on
            return outcomes, str(rule)
        if outcomes[-1].status == "stopped":
            break
    return outcomes, ""


def _row(name: str, outcomes: "list[Outcome]", trouble: str) -> dict[str, Any]:
    """Returns a strategy's line: best, median and worst step seconds over its seeds; None where nothing fits."""
    times = sorted(outcome.step_seconds for outcome in outcomes if outcome.placement is not None)
    return {
        "strategy": name,
        "best_seconds": times[0] if times else None,
        "median_seconds": statistics.median(times) if times else None,
        "worst_seconds": times[-1] if times else None,
        "fits": f"{len(times)}/{len(outcomes)}",
        "evaluations": max([outcome.evaluations for outcome in outcomes], default=0),
        "search_seconds": sum(outcome.seconds for outcome in outcomes),
        "problem": trouble,
    }


def _print_comparison(
    problem: "Problem", rows: list[dict[str, Any]], limit: "Bound | None", options: argparse.Namespace
) -> None:
    from placewise.core.quantities import seconds
    from placewise.report.text_tables import bold, table
    from placewise.search.planner import gap_of

    lowest = min([row["best_seconds"] for row in rows if row["best_seconds"] is not None], default=None)
    for row in rows:
        best = row["best_seconds"]
        row["relative"] = None if best is None or not lowest else best / lowest
        row["gap"] = None if best is None or limit is None else gap_of(best, limit.seconds)
    rows.sort(key=lambda row: (row["best_seconds"] is None, row["best_seconds"] or 0.0))
    if options.json:
        head = {"graph": problem.graph.name, "cluster": problem.cluster.name, "seeds": options.seeds}
        print_json({**head, "bound_seconds": None if limit is None else limit.seconds, "rows": rows})
        return
    seeds = counted(options.seeds, "seed")
    print(f"{bold(problem.graph.name)} on {problem.cluster.name}, {options.order} order, {seeds}")
    if limit is not None:
        print(f"no placement has a step below {seconds(limit.seconds)}")
    print()
    cells = [
        (
            row["strategy"],
            *(
                seconds(row[key]) if row[key] is not None else "-"
                for key in ("best_seconds", "median_seconds", "worst_seconds")
            ),
            "-" if row["relative"] is None else f"{row['relative']:.2f}",
            "-" if row["gap"] is None else f"{row['gap']:.1%}",
            *(row["fits"], f"{row['evaluations']:,}", f"{row['search_seconds']:.1f}"),
        )
        for row in rows
    ]
    print(table(("strategy", "best", "median", "worst", "to best", "gap", "fits", "evaluations", "search s"), cells))
    for row in rows:
        if row["problem"]:
            print(f"\n{row['problem']}")


# --- strategies ---


def add_strategies(commands: Any) -> None:
    """Adds the command."""
    command(commands, "strategies", _strategies, "list the strategies, with their parameters")


def _strategies(options: argparse.Namespace) -> None:
    from placewise.report.text_tables import bold
    from placewise.strategies import STRATEGIES, parameters

    if options.json:
        rows = {
            name: {"family": entry.family, "summary": entry.summary, "parameters": parameters(name)}
            for name, entry in STRATEGIES.items()
        }
        print_json(rows)
        return
    width = max(map(len, STRATEGIES)) + 2
    for name, entry in STRATEGIES.items():
        print(f"{bold(name)}{'':<{width - len(name)}}{entry.summary}")
        if known := parameters(name):
            print(f"{'':<{width}}{', '.join(f'{key}={value}' for key, value in known.items())}")
