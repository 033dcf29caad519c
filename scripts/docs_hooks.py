"""What the docs site is given while it is built: the command line's help, so that no page repeats it by hand."""

import argparse
from typing import Any

from placewise.cli import _parser

HERE = "<!-- the help of every command -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns a page's text, with every command's help where the page asks for it."""
    return markdown.replace(HERE, _commands()) if HERE in markdown else markdown


def _commands() -> str:
    table = next(action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    return "\n\n".join(_section(name, parser) for name, parser in table.choices.items())


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
    return f"## {name}\n\n```text\n{parser.format_help()}```"
