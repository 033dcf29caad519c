"""The command line: parsing and printing only. Each command is one file, named like it: place_command.py."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from placewise import __version__
from placewise.cli.bench_command import add_bench
from placewise.cli.bound_command import add_bound
from placewise.cli.capture_command import add_capture
from placewise.cli.clusters_command import add_clusters
from placewise.cli.compare_command import add_compare
from placewise.cli.completion_command import add_completion
from placewise.cli.detect_command import add_detect
from placewise.cli.import_command import add_import
from placewise.cli.info_command import add_info
from placewise.cli.models_command import add_models
from placewise.cli.outputs import warn
from placewise.cli.place_command import add_place
from placewise.cli.profile_command import add_profile
from placewise.cli.report_command import add_report
from placewise.cli.reproduce_command import add_reproduce
from placewise.cli.resume_command import add_resume
from placewise.cli.run_command import add_run
from placewise.cli.runs_command import add_runs
from placewise.cli.simulate_command import add_simulate
from placewise.cli.strategies_command import add_strategies
from placewise.core.errors import InputError, NothingFits, PlacewiseError
from placewise.core.suggestions import closest, did_you_mean
from placewise.machines.hardware_queues import request_hardware_queues

COMMANDS = (  # in the order in which a newcomer needs them
    add_place,
    add_compare,
    add_simulate,
    add_bound,
    add_detect,
    add_profile,
    add_run,
    add_report,
    add_runs,
    add_resume,
    add_models,
    add_clusters,
    add_strategies,
    add_capture,
    add_info,
    add_import,
    add_reproduce,
    add_bench,
    add_completion,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 wrong input, 3 nothing fits."""
    options = make_parser().parse_args(arguments)
    request_hardware_queues()  # before a command captures a step, which may start CUDA
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have characters that the terminal can't show
    try:
        _check_not_empty(options)
        options.carry_out(options)
        sys.stdout.flush()
        return 0
    except PlacewiseError as problem:
        warn(_one_line(problem))
        return 2 if isinstance(problem, InputError) else 3 if isinstance(problem, NothingFits) else 1
    except MemoryError as problem:  # an option can ask for more than there is
        warn(f"out of memory: {_one_line(problem)}")
        return 1
    except KeyboardInterrupt:
        warn("stopped")
        return 130
    except BrokenPipeError:  # `placewise ... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = _Parser(
        prog="placewise",
        description="Finds where each operation of a neural network's training step should run.",
        epilog="`placewise COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"placewise {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for add in COMMANDS:
        add(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and name the command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self._subparsers is None:
            self._check_spelling(list(sys.argv[1:] if args is None else args))
        known, others = super().parse_known_args(args, namespace)
        if others:  # refused here, because the parser above would name `placewise` alone
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return known, others

    def _check_spelling(self, words: list[str]) -> None:
        """Refuses a misspelt option before argparse misses the one that was meant."""
        known = [option[2:] for option in self._option_string_actions if option.startswith("--")]
        for word in words[: words.index("--")] if "--" in words else words:
            name = word[2:].partition("=")[0]
            is_unknown = word.startswith("--") and not any(option.startswith(name) for option in known)
            if is_unknown and (meant := closest(name, known)):
                self.error(f"unknown option --{name}: did you mean '--{meant}'?")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            is_command = isinstance(action, argparse._SubParsersAction)
            what = str(action.metavar).lower() if is_command else "value"
            rule = f"unknown {what} {value!r}: {did_you_mean(str(value), map(str, action.choices))}"
            raise argparse.ArgumentError(None if is_command else action, rule)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_one_line(message)} (see {self.prog} --help)\n")


def _check_not_empty(options: argparse.Namespace) -> None:
    """Refuses empty words, such as an unset variable of a script: they would mean the default, or no file."""
    for name, value in vars(options).items():
        if value == "" or (isinstance(value, list) and "" in value):
            raise InputError(f"{name.replace('_', '-')}: must not be empty")


def _one_line(message: object) -> str:
    """Returns a message as one line, whatever characters its names have."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(message))
