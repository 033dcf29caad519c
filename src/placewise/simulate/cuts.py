"""What a placement cuts: how many tensors it copies between devices, and between which modules."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.grouping import module_path
from placewise.core.problem import Problem
from placewise.simulate.compile import borrowing
from placewise.simulate.flat_problem import Int32s, tensor_groups, unique_reads

MOST_CUTS = 2**24  # different ones, up to which those that were seen are marked in a table


@dataclass(frozen=True, eq=False)
class Crossings:
    """Where copies can be: the reads of other groups' tensors."""

    num_devices: int
    sources: Ints  # [reads], the group that the tensor is with
    targets: Ints  # [reads], the group of the op that reads it
    tensors: Ints  # [reads]
    modules: Ints  # [groups], a number for the module of each group
    pairs: Ints  # [reads], a number for the two modules: of the op that makes the tensor, and of the one that reads it

    @classmethod
    def of(cls, problem: Problem) -> "Crossings":
        """Returns the crossings of a problem; in a graph without modules, a group counts as one."""
        graph = problem.graph
        reading, read = unique_reads(graph.ops.reads)
        groups = tensor_groups(problem)
        apart = groups[read] != problem.op_groups[reading]
        reading, read = reading[apart], read[apart]
        modules = _modules(problem)  # [groups]
        source, target = modules[groups[read]], modules[problem.op_groups[reading]]
        low, high = np.minimum(source, target), np.maximum(source, target)
        pairs = np.unique(low * (int(modules.max(initial=0)) + 1) + high, return_inverse=True)[1].reshape(-1)
        return cls(problem.num_devices, groups[read], problem.op_groups[reading], read, modules, pairs)

    def count_copies(self, placement: Ints) -> int:
        """Returns how many copies a step with this placement [groups] makes: one for each tensor and device it goes to."""
        return self.count(placement)[0]

    def count_cuts(self, placement: Ints) -> int:
        """Returns between how many pairs of modules a placement [groups] copies tensors, for each pair of devices.

        Directions, phases and micro-batches are not counted apart. A copy is for the module that reads it first in the
        program. A module that is split counts as a pair with itself.
        """
        return self.count(placement)[1]

    def count(self, placement: Ints) -> tuple[int, int]:
        """Returns the copies and the cuts of a placement [groups]."""
        places, cuts = self._copied(placement)
        return len(places), len(np.unique(cuts))

    def count_moved(self, placement: Ints, moves: Sequence[tuple[Ints, int]]) -> Ints:
        """Returns the copies and the cuts after each move alone, of some groups to a device: [moves, 2]."""
        counts = np.zeros((len(moves), 2), np.int64)
        num_pairs = int(self.pairs.max(initial=-1)) + 1
        if not moves:
            return counts
        if num_pairs * self.num_devices**2 > MOST_CUTS:
            for row, (groups, device) in enumerate(moves):
                moved = placement.copy()
                moved[groups] = device
                counts[row] = self.count(moved)
            return counts
        _count_moved(
            self.num_devices,
            self.sources,
            self.targets,
            self.tensors,
            self.pairs,
            np.array(placement, np.int64),
            np.concatenate([groups for groups, _ in moves]),
            np.cumsum([0, *(len(groups) for groups, _ in moves)]),
            np.array([device for _, device in moves], np.int64),
            np.full((int(self.tensors.max(initial=-1)) + 1) * self.num_devices, -1, np.int32),
            np.full(num_pairs * self.num_devices**2, -1, np.int32),
            np.zeros(len(placement), np.int64),
            counts,
        )
        return counts

    def prices(self, placement: Ints, share: float) -> Floats:
        """Returns what each copy costs, so that those of a placement cost 1 for each cut: [copied tensors, devices].

        The copies of a cut share its price, so a copy of a cut that is there anyway is cheap, and the last copies of a small
        cut are dear; `share` of the price is for all copies alike.
        """
        tensors, first = np.unique(self.tensors, return_index=True)
        source = placement[self.sources[first]][:, None]  # [copied tensors, 1]
        device = np.arange(self.num_devices)
        low, high = np.minimum(source, device), np.maximum(source, device)
        cut = (self.pairs[first][:, None] * self.num_devices + low) * self.num_devices + high  # of a copy that is not there
        places, cuts = self._copied(placement)
        cut[np.searchsorted(tensors, places // self.num_devices), places % self.num_devices] = cuts
        known, sizes = np.unique(cuts, return_counts=True)
        prices: Floats = np.ones(cut.shape)
        if len(known):
            at = np.minimum(np.searchsorted(known, cut), len(known) - 1)
            prices = np.where(known[at] == cut, (1 - share) / sizes[at] + share * len(known) / len(places), 1.0)
        return prices

    def _copied(self, placement: Ints) -> tuple[Ints, Ints]:
        """Returns the copies of a placement, by their tensor and the device that they go to, and the cut of each."""
        places, cuts = np.zeros(len(self.tensors), np.int64), np.zeros(len(self.tensors), np.int64)
        seen = np.zeros((int(self.tensors.max(initial=-1)) + 1) * self.num_devices, np.bool_)
        found = _find_copies(
            self.num_devices, self.sources, self.targets, self.tensors, self.pairs, placement, seen, places, cuts
        )
        return places[:found], cuts[:found]


@borrowing
def _find_copies(
    num_devices: int,
    sources: Ints,
    targets: Ints,
    tensors: Ints,
    pairs: Ints,
    placement: Ints,
    seen: Bools,
    places: Ints,
    cuts: Ints,
) -> int:
    """Writes each copy's tensor and device, and its pairs of modules and devices, as numbers; returns how many there are."""
    found = 0
    for read in range(len(tensors)):
        there, here = placement[sources[read]], placement[targets[read]]
        place = tensors[read] * num_devices + here
        if there != here and not seen[place]:
            seen[place] = True
            places[found] = place
            cuts[found] = (pairs[read] * num_devices + min(there, here)) * num_devices + max(there, here)
            found += 1
    return found


@borrowing
def _count_moved(
    num_devices: int,
    sources: Ints,
    targets: Ints,
    tensors: Ints,
    pairs: Ints,
    placement: Ints,
    groups: Ints,
    ends: Ints,
    devices: Ints,
    seen_places: Int32s,
    seen_cuts: Int32s,
    before: Ints,
    counts: Ints,
) -> None:
    """Writes the copies and the cuts after each move; what was seen has the number of the move that saw it last."""
    for move in range(len(devices)):
        for i in range(ends[move], ends[move + 1]):
            before[groups[i]] = placement[groups[i]]
            placement[groups[i]] = devices[move]
        copies, cuts = 0, 0
        for read in range(len(tensors)):
            there, here = placement[sources[read]], placement[targets[read]]
            if there != here:
                place = tensors[read] * num_devices + here
                if seen_places[place] != move:
                    seen_places[place] = move
                    copies += 1
                    cut = (pairs[read] * num_devices + min(there, here)) * num_devices + max(there, here)
                    if seen_cuts[cut] != move:
                        seen_cuts[cut] = move
                        cuts += 1
        counts[move, 0] = copies
        counts[move, 1] = cuts
        for i in range(ends[move], ends[move + 1]):
            placement[groups[i]] = before[groups[i]]


def _modules(problem: Problem) -> Ints:
    """Returns a number for the module of each group, which is that of its first op: [groups]."""
    graph = problem.graph
    paths = [module_path(graph, op) for op in range(len(graph.ops))]
    number = {path: i for i, path in enumerate(dict.fromkeys(paths))}
    if len(number) <= 1:
        return np.arange(problem.num_groups)
    modules = np.full(problem.num_groups, len(number), np.int64)  # a group without ops is in a module of its own
    modules[problem.op_groups[::-1]] = [number[path] for path in reversed(paths)]
    homes = np.flatnonzero((graph.tensors.home >= 0) & (graph.first_reader >= 0))[::-1]
    alone = modules[problem.merged[graph.tensors.home[homes]]] == len(number)
    homes = homes[alone]
    modules[problem.merged[graph.tensors.home[homes]]] = [number[paths[op]] for op in graph.first_reader[homes].tolist()]
    return modules
