"""Making graphs, and looking at them."""

import argparse
import dataclasses
from typing import Any

from placewise.cli.common import (
    CLUSTER_HELP,
    MODEL_HELP,
    check_writable,
    command,
    count_argument,
    positive_argument,
    print_json,
)


def add_capture(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "capture", _capture, "record a model's training step as a graph file")
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "-o", "--output", metavar="GRAPH", required=True, help="the file to write: graph.json or graph.json.gz"
    )


def _capture(options: argparse.Namespace) -> None:
    from placewise.formats.graph_file import write_graph
    from placewise.models import load_graph

    check_writable(options.output)
    graph = load_graph(options.model)
    write_graph(graph, options.output)
    facts = {"file": options.output, "name": graph.name, "digest": graph.digest}
    facts |= {"ops": len(graph.ops), "tensors": len(graph.tensors), "groups": graph.num_groups}
    if options.json:
        print_json(facts)
    else:
        print(f"{options.output}: {len(graph.ops):,} ops, {len(graph.tensors):,} tensors, {graph.num_groups:,} groups")


def add_import(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "import", _import, "turn a graph that others measured, and its machine, into our files")
    parser.add_argument("file", metavar="FILE", help="a PipeDream profile, or a dnn-partitioning JSON")
    parser.add_argument("-o", "--output", metavar="GRAPH", required=True, help="the graph to write")
    parser.add_argument("--cluster-output", metavar="CLUSTER", help="the machine to write: that of docs/importers.md")
    parser.add_argument("--merged", action="store_true", help="PipeDream: a layer's forward and backward as one op")
    parser.add_argument("--gpus", metavar="N", type=positive_argument, default=4, help="PipeDream: GPUs of the machine (4)")


def _import(options: argparse.Namespace) -> None:
    from placewise.core.errors import GraphError
    from placewise.formats.cluster_file import write_cluster
    from placewise.formats.files import read_bytes
    from placewise.formats.graph_file import write_graph
    from placewise.formats.importers import (
        dnn_partitioning_cluster,
        is_pipedream,
        pipedream_cluster,
        read_any_graph,
        read_pipedream,
    )

    check_writable(options.output, options.cluster_output)
    is_profile = is_pipedream(read_bytes(options.file, GraphError))
    graph = read_pipedream(options.file, merged=options.merged) if is_profile else read_any_graph(options.file)
    cluster = None
    if options.cluster_output:
        cluster = pipedream_cluster(options.gpus) if is_profile else dnn_partitioning_cluster(options.file)
    write_graph(graph, options.output)
    if cluster is not None:
        write_cluster(cluster, options.cluster_output)
    if options.json:
        print_json({"file": options.output, "cluster": options.cluster_output, "name": graph.name, "ops": len(graph.ops)})
    else:
        print(f"{options.output}: {len(graph.ops):,} ops" + (f"; {options.cluster_output}" if cluster is not None else ""))


def add_info(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "info", _info, "say what a graph is like: ops, flops, bytes, parallelism")
    parser.add_argument("model", metavar="GRAPH", help=MODEL_HELP)
    parser.add_argument("--cluster", metavar="C", help=f"{CLUSTER_HELP}: take its times, and show each device's")
    parser.add_argument(
        "--kinds", type=count_argument, default=12, metavar="N", help="how many kinds of op to list (default 12)"
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


def _print_info(name: str, facts: Any, by_device: dict[str, float], options: argparse.Namespace) -> None:
    from placewise.core.quantities import count, nbytes, seconds
    from placewise.report.text_tables import bold, table

    where = f"each op on its fastest device of {options.cluster}" if by_device else "a device of 10 Tflop/s and 500 GB/s"
    print(bold(name or options.model))
    print(f"{facts.num_ops:,} ops in {facts.num_groups:,} groups, {facts.num_tensors:,} tensors")
    print(f"{count(facts.flops)}flop, {nbytes(facts.nbytes_moved)} moved")
    print("resident: " + (", ".join(f"{kind} {nbytes(size)}" for kind, size in facts.resident_bytes.items()) or "nothing"))
    print(f"work {seconds(facts.work_seconds)}, critical path {seconds(facts.critical_path_seconds)} ({where})")
    print(f"parallelism {facts.parallelism:.2f}: no number of such devices is faster by more")
    print(f"{facts.depth:,} levels, the widest has {facts.widest_level:,} ops\n")
    rows = [(phase, f"{n:,}", f"{count(facts.flops_by_phase[phase])}flop") for phase, n in facts.ops_by_phase.items()]
    print(table(("phase", "ops", "work"), rows) + "\n")
    kinds = list(facts.ops_by_kind.items())
    shown = [(kind, f"{n:,}") for kind, n in kinds[: options.kinds]]
    if len(kinds) > options.kinds:
        shown.append((f"{len(kinds) - options.kinds} more kinds", f"{sum(n for _, n in kinds[options.kinds :]):,}"))
    print(table(("kind", "ops"), shown))
    if by_device:
        print("\n" + table(("device", "all ops here"), [(device, seconds(time)) for device, time in by_device.items()]))
