"""Makes the pictures of the page in docs/images: `.venv/bin/python scripts/screenshots.py` (needs Chromium)."""

import tempfile
from pathlib import Path
from typing import NamedTuple

from placewise.cli import main
from placewise.experiments.bench.headless_browser import LONGEST_OP, hover_op, open_browser, open_page

FOLDER = Path(__file__).parents[1] / "docs" / "images"


class Picture(NamedTuple):
    """A page to make, and the size of its screenshot."""

    name: str
    model: str
    cluster: str
    evaluations: int
    width: int
    height: int


PICTURES = (
    Picture("page-nmt", "nmt:layers=2", "2xK80", 200, 1280, 900),
    Picture("page-gpt", "gpt:micro_batches=8", "4xV100-nvlink", 100, 1920, 1400),
)


def take(picture: Picture) -> None:
    """Places the model, opens the page, shows the card of the longest op, and saves the picture."""
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        path = Path(folder) / "page.html"
        command = ["place", picture.model, "--cluster", picture.cluster, "--budget", str(picture.evaluations), "--quiet"]
        assert main([*command, "--report", str(path)]) == 0
        page = open_page(browser, path)
        page.set_viewport_size({"width": picture.width, "height": picture.height})
        hover_op(page, page.evaluate(LONGEST_OP))
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=FOLDER / f"{picture.name}.png")


if __name__ == "__main__":
    for entry in PICTURES:
        take(entry)
