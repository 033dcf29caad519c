"""What is in a device's memory when it is fullest."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Ints
from placewise.simulate.flat_problem import tensor_groups, unique_reads
from placewise.simulate.schedule import Schedule

TO_THE_END = np.iinfo(np.int64).max

SINCE_BEFORE = -1  # what is at home when the step starts


class Lives(NamedTuple):
    """Each piece of memory that a step takes: where, and from which to which launch."""

    tensors: Ints  # [pieces], the tensor whose bytes they are
    is_copy: Bools  # [pieces]
    devices: Ints  # [pieces]
    first: Ints  # [pieces], position in the launch order
    last: Ints  # [pieces]


def lives(schedule: Schedule) -> Lives:
    """Returns every tensor that has its own memory, then every copy in the order of the launches."""
    graph, t = schedule.problem.graph, schedule.timeline
    position = np.empty(len(schedule.order), np.int64)  # [ops]
    position[schedule.order] = np.arange(len(schedule.order))
    home = np.append(schedule.placement, 0)[tensor_groups(schedule.problem)]  # [tensors], those of nobody on device 0
    owned = np.flatnonzero(graph.storage == np.arange(len(graph.tensors)))
    reading, read = unique_reads(graph.ops.reads)
    here = home[read] == schedule.devices[reading]
    last = np.full(len(graph.tensors), SINCE_BEFORE)
    np.maximum.at(last, graph.storage[read[here]], position[reading[here]])
    np.maximum.at(last, graph.storage[graph.ops.writes.values], position[graph.ops.writes.rows])
    np.maximum.at(last, graph.storage[schedule.copy_tensors], position[t.copy_reader])  # a source lives until it is sent
    last[graph.storage[graph.outputs]] = TO_THE_END
    last[graph.producer < 0] = TO_THE_END
    first = np.append(position, SINCE_BEFORE)[graph.producer[owned]]
    key = np.full((len(graph.tensors), schedule.problem.num_devices), SINCE_BEFORE)  # the last reader of a copy
    np.maximum.at(key, (read[~here], schedule.devices[reading[~here]]), position[reading[~here]])
    copies = schedule.copy_tensors
    return Lives(
        np.concatenate([owned, copies]),
        np.arange(len(owned) + len(copies)) >= len(owned),
        np.concatenate([home[owned], t.copy_target]),
        np.concatenate([first, position[t.copy_reader]]),
        np.concatenate([last[owned], key[copies, t.copy_target]]),
    )


def resident_bytes(schedule: Schedule, pieces: Lives) -> Ints:
    """Returns the bytes that are in use on each device before the first launch: [devices]."""
    at_home = pieces.first == SINCE_BEFORE
    sizes = schedule.problem.graph.tensors.nbytes[pieces.tensors[at_home]]
    used = np.zeros(schedule.problem.num_devices, np.int64)
    np.add.at(used, pieces.devices[at_home], sizes)
    return used


def peak_positions(schedule: Schedule) -> Ints:
    """Returns the launch at which each device first needs the most memory, or -1: before the first one: [devices]."""
    own = schedule.devices[schedule.order][:, None] == np.arange(schedule.problem.num_devices)
    full = own & (schedule.memory == schedule.peak_bytes)
    full = np.append(full, np.zeros((1, full.shape[1]), np.bool_), axis=0)  # there may be no launch
    return np.where(full.any(axis=0), full.argmax(axis=0), SINCE_BEFORE)


def live_at(pieces: Lives, device: int, position: int) -> Ints:
    """Returns the pieces that are on a device at a launch: [live]."""
    return np.flatnonzero((pieces.devices == device) & (pieces.first <= position) & (position <= pieces.last))
