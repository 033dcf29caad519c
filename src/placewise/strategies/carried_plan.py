"""A plan file as a placement of a problem: of its own graph, or carried over by name to a similar graph or machine."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.carried_placements import FROM_MODULE, FROM_NAME, KnownPlaces
from placewise.core.errors import PlanError
from placewise.core.labels import sum_by_label
from placewise.core.plan import Plan, digest_of_graph
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
from placewise.strategies.list_scheduling.tasks import place_the_rest
from placewise.strategies.memory_repair import repair
from placewise.strategies.single_device import accelerators, move_to_allowed

NEXT_TO_NOTHING = 1e-12  # seconds of ops that do no work, so that they have a vote too


@dataclass(frozen=True, eq=False)
class CarriedPlan:
    """Where an older plan puts the groups of a problem, and how much of the graph it knows."""

    placement: Ints  # [groups]
    order: Ints | None  # [ops]; None unless it is the plan of this very graph, on these devices
    num_ops: int
    by_name: int  # ops that the plan's graph has, too
    by_module: int  # other ops of modules that the plan's graph has, too
    replaced: tuple[str, ...] = ()  # devices of the plan that the machine does not have

    def in_words(self, source: str) -> str:
        """Returns one line on how much of the graph the plan covers."""
        known = self.by_name + self.by_module
        share = known / self.num_ops if self.num_ops else 1.0
        shown = "100%" if known == self.num_ops else f"{min(share, 0.999):.1%}"
        line = f"{source} covers {shown} of the graph: {self.by_name:,} of {self.num_ops:,} ops by name"
        line += f", {self.by_module:,} by module" if self.by_module else ""
        if rest := self.num_ops - known:
            where = "goes where the op before it goes" if rest == 1 else "go where the op before them goes"
            line += f"; {rest:,} {where}"
        if self.replaced:
            line += f"; what ran on {', '.join(self.replaced)} goes to other devices"
        return line


def carry_plan(problem: Problem, path: str) -> CarriedPlan:
    """Returns the placement of a plan file for a problem; a PlanError if the plan is for a graph without a common name.

    Where the plan has devices that the machine does not have, the simulator chooses who takes their place; what then does
    not fit is repaired. A group goes where most of its work goes; ties go to the lowest device.
    """
    plan = Plan.load(path)
    if not is_plan_of(plan, problem):
        return _carried_by_name(problem, plan, path)
    names = problem.cluster.device_names
    if problem.merged.size == problem.num_groups and {*plan.placement} <= {None, *names}:
        placement, order = plan.resolve(problem, path)
        return CarriedPlan(placement, order, problem.num_ops, problem.num_ops, 0)
    if len(plan.placement) != problem.graph.num_groups:
        raise PlanError(
            f"{path}: placement has {len(plan.placement)} entries, the graph has {problem.graph.num_groups} groups"
        )
    places = [plan.placement[group] or names[0] for group in problem.graph.ops.groups.tolist()]  # nowhere: the first
    placement, replaced = _placed(problem, places)
    return CarriedPlan(placement, None, problem.num_ops, problem.num_ops, 0, replaced)


def is_plan_of(plan: Plan, problem: Problem) -> bool:
    """Returns whether a plan says that it is for the problem's graph; one that does not say counts if the sizes agree."""
    if plan.graph_digest is None:
        return not plan.groups or len(plan.placement) == problem.graph.num_groups
    return plan.graph_digest in (digest_of_graph(problem.graph), problem.graph.untimed_digest, problem.graph.digest)


def _carried_by_name(problem: Problem, plan: Plan, path: str) -> CarriedPlan:
    what = f"{path}: is for another graph than {problem.graph.name!r}"
    if not plan.groups:
        raise PlanError(f"{what}, and has no names of its groups to find them by: place that model again")
    there = [(name, place) for name, place in zip(plan.groups, plan.placement, strict=True) if place is not None]
    known = KnownPlaces.of_names([name for name, _ in there], [place for _, place in there])
    carried = known.carry_to(problem.graph)
    by_name, by_module = (carried.reasons.count(reason) for reason in (FROM_NAME, FROM_MODULE))
    if problem.num_ops and not by_name + by_module:
        raise PlanError(f"{what}, and the two have no op and no module in common")
    placement, replaced = _placed(problem, carried.places)
    return CarriedPlan(placement, None, problem.num_ops, by_name, by_module, replaced)


def _placed(problem: Problem, places: Sequence[str]) -> tuple[Ints, tuple[str, ...]]:
    """Returns the placement [groups] for the name of a device for each op, and the names that the machine does not have."""
    names = list(problem.cluster.device_names)
    missing = [name for name in dict.fromkeys(places) if name not in names]
    number = {name: label for label, name in enumerate([*names, *missing])}
    num_labels = len(number)
    labels = np.array([number[place] for place in places], np.int64)
    votes = sum_by_label(
        problem.op_groups * num_labels + labels, problem.fastest_seconds + NEXT_TO_NOTHING, problem.num_groups * num_labels
    ).reshape(problem.num_groups, num_labels)
    has_ops = votes.any(axis=1)
    wanted = np.where(has_ops, votes.argmax(axis=1), -1)  # [groups], labels
    if not problem.num_groups:
        return wanted, tuple(missing)
    trials = [_complete(problem, trial) for trial in _without_missing(problem, wanted, missing)]
    model = Simulator(problem)
    best = trials[int(model(np.stack(trials)).cost.argmin())] if len(trials) > 1 else trials[0]
    return (repair(model, best) if problem.num_ops else best), tuple(missing)


def _complete(problem: Problem, wanted: Ints) -> Ints:
    """Returns the placement with every group on a device that can run it; -1 is a group without ops."""
    allowed = move_to_allowed(problem, np.maximum(wanted, 0)[None])[0]
    return place_the_rest(problem, np.where(wanted < 0, -1, allowed))


def _without_missing(problem: Problem, wanted: Ints, missing: list[str]) -> list[Ints]:
    """Returns placements in which other devices have what was on missing ones: [groups] each, -1 for groups without ops.

    Devices of the same kind (gpu in a/gpu:3) take it, or else the accelerators: each of them in turn takes all of it, and
    all of them take a stretch of it.
    """
    if not missing:
        return [wanted]
    seconds = sum_by_label(problem.op_groups, problem.fastest_seconds + NEXT_TO_NOTHING, problem.num_groups)
    trials = [wanted.copy() for _ in range(problem.num_devices + 1)]
    for i, name in enumerate(missing):
        groups = np.flatnonzero(wanted == problem.num_devices + i)
        heirs = _heirs(problem, name)
        for turn, trial in enumerate(trials[:-1]):
            trial[groups] = heirs[(turn + i) % len(heirs)]
        done = np.cumsum(seconds[groups])  # groups are numbered in the order of their first ops
        part = (done - seconds[groups] / 2) / done[-1:].sum() * len(heirs) if len(groups) else done
        trials[-1][groups] = heirs[np.minimum(part.astype(np.int64), len(heirs) - 1)]
    return list(np.unique(np.stack(trials), axis=0))


def _heirs(problem: Problem, name: str) -> Ints:
    """Returns the devices that can take the place of one of this name: [at least 1]."""
    kind = name.rpartition("/")[2].partition(":")[0]
    same = [d for d, known in enumerate(problem.cluster.device_names) if known.rpartition("/")[2].partition(":")[0] == kind]
    return np.array(same, np.int64) if same else accelerators(problem)
