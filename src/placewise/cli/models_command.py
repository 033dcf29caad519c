"""placewise models: the models of the zoo and their options."""

import argparse
from typing import Any

from placewise.cli.outputs import print_json
from placewise.cli.shared_options import add_command

_WIDTH = 14  # of the column of names


def add_models(commands: Any) -> None:
    """Adds the command."""
    add_command(commands, "models", _models, "list the models of the zoo and their options")


def _models(options: argparse.Namespace) -> None:
    from placewise import zoo
    from placewise.report.terminal_text import bold

    if options.json:
        models = {name: {"summary": entry.summary, "options": zoo.model_options(name)} for name, entry in zoo.MODELS.items()}
        print_json(models)
        return
    for name, entry in zoo.MODELS.items():
        print(f"{bold(name)}{'':<{_WIDTH - len(name)}}{entry.summary}")
        print(f"{'':<{_WIDTH}}{', '.join(f'{option}={default}' for option, default in zoo.model_options(name).items())}")
