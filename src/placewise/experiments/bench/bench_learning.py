"""How the learning strategies compare on the models of Post's figure 2 and appendix: `placewise bench learning`."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from placewise.experiments.bench import Benchmark, Findings, Rows, option

if TYPE_CHECKING:
    from placewise.core.problem import Problem
    from placewise.search.driver import JudgedBatch
    from placewise.simulate.simulator import Simulator

MACHINES = {"resnet:depth=50": "2xK80", "inception-v3": "4xK80", "resnet:depth=101": "8xK80"}

OTHER_MACHINE = "4xK80"  # of other models

BUDGET, SEEDS = 2400, 5

WINDOW, EARLY = 120, 300  # samples of which an average is taken; evaluations after which the early average ends


class Contestant(NamedTuple):
    """A strategy with settings, and what to call them."""

    strategy: str
    variant: str = "default"
    settings: Mapping[str, str] = {}


AS_PRINTED = {"failing_seconds": "100", "grouping": "colocated"}  # a step that fails counts 100 s, no groups are merged

GRADIENTS = ("post", "ppo", "policy-gradient")

CONTESTANTS = (
    *(Contestant(name) for name in ("post", "cross-entropy", "ppo", "policy-gradient")),
    *(Contestant(name, "raw", {"advantage": "raw"}) for name in GRADIENTS),
    *(Contestant(name, "normalised", {"advantage": "normalised"}) for name in GRADIENTS),
    Contestant("post", "as printed", {"advantage": "raw", **AS_PRINTED}),
    Contestant("cross-entropy", "as printed", AS_PRINTED),
    *(Contestant(name, "as printed", {"advantage": "raw", **AS_PRINTED}) for name in ("ppo", "policy-gradient")),
    *(Contestant(name) for name in ("random", "hill-climb", "genetic")),
    *(Contestant(name, "random start", {"start": "random"}) for name in ("hill-climb", "genetic")),
    Contestant("heft"),
)


@dataclass(frozen=True)
class Learning(Benchmark):
    """What learning strategies sample and find with 2,400 evaluations, over five seeds (Post's figure 2)."""

    models: tuple[str, ...] = option("models", "only these models", default=tuple(MACHINES))

    def run(self) -> Findings:
        """Returns the average step of 120 samples, early and at the end, and the best step: mean and deviation over seeds.

        HEFT is not a search: its average is that of its proposals.
        """
        from placewise.core.cluster import Cluster
        from placewise.core.problem import Problem
        from placewise.models import load_graph
        from placewise.simulate.simulator import Simulator

        rows: Rows = []
        for model in self.models:
            problem = Problem.of(load_graph(model), Cluster.load(MACHINES.get(model, OTHER_MACHINE)))
            simulator = Simulator(problem)
            for contestant in CONTESTANTS:
                rows.append({"model": model, "machine": problem.cluster.name, **_row(problem, simulator, contestant)})
        return self.findings(rows)


def _row(problem: "Problem", simulator: "Simulator", contestant: Contestant) -> dict[str, Any]:
    from placewise.search.budget import Budget
    from placewise.search.driver import search
    from placewise.strategies import make

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

    def batches(self) -> "tuple[JudgedBatch, ...]":
        return ()

    def add(self, step: "JudgedBatch") -> None:
        self.costs += step.evaluation.cost.tolist()
