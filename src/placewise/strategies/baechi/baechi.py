"""Baechi's three placers (Jeon, Cai, Srivastava et al., SoCC 2020): m-TOPO, m-ETF and m-SCT.

m-ETF and m-SCT have their own model of the machine; docs/strategies/m-etf.md tells where it differs from the simulator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from placewise.core.arrays import Bools, Ints, Ragged
from placewise.core.contracts import Proposal, Search
from placewise.core.problem import Problem
from placewise.simulate.dependencies import build_dependencies
from placewise.simulate.flat_problem import flatten
from placewise.strategies.baechi.favourite_children import favourite_children
from placewise.strategies.baechi.scheduler import Case, schedule_earliest
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.list_scheduling.insertion import upward_ranks
from placewise.strategies.list_scheduling.tasks import (
    build_tasks,
    group_bytes,
    mean_copy_seconds,
    mean_op_seconds,
    place_the_rest,
    task_edges,
)
from placewise.strategies.memory_repair import propose_or_repair

Devices = Literal["accelerators", "all"]  # as in the paper, no CPUs except for groups that run nowhere else; or all devices

Queue = Literal["channel", "device"]  # copies wait for the machine's channels, or as in Baechi in one queue for a device

Ties = Literal["program", "breadth", "path"]  # go to the first op of the program; as in Baechi breadth first; as in FLB
# (Radulescu and van Gemund 2000) to the op with the longest path behind it


@dataclass(frozen=True)
class MTopo:
    """Fills one device after the other in program order, each up to an equal share of all bytes plus the largest group."""

    devices: Devices = "accelerators"

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields one placement, in the evaluator's own order; then a repaired one if it does not fit."""
        yield from propose_or_repair(problem, Proposal(_fill(problem, _places(problem, self.devices))[None]))


@dataclass(frozen=True)
class MEtf:
    """Always starts the op that can start earliest, on the device where it can, if it fits there.

    It proposes the placement twice: in the evaluator's order, and in the order in which the model starts the ops. Ties go
    to the earlier op of the program, and then to the lowest device.
    """

    devices: Devices = "accelerators"
    queue: Queue = "channel"
    ties: Ties = "program"

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placement twice, in the evaluator's order and in the model's; a repaired one if it does not fit."""
        favourites = np.full(problem.num_ops, -1)
        scheduled = _schedules(problem, _places(problem, self.devices), favourites, self.queue, self.ties)
        yield from propose_or_repair(problem, *scheduled)


@dataclass(frozen=True)
class MSct:
    """m-ETF in which a device waits for the favourite child of the op that it ran last, unless another op is urgent.

    Proposals and ties are as for m-ETF. Edges whose relaxed x is below `threshold` lead to favourites. If the linear program
    takes more than `lp_iterations`, there are no favourites, which is m-ETF.
    """

    devices: Devices = "accelerators"
    queue: Queue = "channel"
    ties: Ties = "program"
    threshold: float = 0.1
    lp_iterations: int = 50_000

    def __post_init__(self) -> None:
        check_fields(self, "threshold", lambda v: 0 <= v <= 0.5, "must be from 0 to 0.5")
        check_fields(self, "lp_iterations", lambda v: v >= 0, "must be at least 0")

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placement twice, in the evaluator's order and in the model's; a repaired one if it does not fit."""
        places = _places(problem, self.devices)
        sources, targets, nbytes = task_edges(problem)
        copies = mean_copy_seconds(problem, nbytes, np.asarray(places.any(axis=0)))
        times = mean_op_seconds(problem, places)
        found = favourite_children(times, sources, targets, copies, self.threshold, self.lp_iterations)
        favourites = np.full(problem.num_ops, -1) if found is None else found
        yield from propose_or_repair(problem, *_schedules(problem, places, favourites, self.queue, self.ties))


