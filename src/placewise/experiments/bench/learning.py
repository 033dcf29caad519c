"""How strategies that learn a table compare on the models of Post's figure 2 and appendix: `placewise bench learning`."""

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.models import load_graph
from placewise.search.budget import Budget
from placewise.search.driver import JudgedBatch, search
from placewise.simulate.simulator import Simulator
from placewise.strategies import make

Rows = list[dict[str, Any]]

MACHINES = {"resnet:depth=50": "2xK80", "inception-v3": "4xK80", "resnet:depth=101": "8xK80"}  # others: 4xK80

BUDGET, SEEDS, WINDOW, EARLY = 2400, 5, 120, 300


class Contestant(NamedTuple):
    """A strategy with settings, and what to call them."""

    strategy: str
    variant: str = "default"
    settings: Mapping[str, str] = {}


AS_PRINTED = {"failing_seconds": "100", "grouping": "colocated"}

CONTESTANTS = (
    *(Contestant(name) for name in ("post", "cross-entropy", "ppo", "policy-gradient")),
    *(Contestant(name, "raw", {"advantage": "raw"}) for name in ("post", "ppo", "policy-gradient")),
    *(Contestant(name, "normalised", {"advantage": "normalised"}) for name in ("post", "ppo", "policy-gradient")),
    Contestant("post", "as printed", {"advantage": "raw", **AS_PRINTED}),
    Contestant("cross-entropy", "as printed", AS_PRINTED),
    *(Contestant(name, "as printed", {"advantage": "raw", **AS_PRINTED}) for name in ("ppo", "policy-gradient")),
    *(Contestant(name) for name in ("random", "hill-climb", "genetic")),
    *(Contestant(name, "random start", {"start": "random"}) for name in ("hill-climb", "genetic")),
    Contestant("heft"),
)


def bench_learning(models: tuple[str, ...]) -> Rows:
    """Returns the average time of 120 samples, early and at the end, and the best time found: mean and deviation over seeds.

    As printed: the paper's settings, in seconds, every group by itself. HEFT is no search: its average is that of its
    proposals.
    """
    rows = []
    for model in models or tuple(MACHINES):
        problem = Problem.of(load_graph(model), Cluster.load(MACHINES.get(model, "4xK80")))
        simulator = Simulator(problem)
        for contestant in CONTESTANTS:
            rows.append({"model": model, "machine": problem.cluster.name, **_row(problem, simulator, contestant)})
    return rows


def _row(problem: Problem, simulator: Simulator, contestant: Contestant) -> dict[str, Any]:
    early, last, bests, seconds = [], [], [], 0.0
    for seed in range(SEEDS):
        samples = _Samples()
        strategy = make(contestant.strategy, dict(contestant.settings))
        outcome = search(problem, strategy, simulator, budget=Budget(BUDGET), seed=seed, record=samples)
        early.append(statistics.fmean(samples.costs[:EARLY][-WINDOW:]))
        last.append(statistics.fmean(samples.costs[-WINDOW:]))
        bests.append(outcome.step_seconds)
        seconds += outcome.seconds
    return {
        "strategy": contestant.strategy,
        "variant": contestant.variant,
        "samples to 300": statistics.fmean(early),
        "last samples": statistics.fmean(last),
        "±": statistics.stdev(last),
        "best": statistics.fmean(bests),
        "± of best": statistics.stdev(bests),
        "search s": seconds / SEEDS,
    }


class _Samples:
    """A record that keeps the cost of every evaluation."""

    def __init__(self) -> None:
        self.costs: list[float] = []

    def batches(self) -> tuple[JudgedBatch, ...]:
        return ()

    def add(self, step: JudgedBatch) -> None:
        self.costs += step.evaluation.cost.tolist()
