"""What HDP's networks read of the ops that they group, and of the groups that they place."""

from dataclasses import dataclass

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.problem import Problem
from placewise.core.sets import sums
from placewise.strategies.learned import seq2seq_features as features


@dataclass(frozen=True, eq=False)
class Units:
    """The groups of a problem, as HDP reads them: units, so that a group is one that HDP makes of them."""

    kinds: Floats  # [units, kinds], how many ops of each kind
    sizes: Floats  # [units, 6 + 1], of the largest outputs, padded with -1, and log10(1 + the number of outputs)
    neighbours: Floats  # [units, 12], numbers / units of up to 6 that it reads from and 6 that read from it, padded with -1
    output_bytes: Floats  # [units], of all tensors that its ops write
    source: Ints  # [edges], units that write
    target: Ints  # [edges], units that read it, each pair once

    @classmethod
    def of(cls, problem: Problem) -> "Units":
        """Returns the units of a problem."""
        graph, labels, count = problem.graph, problem.op_groups, problem.num_groups
        sizes, num_outputs = features.output_sizes(graph, labels, count)
        source, target = features.edges_between(graph, labels, count)
        written = graph.ops.writes
        return cls(
            features.Kinds.of(graph).counted(labels, count),
            np.concatenate([sizes, np.log10(1.0 + num_outputs)[:, None]], axis=1),
            features.neighbours(source, target, count),
            sums(labels[written.rows], graph.tensors.nbytes[written.values].astype(np.float64), count),
            source,
            target,
        )

    def embedded(self) -> Floats:
        """Returns what the grouper reads: shares of kinds, sizes of outputs, neighbours: [units, kinds + 7 + 12]."""
        shares = self.kinds / np.maximum(self.kinds.sum(axis=1, keepdims=True), 1.0)
        return np.concatenate([shares, self.sizes, self.neighbours], axis=1)

    def grouped(self, groups: Ints, num_groups: int) -> Floats:
        """Returns what the placer reads of groups, from each unit's group [units]: [groups, kinds + 1 + groups].

        The columns are log10(1 + the number of ops of a kind), the size of all outputs together, and 1 for every group that
        reads from it.
        """
        counts = features.column_sums(groups, self.kinds, num_groups)
        nbytes = sums(groups, self.output_bytes, num_groups)
        source, target = groups[self.source], groups[self.target]
        between = source != target
        readers = features.adjacency(source[between], target[between], num_groups)
        return np.concatenate([np.log10(1.0 + counts), features.scaled(nbytes)[:, None], readers], axis=1)
