"""The simulator as a model of a real machine: measured step times correct its op and copy times."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.problem import Problem
from placewise.machines.variants import with_launches
from placewise.simulate.flat_problem import Int32s
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.candidates import Candidate

LEGS = ("copy", "host")  # what a critical path has besides ops: copies, and launches

KINDS = 8  # kinds of op with a factor of their own: those with the most time on critical paths
TRUST = 0.05  # in the model: a factor of 2 weighs as much as an error of this share of a step's time
TURNS = 3  # of fitting, as critical paths change with the factors
APART = 0.02  # share of groups in which placements worth measuring differ


class MeasuredPlacement(NamedTuple):
    """A placement and its measured step time."""

    placement: Ints  # [groups]
    order: Int32s  # [ops]
    seconds: float


def correct_times(problem: Problem, measured: Sequence[MeasuredPlacement]) -> Problem:
    """Returns the problem with op and copy times that explain the measurements better.

    A step's time is the sum over its critical path. Factors for the commonest kinds of op there, for all other kinds, for
    copies and for the host's launches are fitted by least squares of relative errors; a ridge keeps them near 1.
    """
    for _ in range(TURNS):
        model = Simulator(problem)
        paths = [_path_seconds(model, m) for m in measured]
        total: dict[str, float] = {}
        for path in paths:
            for kind, seconds in path.items():
                total[kind] = total.get(kind, 0.0) + seconds
        kinds = sorted((kind for kind in total if kind not in LEGS), key=lambda kind: (-total[kind], kind))[:KINDS]
        columns = [*kinds, *LEGS, "other"]
        rows = np.zeros((len(measured), len(columns)))
        for row, (path, m) in enumerate(zip(paths, measured, strict=True)):
            for kind, seconds in path.items():
                rows[row, columns.index(kind if kind in columns else "other")] += seconds / m.seconds
        ridge = TRUST * np.eye(len(columns))
        design, target = np.concatenate([rows, ridge]), np.concatenate([np.ones(len(measured)), ridge.sum(axis=1)])
        factors = np.clip(np.linalg.lstsq(design, target, rcond=None)[0], 0.2, 5.0)
        problem = _scaled(problem, dict(zip(columns, factors.tolist(), strict=True)))
    return problem


def pick_different(candidates: Sequence[Candidate], measured: Sequence[Ints], count: int) -> list[Candidate]:
    """Returns the best `count` candidates (sorted by cost) that differ from each other and from what was measured."""
    chosen: list[Candidate] = []
    known = list(measured)
    for apart in (APART, 0.0):  # similar ones are better than none
        for candidate in candidates:
            if len(chosen) < count and all((candidate.placement != other).mean() > apart for other in known):
                chosen.append(candidate)
                known.append(candidate.placement)
    return chosen


def _path_seconds(model: Simulator, measured: MeasuredPlacement) -> dict[str, float]:
    """Returns the seconds of each kind of op, of copies and of launches on the critical path."""
    schedule = model.schedule(measured.placement, measured.order.astype(np.int64))
    kinds, found = model.problem.graph.ops.kinds, dict[str, float]()
    for leg in schedule.critical_path:
        kind = kinds[leg.number] if leg.kind == "op" else leg.kind
        found[kind] = found.get(kind, 0.0) + leg.end - leg.start
    return found


def _scaled(problem: Problem, factors: dict[str, float]) -> Problem:
    """Returns the problem with the times of each kind of op, of copies and of launches multiplied by their factors."""
    of_op = np.array([factors.get(kind, factors["other"]) for kind in problem.graph.ops.kinds])
    links = tuple(
        replace(
            link,
            bytes_per_second=link.bytes_per_second / factors["copy"],
            latency_seconds=link.latency_seconds * factors["copy"],
            delay_seconds=link.delay_seconds * factors["copy"],
        )
        for link in problem.cluster.links
    )
    cluster = replace(with_launches(problem.cluster, factors["host"]), links=links)
    return replace(problem, op_seconds=problem.op_seconds * of_op[:, None], cluster=cluster)
