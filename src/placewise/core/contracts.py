"""The architecture on one page: strategies propose placements, evaluators judge them, a driver connects the two.

A strategy *yields* a batch of placements and *receives* their evaluation: HEFT is a single yield, Post a loop. The driver
owns the budget, the record, the clock and the seed. A strategy never prints, never reads the clock and never calls an
evaluator on its own, so equal budgets are equal by construction.
"""

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.problem import Problem


class Evaluation(NamedTuple):
    """How good each placement of a batch is."""

    cost: Floats  # [batch], what a strategy minimises: step_seconds, and more where a placement does not fit
    step_seconds: Floats  # [batch]
    overflow_bytes: Ints  # [batch], by how much the peaks exceed the devices' memories in total; 0: it fits


class Proposal(NamedTuple):
    """A batch of placements to judge."""

    placements: Ints  # [batch, groups]
    orders: Ints | None = None  # [batch, ops], None: the evaluator chooses
    notes: Mapping[str, Any] = {}  # loss, entropy, bound...: recorded with the proposal


Search = Generator[Proposal, Evaluation, None]


class Evaluator(Protocol):
    """Judges placements. A simulator, a pool, a cache, a Ray cluster and real hardware all have this type."""

    def __call__(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        """Returns the evaluation of a batch; a placement's result does not depend on the rest of the batch."""
        ...


class Strategy(Protocol):
    """Proposes placements: a frozen dataclass whose fields are the hyper-parameters."""

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields proposals, receives their evaluations, and returns when it has nothing left to propose."""
        ...
