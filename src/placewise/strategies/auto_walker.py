"""What a walk from placement to placement works on, and how it goes."""

from typing import Any, NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.simulate.kernels import (
    UNLAUNCHED,
    MemoryWorkspace,
    Snapshots,
    Workspace,
    new_memory_workspace,
    new_workspace,
)
from placewise.simulate.tables import Small, Tables
from placewise.strategies.auto_moves import Picked, Randomness, Undone, new_picked, new_undone

STRIDE = 32  # positions between saved states


class Trail(NamedTuple):
    """The times of the placement that a walk is at."""

    ends: Floats  # [ops]
    launch_at: Small  # [places]
    arrivals: Floats  # [places]
    launched: Small  # [places], in launch order
    num_launched: Ints  # [1], of `launched`
    restored: Ints  # [1], ends in the workspace are right before this position
    latest: Floats  # [ops]
    copy_latest: Floats  # [places]
    next_free: Floats  # [devices + channels], while `latest` is found


class Walker(NamedTuple):
    """What a walk works on. Between trials `work` is as the trail says, but for ends behind the last trial's start."""

    order: Small  # [ops]
    positions: Small  # [ops], each op's place in the order
    work: Workspace
    snapshots: Snapshots  # of the trail
    trial: Snapshots
    trail: Trail
    picked: Picked
    undone: Undone
    random: Randomness
    whole: Workspace  # for passes that count memory
    memory: MemoryWorkspace
    peak: Ints  # [devices]
    best: Any  # [groups], the best placement of the walk
    best_order: Small  # [ops]


class Pace(NamedTuple):
    """How a walk goes."""

    trials: int
    first: int  # the number of the first trial: no two trials of a walker have the same
    hot: float  # seconds; a step that is longer by x is taken with probability exp(-x / temperature)
    cold: float  # seconds, the last temperature
    weights: Ints  # [kinds], how often each kind of move is drawn
    longest: int  # ops of a stretch
    focus: float  # the share of moves that are drawn where there is little slack
    checks_memory: bool
    price: float  # seconds that a byte over a device's memory counts as, where memory is checked


def new_walker(tables: Tables, num_groups: int) -> Walker:
    """Returns a walker that stands nowhere yet."""
    num_ops, places = len(tables.op_groups), len(tables.copy_bytes) * tables.num_devices
    trail = Trail(
        ends=np.zeros(num_ops),
        launch_at=np.full(places, UNLAUNCHED, np.int32),
        arrivals=np.zeros(places),
        launched=np.zeros(places, np.int32),
        num_launched=np.zeros(1, np.int64),
        restored=np.zeros(1, np.int64),
        latest=np.zeros(num_ops),
        copy_latest=np.zeros(places),
        next_free=np.zeros(tables.num_devices + tables.num_channels),
    )
    return Walker(
        order=np.zeros(num_ops, np.int32),
        positions=np.zeros(num_ops, np.int32),
        work=new_workspace(tables, num_groups),
        snapshots=_new_snapshots(tables),
        trial=_new_snapshots(tables),
        trail=trail,
        picked=new_picked(num_groups),
        undone=new_undone(num_ops),
        random=np.zeros(1, np.uint64),
        whole=new_workspace(tables, num_groups),
        memory=new_memory_workspace(tables),
        peak=np.zeros(tables.num_devices, np.int64),
        best=np.zeros(num_groups, np.int16),
        best_order=np.zeros(num_ops, np.int32),
    )


def _new_snapshots(tables: Tables) -> Snapshots:
    count = len(tables.op_groups) // STRIDE + 1
    return Snapshots(STRIDE, np.zeros(count), np.zeros((count, tables.num_devices)), np.zeros((count, tables.num_channels)))
