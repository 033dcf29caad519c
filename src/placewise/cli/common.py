"""What the commands share."""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from placewise.core.errors import InputError

MODEL_HELP = "a zoo name with options (nmt:layers=4,batch=64), a graph file, or package.module:function"

CLUSTER_HELP = "a preset (2xK80) or a cluster.toml"


def command(commands: Any, name: str, run: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
    """Adds a command, which `run` carries out, and returns its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(carry_out=run)
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    return parser


def print_json(data: Any) -> None:
    """Prints one JSON object."""
    print(json.dumps(data, indent=1, allow_nan=False))


def check_writable(*paths: str | None, reads: Sequence[str | None] = ()) -> None:
    """Refuses output files that can't be written, would be written twice or are what is read, before any work is done."""
    from placewise.formats.files import is_special

    read = [os.path.realpath(path) for path in reads if path is not None and os.path.isfile(path)]
    known: list[str] = []
    for path in paths:
        if path is None:
            continue
        _check_writable(path)
        if os.path.realpath(path) in read and not is_special(path):
            raise InputError(f"{path}: can't be written: it is what is read")
        if (place := os.path.realpath(path)) in known and not is_special(path):
            raise InputError(f"{path}: can't be written: two outputs have this name")
        known.append(place)


def _check_writable(path: str) -> None:
    from placewise.formats.files import is_special

    folder = Path(path).absolute().parent
    if os.path.isdir(path):
        raise InputError(f"{path}: can't be written: it is a folder")
    if not os.path.isdir(folder):
        raise InputError(f"{path}: can't be written: there is no folder {folder}")
    if not os.access(path if is_special(path) else folder, os.W_OK):
        raise InputError(f"{path}: can't be written: you may not write to {folder}")


def check_folder(path: str | None) -> None:
    """Refuses a folder that files can't be written into; it may not be there yet."""
    if path is None:
        return
    nearest = Path(path).absolute()
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not os.path.isdir(nearest):
        raise InputError(f"{path}: can't be written: {nearest} is no folder")
    if not os.access(nearest, os.W_OK):
        raise InputError(f"{path}: can't be written: you may not write to {nearest}")


def count_argument(text: str) -> int:
    """Returns a whole number of at least 0."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0 and at most 18 digits, it is {text!r}")
    return int(text)


def positive_argument(text: str) -> int:
    """Returns a whole number above 0."""
    if not text.isdecimal() or len(text) > 15 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0 of at most 15 digits, it is {text!r}")
    return int(text)


def seconds_argument(text: str) -> float:
    """Returns seconds above 0."""
    return number_argument(text, "seconds above 0", lambda value: 0 < value < 1e9)


def gap_argument(text: str) -> float:
    """Returns a gap of at least 0."""
    return number_argument(text, "a number of at least 0", lambda value: 0 <= value < 1e9)


def number_argument(text: str, rule: str, holds: Callable[[float], bool]) -> float:
    """Returns a number for which a rule holds."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not holds(value):
        raise argparse.ArgumentTypeError(f"must be {rule}, it is {text!r}")
    return value


def how_to_go_on(options: argparse.Namespace) -> str:
    """Returns what to do about a search that was stopped."""
    return "the same command goes on" if options.run_file else "with --run-file it could go on"


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say who judges."""
    parser.add_argument(
        "--workers", metavar="N", type=positive_argument, help="judge in N processes; with --ray on N Ray workers"
    )
    parser.add_argument("--ray", metavar="ADDRESS", help="judge on a Ray cluster ('local' starts one here)")


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where a search's result goes."""
    parser.add_argument("-o", "--output", metavar="PLAN", help="write the plan.json")
    parser.add_argument("--report", metavar="PAGE", help="write a page.html that shows the plan, and opens offline")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
