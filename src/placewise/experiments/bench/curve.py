"""How fast strategies get to a good answer: the best step against the clock: `placewise bench curve`."""

from contextlib import suppress
from typing import Any

import numpy as np

from placewise.core.cluster import Cluster
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.models import load_graph
from placewise.search.budget import Budget
from placewise.search.driver import Progress
from placewise.search.planner import Planner
from placewise.search.request import Request
from placewise.simulate.simulator import Simulator
from placewise.strategies import STRATEGIES

MODEL, CLUSTER = "nmt:layers=4", "4xK80"  # where no model is given

SECONDS = 10.0  # of the search with each strategy

MOMENTS = (0.5, 1.0, 2.0, 5.0, 10.0)

NEAR = 0.05  # above the best answer of all

NEURAL = ("colocrl", "spotlight", "hdp")  # a few proposals in 10 s show nothing


def bench_curve(models: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Returns each strategy's best milliseconds at some moments, and when it was within 5% of the best of all."""
    problem = Problem.of(load_graph(models[0] if models else MODEL), Cluster.load(models[1] if len(models) > 1 else CLUSTER))
    names = [name for name, entry in STRATEGIES.items() if entry.family != "exact" and name not in NEURAL]
    curves = {name: _curve(problem, name) for name in names}  # of one that is not installed there is nothing
    best = min(steps.min(initial=np.inf) for _, steps in curves.values())
    rows = []
    for name, (seconds, steps) in sorted(curves.items(), key=lambda item: item[1][1].min(initial=np.inf)):
        row: dict[str, Any] = {"strategy": name}
        for moment in MOMENTS:
            known = steps[seconds <= moment].min(initial=np.inf)
            row[f"ms at {moment:g} s"] = float(known * 1e3) if np.isfinite(known) else "-"
        near = seconds[steps <= best * (1 + NEAR)]
        row[f"s to {NEAR:.0%}"] = float(near[0]) if len(near) else "-"
        rows.append(row)
    return rows


def _curve(problem: Problem, name: str) -> tuple[Any, Any]:
    """Returns when a strategy found what: seconds and step seconds, one for each proposal."""
    simulator, points = Simulator(problem), list[tuple[float, float]]()
    simulator(np.argmax(problem.allowed, axis=1)[None])  # compiled, and the tables made, before the clock runs

    def keep(progress: Progress) -> None:
        points.append((progress.seconds, progress.step_seconds))

    with suppress(StrategyError):
        Planner(problem, Request(name, budget=Budget(seconds=SECONDS))).search(keep, evaluator=simulator)
    seconds, steps = np.array(points).reshape(-1, 2).T
    return seconds, steps
