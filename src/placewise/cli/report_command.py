"""placewise report: a page that shows plans or recorded searches."""

import argparse
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from placewise.cli.inputs import check_busy, load_timed
from placewise.cli.outputs import check_writable, print_json, warn
from placewise.cli.shared_options import CLUSTER_HELP, MODEL_HELP, add_command, add_memory_option, add_profile_options
from placewise.core.errors import InputError

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.core.problem import Problem
    from placewise.report.chrome_trace import MeasuredTrace
    from placewise.report.comparisons import Comparisons
    from placewise.report.page.page_data import ShownPlan
    from placewise.search.store import RunFile
    from placewise.simulate.schedule import Schedule

SQLITE = b"SQLite format 3\0"  # how a run file begins

MOST_PLANS = 24  # on a page of a run file


def add_report(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "report", _report, "write a page that shows plans, or the searches of a run file")
    parser.add_argument(
        "sources", metavar="SOURCE", nargs="+", help="plan.json files; or a run file and numbers of its runs"
    )
    parser.add_argument("-o", "--output", metavar="PAGE", required=True, help="the page.html to write")
    parser.add_argument("--graph", metavar="MODEL", help=f"for plans: {MODEL_HELP}")
    parser.add_argument("--cluster", metavar="C", help=f"for plans: {CLUSTER_HELP}")
    add_memory_option(parser)
    parser.add_argument(
        "--measured", metavar="TRACE", help="for one plan: also show this trace.json that `placewise run` measured"
    )
    add_profile_options(parser)


def _report(options: argparse.Namespace) -> None:
    from placewise.report.page.html import write_page

    read = (*options.sources, options.graph, options.cluster, options.measured, options.profile)
    check_writable(options.output, reads=read)
    check_busy(options)
    shown = _of_runs(options) if _is_run_file(options.sources[0]) else _of_plans(options)
    write_page(shown, options.output)
    size = os.path.getsize(options.output)
    if options.json:
        plans = [{"label": plan.label, "step_seconds": plan.schedule.step_seconds} for plan in shown]
        print_json({"page": options.output, "bytes": size, "plans": plans})
    else:
        print(
            f"{options.output}: {len(shown)} plan{'s' if len(shown) > 1 else ''}, {size / 1e6:.1f} MB; open it in a browser"
        )


def _is_run_file(path: str) -> bool:
    from placewise.formats.files import open_regular

    try:
        with open_regular(path, InputError) as file:
            return file.read(len(SQLITE)) == SQLITE
    except InputError:
        return False  # Plan.load refuses it


class _Context:
    """Bounds and comparisons, found once for each problem."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Bound | None, Comparisons]] = {}

    def __call__(self, problem: "Problem") -> "tuple[Bound | None, Comparisons]":
        from placewise.report.comparisons import simulate_comparisons
        from placewise.search.planner import find_bound

        if problem.digest not in self._known:
            self._known[problem.digest] = find_bound(problem), simulate_comparisons(problem)
        return self._known[problem.digest]


# --- plans ---


def _of_plans(options: argparse.Namespace) -> "list[ShownPlan]":
    from placewise.core.plan import Plan
    from placewise.core.problem import Problem
    from placewise.machines.variants import with_cuda_graphs
    from placewise.report.chrome_trace import read_measured
    from placewise.report.page.page_data import ShownPlan, measured_seconds
    from placewise.report.search_curves import curve_of
    from placewise.rewrite.memory_options import graph_of_plan
    from placewise.search.advice import advice_in_words
    from placewise.simulate.simulator import Simulator

    plans = [Plan.load(path) for path in options.sources]
    for name in ("graph", "cluster"):
        if getattr(options, name) is None:
            raise InputError(f"{options.sources[0]}: is a plan, so --{name} is needed")
    if options.measured and len(plans) > 1:
        raise InputError(f"--measured is the trace of one plan, got {len(plans)} plans")
    graph, cluster, _ = load_timed(options, options.graph)
    problem = Problem.of(graph, cluster)
    graphed = Problem.of(graph, with_cuda_graphs(cluster)) if any(plan.cuda_graphs for plan in plans) else problem
    graphs = [graph_of_plan(graph, plan) for plan in plans]
    problems = [
        of if found is graph else Problem.of(found, of.cluster)
        for found, of in zip(graphs, (graphed if plan.cuda_graphs else problem for plan in plans), strict=True)
    ]
    resolved = [plan.resolve(of, path) for plan, of, path in zip(plans, problems, options.sources, strict=True)]
    schedules = [
        Simulator(of, "program").schedule(placement, order)
        for of, (placement, order) in zip(problems, resolved, strict=True)
    ]
    measured = read_measured(options.measured, schedules[0].problem) if options.measured else None
    if measured is not None:
        _compare_placements(measured, schedules[0])
    context = _Context()
    context(problem)
    return [
        ShownPlan(
            label,
            schedule,
            context(of)[0],
            context(graphed if plan.cuda_graphs else problem)[1],
            curve_of(plan.history),
            plan.strategy,
            plan.seed,
            plan.evaluations,
            measured,
            measured_seconds(plan),
            trust=() if plan.simplicity is None else tuple(filter(None, [plan.simplicity.in_words(schedule.step_seconds)])),
            advice=advice_in_words(schedule) if len(plans) == 1 else (),
            interval_seconds=plan.interval_seconds,
        )
        for label, plan, of, schedule in zip(_labels(options.sources), plans, problems, schedules, strict=True)
    ]


def _compare_placements(measured: "MeasuredTrace", schedule: "Schedule") -> None:
    """Warns if a trace was measured with another placement than the plan's."""
    elsewhere = measured.elsewhere(schedule.devices)
    if not len(elsewhere):
        return
    first, names = int(elsewhere[0]), schedule.problem.cluster.device_names
    op = int(measured.ops[first])
    warn(
        f"{measured.source}: was measured with another placement than the plan: {len(elsewhere):,} of "
        f"{len(measured.ops):,} ops ran on other devices; {schedule.problem.graph.ops.names[op]!r} ran on "
        f"{names[measured.devices[first]]}, the plan has it on {names[schedule.devices[op]]}"
    )


