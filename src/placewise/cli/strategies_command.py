"""placewise strategies: the strategies and their parameters."""

import argparse
from typing import Any

from placewise.cli.outputs import print_json
from placewise.cli.shared_options import add_command


def add_strategies(commands: Any) -> None:
    """Adds the command."""
    add_command(commands, "strategies", _strategies, "list the strategies and their parameters")


def _strategies(options: argparse.Namespace) -> None:
    from placewise.core.errors import StrategyError
    from placewise.report.terminal_text import bold
    from placewise.strategies import STRATEGIES, parameters

    def known_parameters(name: str) -> dict[str, Any]:
        try:
            return parameters(name)
        except StrategyError:  # PyTorch is not installed
            return {}

    if options.json:
        rows = {
            name: {"family": entry.family, "summary": entry.summary, "parameters": known_parameters(name)}
            for name, entry in STRATEGIES.items()
        }
        print_json(rows)
        return
    width = max(map(len, STRATEGIES)) + 2
    for name, entry in STRATEGIES.items():
        print(f"{bold(name)}{'':<{width - len(name)}}{entry.summary}")
        if known := known_parameters(name):
            print(f"{'':<{width}}{', '.join(f'{key}={value}' for key, value in known.items())}")
