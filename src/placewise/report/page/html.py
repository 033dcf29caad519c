"""The page that shows plans: one HTML file that works offline and loads nothing.

Panels are discovered automatically: every file in template/panels is one, with the markup, style and script of one part of
the page. They appear in the order of their names. A script registers its panel with `addPanel` (template/state.js).
"""

import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from placewise.formats.files import write_bytes
from placewise.report.page.page_data import ShownPlan, page_data

SCRIPTS = ("data.js", "units.js", "state.js", "lanes.js", "drawing.js", "card.js", "pointer.js")  # what panels use

PANEL = re.compile(r"(?:<!--.*?-->\n)?(.*)<style>\n(.*)</style>\n\n<script>\n(.*)</script>\n", re.DOTALL)


def write_page(shown: Sequence[ShownPlan], path: str | Path) -> None:
    """Writes the page; it opens with the first plan."""
    write_bytes(path, page(shown).encode())


def page(shown: Sequence[ShownPlan]) -> str:
    """Returns the page."""
    template = files("placewise.report.page") / "template"

    def read(*names: str) -> str:
        return "".join((template / name).read_text("utf-8") for name in names)

    markup, style, script = "", read("page.css"), read(*SCRIPTS)
    for panel in sorted(entry.name for entry in (template / "panels").iterdir()):
        match = PANEL.fullmatch(read(f"panels/{panel}"))
        assert match is not None, panel
        markup, style, script = markup + match[1], style + match[2], script + match[3]
    parts = {
        "/*STYLE*/": style,
        "<!--PANELS-->": markup,
        "/*SCRIPT*/": script + read("start.js"),
        "/*DATA*/": in_script(page_data(shown)),  # last, since names in it may look like the others
    }
    text = read("page.html")
    for place, part in parts.items():
        before, _, after = text.partition(place)
        text = before + part + after
    return text


def in_script(data: object) -> str:
    """Returns data as JSON for a script element, which no name in it can end."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
