"""placewise info: what a graph is like."""

import argparse
import dataclasses
from typing import Any

from placewise.cli.outputs import print_json
from placewise.cli.shared_options import CLUSTER_HELP, add_command, add_model_argument, count_argument


def add_info(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "info", _info, "summarise a graph: ops, flops, bytes, parallelism")
    add_model_argument(parser)
    parser.add_argument("--cluster", metavar="C", help=f"{CLUSTER_HELP}: use the times of its devices, and show them")
    parser.add_argument(
        "--kinds", type=count_argument, default=12, metavar="N", help="how many kinds of op to list (default: 12)"
    )


def _info(options: argparse.Namespace) -> None:
    from placewise.core.cluster import Cluster
    from placewise.core.costs import nominal_seconds
    from placewise.core.graph_statistics import Statistics
    from placewise.core.problem import Problem
    from placewise.models import load_graph

    cluster = None if options.cluster is None else Cluster.load(options.cluster)
    graph = load_graph(options.model)
    problem = Problem.of(graph, cluster) if cluster else None
    facts = Statistics.of(graph, nominal_seconds(graph) if problem is None else problem.fastest_seconds)
    by_device = {}
    if problem is not None:
        by_device = dict(zip(problem.cluster.device_names, problem.op_seconds.sum(axis=0).tolist(), strict=True))
    if options.json:
        print_json({"name": graph.name, "digest": graph.digest, **dataclasses.asdict(facts), "device_seconds": by_device})
        return
    _print_info(graph.name, facts, by_device, options)


def _shares(facts: Any) -> str:
    """Returns which share of the flops is in which type, if more than one: " (98.7% in bfloat16, 1.3% in float32)"."""
    types = sorted(facts.flops_by_type.items(), key=lambda item: -item[1])
    return f" ({', '.join(f'{flops / facts.flops:.1%} in {name}' for name, flops in types)})" if len(types) > 1 else ""


def _print_info(name: str, facts: Any, by_device: dict[str, float], options: argparse.Namespace) -> None:
    from placewise.core.quantities import format_bytes, format_seconds, format_with_prefix
    from placewise.report.terminal_text import bold, printable, table

    where = f"each op on its fastest device of {options.cluster}" if by_device else "a device of 10 Tflop/s and 500 GB/s"
    print(bold(printable(name or options.model)))
    print(f"{facts.num_ops:,} ops in {facts.num_groups:,} groups, {facts.num_tensors:,} tensors")
    print(f"{format_with_prefix(facts.flops)}flop{_shares(facts)}, {format_bytes(facts.nbytes_moved)} moved")
    print(
        "resident: "
        + (", ".join(f"{kind} {format_bytes(size)}" for kind, size in facts.resident_bytes.items()) or "nothing")
    )
    print(
        f"work {format_seconds(facts.work_seconds)}, critical path {format_seconds(facts.critical_path_seconds)} ({where})"
    )
    print(f"parallelism {facts.parallelism:.2f}: more such devices give at most this speed-up")
    print(f"{facts.depth:,} levels, the widest has {facts.widest_level:,} ops\n")
    rows = [
        (phase, f"{n:,}", f"{format_with_prefix(facts.flops_by_phase[phase])}flop")
        for phase, n in facts.ops_by_phase.items()
    ]
    print(table(("phase", "ops", "work"), rows) + "\n")
    kinds = list(facts.ops_by_kind.items())
    shown = [(kind, f"{n:,}") for kind, n in kinds[: options.kinds]]
    if len(kinds) > options.kinds:
        shown.append((f"{len(kinds) - options.kinds} more kinds", f"{sum(n for _, n in kinds[options.kinds :]):,}"))
    print(table(("kind", "ops"), shown))
    if by_device:
        print(
            "\n" + table(("device", "all ops here"), [(device, format_seconds(time)) for device, time in by_device.items()])
        )
