"""Options that several commands share, and the types of their values. `inputs` loads and checks what they name."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from placewise.core.quantities import parse_bytes

if TYPE_CHECKING:
    from placewise.machines.slices import Cut

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
    return _whole_number(text, least=0, digits=18)


def positive_argument(text: str) -> int:
    """Returns a whole number above 0."""
    return _whole_number(text, least=1, digits=15)


def _whole_number(text: str, least: int, digits: int) -> int:
    if text.isdecimal() and len(text) > digits:
        raise argparse.ArgumentTypeError(f"must have at most {digits} digits, got {len(text)}")
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number{' above 0' if least else ', 0 or more'}, got {text!r}")
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


def percent_argument(text: str) -> float:
    """Returns a share of at least 0 and below 50%, from "10%" or "0.1"."""
    number, is_percent = text.removesuffix("%"), text.endswith("%")
    rule = "a share of at least 0 and below 50%, as in 10% or 0.1"
    try:
        return number_argument(number, rule, lambda value: 0 <= value < (50 if is_percent else 0.5)) / (
            100 if is_percent else 1
        )
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}") from None


def number_argument(text: str, rule: str, holds: Callable[[float], bool]) -> float:
    """Returns a number that obeys a rule."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not holds(value):
        raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
    return value


def virtual_argument(text: str) -> "tuple[str, Cut]":
    """Returns ("cuda:0", 4) for "cuda:0=4", and ("cuda:0", (32, 64)) for "cuda:0=32+64"."""
    from placewise.machines.slices import parse_cut

    name, _, cut = text.partition("=")
    try:
        if name.startswith("cuda:") and name[5:].isdecimal():
            return name, parse_cut(cut)
    except ValueError:
        pass
    rule = "must be a GPU and a number of slices, or the multiprocessors of each, as in cuda:0=4 and cuda:0=32+64"
    raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")


def memory_argument(text: str) -> tuple[str, int]:
    """Returns ("gpu:0", 2147483648) for "gpu:0=2GiB"."""
    name, equals, amount = text.rpartition("=")
    try:
        if name and equals and (nbytes := parse_bytes(amount)) >= 0:
            return name, nbytes
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"must be a device and its memory, as in gpu:0=2GiB, got {text!r}")


# --- the problem ---


def add_problem_options(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL, --cluster and --memory."""
    add_model_argument(parser)
    add_cluster_option(parser)
    add_memory_option(parser)


def add_model_argument(parser: argparse.ArgumentParser, text: str = MODEL_HELP) -> None:
    """Adds MODEL and --fuse."""
    parser.add_argument("model", metavar="MODEL", help=text)
    parser.add_argument(
        "--fuse",
        action="store_true",
        help="make chains of small ops one op each, compiled to a kernel (the same as fused:MODEL)",
    )


def add_memory_option(parser: argparse.ArgumentParser) -> None:
    """Adds --memory."""
    parser.add_argument(
        "--memory",
        metavar="DEVICE=SIZE",
        type=memory_argument,
        action="append",
        default=[],
        help="use only this much of a device's memory, as in gpu:0=2GiB (may be repeated)",
    )


def add_memory_choices(parser: argparse.ArgumentParser) -> None:
    """Adds --no-recompute and --no-park."""
    parser.add_argument("--no-recompute", action="store_true", help="where memory is tight, recompute no tensors")
    parser.add_argument("--no-park", action="store_true", help="where memory is tight, let no tensors wait on other devices")


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


def add_keep_option(parser: argparse.ArgumentParser) -> None:
    """Adds --keep."""
    parser.add_argument(
        "--keep",
        metavar="G",
        help="search only plans that keep these whole: 'layers' (numbered blocks of the model), 'modules' or a grouping",
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
        help="with --profile: slow ops down as if devices that share hardware were busy this share of the time (default: 0)",
    )


def add_together_option(parser: argparse.ArgumentParser) -> None:
    """Adds --together."""
    parser.add_argument(
        "--together",
        action="store_true",
        help="with --profile: simulate how devices that share hardware slow each other down",
    )


# --- running on this machine ---


def add_virtual_option(parser: "argparse._ActionsContainer", when: str = "") -> None:
    """Adds --virtual; its help begins with when it can be used."""
    parser.add_argument(
        "--virtual",
        metavar="GPU=N",
        type=virtual_argument,
        action="append",
        default=[],
        help=f"{when}split a GPU into N slices, as in cuda:0=4, or into slices of so many multiprocessors, as in "
        "cuda:0=32+64; the slices stand for the cluster's first GPUs (may be repeated)",
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
    add_virtual_option(parser, "with --measure: ")


# --- searching ---


def add_set_option(parser: argparse.ArgumentParser, whose: str, form: str, example: str) -> None:
    """Adds --set."""
    text = f"set a parameter of {whose}, as in {example} (may be repeated); `placewise strategies` lists them"
    parser.add_argument("--set", metavar=form, action="append", default=[], help=text)


def add_budget_options(parser: argparse.ArgumentParser) -> None:
    """Adds --budget and --seconds."""
    parser.add_argument(
        "--budget",
        metavar="N",
        type=positive_argument,
        help="most evaluations (if neither --budget nor --seconds is given: 60 with --measure, else 2400; "
        "auto without --measure runs for 10 seconds instead)",
    )
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=seconds_argument,
        help="most seconds (default: no limit; see --budget)",
    )


def add_simple_option(parser: argparse.ArgumentParser) -> None:
    """Adds --simple."""
    parser.add_argument(
        "--simple",
        metavar="P",
        type=percent_argument,
        help="answer with the simplest plan that takes at most P longer than the fastest one found "
        "(default: 2%% for auto, 0 for other strategies and with --measure; 0 gives the fastest)",
    )


def add_order_option(parser: argparse.ArgumentParser) -> None:
    """Adds --order."""
    parser.add_argument(
        "--order", choices=("priority", "program"), default="priority", help="launch order (default: priority)"
    )


def add_worker_options(parser: "argparse._ActionsContainer") -> None:
    """Adds --workers and --ray."""
    parser.add_argument(
        "--workers", metavar="N", type=positive_argument, help="evaluate in N processes, or with --ray on N Ray workers"
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="evaluate on a Ray cluster; 'local' starts one on this machine")


def add_evaluation_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that choose how placements are evaluated."""
    group = parser.add_argument_group("evaluation")
    add_worker_options(group)
    add_profile_options(group)
    add_measure_options(group)


def add_run_file_option(parser: "argparse._ActionsContainer") -> None:
    """Adds --run-file."""
    parser.add_argument("--run-file", metavar="RUNS.DB", help="record the search here; continue it if it was stopped")


def add_plan_options(parser: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Adds the options for the plan that a search finds, and returns their group."""
    group = parser.add_argument_group("output")
    group.add_argument("-o", "--output", metavar="PLAN", help="write the plan to this plan.json")
    group.add_argument("--report", metavar="PAGE", help="write an HTML page that shows the plan; it opens offline")
    group.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return group
