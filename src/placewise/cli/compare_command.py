"""placewise compare: strategies on one problem with equal budgets."""

import argparse
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from placewise.cli.inputs import check_devices, load_problem, measure_of, settings_of
from placewise.cli.outputs import check_writable, print_json, warn
from placewise.cli.searches import planner_of, search_with_progress
from placewise.cli.shared_options import (
    add_budget_options,
    add_command,
    add_evaluation_options,
    add_grouping_option,
    add_order_option,
    add_problem_options,
    add_run_file_option,
    add_set_option,
    positive_argument,
)
from placewise.core.errors import StrategyError
from placewise.core.quantities import format_count, format_percent

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.core.problem import Problem
    from placewise.search.driver import Outcome
    from placewise.search.planner import Planner


def add_compare(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "compare", _compare, "compare strategies on one problem with equal budgets")
    add_problem_options(parser)
    parser.add_argument(
        "--strategies",
        metavar="A,B",
        default="classical",
        help="names of strategies, or classical, exact, learned, all (default: classical)",
    )
    add_set_option(parser, "a strategy", "STRATEGY.NAME=VALUE", "genetic.crossover=uniform")
    add_budget_options(parser)
    parser.add_argument(
        "--seeds", metavar="K", type=positive_argument, default=1, help="searches with each strategy (default: 1)"
    )
    add_order_option(parser)
    add_grouping_option(parser)
    add_run_file_option(parser)
    add_evaluation_options(parser)


def _compare(options: argparse.Namespace) -> None:
    from placewise.search.budget import budget_of
    from placewise.search.planner import find_bound
    from placewise.search.request import Request
    from placewise.strategies import make, names_of

    check_writable(options.run_file, reads=(options.model, options.cluster, options.profile))
    names, measure = names_of(options.strategies), measure_of(options)
    settings = _settings_by_strategy(options.set, names)
    for name in names:
        make(name, settings[name])  # refuses wrong names before any work
    check_devices(options, measure)
    problem = load_problem(options)
    bound = None if measure else find_bound(problem)  # it holds for simulated times
    rows, stopped = [], ""
    for name in names:
        budget = budget_of(name, options.budget, options.seconds, is_measured=measure is not None)
        first = Request(name, settings[name], budget, 0, options.order, options.model, options.cluster, measure)
        planner = planner_of(options, problem, first, bound)
        outcomes, reason = _searches(planner, options)
        rows.append(_row(name, outcomes, reason))
        if outcomes and outcomes[-1].status == "stopped":
            stopped = name
            break
    _print_comparison(problem, rows, bound, options)
    if stopped:
        others = f"; not started: {', '.join(names[len(rows) :])}" if len(rows) < len(names) else ""
        warn(f"stopped: {stopped} had less than the others{others}")


def _settings_by_strategy(pairs: list[str], names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    """Returns the settings of each strategy."""
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for key, value in settings_of(pairs).items():
        strategy, dot, name = key.partition(".")
        if not dot:
            raise StrategyError(f"--set must be STRATEGY.NAME=VALUE here, got {f'{key}={value}'!r}")
        if strategy not in names:
            raise StrategyError(f"--set {key}={value}: {strategy!r} is not compared, these are: {', '.join(names)}")
        found[strategy][name] = value
    return found


def _searches(planner: "Planner", options: argparse.Namespace) -> "tuple[list[Outcome], str]":
    """Returns what one strategy finds with each seed, until one is stopped; and why it can't be used, or ''."""
    outcomes: list[Outcome] = []
    for seed in range(options.seeds):
        try:
            seeded = replace(planner, request=replace(planner.request, seed=seed))
            outcomes.append(search_with_progress(seeded, options, record=options.run_file))
        except StrategyError as rule:  # this strategy can't; the others can
            return outcomes, str(rule)
        if outcomes[-1].status == "stopped":
            break
    return outcomes, ""


def _row(name: str, outcomes: "list[Outcome]", reason: str) -> dict[str, Any]:
    """Returns a strategy's row: best, median and worst step seconds over its seeds; None if nothing fits."""
    times = sorted(outcome.step_seconds for outcome in outcomes if outcome.placement is not None)
    return {
        "strategy": name,
        "best_seconds": times[0] if times else None,
        "median_seconds": statistics.median(times) if times else None,
        "worst_seconds": times[-1] if times else None,
        "fits": f"{len(times)}/{len(outcomes)}",
        "evaluations": max([outcome.evaluations for outcome in outcomes], default=0),
        "search_seconds": sum(outcome.seconds for outcome in outcomes),
        "problem": reason,
    }


def _print_comparison(
    problem: "Problem", rows: list[dict[str, Any]], bound: "Bound | None", options: argparse.Namespace
) -> None:
    from placewise.core.quantities import format_seconds
    from placewise.report.terminal_text import problem_heading, table
    from placewise.search.planner import gap_of

    lowest = min([row["best_seconds"] for row in rows if row["best_seconds"] is not None], default=None)
    for row in rows:
        best = row["best_seconds"]
        row["relative"] = None if best is None or not lowest else best / lowest
        row["gap"] = None if best is None or bound is None else gap_of(best, bound.seconds)
    rows.sort(key=lambda row: (row["best_seconds"] is None, row["best_seconds"] or 0.0))
    if options.json:
        head = {"graph": problem.graph.name, "cluster": problem.cluster.name, "seeds": options.seeds}
        print_json({**head, "bound_seconds": None if bound is None else bound.seconds, "rows": rows})
        return
    print(f"{problem_heading(problem)}, {options.order} order, {format_count(options.seeds, 'seed')}")
    if bound is not None:
        print(f"no placement has a step below {format_seconds(bound.seconds)}")
    print()
    cells = [
        (
            row["strategy"],
            *("-" if row[f"{which}_seconds"] is None else format_seconds(row[f"{which}_seconds"]) for which in _TIMES),
            "-" if row["relative"] is None else f"{row['relative']:.2f}",
            "-" if row["gap"] is None else format_percent(row["gap"]),
            row["fits"],
            f"{row['evaluations']:,}",
            f"{row['search_seconds']:.1f}",
        )
        for row in rows
    ]
    print(table(("strategy", *_TIMES, "to best", "gap", "fits", "evaluations", "search s"), cells))
    for row in rows:
        if row["problem"]:
            print(f"\n{row['problem']}")


_TIMES = ("best", "median", "worst")
