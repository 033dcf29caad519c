"""Measuring this machine: profile, and the options that use what was measured."""

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from placewise.cli.common import (
    CLUSTER_HELP,
    check_writable,
    command,
    count_argument,
    number_argument,
    positive_argument,
    print_json,
    seconds_argument,
)
from placewise.cli.progress import Line
from placewise.core.errors import InputError

if TYPE_CHECKING:
    from placewise.core.cluster import Cluster
    from placewise.core.graph import Graph
    from placewise.core.profile import Profile
    from placewise.evaluate.measured import Measure
    from placewise.measure.profiler import Measurements

RUN_MODEL_HELP = "a zoo name with options (nmt:layers=4), or package.module:function"

SHOWN_FAILURES = 3


def virtual_argument(text: str) -> tuple[str, int]:
    """Returns ("cuda:0", 4) of "cuda:0=4"."""
    name, _, count = text.partition("=")
    if not name.startswith("cuda:") or not name[5:].isdecimal() or not count.isdecimal() or not 0 < int(count) < 1000:
        raise argparse.ArgumentTypeError(f"must be a GPU and a number of slices, as in cuda:0=4, it is {text!r}")
    return name, int(count)


def add_virtual_option(parser: "argparse._ActionsContainer") -> None:
    """Adds the option that cuts GPUs into slices."""
    parser.add_argument(
        "--virtual",
        metavar="cuda:0=4",
        type=virtual_argument,
        action="append",
        default=[],
        help="cut a GPU into so many devices: the cluster's first GPUs are its slices",
    )


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that take measured times."""
    parser.add_argument("--profile", metavar="PROFILE", help="take the times that `placewise profile` measured")
    parser.add_argument(
        "--busy",
        metavar="SHARE",
        type=share_argument,
        default=0.0,
        help="with --profile: of the time in which all devices on the same hardware are taken to be busy (0)",
    )


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that let placements be measured."""
    parser.add_argument("--measure", action="store_true", help="run placements on this machine instead of simulating them")
    parser.add_argument("--steps", metavar="N", type=positive_argument, help="with --measure: the median of N steps (3)")
    parser.add_argument("--warm-up", metavar="N", type=count_argument, help="with --measure: steps to drop first (1)")
    parser.add_argument(
        "--measure-timeout",
        metavar="S",
        type=seconds_argument,
        help="with --measure: end a placement that takes longer (60)",
    )
    add_virtual_option(parser)


