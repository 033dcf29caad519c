"""A heap of ops for each device, compiled."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.simulate.kernels import kernel
from placewise.strategies.list_compile import inner


class Heaps(NamedTuple):
    """A heap for each device: the op of the smallest key is on top, at place 0; ties go to the lowest op."""

    keys: Floats  # [devices, capacity]
    ops: Ints  # [devices, capacity]
    counts: Ints  # [devices]


@kernel
def new_heaps(num_devices: int, capacity: int) -> Heaps:
    """Returns empty heaps."""
    shape = (num_devices, capacity)
    return Heaps(np.zeros(shape), np.zeros(shape, np.int64), np.zeros(num_devices, np.int64))


@inner
def push(heaps: Heaps, device: int, key: float, op: int) -> None:
    """Adds an op to a device's heap."""
    keys, ops, i = heaps.keys[device], heaps.ops[device], heaps.counts[device]
    heaps.counts[device] += 1
    while i > 0:
        parent = (i - 1) // 2
        if keys[parent] < key or (keys[parent] == key and ops[parent] <= op):
            break
        keys[i], ops[i] = keys[parent], ops[parent]
        i = parent
    keys[i], ops[i] = key, op


@inner
def pop(heaps: Heaps, device: int) -> None:
    """Takes the top off a device's heap."""
    keys, ops, size = heaps.keys[device], heaps.ops[device], heaps.counts[device] - 1
    heaps.counts[device] = size
    key, op, i = keys[size], ops[size], 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        other = child + 1
        if other < size and (keys[other] < keys[child] or (keys[other] == keys[child] and ops[other] < ops[child])):
            child = other
        if key < keys[child] or (key == keys[child] and op <= ops[child]):
            break
        keys[i], ops[i] = keys[child], ops[child]
        i = child
    keys[i], ops[i] = key, op
