"""Hooks for building the docs site: they insert the help of every command, and let a list follow a line of text."""

import argparse
import re
from collections.abc import Iterator
from typing import Any

from placewise.cli.parser import make_parser

HERE = "<!-- the help of every command -->"
LIST_BEHIND_TEXT = re.compile(r"^((?![-|#>\s]|\d+\. ).+\n)(?=- |1\. )", re.MULTILINE)
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns a page's text, with the help of every command in place of the marker.

    In our pages a list may directly follow a line of text, as on GitHub; Python-Markdown needs an empty line between them.
    """
    parts = FENCED.split(markdown)
    text = "".join(part if part.startswith("```") else LIST_BEHIND_TEXT.sub(r"\1\n", part) for part in parts)
    return text.replace(HERE, _commands()) if HERE in text else text


def _commands() -> str:
    return "\n\n".join(_section(name, parser) for name, parser in _parsers(make_parser(), ""))


def _parsers(parser: argparse.ArgumentParser, prefix: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields the commands of a parser by name, each before its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield f"{prefix}{name}", inner
                yield from _parsers(inner, f"{prefix}{name} ")


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
    return f"## {name}\n\n```text\n{parser.format_help()}```"
