"""The command line: parsing and printing only."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from placewise import __version__
from placewise.cli import (
    benchmarks,
    bounding,
    graphs,
    inventory,
    profiling,
    recording,
    reporting,
    reproducing,
    running,
    searching,
    simulation,
)
from placewise.core.errors import InputError, NothingFits, PlacewiseError
from placewise.machines.hardware_queues import want_queues

COMMANDS = (
    *(inventory.add_models, inventory.add_clusters, inventory.add_detect),
    *(graphs.add_capture, graphs.add_import, graphs.add_info, simulation.add_simulate),
    *(bounding.add_bound, profiling.add_profile, running.add_run),
    *(searching.add_place, searching.add_compare, searching.add_strategies, recording.add_runs, recording.add_resume),
    *(reporting.add_report, reproducing.add_reproduce, benchmarks.add_bench),
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, which names the command: it refuses what it does not know itself."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        known, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return known, others

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 wrong input, 3 nothing fits."""
    options = _parser().parse_args(arguments)
    want_queues()  # here, for capturing a step may start CUDA
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what the terminal can't show
    try:
        _check_not_empty(options)
        options.carry_out(options)
        sys.stdout.flush()
        return 0
    except InputError as problem:
        print(f"placewise: {_one_line(problem)}", file=sys.stderr)
        return 2
    except NothingFits as problem:
        print(f"placewise: {_one_line(problem)}", file=sys.stderr)
        return 3
    except PlacewiseError as problem:  # what we asked for could not be done: a worker that keeps dying
        print(f"placewise: {_one_line(problem)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("placewise: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _check_not_empty(options: argparse.Namespace) -> None:
    """Refuses empty words: an unset variable of a script, which would mean the default, or no file at all."""
    for name, value in vars(options).items():
        if value == "" or (isinstance(value, list) and "" in value):
            raise InputError(f"{name.replace('_', '-')}: must not be empty")


def _one_line(message: object) -> str:
    """Returns a message that stays one line whatever names it holds."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="placewise",
        description="Finds where each operation of a neural network's training step should run.",
        epilog="placewise COMMAND --help says more.",
    )
    parser.add_argument("--version", action="version", version=f"placewise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for add in COMMANDS:
        add(commands)
    _add_completion(commands)
    return parser


def _add_completion(commands: Any) -> None:
    text = "print a completion script for your shell"
    parser = commands.add_parser("completion", help=text, description="Print a completion script for your shell.")
    parser.set_defaults(carry_out=_completion)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help='e.g. eval "$(placewise completion bash)"')


def _completion(options: argparse.Namespace) -> None:
    import shtab

    print(shtab.complete(_parser(), shell=options.shell))
