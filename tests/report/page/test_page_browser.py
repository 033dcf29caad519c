"""The page in headless Chromium: what people see and do. Skipped without Chromium."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import graph_data, op, tensor
from simulated import Step, gpus

from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.experiments.bench.generated_problems import generated_graph, some_placements
from placewise.experiments.bench.headless_browser import (
    DRAWN,
    find_browser,
    hover_op,
    open_browser,
    open_page,
    page_speed,
    wait_until,
)
from placewise.report.chrome_trace import read_measured, write_trace
from placewise.report.comparisons import Comparisons, simulate_comparisons
from placewise.report.page.html import write_page
from placewise.report.page.page_data import NO_BREAK, ShownPlan
from placewise.report.search_curves import Point, curve_of, curve_of_progress
from placewise.search.planner import find_bound
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator

pytestmark = pytest.mark.skipif(find_browser() is None, reason="Chromium is missing: scripts/chromium installs it")

HOSTILE = "<img src=x onerror=alert(1)>"
COLOUR = """([id, x, y]) => {
  const copy = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
  copy.drawImage(document.getElementById(id), -x * devicePixelRatio, -y * devicePixelRatio);
  return Array.from(copy.getImageData(0, 0, 1, 1).data);
}"""
FIRST_COPY = """() => {
  const { lanes, view } = placewise.state, lane = lanes.find(({ type, isMeasured }) => type === "copy" && !isMeasured);
  const middle = (lane.starts[0] + lane.ends[0]) / 2;
  return { x: view.left + (middle - view.from) * view.scale, y: lane.top + lane.height / 2 };
}"""
RECTANGLES = """() => new Promise((done) => {
  let count = 0;
  const fill = CanvasRenderingContext2D.prototype.fillRect;
  CanvasRenderingContext2D.prototype.fillRect = function (...box) { count++; fill.apply(this, box); };
  document.getElementById("channels").click();
  requestAnimationFrame(() => requestAnimationFrame(() => done(count)));
})"""
MOST_BYTES = 15e6


def problem() -> Problem:
    """Returns the problem of a chain of six ops, two of each phase, one with a name that would be markup."""
    names = ["encoder.0.mm", "encoder.1.mm", "decoder.mm.backward", f"decoder.{HOSTILE}", "encoder.0.w.add.update", HOSTILE]
    phases = ["forward", "forward", "backward", "backward", "update", "update"]
    rows = [
        op(name, n, [n - 1] if n else [], [n], phase, seconds={"gpu": 1.0 + n})
        for n, (name, phase) in enumerate(zip(names, phases, strict=True))
    ]
    tensors = [tensor(f"<b>t{n}") for n in range(len(rows))]
    tensors[1] |= {"shape": [64, 1024], "dtype": "<i>float32"}
    return Step.of(graph_data(tensors, rows), gpus(2)).problem


def schedule(placement: list[int]) -> Schedule:
    return Simulator(problem(), "program", 1).schedule(np.array(placement))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two plans; the first has copies, a measured timeline and a search that was watched."""
    folder = tmp_path_factory.mktemp("page")
    apart, together = schedule([0, 0, 1, 1, 0, 1]), schedule([0] * 6)
    write_trace(apart, folder / "trace.json")
    measured = read_measured(folder / "trace.json", apart.problem)
    curve = curve_of_progress([Point(1, 0.1, 40.0), Point(5, 0.3, 30.0)])
    comparisons = simulate_comparisons(apart.problem)
    shown = [
        ShownPlan("apart", apart, None, comparisons, curve, "hill-climb", 0, 5, measured),
        ShownPlan(HOSTILE, together, None, comparisons, curve_of([(1, 21.0)]), "gpu-only", 0, 2),
    ]
    write_page(shown, folder / "page.html")
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, path: Path) -> Iterator[Any]:
    """The page, watched: it must say nothing on the console, ask for nothing, and open no dialog."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page, seen = context.new_page(), []
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("dialog", lambda dialog: seen.append(dialog.message))
    page.on("request", lambda request: seen.append(request.url) if not request.url.startswith(("file:", "data:")) else None)
    page.goto(f"file://{path}")
    wait_until(page, DRAWN)
    yield page
    context.close()
    assert seen == []


def settle(page: Any) -> None:
    """Waits until what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def pixels(page: Any, canvas: str = "timeline") -> str:
    settle(page)
    return str(page.evaluate("(id) => document.getElementById(id).toDataURL()", canvas))


