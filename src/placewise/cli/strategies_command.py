"""placewise strategies: the strategies and their parameters."""

import argparse
from typing import Any

from placewise.cli.outputs import print_json
from placewise.cli.shared_options import add_command


def add_strategies(commands: Any) -> None:
    """Adds the command."""
    add_command(commands, "strategies", _strategies, "list the strategies and their parameters")


def _strategies(options: argparse.Namespace) -> None:
    from placewise.report.terminal_text import bold
    from placewise.strategies import STRATEGIES, parameters

    if options.json:
        rows = {
            name: {"family": entry.family, "summary": entry.summary, "parameters": parameters(name)}
            for name, entry in STRATEGIES.items()
        }
        print_json(rows)
        return
    width = max(map(len, STRATEGIES)) + 2
    for name, entry in STRATEGIES.items():
        print(f"{bold(name)}{'':<{width - len(name)}}{entry.summary}")
        if known := parameters(name):
            print(f"{'':<{width}}{', '.join(f'{key}={value}' for key, value in known.items())}")