def _places(problem: Problem, devices: Devices) -> Bools:
    """Returns where each group may go: [groups, devices]."""
    if devices == "all":
        return np.array(problem.allowed)
    places = problem.allowed & np.array([device.kind != "cpu" for device in problem.cluster.devices])
    return np.where(places.any(axis=1, keepdims=True), places, problem.allowed)


def _fill(problem: Problem, places: Bools) -> Ints:
    """Returns the placement [groups] that fills one device after the other.

    A group that can't run on the current device, or that no device has room for, goes to the device with the most room
    left; ties go to the lowest.
    """
    nbytes = group_bytes(problem)
    targets = np.flatnonzero(places.any(axis=0)).tolist()
    share = int(nbytes.sum()) // max(len(targets), 1) + int(nbytes.max(initial=0))
    room = np.minimum(problem.cluster.memory_bytes, min(share, np.iinfo(np.int64).max))
    placement = np.full(problem.num_groups, -1)
    for group in problem.op_groups[np.sort(np.unique(problem.op_groups, return_index=True)[1])].tolist():
        while targets and places[group, targets[0]] and room[targets[0]] < nbytes[group]:
            targets.pop(0)
        here = targets[0] if targets and places[group, targets[0]] else -1
        device = here if here >= 0 else int(np.where(places[group], room, np.iinfo(np.int64).min).argmax())
        placement[group] = device
        room[device] -= nbytes[group]
    return place_the_rest(problem, placement)


def _schedules(problem: Problem, places: Bools, favourites: Ints, queue: Queue, ties: Ties) -> tuple[Proposal, Proposal]:
    """Returns the placement of the model's schedule, and the same with the order of its starts."""
    ranks = _RANKS[ties](problem)
    members = Ragged.grouped(problem.op_groups, np.arange(problem.num_ops), problem.num_groups)
    case = Case(
        flatten(problem), queue == "device", build_dependencies(problem), places, favourites,
        np.array(members.offsets), np.array(members.values), ranks, np.argsort(ranks),
    )  # fmt: skip
    state = schedule_earliest(case)
    placement = place_the_rest(problem, state.devices)
    notes = {"model_seconds": float(state.ends.max(initial=0.0)), "num_favourites": int((favourites >= 0).sum())}
    return Proposal(placement[None], None, notes), Proposal(placement[None], state.order[None], notes)


def _in_program_order(problem: Problem) -> Ints:
    return np.arange(problem.num_ops)


def longest_path_first(problem: Problem) -> Ints:
    """Returns each op's place in the order of falling upward rank, with mean times; ties keep the program's order: [ops]."""
    tasks = build_tasks(problem)
    copies = mean_copy_seconds(problem, tasks.output_bytes, np.ones(problem.num_devices, np.bool_))
    falling = np.argsort(-upward_ranks(tasks, mean_op_seconds(problem, problem.allowed), copies), kind="stable")
    ranks = np.empty(problem.num_ops, np.int64)
    ranks[falling] = np.arange(problem.num_ops)
    return ranks


def breadth_first(problem: Problem) -> Ints:
    """Returns each op's place in the order in which ops have all inputs if they run first come, first served: [ops]."""
    sources, targets, _ = task_edges(problem)
    followers = Ragged.grouped(sources, targets, problem.num_ops)
    waiting = np.bincount(targets, minlength=problem.num_ops).tolist()
    ends, targets_of = followers.offsets.tolist(), followers.values.tolist()
    queue = [n for n, count in enumerate(waiting) if not count]
    for n in queue:  # it grows
        for target in targets_of[ends[n] : ends[n + 1]]:
            waiting[target] -= 1
            if not waiting[target]:
                queue.append(target)
    ranks = np.empty(problem.num_ops, np.int64)
    ranks[queue] = np.arange(problem.num_ops)
    return ranks


_RANKS: dict[str, Callable[[Problem], Ints]] = {
    "program": _in_program_order,
    "breadth": breadth_first,
    "path": longest_path_first,
}