def colour_at(page: Any, n: int) -> tuple[int, ...]:
    """Returns the colour in the middle of an op, a little above it so that its name is not hit."""
    settle(page)
    place = page.evaluate("(op) => placewise.whereIs(op)", n)
    return tuple(page.evaluate(COLOUR, ["timeline", place["x"], place["y"] - 9]))


def test_it_draws(page: Any) -> None:
    """The phases have their own colours: blue, orange, green (with stripes)."""
    forward, backward = colour_at(page, 0), colour_at(page, 2)
    assert forward == (0, 0x72, 0xB2, 255)
    assert backward == (0xE6, 0x9F, 0, 255)
    width = page.locator("#memory").bounding_box()["width"]
    assert page.evaluate(COLOUR, ["memory", width / 2, 50])[3] > 100  # to its own scale, for 2 bytes of 1,000 are low
    page.keyboard.press("l")
    settle(page)
    assert page.evaluate(COLOUR, ["memory", width / 2, 50])[3] == 0
    assert page.locator("#step").inner_text().startswith("27 s")
    assert page.locator("#words li").count() == 1
    assert page.locator("#layers .layer .name").all_inner_texts() == [
        "encoder.0",
        "encoder.1",
        "decoder",
        "ops in no module",
    ]


def test_hovering_an_op_shows_its_card(page: Any) -> None:
    hover_op(page, 2)
    card = page.locator("#card").inner_text()
    assert card.startswith("decoder.mm.backward")
    for text in ("aten.op, backward", "gpu:1", "3 s (measured 3 s)", "the copy of <b>t1"):
        assert text in card
    page.mouse.move(5, 5)
    page.locator("#card").wait_for(state="hidden")


def test_cards_show_the_shapes_that_are_known(page: Any) -> None:
    """Op 1 makes t1, which op 2 reads on the other device: so it is on both cards, and on that of its copy."""
    rows = {}
    for n in (1, 2, 3):
        hover_op(page, n)
        names, texts = (page.locator(f"#card {tag}").all_inner_texts() for tag in ("dt", "dd"))
        rows[n] = dict(zip(names, (text.replace(NO_BREAK, " ") for text in texts), strict=True))
    form = "<i>float32 [64, 1024]"
    assert [(row.get("reads"), row.get("writes")) for row in rows.values()] == [(None, form), (form, None), (None, None)]
    box, place = page.locator("#timeline").bounding_box(), page.evaluate(FIRST_COPY)
    page.mouse.move(box["x"] + place["x"], box["y"] + place["y"])
    settle(page)
    assert page.locator("#card b").inner_text() == "copy of <b>t1"
    assert page.locator("#card dd").all_inner_texts()[1] == form


def test_a_name_that_would_be_markup_is_text(page: Any) -> None:
    hover_op(page, 5)
    assert page.locator("#card b").inner_text() == HOSTILE
    page.locator("#modules .module", has_text="encoder").locator("button").click()
    page.locator("#plans tbody tr").nth(1).click()
    assert page.locator("#plans tbody tr").nth(1).inner_text().startswith(HOSTILE)
    page.locator("#find").fill("onerror")
    assert page.locator("#found").inner_text() == "2 of 6 ops"
    assert page.locator("img").count() == 0


