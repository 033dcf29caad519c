"""Placements that do not fit, repaired with few moves: what placers that keep to memory propose when all else overflows."""

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Proposal, Search
from placewise.core.labels import sum_by_label
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import tensor_groups
from placewise.simulate.peak_memory import allocated_at, allocations_of, peak_positions
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator
from placewise.strategies.sampling import single_placements
from placewise.strategies.single_device import cpus

ROUNDS = 200  # of moves, each judged by the simulator

WIDTH = 8  # groups that are tried as a round's last move, on every device

SHARE = 4  # a round moves at least this part of what is too much, so that large steps need few rounds


def propose_or_repair(problem: Problem, *proposals: Proposal) -> Search:
    """Yields the proposals, and if none of them fits, the best one repaired, and at last everything on each device.

    The simulator is the repair's model of the memory, whatever judges the proposals. Ties go to the first.
    """
    overflows = []
    for proposal in proposals:
        evaluation = yield proposal
        overflows.append(int(evaluation.overflow_bytes[0]))
    if 0 in overflows or problem.graph.has_options:
        return
    model, placement = Simulator(problem), proposals[int(np.argmin(overflows))].placements[0]
    repaired = repair(model, placement)
    notes = {"num_moved": int((repaired != placement).sum())}
    evaluation = yield Proposal(repaired[None], model.order_of(repaired).astype(np.int64)[None], notes)
    if evaluation.overflow_bytes[0]:
        yield Proposal(single_placements(problem))


def repair(model: Simulator, placement: Ints) -> Ints:
    """Returns the placement with groups moved off the devices that have too little memory until it fits: [groups].

    At a device's fullest launch the groups with most bytes there leave first, so that few have to; of the last one and of
    where it goes, the simulator chooses: what leaves the least overflow, then the fastest. It ends early if no move helps.
    """
    memory = model.problem.cluster.memory_bytes
    for _ in range(ROUNDS):
        schedule = model.schedule(placement)
        excess = np.maximum(schedule.peak_bytes - memory, 0)  # [devices]
        for device in np.argsort(-excess, kind="stable")[: np.count_nonzero(excess)].tolist():
            trials = _moves(schedule, device, int(excess[device]))
            if not len(trials):
                continue
            evaluation = model(trials)
            row = int(np.lexsort((evaluation.step_seconds, evaluation.overflow_bytes))[0])
            if evaluation.overflow_bytes[row] < excess.sum():
                placement = trials[row]
                break
        else:
            return placement
    return placement


def _moves(schedule: Schedule, device: int, excess: int) -> Ints:
    """Returns placements with groups moved off a device: [trials, groups]; they differ in the last move."""
    problem = schedule.problem
    held = _held_at_peak(schedule, device)  # [groups]
    elsewhere = problem.allowed.copy()  # [groups, devices]
    elsewhere[:, device] = False
    held[~elsewhere.any(axis=1) | (schedule.placement != device)] = 0
    largest = np.argsort(-held, kind="stable")[: np.count_nonzero(held)]
    room = (problem.cluster.memory_bytes - schedule.peak_bytes).astype(np.float64)  # [devices]
    placement, left = schedule.placement.copy(), -(-excess // SHARE) if _is_large(held, excess) else excess
    for group in largest.tolist():
        if held[group] >= left:
            break
        target = _roomiest(problem, elsewhere[group], room, int(held[group]))
        placement[group], room[target], left = target, room[target] - held[group], left - held[group]
    rest = largest[placement[largest] == device]
    enough = rest[held[rest] >= left][::-1]  # the smallest first
    last = np.concatenate([enough[:WIDTH], rest[held[rest] < left][:WIDTH]])[:WIDTH] if len(rest) else rest
    choices = [(group, target) for group in last.tolist() for target in np.flatnonzero(elsewhere[group]).tolist()]
    trials = [_with(placement, group, target) for group, target in choices]
    if not trials and len(largest):
        trials = [placement]
    return np.array(trials, np.int64).reshape(-1, problem.num_groups)


def _is_large(held: Ints, excess: int) -> bool:
    """Returns whether more than SHARE groups have to go."""
    return int(np.sort(held)[::-1][:SHARE].sum()) < excess


def _roomiest(problem: Problem, can: Ints, room: Floats, nbytes: int) -> int:
    """Returns the device with most room; CPUs only count if no other device has enough."""
    fast = can & ~np.isin(np.arange(len(can)), cpus(problem)) & (room >= nbytes)
    return int(np.where(fast if fast.any() else can, room, -np.inf).argmax())


def _with(placement: Ints, group: int, device: int) -> Ints:
    changed = placement.copy()
    changed[group] = device
    return changed


def _held_at_peak(schedule: Schedule, device: int) -> Ints:
    """Returns the bytes that leave a device at its fullest launch if a group does: [groups].

    They are what the group has there, and the copies that were made for it.
    """
    problem, allocations = schedule.problem, allocations_of(schedule)
    found = allocated_at(allocations, device, int(peak_positions(schedule)[device]))
    tensors = allocations.tensors[found]
    num_owned = int((~allocations.is_copy).sum())
    groups = tensor_groups(problem)[tensors]
    is_copy = allocations.is_copy[found]
    readers = schedule.timeline.copy_reader[found[is_copy] - num_owned]
    groups[is_copy] = problem.op_groups[readers]
    known = groups >= 0
    sizes = problem.graph.tensors.nbytes[tensors[known]].astype(np.float64)
    return sum_by_label(groups[known], sizes, problem.num_groups).astype(np.int64)
