"""What a problem says before anything is decided, in plain lists."""

from dataclasses import dataclass
from functools import cached_property

from placewise.core.problem import Problem
from placewise.simulate.tables import tensor_groups


@dataclass(eq=False)
class Facts:
    """A problem, in plain lists."""

    problem: Problem

    @cached_property
    def ops(self) -> range:
        """All ops."""
        return range(self.problem.num_ops)

    @cached_property
    def group(self) -> list[int]:
        """Each op's group."""
        return [int(g) for g in self.problem.op_groups]

    @cached_property
    def home(self) -> list[int]:
        """The group that each tensor is with."""
        return [int(g) for g in tensor_groups(self.problem)]

    @cached_property
    def seconds(self) -> list[list[float]]:
        """Each op's time on each device."""
        return [[float(t) for t in row] for row in self.problem.op_seconds]

    @cached_property
    def needs(self) -> set[tuple[int, int]]:
        """The pairs of ops of which the second waits for the first."""
        writers, readers, _ = self.problem.graph.edges
        after = self.problem.graph.ops.after
        pairs = {*zip(writers.tolist(), readers.tolist(), strict=True)}
        return pairs | {*zip(after.values.tolist(), after.rows.tolist(), strict=True)}

    def forced(self) -> set[tuple[int, int]]:
        """The pairs of ops of which the second depends on the first, over others too."""
        behind: list[set[int]] = []
        for n in self.ops:
            inputs = [m for m, k in sorted(self.needs) if k == n]
            behind.append({*inputs, *(a for m in inputs for a in behind[m])})
        return {(m, n) for n in self.ops for m in behind[n]}
