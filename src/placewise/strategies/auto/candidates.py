"""Candidates: placements with a launch order that the simulator has judged."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation
from placewise.simulate.flat_problem import Int32s
from placewise.simulate.simulator import Simulator


class Candidate(NamedTuple):
    """A placement in a launch order, and what the simulator predicts for it."""

    cost: float  # seconds, and more where it does not fit
    seconds: float
    overflow_bytes: int
    fullness: float  # the peak of the fullest device over its memory
    placement: Ints  # [groups]
    order: Int32s  # [ops]

    @classmethod
    def of(cls, model: Simulator, placement: Ints, order: Ints | Int32s | None = None) -> "Candidate":
        """Returns the candidate of a placement in this order, or in the model's own."""
        found, _ = candidates_of(model, placement[None], None if order is None else np.asarray(order, np.int64)[None])
        return found[0]


def candidates_of(model: Simulator, placements: Ints, orders: Ints | None) -> tuple[list[Candidate], Evaluation]:
    """Returns the candidates of placements [batch, groups] in orders [batch, ops] or [1, ops], or in the model's own."""
    simulated = model.simulate(placements, orders, keep_orders=True)
    assert simulated.orders is not None
    evaluation = model.evaluation(simulated.step_seconds, simulated.peak_bytes)
    fullness = simulated.peak_bytes / np.maximum(model.problem.cluster.memory_bytes, 1)  # [batch, devices]
    candidates = [
        Candidate(
            cost=float(evaluation.cost[row]),
            seconds=float(evaluation.step_seconds[row]),
            overflow_bytes=int(evaluation.overflow_bytes[row]),
            fullness=float(fullness[row].max()),
            placement=placement,
            order=simulated.orders[row],
        )
        for row, placement in enumerate(placements)
    ]
    return candidates, evaluation


def best_of(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the candidate of least cost; ties go to the first."""
    return min(candidates, key=lambda candidate: candidate.cost)


def best_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates by rising cost, each placement once; ties go to the earlier one."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.cost):
        if not any(np.array_equal(candidate.placement, other.placement) for other in kept):
            kept.append(candidate)
    return kept
