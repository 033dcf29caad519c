"""The best placement and launch order, proved to be the best: for steps of few ops."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from placewise.bounds import bound
from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.problem import Problem
from placewise.strategies.exact_logic import import_solver
from placewise.strategies.exact_model import Program
from placewise.strategies.exact_solving import longest_seconds, solve
from placewise.strategies.sampling import single_placements

ROUNDING = 1e-6  # relative: what rounding times down to the solver's units may hide


@dataclass(frozen=True)
class Exact:
    """Solves placement and order together as a constraint program (CP-SAT), as far as `effort` goes.

    Begins with everything on one device; for a step of more than `max_ops` ops that is all it proposes. Its notes have the
    best bound so far, and a status: begun, too large, unknown, feasible, infeasible (nothing fits) or optimal.
    """

    max_ops: int = 48
    effort: float = 60.0  # the solver's own, repeatable measure of time: about seconds
    first_effort: float = 1.0  # of the first attempt; each further one has twice as much

    def __post_init__(self) -> None:
        if self.max_ops < 0:
            raise ValueError(f"max_ops must be at least 0, it is {self.max_ops}")
        for name in ("effort", "first_effort"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, it is {getattr(self, name)}")

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placements on one device, then better ones; the last proposal says again what is the best, and why."""
        import_solver()
        best = _Best(problem, bound(problem).seconds)
        is_large = problem.num_ops > self.max_ops
        notes = best.notes("too large" if is_large else "begun")
        best.take(Proposal(singles := single_placements(problem)), (yield Proposal(singles, notes=notes)))
        if is_large:
            return
        if best.is_proved:
            yield best.again("optimal")
            return
        program, seed = Program(problem, longest_seconds(problem)), int(rng.integers(2**31))
        spent, effort, status = 0.0, self.first_effort, "unknown"
        while spent < self.effort and status in ("unknown", "feasible"):
            answer = solve(program, min(effort, self.effort - spent), seed, best.hint)
            spent, effort, status = spent + effort, 2 * effort, answer.status
            best.bound_seconds = max(best.bound_seconds, answer.bound_seconds)
            if answer.placement is not None and answer.order is not None:
                proposal = Proposal(answer.placement[None], answer.order[None], best.notes(status))
                best.take(proposal, (yield proposal))
                status = "optimal" if best.is_proved else status
        if status not in ("optimal", "feasible") or best.status != status:
            yield best.again(status)


@dataclass
class _Best:
    """The best so far."""

    problem: Problem
    bound_seconds: float
    step_seconds: float = np.inf
    placement: Ints | None = None
    order: Ints | None = None
    status: str = ""

    @property
    def is_proved(self) -> bool:
        """Whether nothing can be better, but for rounding."""
        return self.step_seconds <= self.bound_seconds * (1 + ROUNDING)

    @property
    def hint(self) -> tuple[Ints, Ints] | None:
        """Where the solver may begin."""
        return None if self.placement is None or self.order is None else (self.placement, self.order)

    def take(self, proposal: Proposal, evaluation: Evaluation) -> None:
        """Takes the best of a judged batch in, if it fits and is better."""
        self.status = str(proposal.notes.get("status", ""))
        seconds = np.where(evaluation.overflow_bytes == 0, evaluation.step_seconds, np.inf)
        row = int(seconds.argmin())
        if seconds[row] < self.step_seconds:
            self.step_seconds, self.placement = float(seconds[row]), proposal.placements[row]
            self.order = None if proposal.orders is None else proposal.orders[row]

    def notes(self, status: str) -> dict[str, Any]:
        """Returns what is known now."""
        return {"status": status, "bound_seconds": self.bound_seconds}

    def again(self, status: str) -> Proposal:
        """Returns the best once more, or everything on the first device where nothing fits."""
        placement = single_placements(self.problem)[0] if self.placement is None else self.placement
        orders = None if self.placement is None or self.order is None else self.order[None]
        return Proposal(placement[None], orders, self.notes(status))
