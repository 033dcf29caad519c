"""Baechi's three placers (Jeon, Cai, Srivastava et al., SoCC 2020): m-TOPO, m-ETF and m-SCT.

m-ETF and m-SCT have a model of the machine of their own; docs/strategies says in what it differs from the simulator.
"""

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
from placewise.strategies.list_scheduling.tasks import complete, group_bytes, mean_copy_seconds, mean_op_seconds, task_edges

Devices = Literal["accelerators", "all"]  # all but the CPUs (for groups that can run on one), as in the paper, or all


@dataclass(frozen=True)
class MTopo:
    """One device after the other filled in program order, up to an equal share of the memory and the largest group."""

    devices: Devices = "accelerators"

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields one placement, in the evaluator's own order."""
        yield Proposal(_fill(problem, _places(problem, self.devices))[None])


@dataclass(frozen=True)
class MEtf:
    """Again and again the op that can start earliest, on the device where it can, if it fits there.

    Two proposals: the placement in the evaluator's order, and in the order in which the model starts the ops. Ties go
    to the op that is earlier in the program, and then to the lowest device.
    """

    devices: Devices = "accelerators"

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placement twice: in the evaluator's own order, and in that of the model's schedule."""
        yield from _propose(problem, _places(problem, self.devices), np.full(problem.num_ops, -1))


@dataclass(frozen=True)
class MSct:
    """m-ETF in which a device waits for the favourite child of the op that it ran last, unless another is urgent.

    Proposals and ties are m-ETF's. Edges with a relaxed x below `threshold` lead to favourites. A linear program that
    takes more than `lp_iterations` gives no favourites, which is m-ETF.
    """

    devices: Devices = "accelerators"
    threshold: float = 0.1
    lp_iterations: int = 50_000

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 0.5:
            raise ValueError(f"threshold must be from 0 to 0.5, it is {self.threshold}")
        if self.lp_iterations < 0:
            raise ValueError(f"lp_iterations must be at least 0, it is {self.lp_iterations}")

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placement twice: in the evaluator's own order, and in that of the model's schedule."""
        places = _places(problem, self.devices)
        sources, targets, nbytes = task_edges(problem)
        copies = mean_copy_seconds(problem, nbytes, np.asarray(places.any(axis=0)))
        times = mean_op_seconds(problem, places)
        found = favourite_children(times, sources, targets, copies, self.threshold, self.lp_iterations)
        yield from _propose(problem, places, np.full(problem.num_ops, -1) if found is None else found)


def _places(problem: Problem, devices: Devices) -> Bools:
    """Returns where each group may go: [groups, devices]."""
    if devices == "all":
        return np.array(problem.allowed)
    places = problem.allowed & np.array([device.kind != "cpu" for device in problem.cluster.devices])
    return np.where(places.any(axis=1, keepdims=True), places, problem.allowed)


def _fill(problem: Problem, places: Bools) -> Ints:
    """Returns the placement [groups] that fills one device after the other.

    A group that can't run on the device that is being filled, and one that no device has room for, goes to the device
    with most room left; ties go to the lowest.
    """
    nbytes = group_bytes(problem)
    targets = np.flatnonzero(places.any(axis=0)).tolist()
    share = int(nbytes.sum()) // max(len(targets), 1) + int(nbytes.max(initial=0))
    room = np.minimum(problem.cluster.memory_bytes, share)
    placement = np.full(problem.num_groups, -1)
    for group in problem.op_groups[np.sort(np.unique(problem.op_groups, return_index=True)[1])].tolist():
        while targets and places[group, targets[0]] and room[targets[0]] < nbytes[group]:
            targets.pop(0)
        here = targets[0] if targets and places[group, targets[0]] else -1
        device = here if here >= 0 else int(np.where(places[group], room, np.iinfo(np.int64).min).argmax())
        placement[group] = device
        room[device] -= nbytes[group]
    return complete(problem, placement)


def _propose(problem: Problem, places: Bools, favourites: Ints) -> Search:
    """Yields the model's schedule as a placement, and as a placement with the order of its starts."""
    members = Ragged.grouped(problem.op_groups, np.arange(problem.num_ops), problem.num_groups)
    case = Case(
        flatten(problem), build_dependencies(problem), places, favourites,
        np.array(members.offsets), np.array(members.values),
    )  # fmt: skip
    state = schedule_earliest(case)
    placement = complete(problem, state.devices)
    notes = {"model_seconds": float(state.ends.max(initial=0.0)), "num_favourites": int((favourites >= 0).sum())}
    yield Proposal(placement[None], None, notes)
    yield Proposal(placement[None], state.order[None], notes)
