"""What a placement cuts: how many tensors it copies between devices, and between which modules."""

from dataclasses import dataclass

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.grouping import module_path
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import tensor_groups, unique_reads


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
        there, here = placement[self.sources], placement[self.targets]
        apart = there != here
        return len(np.unique(self.tensors[apart] * self.num_devices + here[apart]))

    def count_cuts(self, placement: Ints) -> int:
        """Returns between how many pairs of modules a placement [groups] copies tensors, for each pair of devices.

        Directions, phases and micro-batches are not counted apart. A copy is for the module that reads it first in the
        program. A module that is split counts as a pair with itself.
        """
        there, here = placement[self.sources], placement[self.targets]
        apart = np.flatnonzero(there != here)
        _, first = np.unique(self.tensors[apart] * self.num_devices + here[apart], return_index=True)
        copied = apart[first]
        low, high = np.minimum(there, here)[copied], np.maximum(there, here)[copied]
        return len(np.unique((self.pairs[copied] * self.num_devices + low) * self.num_devices + high))


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
