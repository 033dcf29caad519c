"""Simulating a plan."""

import argparse
from typing import Any

from placewise.commands.common import CLUSTER_HELP, MODEL_HELP, check_writable, command, print_json


def add_simulate(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "simulate", _simulate, "say how long a step takes with a plan, and what memory it needs")
    parser.add_argument("model", metavar="GRAPH", help=MODEL_HELP)
    parser.add_argument("--cluster", metavar="C", required=True, help=CLUSTER_HELP)
    parser.add_argument("--plan", metavar="PLAN", required=True, help="the plan.json to simulate")
    parser.add_argument("--order", choices=("program", "priority"), help="instead of the order that the plan says")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline as a Chrome trace, for ui.perfetto.dev")


def _simulate(options: argparse.Namespace) -> None:
    from placewise.capture.models import load_graph
    from placewise.core.cluster import Cluster
    from placewise.core.plan import Plan
    from placewise.core.problem import Problem
    from placewise.report.trace import write_trace
    from placewise.simulate.simulator import Simulator

    check_writable(options.trace)
    plan = Plan.load(options.plan)
    problem = Problem.of(load_graph(options.model), Cluster.load(options.cluster))
    placement, order = plan.resolve(problem, options.plan)
    simulator = Simulator(problem, options.order or "program")
    schedule = simulator.schedule(placement, None if options.order else order)
    if options.trace:
        write_trace(schedule, options.trace)
    if options.json:
        print_json(_schedule_json(schedule))
    else:
        _print_schedule(schedule)


def _schedule_json(schedule: Any) -> dict[str, Any]:
    names, t = schedule.problem.cluster.device_names, schedule.timeline
    columns = (schedule.copy_tensors, t.copy_source, t.copy_target, t.copy_start, t.copy_end, t.copy_reader)
    copies = [
        {"tensor": tensor, "from": names[source], "to": names[target], "start": start, "end": end, "for": reader}
        for tensor, source, target, start, end, reader in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return {
        "step_seconds": schedule.step_seconds,
        "fits": schedule.fits,
        "peak_bytes": dict(zip(names, schedule.peak_bytes.tolist(), strict=True)),
        "start": t.start.tolist(),
        "end": t.end.tolist(),
        "copies": copies,
    }


def _print_schedule(schedule: Any) -> None:
    from placewise.placing import find_bound
    from placewise.report.tables import bold, nbytes, seconds, table
    from placewise.report.words import explain

    problem, step = schedule.problem, schedule.step_seconds
    print(f"{bold(problem.graph.name)} on {problem.cluster.name}: {bold(seconds(step))} a step\n")
    ops = [int((schedule.devices == device).sum()) for device in range(problem.num_devices)]
    rows = [
        (
            *(
                device.name,
                f"{ops[i]:,}",
                seconds(schedule.busy_seconds[i]),
                f"{schedule.busy_seconds[i] / step:.0%}" if step else "-",
            ),
            *(seconds(schedule.copy_seconds[i].sum()), nbytes(schedule.peak_bytes[i]), nbytes(device.memory_bytes)),
            "" if schedule.peak_bytes[i] <= device.memory_bytes else "does not fit",
        )
        for i, device in enumerate(problem.cluster.devices)
    ]
    print(table(("device", "ops", "busy", "of step", "sending", "peak memory", "of", ""), rows))
    print("", *explain(problem, schedule, find_bound(problem)), sep="\n")
