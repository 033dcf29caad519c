"""placewise simulate: what a plan takes, predicted."""

import argparse
from typing import TYPE_CHECKING, Any

from placewise.cli.inputs import check_together, load_timed
from placewise.cli.outputs import check_writable, print_json
from placewise.cli.shared_options import (
    add_command,
    add_problem_options,
    add_profile_options,
    add_together_option,
    percent_argument,
)
from placewise.core.errors import InputError

if TYPE_CHECKING:
    from placewise.simulate.schedule import Schedule


def add_simulate(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "simulate", _simulate, "predict a plan's step time and memory")
    add_problem_options(parser)
    parser.add_argument("--plan", metavar="PLAN", required=True, help="the plan.json to simulate")
    parser.add_argument("--order", choices=("priority", "program"), help="launch order (default: the plan's)")
    parser.add_argument("--trace", metavar="TRACE", help="write the predicted timeline as a Chrome trace (ui.perfetto.dev)")
    parser.add_argument(
        "--disturb",
        metavar="P",
        type=percent_argument,
        help="also predict the step if op times are off by up to P, as in 10%%, and links by twice as much, "
        "with a busy CPU in one of four draws",
    )
    add_profile_options(parser)
    add_together_option(parser)


def _simulate(options: argparse.Namespace) -> None:
    from placewise.core.plan import Plan
    from placewise.core.problem import Problem
    from placewise.machines.variants import with_cuda_graphs
    from placewise.report.chrome_trace import write_trace
    from placewise.rewrite.memory_options import graph_of_plan
    from placewise.simulate.simulator import Simulator

    check_writable(options.trace, reads=(options.model, options.cluster, options.plan, options.profile))
    check_together(options)
    if options.together and options.disturb is not None:
        raise InputError(
            "--disturb and --together exclude each other: --disturb simulates devices that don't share hardware"
        )
    plan = Plan.load(options.plan)
    graph, cluster, profile = load_timed(options)
    cluster = with_cuda_graphs(cluster) if plan.cuda_graphs else cluster
    problem = Problem.of(graph_of_plan(graph, plan), cluster)
    placement, order = plan.resolve(problem, options.plan)
    simulator = Simulator(problem, options.order or "program")
    schedule = simulator.schedule(placement, None if options.order else order)
    if options.together and profile is not None:
        from placewise.measure.contended_schedule import schedule_together

        schedule = schedule_together(problem, profile, placement, schedule.order)
    if options.trace:
        write_trace(schedule, options.trace)
    seconds = None if options.disturb is None else _disturbed(schedule, options.disturb)
    if options.json:
        given = {} if seconds is None else {"disturbed_seconds": seconds.tolist()}
        print_json({**schedule_json(schedule), **given})
    else:
        _print_schedule(schedule, problem)
        if seconds is not None:
            print(_describe_interval(seconds, options.disturb))


def _disturbed(schedule: "Schedule", share: float) -> Any:
    """Returns the step's seconds under each disturbance, which are the same in every call: [draws]."""
    import numpy as np

    from placewise.simulate.disturbances import Disturbances
    from placewise.simulate.simulator import Simulator

    simulator = Simulator(schedule.problem)  # of the ops that are somewhere
    rng = np.random.default_rng(0)
    return Disturbances(share).step_seconds(simulator, schedule.placement[None], schedule.order[None], rng)[0]


def _describe_interval(seconds: Any, share: float) -> str:
    from placewise.core.quantities import format_seconds
    from placewise.simulate.disturbances import interval_of

    low, high = interval_of(seconds)
    return (
        f"if op times are off by up to {share * 100:.3g}%: {format_seconds(low)} to {format_seconds(high)} "
        f"in eight of ten draws, {format_seconds(float(seconds.max()))} in the worst of {len(seconds)}"
    )


def schedule_json(schedule: "Schedule") -> dict[str, Any]:
    """Returns a schedule as plain data, as the definition gives it; ops that are nowhere have no times."""
    import numpy as np

    names, t, present = schedule.problem.cluster.device_names, schedule.timeline, schedule.present
    tensors, readers = schedule.copy_tensors, t.copy_reader.astype(np.int64)
    start, end = t.start.tolist(), t.end.tolist()
    if present is not None:
        tensors, readers = present.tensors[tensors], present.ops[readers]
        start, end = (present.restore_times(times) for times in (start, end))
    columns = (tensors, t.copy_source, t.copy_target, t.copy_start, t.copy_end, readers)
    copies = [
        {"tensor": tensor, "from": names[source], "to": names[target], "start": start, "end": end, "for": reader}
        for tensor, source, target, start, end, reader in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return {
        "step_seconds": schedule.step_seconds,
        "fits": schedule.fits,
        "peak_bytes": dict(zip(names, schedule.peak_bytes.tolist(), strict=True)),
        "start": start,
        "end": end,
        "copies": copies,
    }


def _print_schedule(schedule: Any, problem: Any) -> None:
    """Prints a schedule, and the bound of `problem`: its devices don't slow each other down, so it always holds."""
    from placewise.core.quantities import format_seconds
    from placewise.report.chosen_options import options_in_words
    from placewise.report.explanation import explain
    from placewise.report.terminal_picture import device_table
    from placewise.report.terminal_text import bold, printable, problem_heading
    from placewise.search.planner import find_bound

    print(f"{problem_heading(problem)}: {bold(format_seconds(schedule.step_seconds))} a step\n")
    for line in options_in_words(schedule):
        print(printable(line), end="\n\n")
    print(device_table(schedule))
    print("", *map(printable, explain(schedule.problem, schedule, find_bound(problem))), sep="\n")
