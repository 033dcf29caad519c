"""The page that follows a search, asked as a browser asks."""

import json
import math
import urllib.error
import urllib.request

import pytest
from chain_schedules import two

from placewise.report.comparisons import Comparisons
from placewise.report.page.live_page import ADDRESS, LivePage
from placewise.report.page.page_data import ShownPlan
from placewise.report.search_curves import curve_of


def ask(url: str, host: str | None = None) -> bytes:
    request = urllib.request.Request(url, headers={} if host is None else {"Host": host})
    with urllib.request.urlopen(request, timeout=10) as answer:
        content: bytes = answer.read()
    return content


def test_it_follows_the_search_and_ends_with_the_plan() -> None:
    with LivePage("model on machine", 7.5) as live:
        assert live.url.startswith(f"http://{ADDRESS}:")
        assert b"default-src 'none'" in ask(live.url)
        live.add(1, 0.1, math.inf)
        for evaluations in (2, 3, 4):
            live.add(evaluations, evaluations / 10, 9.0)
        live.add(5, 0.5, 8.0)
        state = json.loads(ask(f"{live.url}state.json"))
        assert state["points"] == [[1, 0.1, None], [2, 0.2, 9.0], [4, 0.4, 9.0], [5, 0.5, 8.0]]
        assert (state["title"], state["bound_seconds"], state["is_done"]) == ("model on machine", 7.5, False)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            ask(f"{live.url}plan.html")
        live._last_asked = -math.inf  # nobody watches any more
        live.finish([ShownPlan("plan", two(), None, Comparisons(None, None), curve_of(()))])
        assert json.loads(ask(f"{live.url}state.json"))["is_done"]
        assert b"placewise" in ask(f"{live.url}plan.html")


def test_a_long_curve_keeps_its_ends() -> None:
    """Of 3,000 improvements half go when there are more than 2,000, and none before that."""
    live = LivePage("model on machine", None)
    for n in range(3000):
        live.add(n, float(n), 9000.0 - n)
        if n in (1500, 2999):
            found = live.answer("/state.json")
            assert found is not None
            points = json.loads(found[1])["points"]
            assert (points[0], points[-1]) == ([0, 0.0, 9000.0], [n, float(n), 9000.0 - n])
            assert len(points) == {1500: 1501, 2999: 2000}[n]
    live._server.server_close()


def test_a_browser_is_answered_while_the_plan_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last question is then a moment ago, however long that takes, and it gets the plan's page."""
    with LivePage("model on machine", None) as live:

        def slow_page(shown: object) -> str:
            assert not json.loads(ask(f"{live.url}state.json"))["is_done"]
            return "the plan"

        monkeypatch.setattr("placewise.report.page.live_page.page", slow_page)
        monkeypatch.setattr("placewise.report.page.live_page.PATIENCE", 0)
        live.finish([])
        assert ask(f"{live.url}plan.html") == b"the plan"


def test_a_browser_that_goes_away_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    with LivePage("model on machine", None) as live:
        for problem in (BrokenPipeError(), ConnectionResetError()):
            try:
                raise problem
            except ConnectionError:
                live._server.handle_error(None, ("127.0.0.1", 1))
    assert capfd.readouterr() == ("", "")


def test_other_sites_and_other_paths_get_nothing() -> None:
    """A page of another site may make a browser ask here under its own name; it must learn nothing."""
    with LivePage("secret", None) as live:
        for path, host in (("state.json", "evil.example"), ("state.json", "evil.example:80"), ("../pyproject.toml", None)):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                ask(live.url + path, host)
    with pytest.raises(urllib.error.URLError):
        ask(live.url)
