"""The parser of all commands."""

import argparse
import sys
from typing import Any, NoReturn

from placewise import __version__
from placewise.cli.advise_command import add_advise
from placewise.cli.bench_command import add_bench
from placewise.cli.bound_command import add_bound
from placewise.cli.capture_command import add_capture
from placewise.cli.clusters_command import add_clusters
from placewise.cli.compare_command import add_compare
from placewise.cli.completion_command import add_completion
from placewise.cli.detect_command import add_detect
from placewise.cli.import_command import add_import
from placewise.cli.info_command import add_info
from placewise.cli.memory_command import add_memory
from placewise.cli.models_command import add_models
from placewise.cli.place_command import add_place
from placewise.cli.profile_command import add_profile
from placewise.cli.report_command import add_report
from placewise.cli.reproduce_command import add_reproduce
from placewise.cli.resume_command import add_resume
from placewise.cli.run_command import add_run
from placewise.cli.runs_command import add_runs
from placewise.cli.simulate_command import add_simulate
from placewise.cli.strategies_command import add_strategies
from placewise.cli.train_policy_command import add_train_policy
from placewise.core.suggestions import closest, did_you_mean
from placewise.report.terminal_text import printable

COMMANDS = (  # in the order in which a newcomer needs them
    add_place,
    add_advise,
    add_compare,
    add_simulate,
    add_bound,
    add_memory,
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
    add_train_policy,
    add_completion,
)


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
        self.exit(2, f"{self.prog}: {printable(message)} (see {self.prog} --help)\n")
