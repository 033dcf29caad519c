"""placewise place: search for a placement."""

import argparse
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from placewise.cli.inputs import check_devices, load_problem, measure_of, settings_of
from placewise.cli.outputs import check_folder, check_writable
from placewise.cli.searches import bounded_planner, finish_search, search_with_progress
from placewise.cli.shared_options import (
    add_budget_options,
    add_command,
    add_evaluation_options,
    add_grouping_option,
    add_keep_option,
    add_memory_choices,
    add_order_option,
    add_plan_options,
    add_problem_options,
    add_run_file_option,
    add_set_option,
    add_simple_option,
    count_argument,
    gap_argument,
)
from placewise.cli.tensorboard_curves import curves
from placewise.core.errors import InputError

if TYPE_CHECKING:
    from placewise.core.problem import Problem
    from placewise.report.page.live_page import LivePage
    from placewise.search.driver import Progress
    from placewise.search.planner import Planner


def add_place(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "place", _place, "search for the placement with the shortest step that fits in memory")
    add_problem_options(parser)
    parser.add_argument("--strategy", metavar="S", help="how to search (default: auto); `placewise strategies` lists them")
    add_set_option(parser, "the strategy", "NAME=VALUE", "crossover=uniform")
    parser.add_argument(
        "--start",
        metavar="PLAN",
        help="begin at this plan, also one of a similar model (another batch size, one layer more) or another machine: "
        "it is carried over by the names of ops and modules",
    )
    add_memory_choices(parser)
    add_budget_options(parser)
    parser.add_argument(
        "--target-gap", metavar="G", type=gap_argument, help="stop when found / bound - 1 is at most G, as in 0.05"
    )
    parser.add_argument("--seed", metavar="N", type=count_argument, default=0, help="random seed (default: 0)")
    add_order_option(parser)
    add_grouping_option(parser)
    add_keep_option(parser)
    add_simple_option(parser)
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="for a plan that runs with CUDA graphs: predict it with their launches"
    )
    output = add_plan_options(parser)
    add_run_file_option(output)
    output.add_argument(
        "--watch",
        action="store_true",
        help="show the search in a browser while it runs; only this machine can open the page",
    )
    output.add_argument("--tensorboard", metavar="DIR", help="write learning curves for TensorBoard to this folder")
    add_evaluation_options(parser)


def _keep_whole(options: argparse.Namespace) -> None:
    """Makes --keep the grouping."""
    from placewise.core.grouping import COLOCATED, KEPT

    if options.keep is None:
        return
    if options.grouping != COLOCATED:
        raise InputError("--keep and --grouping exclude each other: both say which ops are placed together")
    options.grouping = KEPT.get(options.keep, options.keep)


def _choose_micro_batches(options: argparse.Namespace) -> None:
    """Replaces `micro_batches=auto` in MODEL by the number with the shortest step, found by short simulated searches."""
    from placewise.cli.outputs import warn
    from placewise.core.quantities import format_seconds
    from placewise.models import is_zoo_model
    from placewise.search.micro_batches import AUTO, choose_micro_batches

    if not is_zoo_model(options.model) or AUTO not in options.model:
        return
    if options.profile is not None:
        raise InputError(f"{AUTO} can't be used with --profile, whose times are those of one number of micro-batches")

    def problem_of(model: str) -> "Problem":
        given = argparse.Namespace(**{**vars(options), "model": model})
        return _with_options(load_problem(given, cuda_graphs=options.cuda_graphs), options)

    number, found = choose_micro_batches(options.model, problem_of, options.seconds, options.seed, options.order)
    options.model = options.model.replace(AUTO, f"micro_batches={number}")
    if not options.quiet:
        tried = ", ".join(f"{count}: {format_seconds(seconds)}" for count, seconds in found.items())
        warn(f"micro_batches={number} (a step with {tried})")


def _with_options(problem: "Problem", options: argparse.Namespace) -> "Problem":
    """Returns the problem with optional ops if memory is tight and --no-recompute, --no-park and --measure allow it."""
    from placewise.search.tight_memory import with_options_if_tight

    if options.measure:
        return problem
    return with_options_if_tight(problem, recompute=not options.no_recompute, park=not options.no_park)


def _place(options: argparse.Namespace) -> None:
    from placewise.report.search_curves import Point
    from placewise.search.budget import budget_of
    from placewise.search.request import DEFAULT_STRATEGY, Request
    from placewise.search.simplicity import tolerance_of
    from placewise.strategies import make
    from placewise.strategies.warm_start import with_start

    reads = (options.model, options.cluster, options.profile, options.start)
    check_writable(options.output, options.report, options.run_file, reads=reads)
    check_folder(options.tensorboard)
    strategy = options.strategy or DEFAULT_STRATEGY
    measure = measure_of(options)
    _keep_whole(options)
    if options.measure and options.target_gap is not None:
        raise InputError("--target-gap can't be used with --measure: the bound holds only for simulated times")
    budget = budget_of(strategy, options.budget, options.seconds, options.target_gap, is_measured=measure is not None)
    tolerance = tolerance_of(strategy, options.simple, is_measured=measure is not None)
    settings = settings_of(options.set)
    if options.start is not None:
        settings = with_start(strategy, settings, options.start)
    make(strategy, settings)  # refuses wrong names before any work
    if options.cuda_graphs and options.measure:
        raise InputError("--cuda-graphs can't be used with --measure: placements are measured without")
    check_devices(options, measure)
    _choose_micro_batches(options)
    names = (options.model, options.cluster)
    request = Request(strategy, settings, budget, options.seed, options.order, *names, measure, tolerance)
    problem = load_problem(options, cuda_graphs=options.cuda_graphs)
    if options.start is not None and not options.quiet:
        _show_start(problem, options.start)
    problem = _with_options(problem, options)
    planner = bounded_planner(options, problem, request)
    points: list[Point] = []

    with ExitStack() as opened:
        live = opened.enter_context(_live_page(planner)) if options.watch else None

        def keep(progress: "Progress") -> None:
            points.append(Point(progress.evaluations, progress.seconds, progress.step_seconds))
            if live is not None:
                live.add(progress.evaluations, progress.seconds, progress.step_seconds)

        with curves(options.tensorboard) as write:
            outcome = search_with_progress(planner, options, write, keep, record=options.run_file)
        finish_search(planner, outcome, options, points, live)


def _show_start(problem: "Problem", path: str) -> None:
    """Says how much of the graph the plan covers; refuses one that has nothing in common with it."""
    from placewise.cli.outputs import warn
    from placewise.strategies.warm_start import planned

    warn(planned(problem, path).in_words(path))


def _live_page(planner: "Planner") -> "LivePage":
    """Returns the page of --watch, and says where it is."""
    from placewise.report.page.live_page import LivePage
    from placewise.report.terminal_text import problem_heading

    live = LivePage(problem_heading(planner.problem), None if planner.bound is None else planner.bound.seconds)
    print(f"watch the search at {live.url}", file=sys.stderr, flush=True)
    return live
