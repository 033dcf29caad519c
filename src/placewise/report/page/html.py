"""One HTML file that shows plans: it opens offline, and nothing in it asks for anything outside of it."""

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from placewise.formats.files import write_bytes
from placewise.report.page.page_data import ShownPlan, page_data

SCRIPTS = (  # in this order, in one scope
    *("data.js", "units.js", "state.js", "headline.js", "plans.js"),
    *("timeline.js", "drawing.js", "pointer.js", "card.js", "memory.js", "modules.js", "search.js", "main.js"),
)


def write_page(shown: Sequence[ShownPlan], path: str | Path) -> None:
    """Writes the page's file; the first plan is the one that it shows when it is opened."""
    write_bytes(path, page(shown).encode())


def page(shown: Sequence[ShownPlan]) -> str:
    """Returns the page."""
    folder = files("placewise.report.page") / "template"
    parts = {
        "STYLE": (folder / "page.css").read_text("utf-8"),
        "SCRIPT": "".join((folder / name).read_text("utf-8") for name in SCRIPTS),
        "DATA": in_script(page_data(shown)),
    }
    text = (folder / "page.html").read_text("utf-8")
    for name, part in parts.items():
        before, _, behind = text.partition(f"/*{name}*/")
        text = before + part + behind
    return text


def in_script(data: object) -> str:
    """Returns data as JSON that can stand in a script element: no name in it can end that element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
