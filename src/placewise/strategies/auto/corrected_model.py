"""The simulator as a model of a machine that measures: what was measured corrects it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import Int32s
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.walkers import Stand

KINDS = 8  # kinds of op that get a factor of their own: those with the most time on critical paths

TRUST = 0.05  # in the model: a factor of 2 weighs as much as an error of this share of a step's time

TURNS = 3  # critical paths change with the factors

APART = 0.02  # the share of groups in which placements worth measuring differ


class CorrectedModel(NamedTuple):
    """A placement that was measured."""

    placement: Ints  # [groups]
    order: Int32s  # [ops]
    seconds: float


def corrected(problem: Problem, measured: Sequence[CorrectedModel]) -> Problem:
    """Returns the problem with op and copy times that explain the measurements better.

    A step's time is the sum over its critical path; a factor for each of the commonest kinds of op there, one for all other
    kinds and one for copies are fitted by least squares of relative errors, held near 1 by a ridge.
    """
    for _ in range(TURNS):
        model = Simulator(problem)
        paths = [_path_seconds(model, m) for m in measured]
        total: dict[str, float] = {}
        for path in paths:
            for kind, seconds in path.items():
                total[kind] = total.get(kind, 0.0) + seconds
        kinds = sorted((kind for kind in total if kind != "copy"), key=lambda kind: (-total[kind], kind))[:KINDS]
        columns = [*kinds, "copy", "other"]
        rows = np.zeros((len(measured), len(columns)))
        for row, (path, m) in enumerate(zip(paths, measured, strict=True)):
            for kind, seconds in path.items():
                rows[row, columns.index(kind if kind in columns else "other")] += seconds / m.seconds
        ridge = TRUST * np.eye(len(columns))
        design, target = np.concatenate([rows, ridge]), np.concatenate([np.ones(len(measured)), ridge.sum(axis=1)])
        factors = np.clip(np.linalg.lstsq(design, target, rcond=None)[0], 0.2, 5.0)
        problem = _scaled(problem, dict(zip(columns, factors.tolist(), strict=True)))
    return problem


def most_different(candidates: Sequence[Stand], measured: Sequence[Ints], count: int) -> list[Stand]:
    """Returns up to `count` of the candidates, which are sorted by cost: the best that differ from all before them."""
    chosen: list[Stand] = []
    known = list(measured)
    for apart in (APART, 0.0):  # rather alike ones than none
        for stand in candidates:
            if len(chosen) < count and all((stand.placement != other).mean() > apart for other in known):
                chosen.append(stand)
                known.append(stand.placement)
    return chosen


def _path_seconds(model: Simulator, measured: CorrectedModel) -> dict[str, float]:
    """Returns the seconds of each kind of op, and of copies, on the critical path."""
    schedule = model.schedule(measured.placement, measured.order.astype(np.int64))
    kinds, found = model.problem.graph.ops.kinds, dict[str, float]()
    for link in schedule.critical_path:
        kind = kinds[link.number] if link.kind == "op" else link.kind
        found[kind] = found.get(kind, 0.0) + link.end - link.start
    return found


def _scaled(problem: Problem, factors: dict[str, float]) -> Problem:
    """Returns the problem with the times of each kind of op, and of copies, multiplied."""
    of_op = np.array([factors.get(kind, factors["other"]) for kind in problem.graph.ops.kinds])
    links = tuple(
        replace(
            link,
            bytes_per_second=link.bytes_per_second / factors["copy"],
            latency_seconds=link.latency_seconds * factors["copy"],
        )
        for link in problem.cluster.links
    )
    cluster = replace(problem.cluster, links=links)
    return replace(problem, op_seconds=problem.op_seconds * of_op[:, None], cluster=cluster)
