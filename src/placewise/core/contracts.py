"""The architecture on one page: strategies propose placements, evaluators judge them, a driver passes one to the other.

A strategy *yields* a batch of placements and *receives* their evaluation: HEFT is a single yield, Post a loop. The driver
owns the budget, the record, the clock and the seed; a strategy never prints, never times and never evaluates behind the
driver's back, so equal budgets are equal by construction.
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
    overflow_bytes: Ints  # [batch], the bytes over the devices' memories, added up; 0: it fits


class Proposal(NamedTuple):
    """A batch of placements to judge."""

    placements: Ints  # [batch, groups]
    orders: Ints | None = None  # [batch, ops], None: the evaluator's own
    notes: Mapping[str, Any] = {}  # loss, entropy, bound...: recorded, never printed


Search = Generator[Proposal, Evaluation, None]


class Evaluator(Protocol):
    """Judges placements: a simulator, a pool, a cache, a Ray cluster and real hardware are all this one type."""

    def __call__(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        """Returns the evaluation of a batch, the same whatever the batch's other rows are."""
        ...


class Strategy(Protocol):
    """Proposes placements: a frozen dataclass whose fields are the hyper-parameters."""

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields proposals, receives their evaluations, and returns when it has nothing more to propose."""
        ...
