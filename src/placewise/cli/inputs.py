"""What options name, loaded and checked: the problem, the profile, how to measure, the strategy's settings."""

import argparse
from typing import TYPE_CHECKING

from placewise.cli.outputs import warn
from placewise.core.errors import InputError, StrategyError

if TYPE_CHECKING:
    from placewise.core.cluster import Cluster
    from placewise.core.graph import Graph
    from placewise.core.problem import Problem
    from placewise.core.profile import Profile
    from placewise.evaluate.measured import Measure


def load_problem(options: argparse.Namespace, *, cuda_graphs: bool = False) -> "Problem":
    """Returns the problem of MODEL, --cluster, --memory, --profile and --grouping; with `cuda_graphs`, their launches."""
    from placewise.core.problem import Problem
    from placewise.machines.variants import with_cuda_graphs

    graph, cluster, _ = load_timed(options)
    return Problem.of(graph, with_cuda_graphs(cluster) if cuda_graphs else cluster, options.grouping)


def load_timed(options: argparse.Namespace, model: str | None = None) -> "tuple[Graph, Cluster, Profile | None]":
    """Returns the graph of MODEL, the cluster within --memory, and the profile.

    With --profile, both have its measured times.
    """
    from placewise.core.cluster import Cluster
    from placewise.models import load_graph, load_step

    check_busy(options)
    model = options.model if model is None else model
    cluster = Cluster.load(options.cluster).limited(dict(options.memory))
    if options.profile is None:
        is_run = getattr(options, "measure", False)  # then a graph file is refused at once
        return load_step(model).graph if is_run else load_graph(model), cluster, None
    from placewise.measure.profiler import apply_profile

    profile = load_profile(options, cluster)  # refused before the model is captured
    return *apply_profile(load_step(model), cluster, profile, options.busy), profile


def load_profile(options: argparse.Namespace, cluster: "Cluster") -> "Profile":
    """Returns the --profile; it must have times for all devices."""
    from placewise.formats.profile_file import read_profile

    profile = read_profile(options.profile)
    profile.check_covers(cluster, options.profile)
    if doubt := profile.doubt():
        warn(f"{options.profile}: {doubt}: profile again, or search with --measure")
    return profile


def check_busy(options: argparse.Namespace) -> None:
    """Refuses --busy without a profile."""
    if options.busy and options.profile is None:
        raise InputError("--busy needs --profile, which says how much busy devices slow each other down")


def check_together(options: argparse.Namespace) -> None:
    """Refuses --together without a profile, or with --busy."""
    if options.together and options.profile is None:
        raise InputError("--together needs --profile, which has the measured contention")
    if options.together and options.busy:
        raise InputError("--together and --busy exclude each other: --together simulates when devices are busy")


def measure_of(options: argparse.Namespace) -> "Measure | None":
    """Returns how placements are measured; None: they are simulated."""
    from placewise.evaluate.measured import Measure

    given = {
        "steps": options.steps,
        "warm_up": options.warm_up,
        "timeout_seconds": options.measure_timeout,
        "virtual": dict(options.virtual) or None,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    if chosen and not options.measure:
        raise InputError("--steps, --warm-up, --measure-timeout and --virtual need --measure")
    return Measure(**chosen) if options.measure else None


def check_devices(options: argparse.Namespace, measure: "Measure | None") -> None:
    """Refuses to measure on devices that this machine does not have; with --ray other machines measure."""
    if measure is not None and options.ray is None:
        from placewise.core.cluster import Cluster
        from placewise.run.devices import real_devices

        real_devices(Cluster.load(options.cluster), measure.virtual)


def settings_of(pairs: list[str]) -> dict[str, str]:
    """Returns the settings of --set by name."""
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise StrategyError(f"--set must be NAME=VALUE, got {pair!r}")
        settings[name] = value
    return settings
