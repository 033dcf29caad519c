"""What the solver finds for a constraint program of placement and order."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.problem import Problem
from placewise.simulate.tables import unique_reads
from placewise.strategies.exact_logic import import_solver
from placewise.strategies.exact_model import Program


class Answer(NamedTuple):
    """What the solver found."""

    status: str  # "optimal", "feasible", "infeasible", "unknown"
    bound_seconds: float
    placement: Ints | None  # [groups]
    order: Ints | None  # [ops]


def longest_seconds(problem: Problem) -> float:
    """Returns a time that no step exceeds: all ops and all copies, each at its slowest, one after the other."""
    _, tensors = unique_reads(problem.graph.ops.reads)
    cluster, read = problem.cluster, np.unique(tensors)
    slowest = problem.graph.tensors.nbytes[read] / cluster.bytes_per_second.min() + cluster.latency_seconds.max()
    copies = (slowest.sum() + cluster.dispatch_seconds * len(read)) * (problem.num_devices - 1)
    ops = np.where(problem.allowed[problem.op_groups], problem.op_seconds, 0.0).max(axis=1, initial=0.0)
    return float(ops.sum() + problem.num_ops * cluster.dispatch_seconds + copies)


def solve(program: Program, effort: float, seed: int, hint: tuple[Ints, Ints] | None) -> Answer:
    """Returns what the solver finds with an amount of its own, repeatable measure of time (about seconds)."""
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
    placement = np.array(rows, np.int64).reshape(program.problem.num_groups, -1).argmax(axis=1)
    order = np.argsort([solver.value(place) for place in program.position], kind="stable")
    return Answer(word, bound, placement, order.astype(np.int64))
