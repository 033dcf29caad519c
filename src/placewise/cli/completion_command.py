"""placewise completion: scripts with which shells complete our commands and options."""

import argparse
from typing import Any


def add_completion(commands: Any) -> None:
    """Adds the command."""
    text = "print a completion script for your shell"
    parser = commands.add_parser("completion", help=text, description="Print a completion script for your shell.")
    parser.set_defaults(carry_out=_complete)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help='your shell: eval "$(placewise completion bash)"')


def _complete(options: argparse.Namespace) -> None:
    import shtab

    from placewise.cli.parser import make_parser

    print(shtab.complete(make_parser(), shell=options.shell))