def _labels(paths: Sequence[str]) -> list[str]:
    """Returns short names of files: without their folders, unless two would be the same."""
    stems = [os.path.basename(path).removesuffix(".json") for path in paths]
    return stems if len({*stems}) == len(stems) else list(paths)


# --- runs ---


def _of_runs(options: argparse.Namespace) -> "list[ShownPlan]":
    from placewise.search.store import RunFile

    path, *numbers = options.sources
    for name in ("graph", "cluster", "measured", "profile"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name} is for plans, {path} is a run file")
    for number in numbers:
        if not number.isdecimal() or len(number) > 18:
            raise InputError(f"{path}: expected run numbers after the run file, got {number!r}")
    with RunFile(path, read_only=True) as file:
        chosen = [int(number) for number in numbers] or [run.number for run in file.runs() if run.step_seconds is not None]
        if not chosen:
            raise InputError(f"{path}: no run has found a placement that fits")
        return list(_shown_runs(file, chosen))


def _shown_runs(file: "RunFile", numbers: list[int]) -> "Iterator[ShownPlan]":
    """Gives the fastest runs: those of one problem together, the fastest first."""
    from placewise.report.page.page_data import ShownPlan
    from placewise.report.search_curves import curve_of_batches
    from placewise.search.store import check_recorded
    from placewise.simulate.simulator import Simulator

    runs = [file.info(number) for number in dict.fromkeys(numbers)]
    for run in runs:
        if run.step_seconds is None:
            raise InputError(f"{file.path}: run {run.number} has found no placement that fits")
    first = {run.specification.problem_digest: i for i, run in reversed(list(enumerate(runs)))}
    runs = sorted(runs, key=lambda run: run.step_seconds or 0.0)[:MOST_PLANS]
    problems: dict[str, Problem] = {}
    context = _Context()
    for run in sorted(runs, key=lambda run: first[run.specification.problem_digest]):
        specification = run.specification
        if specification.problem_digest not in problems:
            problems[specification.problem_digest] = file.problem(run.number)
        problem = problems[specification.problem_digest]
        batches = list(file.batches(run.number))
        finding = file.head(run.number).finding
        answer = None if finding is None else finding[2]  # the simpler plan that the search has ended with
        best = next(batch.best for batch in reversed(batches) if batch.best is not None)
        shown = best if answer is None else (answer.placement, answer.order)
        check_recorded(problem, shown, f"{file.path}: run {run.number}")
        schedule = Simulator(problem, specification.order).schedule(*shown)
        yield ShownPlan(
            f"run {run.number}",
            schedule,
            *context(problem),
            curve_of_batches(batches),
            specification.strategy,
            specification.seed,
            run.evaluations,
            measured_seconds=run.step_seconds if specification.measured else None,
            trust=() if answer is None else tuple(filter(None, [answer.simplicity.in_words(schedule.step_seconds)])),
        )
