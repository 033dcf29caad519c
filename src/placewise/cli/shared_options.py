"""Options that several commands share: their types, their help, and what reads them."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from placewise.core.errors import InputError

if TYPE_CHECKING:
    from placewise.core.cluster import Cluster
    from placewise.core.graph import Graph
    from placewise.core.profile import Profile
    from placewise.evaluate.measured import Measure

RUN_MODEL_HELP = "a zoo model (nmt:layers=4), package.module:function or path/to/file.py:function"

MODEL_HELP = "a zoo model (nmt:layers=4), a graph file, package.module:function or path/to/file.py:function"

CLUSTER_HELP = "a preset (2xK80) or a cluster.toml"


def add_command(
    commands: Any, name: str, carry_out: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    """Adds a command and returns its parser; `text` is its help."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(carry_out=carry_out)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


# --- types ---


def count_argument(text: str) -> int:
    """Returns a whole number, 0 or more."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 0 and of at most 18 digits, got {text!r}")
    return int(text)


def positive_argument(text: str) -> int:
    """Returns a whole number above 0."""
    if not text.isdecimal() or len(text) > 15 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number, above 0 and of at most 15 digits, got {text!r}")
    return int(text)


def seconds_argument(text: str) -> float:
    """Returns seconds above 0."""
    return number_argument(text, "a number of seconds above 0", lambda value: 0 < value < 1e9)


def gap_argument(text: str) -> float:
    """Returns a gap, 0 or more."""
    return number_argument(text, "a number of at least 0", lambda value: 0 <= value < 1e9)


def share_argument(text: str) -> float:
    """Returns a number from 0 to 1."""
    return number_argument(text, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def number_argument(text: str, rule: str, holds: Callable[[float], bool]) -> float:
    """Returns a number that obeys a rule."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not holds(value):
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return value


def virtual_argument(text: str) -> tuple[str, int]:
    """Returns ("cuda:0", 4) for "cuda:0=4"."""
    name, _, count = text.partition("=")
    if not name.startswith("cuda:") or not name[5:].isdecimal() or not count.isdecimal() or not 0 < int(count) < 1000:
        raise argparse.ArgumentTypeError(f"must be a GPU and a number of slices, as in cuda:0=4, got {text!r}")
    return name, int(count)


# --- the problem ---


def add_problem_options(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL and --cluster."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_cluster_option(parser)


def add_cluster_option(parser: argparse.ArgumentParser) -> None:
    """Adds --cluster, which must be given."""
    parser.add_argument("--cluster", metavar="C", required=True, help=CLUSTER_HELP)


def add_grouping_option(parser: argparse.ArgumentParser) -> None:
    """Adds --grouping."""
    parser.add_argument(
        "--grouping",
        metavar="G",
        default="colocated",
        help="which ops are placed together (default: colocated); see docs/concepts.md",
    )


# --- measured times ---


def add_profile_options(parser: "argparse._ActionsContainer") -> None:
    """Adds --profile and --busy."""
    parser.add_argument("--profile", metavar="PROFILE", help="use the times that `placewise profile` measured")
    parser.add_argument(
        "--busy",
        metavar="SHARE",
        type=share_argument,
        default=0.0,
        help="with --profile: assume that devices on the same hardware are all busy for this share of the time (default: 0)",
    )


def add_together_option(parser: argparse.ArgumentParser) -> None:
    """Adds --together."""
    parser.add_argument(
        "--together",
        action="store_true",
        help="with --profile: let devices on the same hardware slow each other down",
    )


def check_busy(options: argparse.Namespace) -> None:
    """Refuses --busy without a profile."""
    if options.busy and options.profile is None:
        raise InputError("--busy needs a --profile: it has measured how much busy devices slow each other down")


def check_together(options: argparse.Namespace) -> None:
    """Refuses --together without a profile, or with --busy."""
    if options.together and (options.profile is None or options.busy):
        raise InputError("--together needs a --profile, and can't be used with --busy: it simulates which devices are busy")


def load_profile(options: argparse.Namespace, cluster: "Cluster") -> "Profile":
    """Returns the --profile; it must have times for all devices."""
    from placewise.formats.profile_file import read_profile

    profile = read_profile(options.profile)
    profile.check_covers(cluster, options.profile)
    return profile


def load_timed(options: argparse.Namespace, model: str | None = None) -> "tuple[Graph, Cluster, Profile | None]":
    """Returns the graph of MODEL, the cluster, both with the measured times of --profile if it is given, and the profile."""
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


# --- running on this machine ---


def add_virtual_option(parser: "argparse._ActionsContainer") -> None:
    """Adds --virtual."""
    parser.add_argument(
        "--virtual",
        metavar="cuda:0=4",
        type=virtual_argument,
        action="append",
        default=[],
        help="split a GPU into this many devices: the cluster's first GPUs are its slices (may be repeated)",
    )


def add_measure_options(parser: "argparse._ActionsContainer") -> None:
    """Adds --measure and how to measure."""
    parser.add_argument("--measure", action="store_true", help="run placements on this machine instead of simulating them")
    parser.add_argument(
        "--steps", metavar="N", type=positive_argument, help="with --measure: take the median of N steps (default: 3)"
    )
    parser.add_argument(
        "--warm-up", metavar="N", type=count_argument, help="with --measure: run N steps first, untimed (default: 1)"
    )
    parser.add_argument(
        "--measure-timeout",
        metavar="S",
        type=seconds_argument,
        help="with --measure: give up on a placement after S seconds (default: 60)",
    )
    add_virtual_option(parser)


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


# --- searching ---


def add_worker_options(parser: "argparse._ActionsContainer") -> None:
    """Adds --workers and --ray."""
    parser.add_argument(
        "--workers", metavar="N", type=positive_argument, help="evaluate in N processes, or with --ray on N Ray workers"
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="evaluate on a Ray cluster; 'local' starts one on this machine")


def how_to_continue(options: argparse.Namespace) -> str:
    """Returns how to continue a search that was stopped."""
    return "the same command continues it" if options.run_file else "with --run-file it could be continued"


def warn(line: str) -> None:
    """Prints a line on standard error."""
    print(f"placewise: {line}", file=sys.stderr)