def test_the_critical_path_toggles(page: Any) -> None:
    shown = pixels(page)
    page.locator("#critical").click()
    page.mouse.move(5, 5)
    hidden = pixels(page)
    assert hidden != shown
    assert page.locator("#critical").get_attribute("aria-pressed") == "false"
    page.keyboard.press("c")
    assert pixels(page) == shown


def test_the_module_tree_filters_the_timeline(page: Any) -> None:
    row = page.locator("#modules .module", has_text="decoder")
    lit = colour_at(page, 0), colour_at(page, 2)
    row.click()
    assert page.locator("#found").inner_text() == "2 of 6 ops"
    assert colour_at(page, 2) == lit[1]
    assert colour_at(page, 0)[3] < 100  # faded
    assert row.get_attribute("aria-selected") == "true"
    row.click()
    assert (colour_at(page, 0), colour_at(page, 2)) == lit
    assert page.locator("#found").inner_text() == ""


def test_the_tree_opens(page: Any) -> None:
    """The encoder has two modules inside, 0 (its op of 1 s and an update of 5 s) and 1."""
    page.locator("#modules .module", has_text="encoder").locator("button").click()
    rows = [" ".join(text.split()) for text in page.locator("#modules .module").all_inner_texts()]
    assert rows[1:3] == ["0 6 s 29%", "1 2 s 9.5%"]


def test_the_comparison_switches(page: Any) -> None:
    before = pixels(page)
    page.locator("#plans tbody tr").nth(1).click()
    assert page.locator("#step").inner_text().startswith("21 s")
    assert pixels(page) != before
    page.keyboard.press("[")
    assert page.locator("#step").inner_text().startswith("27 s")
    page.mouse.move(5, 5)
    assert pixels(page) == before


def test_wheel_drag_and_keys_move_the_view(page: Any) -> None:
    def view() -> tuple[float, float]:
        settle(page)
        return page.evaluate("placewise.state.from"), page.evaluate("placewise.state.to")

    hover_op(page, 2)
    page.mouse.wheel(0, -200)
    wait_until(page, "placewise.state.to - placewise.state.from < 26")
    start, end = view()
    assert end - start == pytest.approx(27 * np.exp(-0.4))
    page.mouse.down()
    page.mouse.move(page.evaluate("innerWidth / 2") - 300, 400, steps=4)
    page.mouse.up()
    moved = view()
    assert moved[0] != start
    assert moved[1] - moved[0] == pytest.approx(end - start)
    page.keyboard.press("+")
    closer = view()
    assert closer[1] - closer[0] == pytest.approx((end - start) / 1.5)
    page.keyboard.press("ArrowLeft")
    assert view()[0] < closer[0]
    page.keyboard.press("0")
    assert view() == (0, 27)


