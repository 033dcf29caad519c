"""Pictures of searches: what a line shows, and that the picture is sound."""

import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import refused

from placewise.experiments.recorded_searches import Found
from placewise.experiments.search_figures import COLOURS, _looks, draw_figure, lines_of, write_figure


def searched(*bests: float) -> Found:
    """Returns a search of one seed that finds a step after each 10 evaluations."""
    history = tuple((10 * (n + 1), 0.1 * n, best) for n, best in enumerate(bests))
    return Found("s", (bests[-1],), 100, 1.0, histories=(history,))


def at_once(seconds: float) -> Found:
    return Found("s", (seconds,), 1, histories=(((1, 0.0, seconds),),))


def texts(picture: bytes) -> list[str]:
    """Returns the texts of a picture, which must be well-formed."""
    return [(e.text or "").strip() for e in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_the_best_so_far_is_what_a_line_shows() -> None:
    """Seeds that find 4 s after 1 evaluation and 2 s after 10, and 8 s after 5: the median is 6 from 5 on, 5 from 10 on."""
    histories = (((1, 0.0, 4.0), (10, 0.1, 2.0)), ((5, 0.0, 8.0),))
    post, one = lines_of({"Post": Found("post", (2.0, 8.0), 100, 1.0, histories=histories), "one": at_once(3.0)}, 100)
    assert post.spent.tolist() == [5, 10, 100]
    assert (post.middle.tolist(), post.low.tolist(), post.high.tolist()) == ([6, 5, 5], [4, 2, 2], [8, 8, 8])
    assert not post.is_level
    assert one.is_level
    assert (one.spent.tolist(), one.middle.tolist()) == ([1, 100], [3, 3])


def test_the_picture_has_its_texts_whatever_names_hold() -> None:
    lines = lines_of({"Post": searched(1.0, 0.5), "$a_b$": at_once(0.9), "CPU": at_once(9.0)}, 100)
    found = texts(draw_figure("<b> & co", lines, 0.25, 100))
    assert {"<b> & co", "evaluations", "best step so far, seconds", "bound: no placement is faster"} <= {*found}
    assert {"Post 0.5 s", "$a_b$ 0.9 s", "above: CPU 9 s", "1", "10", "100"} <= {*found}
    assert "CPU 9 s" not in found
    assert draw_figure("nothing", [], None, 1)


def test_the_same_picture_has_the_same_bytes() -> None:
    pictures = {draw_figure("t", lines_of({"a": searched(2.0, 1.0), "b": at_once(1.5)}, 100), 0.5, 100) for _ in range(2)}
    assert len(pictures) == 1


def test_labels_do_not_overlap() -> None:
    """30 strategies that end within 1%, so that their labels need more room than their lines."""
    picture = draw_figure("t", lines_of({f"s{n}": searched(2.0, 1 + n / 3000) for n in range(30)}, 100), None, 100)
    places = sorted(
        float(e.get("y", "nan"))
        for e in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
        if (e.text or "").strip().startswith("s")
    )
    assert len(places) == 30
    assert min(b - a for a, b in pairwise(places)) >= 11.9


def test_no_two_lines_look_the_same() -> None:
    looks = _looks(lines_of({f"s{n}": searched(1.0) for n in range(2 * len(COLOURS))}, 100))
    assert len({*looks}) == len(looks)


def test_a_strategy_that_found_nothing_has_no_picture(tmp_path: Path) -> None:
    write_figure(tmp_path / "new", "none", "none", {"a": Found("s", (None,))}, 100)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_there_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command in (["bench", "suite"], ["reproduce", "post"]):
        assert "--plots: needs matplotlib: pip install 'placewise[plots]'" in refused([*command, "--plots", "x"], capsys)
