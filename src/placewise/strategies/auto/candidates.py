"""Candidates: placements with a launch order that the simulator has judged."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints
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
        given = None if order is None else np.asarray(order, np.int64)[None]
        simulated = model.simulate(placement[None], given, keep_orders=True)
        assert simulated.orders is not None
        evaluation = model.evaluation(simulated.step_seconds, simulated.peak_bytes)
        fullness = (simulated.peak_bytes[0] / np.maximum(model.problem.cluster.memory_bytes, 1)).max()
        return cls(
            cost=float(evaluation.cost[0]),
            seconds=float(evaluation.step_seconds[0]),
            overflow_bytes=int(evaluation.overflow_bytes[0]),
            fullness=float(fullness),
            placement=placement,
            order=simulated.orders[0],
        )


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
