"""auto that places coarse blocks first: whole modules, and few blocks of neighbours. Then walks begin at what that found."""

from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from placewise.core.contracts import Search
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.auto import Auto, nothing, propose
from placewise.strategies.auto.candidates import Candidate, best_first, best_of
from placewise.strategies.auto.starts import growing_portfolio
from placewise.strategies.blocks import Blocks

GROUPINGS = ("module", "coarse:64", "coarse:200")

ROUNDS = 12  # of the walks with each grouping: one cycle

LEAST_GROUPS = 2  # with which there is something to decide


@dataclass(frozen=True, eq=False)
class CoarseFirst:
    """Walks that move whole blocks, for each grouping, and then auto from what they found and from its own starts.

    Plans of few blocks need few copies, and on large steps they are often the faster ones too: there are fewer of them.
    """

    auto: Auto = field(default_factory=Auto)
    groupings: tuple[str, ...] = GROUPINGS

    @property
    def chooses_options(self) -> bool:
        """Whether it chooses among optional ops itself."""
        return self.auto.chooses_options

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the best start, what the walks over blocks find, and then what auto finds, without end."""
        if problem.graph.has_options or not problem.num_ops or problem.num_devices == 1:
            yield from self.auto.search(problem, rng)
            return
        model = Simulator(problem)
        best, starts = np.inf, list[Candidate]()
        for starts in self.auto.begun(model, growing_portfolio(model, rng)):
            is_better, best = starts[0].cost < best, min(best, starts[0].cost)
            yield propose(starts[:1], {"stage": "start"}) if is_better else nothing(problem)
        found: list[Candidate] = []
        for grouping in self.groupings:
            blocks = Blocks.of(problem, grouping)
            if not LEAST_GROUPS <= blocks.num_blocks < problem.num_groups:
                continue
            merged = blocks.of_group[problem.merged]
            coarse = Problem(problem.graph, problem.cluster, grouping, merged, problem.op_seconds, blocks.allowed)
            coarse_model = Simulator(coarse)
            first = best_first([Candidate.of(coarse_model, blocks.contract(start.placement)) for start in starts])
            for candidates, notes in islice(self.auto.walk_from(coarse_model, first, rng), ROUNDS):
                placements = blocks.expand(np.stack([candidate.placement for candidate in candidates]))
                whole = [
                    candidate._replace(placement=placement)
                    for candidate, placement in zip(candidates, placements, strict=True)
                ]
                yield propose(whole, {**notes, "stage": "blocks", "grouping": grouping})
            found.append(best_of(whole))
        mixed = [*starts[:2], *best_first(found)[:1], *starts[2:]]  # one of the first walks begins at what the blocks found
        for candidates, notes in self.auto._walks(model, mixed, rng):
            yield propose(candidates, notes)