def measure_of(options: argparse.Namespace) -> "Measure | None":
    """Returns how placements are to be measured; None: they are simulated."""
    from placewise.evaluate.measured import Measure

    given = {
        "steps": options.steps,
        "warm_up": options.warm_up,
        "timeout_seconds": options.measure_timeout,
        "virtual": dict(options.virtual) or None,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen and not options.measure:
        raise InputError("--steps, --warm-up, --measure-timeout and --virtual: need --measure")
    return Measure(**chosen) if options.measure else None


def check_devices(options: argparse.Namespace, measure: "Measure | None") -> None:
    """Refuses to measure on devices that this machine has not; of a Ray cluster's machines nothing is known here."""
    if measure is not None and options.ray is None:
        from placewise.core.cluster import Cluster
        from placewise.run.devices import real_devices

        real_devices(Cluster.load(options.cluster), measure.virtual)


def report_failure(line: str) -> None:
    """Says on standard error that a measurement failed."""
    print(f"placewise: {line}", file=sys.stderr)


def share_argument(text: str) -> float:
    """Returns a number from 0 to 1."""
    return number_argument(text, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def check_busy(options: argparse.Namespace) -> None:
    """Refuses a --busy that nothing would come of."""
    if options.busy and options.profile is None:
        raise InputError("--busy: needs a --profile, which says how much busy neighbours slow a device down")


def check_together(options: argparse.Namespace) -> None:
    """Refuses a --together without a profile, or with a guess of what it finds out."""
    if options.together and (options.profile is None or options.busy):
        raise InputError("--together: needs a --profile, and no --busy: it finds out who is busy when")


def load_timed(options: argparse.Namespace, model: str | None = None) -> "tuple[Graph, Cluster, Profile | None]":
    """Returns the graph of MODEL and the cluster, with measured times where there is a --profile, and the profile."""
    from placewise.core.cluster import Cluster
    from placewise.models import load_graph, load_step

    check_busy(options)
    model = options.model if model is None else model
    cluster = Cluster.load(options.cluster)
    if options.profile is None:
        is_run = getattr(options, "measure", False)  # then a graph file is refused at once
        return load_step(model).graph if is_run else load_graph(model), cluster, None
    from placewise.measure.profiler import apply_profile

    profile = load_profile(options, cluster)  # refused before the model is captured
    return *apply_profile(load_step(model), cluster, profile, options.busy), profile


def load_profile(options: argparse.Namespace, cluster: "Cluster") -> "Profile":
    """Returns the --profile, if it has times for all devices."""
    from placewise.formats.profile_file import read_profile

    profile = read_profile(options.profile)
    profile.check_covers(cluster, options.profile)
    return profile


def add_profile(commands: Any) -> None:
    """Adds the command."""
    parser = command(commands, "profile", _profile, "measure a model's ops, and the links, on this machine's devices")
    parser.add_argument("model", metavar="MODEL", help=RUN_MODEL_HELP)
    parser.add_argument("--cluster", metavar="C", required=True, help=f"{CLUSTER_HELP}: it names the devices")
    add_virtual_option(parser)
    parser.add_argument("-o", "--output", metavar="PROFILE", required=True, help="the profile.json to write")
    parser.add_argument(
        "--run-step", action="store_true", help="run the model too: CPU times and launches of a GPU as in a whole step"
    )
    parser.add_argument("--graph", metavar="GRAPH", help="write the graph with these times too")
    parser.add_argument("--cluster-out", metavar="CLUSTER", help="write the cluster with the measured links too")


def _profile(options: argparse.Namespace) -> None:
    from placewise.core.cluster import Cluster
    from placewise.formats.cluster_file import write_cluster
    from placewise.formats.graph_file import write_graph
    from placewise.formats.profile_file import write_profile
    from placewise.measure.example_batch import real_step
    from placewise.measure.profiler import apply_profile, measure_profile
    from placewise.models import load_step

    check_writable(options.output, options.graph, options.cluster_out, reads=(options.model, options.cluster))
    cluster = Cluster.load(options.cluster)
    captured = real_step(options.model) if options.run_step else load_step(options.model)
    begun = time.perf_counter()
    with Line(options) as line:

        def report(what: str) -> None:
            line.show(f"{what}, {time.perf_counter() - begun:.0f} s")

        found = measure_profile(captured, cluster, dict(options.virtual), runs_step=options.run_step, report=report)
    graph, measured = apply_profile(captured, cluster, found.profile)
    write_profile(found.profile, options.output)
    if options.graph:
        write_graph(graph, options.graph)
    if options.cluster_out:
        write_cluster(measured, options.cluster_out)
    if options.json:
        print_json(_facts(found, graph, measured, options))
    else:
        _print(found, graph, measured, options)


def _op_sums(graph: "Graph", cluster: "Cluster") -> dict[str, float]:
    from placewise.core.costs import predict_op_seconds

    return dict(zip(cluster.device_names, predict_op_seconds(graph, cluster).sum(axis=0).tolist(), strict=True))


def _facts(found: "Measurements", graph: "Graph", cluster: "Cluster", options: argparse.Namespace) -> dict[str, Any]:
    return {
        "file": options.output,
        "signatures": found.num_signatures,
        "ops": len(graph.ops),
        "seconds": found.seconds,
        "device_seconds": _op_sums(graph, cluster),
        "dispatch_seconds": found.profile.dispatch_seconds,
        "contention": {kind: vars(factors) for kind, factors in found.profile.contention.items()},
        "failures": [list(failure) for failure in found.failures],
    }


def _print(found: "Measurements", graph: "Graph", cluster: "Cluster", options: argparse.Namespace) -> None:
    from placewise.core.quantities import count, seconds
    from placewise.report.text_tables import table

    profile, sums = found.profile, _op_sums(graph, cluster)
    took = f"{found.num_signatures:,} signatures of {len(graph.ops):,} ops, measured in {found.seconds:.1f} s"
    print(f"{options.output}: {took}\n")
    rows = [(d.name, d.hardware, d.times_of, seconds(sums[d.name])) for d in profile.devices]
    print(table(("device", "what it is", "times of", "all ops here"), rows, left=3))
    if profile.links:
        links = [
            (link.source, link.target, seconds(link.latency_seconds), f"{count(link.bytes_per_second)}B/s")
            for link in profile.links
        ]
        print("\n" + table(("from", "to", "latency", "bandwidth"), links, left=2))
    print(f"\na launch takes the host {seconds(profile.dispatch_seconds)}")
    for kind, factors in profile.contention.items():
        products, sums_of = (", ".join(f"{factor:.2f}" for factor in row) for row in (factors.compute, factors.memory))
        print(f"{kind}s that are busy together, by how many others: products × {products}; additions × {sums_of}")
    if found.failures:
        print(f"\n{len(found.failures)} signatures could not be measured, and keep the roofline's time:")
        for device, signature, why in found.failures[:SHOWN_FAILURES]:
            print(f"  {device}: {signature}: {why}")
