"""auto from a given placement on: for a step that is like one that has a plan already."""

from dataclasses import dataclass, field

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Search
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.auto import Auto, propose
from placewise.strategies.auto.candidates import Candidate, best_first


@dataclass(frozen=True, eq=False)
class Continued:
    """Walks from a placement, in its own order and in the one that the simulator chooses."""

    placement: Ints  # [groups]
    order: Ints | None = None  # [ops]
    auto: Auto = field(default_factory=Auto)

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placement itself, then what the walks find after each round, without end."""
        model = Simulator(problem)
        orders = [None] if self.order is None else [None, self.order]
        starts = best_first([Candidate.of(model, self.placement, order) for order in orders])
        yield propose(starts, {"stage": "start"})
        if problem.num_ops and problem.num_devices > 1:
            for candidates, notes in self.auto.walk_from(model, starts, rng):
                yield propose(candidates, notes)
