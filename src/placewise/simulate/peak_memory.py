"""What is in a device's memory when it is fullest."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Ints
from placewise.simulate.flat_problem import tensor_groups, unique_reads
from placewise.simulate.schedule import Schedule

TO_THE_END = np.iinfo(np.int64).max

BEFORE_STEP = -1  # the position of what is allocated before the first launch


class Allocations(NamedTuple):
    """The memory that a step allocates: for which tensor, on which device, from which launch to which launch."""

    tensors: Ints  # [allocations]
    is_copy: Bools  # [allocations]
    devices: Ints  # [allocations]
    first: Ints  # [allocations], position in the launch order
    last: Ints  # [allocations]


def allocations_of(schedule: Schedule) -> Allocations:
    """Returns every tensor that has its own memory, then every copy, in launch order."""
    graph, t = schedule.problem.graph, schedule.timeline
    position = np.empty(len(schedule.order), np.int64)  # [ops]
    position[schedule.order] = np.arange(len(schedule.order))
    home = np.append(schedule.placement, 0)[
        tensor_groups(schedule.problem)
    ]  # [tensors], tensors without a group are on device 0
    owned = np.flatnonzero(graph.storage == np.arange(len(graph.tensors)))
    reading, read = unique_reads(graph.ops.reads)
    here = home[read] == schedule.devices[reading]
    last = np.full(len(graph.tensors), BEFORE_STEP)
    np.maximum.at(last, graph.storage[read[here]], position[reading[here]])
    np.maximum.at(last, graph.storage[graph.ops.writes.values], position[graph.ops.writes.rows])
    np.maximum.at(last, graph.storage[schedule.copy_tensors], position[t.copy_reader])  # a source stays until it is sent
    last[graph.storage[graph.outputs]] = TO_THE_END
    last[graph.producer < 0] = TO_THE_END
    first = np.append(position, BEFORE_STEP)[graph.producer[owned]]
    key = np.full((len(graph.tensors), schedule.problem.num_devices), BEFORE_STEP)  # the last reader of a copy
    np.maximum.at(key, (read[~here], schedule.devices[reading[~here]]), position[reading[~here]])
    copies = schedule.copy_tensors
    return Allocations(
        np.concatenate([owned, copies]),
        np.arange(len(owned) + len(copies)) >= len(owned),
        np.concatenate([home[owned], t.copy_target]),
        np.concatenate([first, position[t.copy_reader]]),
        np.concatenate([last[owned], key[copies, t.copy_target]]),
    )


def bytes_before_step(schedule: Schedule, allocations: Allocations) -> Ints:
    """Returns the bytes that are in use on each device before the first launch: [devices]."""
    early = allocations.first == BEFORE_STEP
    sizes = schedule.problem.graph.tensors.nbytes[allocations.tensors[early]]
    used = np.zeros(schedule.problem.num_devices, np.int64)
    np.add.at(used, allocations.devices[early], sizes)
    return used


def peak_positions(schedule: Schedule) -> Ints:
    """Returns the position of the launch at which each device first needs the most memory, or BEFORE_STEP: [devices]."""
    own = schedule.devices[schedule.order][:, None] == np.arange(schedule.problem.num_devices)
    full = own & (schedule.memory == schedule.peak_bytes)
    full = np.append(full, np.zeros((1, full.shape[1]), np.bool_), axis=0)  # there may be no launch
    return np.where(full.any(axis=0), full.argmax(axis=0), BEFORE_STEP)


def allocated_at(allocations: Allocations, device: int, position: int) -> Ints:
    """Returns which allocations are on a device at a launch: [found]."""
    is_there = (allocations.first <= position) & (position <= allocations.last)
    return np.flatnonzero((allocations.devices == device) & is_there)
