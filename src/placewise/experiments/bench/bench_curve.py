"""How fast strategies get to a good placement: `placewise bench curve`."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placewise.experiments.bench import Benchmark, Findings, Rows, fast_strategies, option

if TYPE_CHECKING:
    from placewise.core.arrays import Floats
    from placewise.core.problem import Problem
    from placewise.search.driver import Progress

MOMENTS = (0.5, 1.0, 2.0, 5.0, 10.0)  # seconds of a search

NEAR = 0.05  # above the best step of all strategies


@dataclass(frozen=True)
class BestOverTime(Benchmark):
    """How fast each strategy finds a good placement."""

    model: str = option("model", default="nmt:layers=4")
    cluster: str = option("cluster", default="4xK80")
    strategies: tuple[str, ...] = ()  # empty: all but exact and the neural ones, which propose too little in this time
    seconds: float = MOMENTS[-1]  # for each search

    def run(self) -> Findings:
        """Searches with one strategy after the other."""
        from placewise.core.cluster import Cluster
        from placewise.core.problem import Problem
        from placewise.models import load_graph

        problem = Problem.of(load_graph(self.model), Cluster.load(self.cluster))
        return self.findings(curve_rows({name: self._curve(problem, name) for name in self.strategies or fast_strategies()}))

    def _curve(self, problem: "Problem", strategy: str) -> "tuple[Floats, Floats]":
        """Returns the seconds and the best step seconds after each proposal of a strategy; empty if it can't be used."""
        import numpy as np

        from placewise.core.errors import StrategyError
        from placewise.search.budget import Budget
        from placewise.search.planner import Planner
        from placewise.search.request import Request
        from placewise.simulate.simulator import Simulator

        simulator, points = Simulator(problem), list[tuple[float, float]]()
        simulator(np.argmax(problem.allowed, axis=1)[None])  # compiles, and fills the tables, before the clock runs

        def keep(progress: "Progress") -> None:
            points.append((progress.seconds, progress.step_seconds))

        with suppress(StrategyError):
            Planner(problem, Request(strategy, budget=Budget(seconds=self.seconds))).search(keep, evaluator=simulator)
        seconds, steps = np.array(points).reshape(-1, 2).T
        return seconds, steps


def curve_rows(curves: "Mapping[str, tuple[Floats, Floats]]") -> Rows:
    """Returns each strategy's best milliseconds at some moments, and when it was within 5% of the best; best first."""
    best = min(_lowest(steps) for _, steps in curves.values())
    rows: Rows = []
    for name, (seconds, steps) in sorted(curves.items(), key=lambda item: _lowest(item[1][1])):
        row: dict[str, Any] = {"strategy": name}
        for moment in MOMENTS:
            known = _lowest(steps[seconds <= moment])
            row[f"ms at {moment:g} s"] = known * 1e3 if math.isfinite(known) else "-"
        near = seconds[steps <= best * (1 + NEAR)]
        row[f"s to {NEAR:.0%}"] = float(near[0]) if len(near) else "-"
        rows.append(row)
    return rows


def _lowest(steps: "Floats") -> float:
    return float(steps.min(initial=math.inf))
