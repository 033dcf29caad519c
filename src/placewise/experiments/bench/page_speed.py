"""How large a page is, how soon it can be used, and how smoothly it zooms, in headless Chromium."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewise.core.cluster import Cluster
from placewise.core.errors import InputError
from placewise.core.problem import Problem
from placewise.experiments.bench.common import Rows, some_placements
from placewise.models import load_graph

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PAGED = ("nmt:layers=2", "gpt:batch=64,micro_batches=64")  # 7,394 and more than 50,000 ops

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

QUIETLY = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")

DRAWN = "window.placewise?.state.frames > 0"

ZOOM = """async (frames) => {
  const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect();
  const next = () => new Promise(requestAnimationFrame);
  await next();
  const started = performance.now();
  for (let i = 0; i < frames; i++) {
    const deltaY = i < frames / 2 ? -60 : 60;
    canvas.dispatchEvent(new WheelEvent("wheel", { deltaY, clientX: box.left + box.width / 2, clientY: box.top + 40,
      bubbles: true, cancelable: true }));
    await next();
  }
  return frames / (performance.now() - started) * 1000;
}"""


def bench_page(models: tuple[str, ...]) -> Rows:
    """Returns megabytes, seconds until an op's card is shown, and frames a second while zooming in and out."""
    from placewise.report.page.comparisons import comparisons_of
    from placewise.report.page.html import write_page
    from placewise.report.page.page_data import Shown
    from placewise.report.search_curves import curve_of
    from placewise.search.planner import find_bound
    from placewise.simulate.simulator import Simulator

    rows = []
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        for model in models or PAGED:
            problem = Problem.of(load_graph(model), Cluster.load("4xV100-nvlink"))
            schedule = Simulator(problem).schedule(some_placements(problem, 1)["parts"][0])
            path = Path(folder) / "page.html"
            started = time.perf_counter()
            write_page([Shown("parts", schedule, find_bound(problem), comparisons_of(problem), curve_of(()))], path)
            row = {"model": model, "ops": problem.num_ops, "copies": len(schedule.copy_tensors)}
            row |= {"written s": time.perf_counter() - started, "MB": path.stat().st_size / 1e6}
            rows.append({**row, **page_speed(browser, path)})
    return rows


def find_browser() -> str | None:
    """Returns the path of an installed Chromium, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@contextmanager
def open_browser() -> "Iterator[Browser]":
    """Gives a headless Chromium; an InputError says what is missing."""
    path = find_browser()
    if path is None:
        raise InputError("a page is tried in Chromium: install Debian's package chromium, or Google Chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise InputError("a browser is driven by playwright: pip install 'placewise[dev]'") from None
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(QUIETLY))
        try:
            yield browser
        finally:
            browser.close()


def open_page(browser: "Browser", path: str | Path, **options: Any) -> "Page":
    """Returns a page that has drawn its first frame."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
    page.goto(f"file://{os.path.abspath(path)}")
    wait_until(page, DRAWN)
    return page


def wait_until(page: "Page", condition: str) -> None:
    """Waits until an expression of JavaScript is true, at most 30 seconds.

    Playwright's own way to wait evaluates texts later on, which the page does not allow to anybody.
    """
    page.evaluate(
        f"""() => new Promise((done, fail) => {{
          const look = () => (({condition}) ? done() : requestAnimationFrame(look));
          setTimeout(() => fail(new Error("waited 30 s for {condition}")), 30000);
          look();
        }})"""
    )


def hover_op(page: "Page", op: int) -> None:
    """Moves the pointer onto an op that is in view, and waits for its card."""
    timeline = page.locator("#timeline")
    timeline.scroll_into_view_if_needed()
    box = timeline.bounding_box()
    place = page.evaluate("(op) => placewise.whereIs(op)", op)
    assert box is not None
    page.mouse.move(box["x"] + place["x"], box["y"] + place["y"])
    page.locator("#card").wait_for(state="visible")


def page_speed(browser: "Browser", path: str | Path, frames: int = 120) -> dict[str, float]:
    """Returns the seconds from opening a page until it has shown an op's card, and the frames a second of zooming."""
    started = time.perf_counter()
    page = open_page(browser, path)
    hover_op(page, page.evaluate("placewise.state.plan.seconds.reduce((best, s, i, all) => (s > all[best] ? i : best), 0)"))
    usable = time.perf_counter() - started
    speed = float(page.evaluate(ZOOM, frames))
    page.close()
    return {"usable s": usable, "frames a second": speed}
