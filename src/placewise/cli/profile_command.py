"""placewise profile: measured times of a model's ops and of the links on this machine."""

import argparse
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from placewise.cli.outputs import check_writable, print_json, warn
from placewise.cli.progress import Line, Shown
from placewise.cli.shared_options import CLUSTER_HELP, RUN_MODEL_HELP, add_command, add_model_argument, add_virtual_option
from placewise.core.errors import InputError

if TYPE_CHECKING:
    from placewise.core.cluster import Cluster
    from placewise.core.graph import Graph
    from placewise.measure.profiler import Profiling

SHOWN_FAILURES = 3

MOST_SECONDS = 1800  # that a host waits for the slowest one


def add_profile(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(
        commands,
        "profile",
        _profile,
        "measure a model's ops and the links on this machine's devices; under torchrun, on all hosts",
    )
    add_model_argument(parser, RUN_MODEL_HELP)
    parser.add_argument("--cluster", metavar="C", required=True, help=f"{CLUSTER_HELP}, which names the devices")
    add_virtual_option(parser)
    parser.add_argument("-o", "--output", metavar="PROFILE", required=True, help="the profile.json to write")
    parser.add_argument(
        "--ops-only",
        action="store_true",
        help="don't run whole steps, for models that this machine can't hold: ops and launches are only timed one by one, "
        "and no prediction is checked",
    )
    parser.add_argument("--run-step", action="store_true", help=argparse.SUPPRESS)  # the default since 0.2
    parser.add_argument("--graph-output", metavar="GRAPH", help="write the graph with these times to this graph.json")
    parser.add_argument(
        "--cluster-output", metavar="CLUSTER", help="write the cluster with the measured links to this cluster.toml"
    )


def _profile(options: argparse.Namespace) -> None:
    from placewise.core.cluster import Cluster
    from placewise.formats.cluster_file import write_cluster
    from placewise.formats.graph_file import write_graph
    from placewise.formats.profile_file import write_profile
    from placewise.measure.prediction_checks import check_predictions
    from placewise.measure.profile_of_hosts import profile_hosts
    from placewise.measure.profiler import apply_profile, measure_profile
    from placewise.measure.random_batch import load_with_weights
    from placewise.models import load_step
    from placewise.run.backends.hosts import joined_ranks

    check_writable(options.output, options.graph_output, options.cluster_output, reads=(options.model, options.cluster))
    if options.run_step and options.ops_only:
        raise InputError("--run-step and --ops-only exclude each other")
    cluster, runs_step = Cluster.load(options.cluster), not options.ops_only
    captured = load_with_weights(options.model) if runs_step else load_step(options.model)
    virtual, rank, begun = dict(options.virtual), 0, time.perf_counter()
    with ExitStack() as stack:
        line = stack.enter_context(Line(options))

        def report(what: str) -> None:
            if not rank:
                line.show(Shown(f"{what}, {time.perf_counter() - begun:.0f} s"))

        if len(cluster.host_names) > 1 and "RANK" in os.environ:
            rank = stack.enter_context(joined_ranks(MOST_SECONDS))
            found = profile_hosts(captured, cluster, virtual, runs_step=runs_step, report=report)
        else:
            found = measure_profile(captured, cluster, virtual, runs_step=runs_step, report=report)
        if runs_step:
            checked = check_predictions(captured, cluster, found.profile, virtual, report)
            found = replace(found, profile=checked, seconds=time.perf_counter() - begun)
    if rank:  # the first one tells
        return
    graph, measured = apply_profile(captured, cluster, found.profile)
    write_profile(found.profile, options.output)
    if options.graph_output:
        write_graph(graph, options.graph_output)
    if options.cluster_output:
        write_cluster(measured, options.cluster_output)
    if options.json:
        print_json(_facts(found, graph, measured, options))
    else:
        _print(found, graph, measured, options)


def _op_sums(graph: "Graph", cluster: "Cluster") -> dict[str, float]:
    from placewise.core.costs import predict_op_seconds

    return dict(zip(cluster.device_names, predict_op_seconds(graph, cluster).sum(axis=0).tolist(), strict=True))


def _facts(found: "Profiling", graph: "Graph", cluster: "Cluster", options: argparse.Namespace) -> dict[str, Any]:
    return {
        "file": options.output,
        "signatures": found.num_signatures,
        "ops": len(graph.ops),
        "seconds": found.seconds,
        "device_seconds": _op_sums(graph, cluster),
        "dispatch_seconds": found.profile.dispatch_seconds,
        "contention": {kind: vars(factors) for kind, factors in found.profile.contention.items()},
        "checks": [{**vars(check), "error": check.error} for check in found.profile.checks],
        "failures": [list(failure) for failure in found.failures],
    }


def _print(found: "Profiling", graph: "Graph", cluster: "Cluster", options: argparse.Namespace) -> None:
    from placewise.core.quantities import format_seconds, format_with_prefix
    from placewise.report.terminal_text import printable, table

    profile, sums = found.profile, _op_sums(graph, cluster)
    took = f"{found.num_signatures:,} signatures of {len(graph.ops):,} ops, measured in {found.seconds:.1f} s"
    print(f"{options.output}: {took}\n")
    rows = [(d.name, d.hardware, d.times_of, format_seconds(sums[d.name])) for d in profile.devices]
    print(table(("device", "what it is", "times of", "all ops here"), rows, left=3))
    if profile.links:
        links = [
            (
                link.source,
                link.target,
                format_seconds(link.latency_seconds),
                f"{format_with_prefix(link.bytes_per_second)}B/s",
            )
            for link in profile.links
        ]
        print("\n" + table(("from", "to", "latency", "bandwidth"), links, left=2))
    print(f"\nhost time of a launch: {format_seconds(profile.dispatch_seconds)}")
    for kind, factors in profile.contention.items():
        products, sums_of = (", ".join(f"{factor:.2f}" for factor in row) for row in (factors.compute, factors.memory))
        print(f"{kind} next to 1, 2, ... busy ones: matrix products take × {products}; additions × {sums_of}")
    if profile.checks:
        checks = [
            (
                check.placement,
                format_seconds(check.predicted_seconds),
                format_seconds(check.measured_seconds),
                f"{check.error:+.1%}",
            )
            for check in profile.checks
        ]
        print("\n" + table(("check", "predicted", "measured", "error"), checks, left=1))
    if doubt := profile.doubt():
        warn(f"{options.output}: {doubt}: measure again on an idle machine, or search with place --measure")
    if found.failures:
        print(f"\n{len(found.failures)} signatures could not be measured and keep their roofline time:")
        for device, signature, why in found.failures[:SHOWN_FAILURES]:
            print(printable(f"  {device}: {signature}: {why}"))
