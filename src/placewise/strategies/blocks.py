"""Blocks: groups of a problem that a strategy places by one decision."""

from dataclasses import dataclass

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.grouping import group_ops, is_grouping, unknown_grouping
from placewise.core.labels import connected_components, renumber, sum_by_label
from placewise.core.problem import Problem

NEXT_TO_NOTHING = 1e-12  # seconds of groups that do no work, so that `contract` finds the device of a block of them too


def check_grouping(grouping: str) -> None:
    """Raises ValueError unless core/grouping.py knows the grouping."""
    if not is_grouping(grouping):
        raise ValueError(unknown_grouping(grouping))


@dataclass(frozen=True, eq=False)
class Blocks:
    """The block of each group."""

    of_group: Ints  # [groups] -> block
    allowed: Bools  # [blocks, devices], where the groups of a block can run
    group_seconds: Floats  # [groups], the time of a group's ops, each on its fastest device

    @classmethod
    def of(cls, problem: Problem, grouping: str) -> "Blocks":
        """Returns the problem's groups joined as this grouping of the graph joins them; blocks are numbered by first group.

        Groups that can run on different sets of devices stay in different blocks, so that every block has a device, and one
        op without a GPU kernel does not take a whole module to the CPU.
        """
        wanted = group_ops(problem.graph, grouping)  # [the graph's groups]
        first = np.zeros(int(wanted.max(initial=-1)) + 1, np.int64)
        first[wanted[::-1]] = problem.merged[::-1]
        pairs = np.stack([problem.merged, first[wanted]], axis=1)
        joined = connected_components(problem.num_groups, pairs[pairs[:, 0] != pairs[:, 1]].tolist())
        kinds = problem.device_sets
        of_group = renumber(joined * (int(kinds.max(initial=0)) + 1) + kinds)
        allowed = np.zeros((int(of_group.max(initial=-1)) + 1, problem.num_devices), np.bool_)
        allowed[of_group] = problem.allowed
        seconds = sum_by_label(problem.op_groups, problem.fastest_seconds, problem.num_groups)
        return cls(of_group, allowed, np.maximum(seconds, NEXT_TO_NOTHING))

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return len(self.allowed)

    def expand(self, placements: Ints) -> Ints:
        """Returns placements of groups from placements of blocks: [batch, blocks] -> [batch, groups]."""
        expanded: Ints = placements[:, self.of_group]
        return expanded

    def contract(self, placement: Ints) -> Ints:
        """Returns each block's device from a placement of groups: [groups] -> [blocks].

        It is the device that has most of the block's time; ties go to the lowest device that can run the block.
        """
        num_blocks, num_devices = self.allowed.shape
        seconds = sum_by_label(self.of_group * num_devices + placement, self.group_seconds, num_blocks * num_devices)
        devices: Ints = np.where(self.allowed, seconds.reshape(num_blocks, num_devices), -1.0).argmax(axis=1)
        return devices
