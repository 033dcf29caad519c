"""Your own strategy in 20 lines: it moves one span of consecutive groups at a time, and keeps what is not worse.

A strategy is a frozen dataclass with one method. It yields a batch of placements and receives their evaluation; the driver
owns the budget, the clock, the seed and the record. It works with every evaluator: simulated, on Ray, measured.
"""

from dataclasses import dataclass

import numpy as np

import placewise as pw
from placewise.core.contracts import Proposal, Search
from placewise.models import load_graph
from placewise.search.budget import Budget
from placewise.search.driver import search


@dataclass(frozen=True)
class Spans:
    """Starts with each group on its first allowed device; ties in a batch go to the first placement."""

    batch: int = 16

    def search(self, problem: pw.Problem, rng: np.random.Generator) -> Search:
        """Yields changes of the best placement so far, forever."""
        best = problem.allowed.argmax(axis=1)  # [groups]
        best_cost = (yield Proposal(best[None])).cost[0]
        while True:
            trials = np.tile(best, (self.batch, 1))  # [batch, groups]
            for trial in trials:
                first, last = np.sort(rng.integers(problem.num_groups + 1, size=2))
                device = rng.integers(problem.num_devices)
                trial[first:last] = np.where(problem.allowed[first:last, device], device, trial[first:last])
            cost = (yield Proposal(trials)).cost  # [batch]
            if cost.min() <= best_cost:
                best, best_cost = trials[cost.argmin()], cost.min()


problem = pw.Problem.of(load_graph("nmt:layers=2,length=10"), pw.Cluster.load("2xK80"))
outcome = search(problem, Spans(), pw.Simulator(problem), budget=Budget(evaluations=600), seed=0)
print(f"spans        {outcome.step_seconds * 1e3:6.1f} ms after {outcome.evaluations} evaluations")
for name in ("gpu-only", "hill-climb"):
    plan = pw.place(problem.graph, problem.cluster, strategy=name, evaluations=600)
    print(f"{name:<12} {plan.step_seconds * 1e3:6.1f} ms after {plan.evaluations} evaluations")
