"""A page that follows a search while it runs: the best step so far, the bound and the curve, on this machine only."""

import json
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Self

import numpy as np

from placewise.report.page.html import page
from placewise.report.page.page_data import ShownPlan

ADDRESS = "127.0.0.1"  # never another one: anybody who reaches the page can read it

RECENT, PATIENCE = 3.0, 10.0  # seconds: a browser that asked within the first gets the last page within the second

MOST_POINTS = 2000


class LivePage:
    """Serves the page while the block runs; at the end a browser that still looks at it gets the plan's own page."""

    def __init__(self, title: str, bound_seconds: float | None) -> None:
        self._state: dict[str, Any] = {"title": title, "bound_seconds": bound_seconds, "points": [], "is_done": False}
        self._last_asked, self._plan_page = -np.inf, b""
        self._was_fetched = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server((ADDRESS, 0), _handler_of(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it."""
        return f"http://{ADDRESS}:{self._server.server_address[1]}/"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, evaluations: int, seconds: float, step_seconds: float) -> None:
        """Adds a point of the curve, if the step is shorter than before; the last one always says how far the search is."""
        with self._lock:
            points = self._state["points"]
            best = step_seconds if np.isfinite(step_seconds) else None
            if len(points) > 1 and points[-1][2] == points[-2][2] == best:
                points.pop()  # the step has not changed for two points: the later one says so
            points.append([evaluations, seconds, best])
            if len(points) > MOST_POINTS:
                del points[1:-1:2]  # the curve keeps its ends and its shape

    def finish(self, shown: Sequence[ShownPlan]) -> None:
        """Shows the plan's own page to a browser that has asked a moment ago; it stays there when this process has ended."""
        plan_page = page(shown).encode()  # this takes a while for a large step, and the browser goes on asking
        with self._lock:
            self._plan_page, self._state["is_done"] = plan_page, True
            is_watched = time.monotonic() - self._last_asked < RECENT
        if is_watched:
            self._was_fetched.wait(PATIENCE)

    def answer(self, path: str) -> tuple[str, bytes] | None:
        """Returns the type and the content of what a browser asks for; None if there is no such thing."""
        with self._lock:
            if path == "/":
                return "text/html", _live_template()
            if path == "/state.json":
                self._last_asked = time.monotonic()
                return "application/json", json.dumps(self._state, allow_nan=False).encode()
            if path == "/plan.html" and self._plan_page:
                return "text/html", self._plan_page
        return None

    def was_sent(self, path: str) -> None:
        """Notes that a browser has got something."""
        if path == "/plan.html":
            self._was_fetched.set()


class _Server(ThreadingHTTPServer):
    """Answers each browser in a thread of its own; one that goes away is no error."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints what went wrong, unless the browser has only closed its connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _live_template() -> bytes:
    template = files("placewise.report.page") / "template"
    return (template / "live.html").read_bytes().replace(b"/*UNITS*/", (template / "units.js").read_bytes())


def _handler_of(live: LivePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers three fixed paths; requests that name another host are refused, so that no other site can read them."""

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            found = live.answer(self.path) if host in (ADDRESS, "localhost") else None
            if found is None:
                self.send_error(404)
                return
            kind, content = found
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(content)
            live.was_sent(self.path)

        def log_message(self, *_: Any) -> None:
            """Prints nothing."""

    return Handler
