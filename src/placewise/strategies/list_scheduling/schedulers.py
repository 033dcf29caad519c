"""List scheduling: HEFT, CPoP (Topcuoglu, Hariri, Wu 2002) and Mayer's critical path (2017).

All three have their own model of the machine, in which copies never wait; see docs/strategies/heft.md.
"""

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Proposal, Search
from placewise.core.problem import Problem
from placewise.simulate.dependencies import build_dependencies
from placewise.simulate.flat_problem import flatten
from placewise.simulate.kernels import new_workspace
from placewise.simulate.priority import new_priority_workspace, priority_order
from placewise.strategies.list_scheduling.insertion import downward_ranks, schedule_by_insertion, upward_ranks
from placewise.strategies.list_scheduling.tasks import (
    Tasks,
    build_tasks,
    group_bytes,
    mean_copy_seconds,
    mean_op_seconds,
    place_the_rest,
)
from placewise.strategies.memory_repair import propose_or_repair


@dataclass(frozen=True)
class Heft:
    """Puts each op, by falling upward rank, into the gap in which it ends first (Topcuoglu et al. 2002).

    It proposes the placement twice: in the evaluator's order, and in the order in which the model starts the ops. Ties in
    rank go to the earlier op of the program, ties in time to the lowest device.
    """

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placement twice: in the evaluator's own order, and in the order of the model's schedule."""
        tasks = build_tasks(problem)
        ranks, _, _ = _mean_ranks(problem, tasks)
        sequence = np.argsort(-ranks, kind="stable")
        yield from _propose(problem, tasks, sequence, np.full(problem.num_ops, -1))


@dataclass(frozen=True)
class Cpop:
    """Puts the critical path on the device that runs it fastest, all else where it ends first (Topcuoglu et al. 2002).

    Proposals and ties are as for HEFT. An op of the path that can't run on that device goes where it ends first. `rank` is
    the paper's, or SAGA's, in which hardly ever more than the entry op is on the path.
    """

    rank: Literal["paper", "saga"] = "paper"

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placement twice: in the evaluator's own order, and in the order of the model's schedule."""
        tasks = build_tasks(problem)
        upward, op_seconds, _ = _mean_ranks(problem, tasks)
        means = mean_copy_seconds(problem, tasks.input_bytes, np.ones(problem.num_devices, np.bool_))
        priorities = upward + downward_ranks(tasks, op_seconds, means, self.rank == "saga")
        path = critical_path(tasks, priorities) if self.rank == "paper" else _alike(tasks, priorities)
        wanted = np.full(problem.num_ops, -1)
        if len(path):
            can = problem.allowed[problem.op_groups[path]]  # [path, devices]
            seconds = np.where(can, problem.op_seconds[path], problem.fastest_seconds[path][:, None])
            device = int(seconds.sum(axis=0).argmin())
            wanted[path[can[:, device]]] = device
        yield from _propose(problem, tasks, _by_priority(tasks, priorities), wanted)