def test_finding_goes_from_op_to_op(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("ENCODER")
    assert page.locator("#found").inner_text() == "3 of 6 ops"
    for name in ("encoder.0.mm", "encoder.1.mm", "encoder.0.w.add.update", "encoder.0.mm"):
        page.keyboard.press("Enter")
        assert page.locator("#card b").inner_text() == name
    page.keyboard.press("Escape")
    assert page.locator("#found").inner_text() == ""


def test_measured_lanes_can_be_hidden(page: Any) -> None:
    height = page.locator("#timeline").bounding_box()["height"]
    page.locator("#measured").click()
    settle(page)
    assert page.locator("#timeline").bounding_box()["height"] < height
    page.keyboard.press("]")
    settle(page)
    assert page.locator("#measured").is_hidden()


def test_a_search_that_measured_shows_its_time_and_no_bound(browser: Any, tmp_path: Path) -> None:
    together = schedule([0] * 6)
    limit = find_bound(together.problem)
    assert limit is not None
    for name, real in (("measured", 99.0), ("simulated", None)):
        found = ("heft", 0, 1, None, real)
        shown = ShownPlan(
            name, together, limit, simulate_comparisons(together.problem), curve_of([(1, 21.0), (2, 20.0)]), *found
        )
        write_page([shown], tmp_path / f"{name}.html")
        page = browser.new_page()
        page.goto((tmp_path / f"{name}.html").as_uri())
        settle(page)
        assert ("99 s" in page.locator("#figures").inner_text()) == (real is not None)
        assert ("bound" in page.locator("#curves-legend").inner_text()) == (real is None)
        page.close()


def test_channels_can_be_hidden(page: Any) -> None:
    """Two channels are used, each 20 pixels high with its gap, predicted and measured."""
    height = page.locator("#timeline").bounding_box()["height"]
    page.keyboard.press("h")
    settle(page)
    assert page.locator("#timeline").bounding_box()["height"] == height - 80


def test_the_peak_the_search_and_the_help(page: Any) -> None:
    page.locator("#peaks button", has_text="gpu:0").click()
    assert page.locator("#peak").inner_text().startswith("gpu:0 needs 2 B at")
    page.locator("#axes button", has_text="by seconds").click()
    assert page.locator("#curves path.best").count() == 2
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#keys").is_hidden()


def test_it_opens_in_the_dark_and_on_paper(browser: Any, path: Path) -> None:
    page = open_page(browser, path, color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    page.emulate_media(media="print")
    assert page.locator("#find").is_hidden()
    assert len(page.pdf()) > 10_000
    page.close()


def test_ops_are_found_whatever_order_they_are_launched_in(browser: Any, tmp_path: Path) -> None:
    rows = [op(f"op{n}", n, [], [n], seconds={"gpu": 1.0}) for n in range(4)]
    apart = Step.of(graph_data([tensor(f"t{n}") for n in range(4)], rows), gpus(1)).problem
    found = Simulator(apart, "program", 1).schedule(np.zeros(4, np.int64), np.array([2, 0, 3, 1]))
    write_page([ShownPlan("plan", found, None, Comparisons(None, None), curve_of(()))], tmp_path / "page.html")
    page = open_page(browser, tmp_path / "page.html")
    for n in range(4):
        hover_op(page, n)
        assert page.locator("#card b").inner_text() == f"op{n}"
    page.close()


def test_an_empty_step_and_one_op(browser: Any, tmp_path: Path) -> None:
    for rows in ([], [op("a", 0, [], [0], seconds={"gpu": 1.0})]):
        empty = Step.of(graph_data([tensor()] if rows else [], rows), gpus(1)).problem
        found = Simulator(empty, "program", 1).schedule(np.zeros(empty.num_groups, np.int64))
        write_page([ShownPlan("plan", found, None, Comparisons(None, None), curve_of(()))], tmp_path / "page.html")
        page = open_page(browser, tmp_path / "page.html")
        assert "per step" in page.locator("#step").inner_text()
        page.close()


def test_fifty_thousand_ops_are_small_and_drawn_by_pixels(browser: Any, tmp_path: Path) -> None:
    """Ops narrower than a pixel are merged, so that a frame draws less than one rectangle for ten ops."""
    graph = generated_graph(50_000)
    n = np.arange(len(graph.ops))
    names = tuple(f"blocks.{i % 97}.attention.projection.mm.backward_{i}" for i in n.tolist())
    graph = dataclasses.replace(graph, ops=dataclasses.replace(graph.ops, names=names, phases=n * 3 // len(n)))
    large = Problem.of(graph, Cluster.load("2xK80"))
    found = Simulator(large, "program", 1).schedule(some_placements(large, 1)["parts"][0])
    write_page([ShownPlan("parts", found, None, Comparisons(None, None), curve_of(()))], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < MOST_BYTES
    page = open_page(browser, tmp_path / "page.html")
    assert 100 < page.evaluate(RECTANGLES) < 5000
    page.close()
    assert all(figure > 0 for figure in page_speed(browser, tmp_path / "page.html", frames=10).values())
