"""The best of all bounds, and the wiring of those that are tried."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from placewise.bounds.certain_part import certain_part
from placewise.bounds.dag import Dag, alike, build_dag
from placewise.bounds.longest_path import longest_path
from placewise.bounds.segments import Segmented, best_segments
from placewise.bounds.shared_work import Prices, Shared, best_window
from placewise.core.arrays import Floats, Ints
from placewise.core.problem import Problem

THOROUGH_SECONDS = 5.0  # the effort from which on the slow bounds are tried too
SHAVE = 1.0 - 1e-9  # takes off what rounding may have added to a sum of many times


@dataclass(frozen=True)
class Bound:
    """A step time that no placement can beat, in any launch order."""

    seconds: float
    name: str
    certificate: Mapping[str, Any] = field(repr=False)  # plain data from which `bounds.check` derives the same time
    parts: tuple["Bound", ...] = field(default=(), repr=False)  # all bounds that were tried; this one is the best of them


def bound(problem: Problem, *, seconds: float | None = None) -> Bound:
    """Returns the best lower bound of the step time that about `seconds` of effort find.

    The same arguments give the same bound: the effort is counted in units of work, not by the clock. Without seconds, or
    with fewer than `THOROUGH_SECONDS`, only the bounds that take a second or two are tried. Ties go to the simpler bound.
    With optional ops it is the bound of the `certain_part`, and so are the certificates.
    """
    view = _View(certain_part(problem))
    tried = [make(view) for make in _QUICK]
    if seconds is not None and seconds >= THOROUGH_SECONDS:
        tried.append(_segments(view, seconds))
    parts = tuple(Bound(max(part.seconds, 0.0) * SHAVE, part.name, part.certificate) for part in tried)
    best = max(parts, key=lambda part: part.seconds)
    return Bound(best.seconds, best.name, best.certificate, parts)


@dataclass(frozen=True, eq=False)
class _View:
    """A problem, and what several bounds need to know about it."""

    problem: Problem

    @cached_property
    def classes(self) -> Ints:
        return alike(self.problem)

    @cached_property
    def dag(self) -> Dag:
        return build_dag(self.problem, self.classes)

    @cached_property
    def heads(self) -> Floats:
        return self.dag.heads()

    @cached_property
    def tails(self) -> Floats:
        return self.dag.tails()

    @cached_property
    def shared(self) -> Shared:
        return Shared.of(self.problem, self.classes)


def _host(view: _View) -> Bound:
    """Of several hosts, one launches at least its share of the ops; the last one that it launches still has to run."""
    problem = view.problem
    dispatch = problem.cluster.dispatch_seconds
    last = float(problem.fastest_seconds.min(initial=np.inf)) if problem.num_ops else 0.0
    launches = -(-problem.num_ops // len(problem.cluster.host_names))
    return Bound(launches * dispatch + last if dispatch else 0.0, "host", {})


def _path(view: _View) -> Bound:
    path = longest_path(view.dag, view.heads, view.tails)
    return Bound(path.seconds, "path", {"group": path.group, "ops": path.ops.tolist()})


def _work(view: _View) -> Bound:
    return _shared(view, "work", np.arange(view.problem.num_ops), np.zeros(view.problem.num_devices), {})


def _window(view: _View) -> Bound:
    """Picks the thresholds for which equal prices promise the most, then the best prices for these ops."""
    problem = view.problem
    if not problem.num_ops:
        nothing = [0.0] * problem.num_devices
        return Bound(0.0, "window", {"prices": nothing, "memory_prices": nothing, "head": 0.0, "tail": 0.0})
    prices = view.shared.prices(np.arange(problem.num_ops), np.zeros(problem.num_devices))
    heads, tails = view.heads.min(axis=1), view.tails.min(axis=1)
    with np.errstate(invalid="ignore"):
        least = prices.seconds[view.shared.firsts]
        worth = np.where(np.isinf(view.dag.seconds), np.inf, view.dag.seconds * least).min(axis=1)
    window = best_window(worth, heads, tails, float(prices.seconds.sum()) or 1.0)
    ops = np.flatnonzero((heads >= window.head) & (tails >= window.tail))
    starts = (view.heads[ops].min(axis=0) + view.tails[ops].min(axis=0))[view.classes]
    return _shared(view, "window", ops, starts, {"head": window.head, "tail": window.tail})


def _shared(view: _View, name: str, ops: Ints, starts: Floats, fields: dict[str, Any]) -> Bound:
    shared = view.shared
    starts = np.where(np.isinf(starts), 1e300, starts)  # a device that can run none of them never joins
    work = shared.work(ops)
    seconds, prices = 0.0, Prices(np.zeros_like(starts), np.zeros_like(starts))
    together = np.full_like(
        starts, starts.min()
    )  # the linear program has T after every start, so one late start would spoil it
    for guess in (starts, together):
        candidate = shared.prices(ops, guess)
        least = shared.least_time(candidate, starts, work)
        if seconds < least < 1e299:
            seconds, prices = least, candidate
    certificate = {"prices": prices.seconds.tolist(), "memory_prices": prices.memory.tolist(), **fields}
    return Bound(seconds, name, certificate)


def _segments(view: _View, seconds: float) -> Bound:
    found: Segmented = best_segments(view.problem, build_dag(view.problem), seconds)
    return Bound(found.seconds, "segments", found.certificate)


_QUICK: tuple[Callable[[_View], Bound], ...] = (_host, _path, _work, _window)