@dataclass(frozen=True)
class CriticalPath:
    """Puts the critical path on the fastest device, all else where the least work is (Mayer et al. 2017, CP with PCT).

    Groups off the path are placed in program order; ties go to the lowest device. Devices without room for a group's bytes
    are left out; if there is no other, memory does not count for this group.
    """

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the placement twice: in the evaluator's own order, and with the longest remaining path first.

        If neither fits, a repaired one follows.
        """
        tasks = build_tasks(problem)
        ranks, _, output_seconds = _mean_ranks(problem, tasks)
        path = _longest_path(tasks, ranks, output_seconds)
        placement = _balance(problem, path)
        flat, waits = flatten(problem), build_dependencies(problem)
        work, schedule = new_workspace(flat, problem.num_groups), new_priority_workspace(flat, waits)
        work.devices[:] = placement
        priority_order(flat, waits, work, schedule)
        ordered = Proposal(placement[None], schedule.order.astype(np.int64)[None])
        yield from propose_or_repair(problem, Proposal(placement[None]), ordered)


def critical_path(tasks: Tasks, priorities: Floats) -> Ints:
    """Returns the ops of the critical path: the entry op of highest priority, then always the successor of highest priority.

    The paper takes a successor with the entry's own priority; the highest one is the same except for rounding.
    """
    entries = np.flatnonzero(np.diff(tasks.input_ends) == 0)
    path = [int(entries[priorities[entries].argmax()])] if len(entries) else []
    while path:
        successors = tasks.output_ops[tasks.output_ends[path[-1]] : tasks.output_ends[path[-1] + 1]]
        if not len(successors):
            break
        path.append(int(successors[priorities[successors].argmax()]))
    return np.array(path, np.int64)


def _alike(tasks: Tasks, priorities: Floats) -> Ints:
    """Returns the ops with the priority of the highest entry op."""
    entries = np.flatnonzero(np.diff(tasks.input_ends) == 0)
    return np.flatnonzero(np.isclose(priorities, priorities[entries].max(initial=0.0)))


def _mean_ranks(problem: Problem, tasks: Tasks) -> tuple[Floats, Floats, Floats]:
    """Returns the upward ranks [ops] and the mean times behind them: of ops [ops], of copies [edges, as `output_ops`]."""
    op_seconds = mean_op_seconds(problem, problem.allowed)
    output_seconds = mean_copy_seconds(problem, tasks.output_bytes, np.ones(problem.num_devices, np.bool_))
    return upward_ranks(tasks, op_seconds, output_seconds), op_seconds, output_seconds


def _propose(problem: Problem, tasks: Tasks, sequence: Ints, wanted: Ints) -> Search:
    """Yields the placement of the schedule by insertion, then the same with the order of its starts."""
    placement, starts, ends = schedule_by_insertion(tasks, sequence, wanted)
    placement = place_the_rest(problem, placement)
    notes = {"model_seconds": float(ends.max(initial=0.0))}
    yield Proposal(placement[None], None, notes)
    position = np.empty(problem.num_ops, np.int64)
    position[sequence] = np.arange(problem.num_ops)  # ops that start together stay in this order
    yield Proposal(placement[None], np.lexsort((position, starts))[None], notes)


def _by_priority(tasks: Tasks, priorities: Floats) -> Ints:
    """Returns the ops in the order of a priority queue of those whose inputs are out: the highest priority first."""
    waiting, targets = np.diff(tasks.input_ends).tolist(), tasks.output_ops.tolist()
    first, urgency = tasks.output_ends.tolist(), (-priorities).tolist()
    queue = [(urgency[n], n) for n, count in enumerate(waiting) if not count]
    heapq.heapify(queue)
    sequence = []
    while queue:
        _, n = heapq.heappop(queue)
        sequence.append(n)
        for target in targets[first[n] : first[n + 1]]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(queue, (urgency[target], target))
    return np.array(sequence, np.int64)


def _longest_path(tasks: Tasks, ranks: Floats, output_seconds: Floats) -> Ints:
    """Returns the ops of a longest path; ties go to the lowest index."""
    path = [int(ranks.argmax())] if len(ranks) else []
    while path:
        edges = slice(tasks.output_ends[path[-1]], tasks.output_ends[path[-1] + 1])
        if edges.start == edges.stop:
            break
        path.append(int(tasks.output_ops[edges][(output_seconds[edges] + ranks[tasks.output_ops[edges]]).argmax()]))
    return np.array(path, np.int64)


def _balance(problem: Problem, path: Ints) -> Ints:
    """Returns the placement [groups] with the path on the fastest device with room, and the rest balanced by time."""
    group_seconds = np.zeros((problem.num_groups, problem.num_devices))
    np.add.at(group_seconds, problem.op_groups, problem.op_seconds)
    whole = np.where(problem.allowed[problem.op_groups], problem.op_seconds, problem.fastest_seconds[:, None]).sum(axis=0)
    nbytes, room = group_bytes(problem), problem.cluster.memory_bytes.astype(np.float64)
    load = np.zeros(problem.num_devices)
    placement = np.full(problem.num_groups, -1)
    for op, on_path in [*((op, True) for op in path.tolist()), *((op, False) for op in range(problem.num_ops))]:
        group = problem.op_groups[op]
        if placement[group] < 0:
            can = problem.allowed[group] & (room >= nbytes[group])
            can = can if can.any() else problem.allowed[group]
            device = int(np.where(can, whole if on_path else load + group_seconds[group], np.inf).argmin())
            placement[group] = device
            load[device] += group_seconds[group, device]
            room[device] -= nbytes[group]
    return place_the_rest(problem, placement)
