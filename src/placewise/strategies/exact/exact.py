"""The best placement and launch order, with a proof, for steps with few ops."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from placewise.bounds.best_bound import bound
from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.problem import NOWHERE, Problem
from placewise.simulate.longest_step import longest_step_seconds
from placewise.strategies.exact.constraint_program import ConstraintProgram, import_solver
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.sampling import single_placements

ROUNDING = 1e-6  # relative error from rounding times down to the solver's units


@dataclass(frozen=True)
class Exact:
    """Solves placement, order and the choice of optional ops together as a constraint program (CP-SAT), within an `effort`.

    It begins with everything on one device; for a step with more than `max_ops` ops it proposes nothing else. Its notes have
    the best bound so far, and a status: begun, too large, unknown, feasible, infeasible (nothing fits) or optimal.
    """

    max_ops: int = 48
    effort: float = 60.0  # the solver's own, repeatable measure of time: about seconds
    first_effort: float = 1.0  # of the first attempt; each further one has twice the effort of the last

    def __post_init__(self) -> None:
        check_fields(self, "max_ops", lambda v: v >= 0, "must be at least 0")
        check_fields(self, "effort first_effort", lambda v: v > 0, "must be above 0")

    @property
    def chooses_options(self) -> bool:
        """Whether it chooses among optional ops itself."""
        return True

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placements on one device, then better ones; at last the best one again, with its status."""
        import_solver()
        best = _Best(problem, bound(problem).seconds)
        is_large = problem.num_ops > self.max_ops
        notes = best.notes("too large" if is_large else "begun")
        singles = _plain_placements(problem)
        best.take(Proposal(singles), (yield Proposal(singles, notes=notes)))
        if is_large:
            return
        if best.is_proved:
            yield best.again("optimal")
            return
        program, seed = ConstraintProgram(problem, longest_step_seconds(problem)), int(rng.integers(2**31))
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
        """Whether nothing can be better, except for rounding."""
        return self.step_seconds <= self.bound_seconds * (1 + ROUNDING)

    @property
    def hint(self) -> tuple[Ints, Ints] | None:
        """Where the solver may begin."""
        return None if self.placement is None or self.order is None else (self.placement, self.order)

    def take(self, proposal: Proposal, evaluation: Evaluation) -> None:
        """Takes the best of an evaluated batch if it fits and is better."""
        self.status = str(proposal.notes.get("status", ""))
        seconds = np.where(evaluation.overflow_bytes == 0, evaluation.step_seconds, np.inf)
        row = int(seconds.argmin())
        if seconds[row] < self.step_seconds:
            self.step_seconds, self.placement = float(seconds[row]), proposal.placements[row]
            self.order = None if proposal.orders is None else proposal.orders[row]

    def notes(self, status: str) -> dict[str, Any]:
        """Returns the notes of the next proposal."""
        return {"status": status, "bound_seconds": self.bound_seconds}

    def again(self, status: str) -> Proposal:
        """Returns the best again, or everything on the first device if nothing fits."""
        placement = _plain_placements(self.problem)[0] if self.placement is None else self.placement
        orders = None if self.placement is None or self.order is None else self.order[None]
        return Proposal(placement[None], orders, self.notes(status))


def _plain_placements(problem: Problem) -> Ints:
    """Returns the placements with everything on one device, and no optional ops: [count, groups]."""
    return np.where(problem.optional, NOWHERE, single_placements(problem))


class Answer(NamedTuple):
    """What the solver found."""

    status: str  # "optimal", "feasible", "infeasible", "unknown"
    bound_seconds: float
    placement: Ints | None  # [groups]
    order: Ints | None  # [ops]


def solve(program: ConstraintProgram, effort: float, seed: int, hint: tuple[Ints, Ints] | None) -> Answer:
    """Returns what the solver finds within an effort."""
    cp_model = import_solver()
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = effort
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    program.model.clear_hints()
    if hint is not None:
        placement, order = hint
        for group, row in enumerate(program.on):
            for d, literal in enumerate(row):
                if not isinstance(literal, int):
                    program.model.add_hint(literal, int(placement[group]) == d)
        for place, n in enumerate(order.tolist()):
            program.model.add_hint(program.position[n], place)
    status = solver.solve(program.model)
    words = {cp_model.OPTIMAL: "optimal", cp_model.FEASIBLE: "feasible", cp_model.INFEASIBLE: "infeasible"}
    word = words.get(status, "unknown")
    bound = max(solver.best_objective_bound, 0.0) * program.unit if word != "infeasible" else 0.0
    if word not in ("optimal", "feasible"):
        return Answer(word, bound, None, None)
    rows = [[0 if isinstance(literal, int) else solver.value(literal) for literal in row] for row in program.on]
    chosen = np.array(rows, np.int64).reshape(program.problem.num_groups, -1)
    placement = np.where(chosen.any(axis=1), chosen.argmax(axis=1), NOWHERE)
    order = np.argsort([solver.value(place) for place in program.position], kind="stable")
    return Answer(word, bound, placement, order.astype(np.int64))
