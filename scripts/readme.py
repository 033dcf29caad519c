"""Updates README: the output of `place` and the rows of results. Run it as `.venv/bin/python scripts/readme.py`."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH = 120
PLACE = re.compile(r"\n    placewise (place .+)\n\n((?:    .*\n|\n)+)")
WITHOUT_PARTITIONERS = """
import sys
sys.modules.update(pymetis=None, pyscotch=None)
from placewise.cli import main
sys.exit(main(sys.argv[1:]))
"""
COLUMNS = ("row", "one GPU", "best other", "by", "auto", "gap")
ROW = re.compile(r"^\| ([\w.:=,-]+ on [\w+-]+) \|.*\n", re.MULTILINE)


def printed(command: str) -> str:
    """Returns the output of a command as README shows it: wrapped and indented.

    It runs as in `make demo`, which installs neither Metis nor Scotch: `auto` has fewer starts without them.
    """
    environment = {**os.environ, "COLUMNS": str(WIDTH), "PYTHONIOENCODING": "utf-8"}
    whole = [sys.executable, "-c", WITHOUT_PARTITIONERS, *command.split()]
    text = subprocess.run(whole, env=environment, capture_output=True, encoding="utf-8", check=True).stdout
    fill = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_on_hyphens=False).fill
    lines = [fill(line) if len(line) > WIDTH else line for line in text.splitlines()]
    return textwrap.indent("\n".join(lines), "    ") + "\n\n"


def results(page: str) -> dict[str, dict[str, str]]:
    """Returns the cells of every row 'MODEL on CLUSTER' of the results page, by row and by column."""
    found: dict[str, dict[str, str]] = {}
    header: list[str] = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "row":
            header = cells
        elif header and " on " in cells[0] and len(cells) == len(header):
            found.setdefault(cells[0], dict(zip(header, cells, strict=True)))  # the first table that has the row
    return found


def updated_rows(text: str, page: str) -> str:
    """Returns the text with the rows of results of the page."""
    rows = results(page)
    return ROW.sub(lambda match: "| " + " | ".join(rows[match[1]][name] for name in COLUMNS) + " |\n", text)


def updated_output(text: str) -> str:
    """Returns the text with what `placewise place` prints now."""
    match = PLACE.search(text)
    assert match is not None
    return text[: match.start(2)] + printed(match[1]) + text[match.end(2) :]


if __name__ == "__main__":
    readme = ROOT / "README.md"
    os.chdir(ROOT)
    (ROOT / "demo").mkdir(exist_ok=True)
    printed("capture nmt:layers=2 -o demo/nmt2.json.gz")
    rows_page = (ROOT / "docs" / "results" / "rows.md").read_text(encoding="utf-8")
    readme.write_text(updated_output(updated_rows(readme.read_text(encoding="utf-8"), rows_page)), encoding="utf-8")
