"""Pages in headless Chromium, driven by playwright."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewise.core.errors import InputError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")

DRAWN = "window.placewise?.state.frames > 0"

LONGEST_OP = "placewise.state.plan.seconds.reduce((best, s, i, all) => (s > all[best] ? i : best), 0)"

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


def find_browser() -> str | None:
    """Returns the path of an installed Chromium, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


@contextmanager
def open_browser() -> "Iterator[Browser]":
    """Gives a headless Chromium; an InputError says what is missing."""
    path = find_browser()
    if path is None:
        raise InputError("Chromium is missing: install Debian's package chromium, or Google Chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise InputError("playwright is missing: pip install 'placewise[dev]'") from None
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
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
    """Waits until a JavaScript expression is true, at most 30 seconds.

    Playwright's own way to wait evaluates strings, which the page's Content-Security-Policy forbids.
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
    """Returns the seconds from opening a page until it shows an op's card, and the frames per second when zooming."""
    started = time.perf_counter()
    page = open_page(browser, path)
    hover_op(page, page.evaluate(LONGEST_OP))
    usable = time.perf_counter() - started
    speed = float(page.evaluate(ZOOM, frames))
    page.close()
    return {"usable s": usable, "frames a second": speed}
