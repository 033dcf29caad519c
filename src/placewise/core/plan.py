"""A plan: where each group runs, in which order the ops are launched, and what was found on the way to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.errors import InputError, PlanError
from placewise.core.graph import Graph, as_graph
from placewise.core.problem import Problem
from placewise.core.quantities import format_count, format_percent_rounded_up


@dataclass(frozen=True)
class Plan:
    """A placement of a graph's own groups, an order, and what was predicted; only the placement must be there."""

    placement: tuple[str, ...]  # a device's name for each of the graph's own groups
    order: tuple[int, ...] | None = None  # None: program order
    graph_digest: str | None = None
    cluster: str | None = None  # its name
    strategy: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the strategy
    seed: int | None = None
    evaluations: int | None = None
    step_seconds: float | None = None
    bound_seconds: float | None = None
    gap: float | None = None
    fits: bool | None = None
    peak_bytes: Mapping[str, int] = field(default_factory=dict)  # by device
    history: tuple[tuple[int, float], ...] = ()  # (evaluations spent, best step seconds)
    predicted_seconds: float | None = None  # where step_seconds was measured: what the simulator says; else None

    def save(self, path: str | Path) -> None:
        """Writes the plan's file."""
        from placewise.formats.plan_file import write_plan

        write_plan(self, path)

    def __str__(self) -> str:
        """Returns the plan in a few lines: step time, strategy, groups and peak memory by device."""
        step = "?" if self.step_seconds is None else f"{self.step_seconds * 1e3:.4g} ms"
        bound = "" if self.gap is None else f", at most {format_percent_rounded_up(self.gap)} above the best possible"
        if self.predicted_seconds is not None:
            bound = f", measured (predicted {self.predicted_seconds * 1e3:.4g} ms)"
        spent = "? evaluations" if self.evaluations is None else format_count(self.evaluations, "evaluation")
        lines = [f"{step} a step on {self.cluster}{bound} ({self.strategy}, {spent}, seed {self.seed})"]
        width = max(map(len, self.peak_bytes), default=0)
        for device, peak in self.peak_bytes.items():
            lines.append(f"  {device:<{width}}  {self.placement.count(device):>7,} groups  {peak / 2**30:8.2f} GiB peak")
        return "\n".join(lines)

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Returns the plan of a file; a PlanError names the file, the field and the rule that does not hold."""
        from placewise.formats.plan_file import read_plan

        return read_plan(path)

    def compile(
        self, step: Any, cluster: Any = None, *, virtual: Mapping[str, int] | None = None, cuda_graphs: bool = False
    ) -> Any:
        """Returns the captured step as the plan places it, ready to run on this machine: `loss = train_step(batch)`.

        Without a cluster it is the preset that the plan names, or this machine. `virtual` cuts GPUs into devices:
        {"cuda:0": 4}. `cuda_graphs` launches stretches of a GPU by one call each, for some more memory (docs/run.md).
        `run/step/train_step.py` says what the returned TrainStep does.
        """
        from placewise.run.step.compiling import compile_plan

        return compile_plan(self, step, cluster, virtual, cuda_graphs)

    def device_map(self, step: Any) -> dict[str, Any]:
        """Returns the plan of a captured step, or of a graph, for Hugging Face Accelerate: a device for each module.

        An ExecutionError names the modules that the plan splits.
        """
        from placewise.run.device_map import export_device_map

        graph = as_graph(step)
        self._check_graph(graph, "plan")
        if len(self.placement) != graph.num_groups:
            raise PlanError(f"plan: placement has {len(self.placement)} entries, the graph has {graph.num_groups} groups")
        return export_device_map(graph, self.placement)

    def resolve(self, problem: Problem, source: str = "plan") -> tuple[Ints, Ints | None]:
        """Returns the placement [groups] and the order [ops] or None, if they are ones of this problem."""
        self._check_graph(problem.graph, source)
        try:
            placement = problem.contract(self.placement)
            return placement, None if self.order is None else problem.check_order(np.array(self.order, np.int64))
        except InputError as rule:
            raise PlanError(f"{source}: {rule}") from None

    def _check_graph(self, graph: Graph, source: str) -> None:
        known = (digest_of_graph(graph), graph.untimed_digest, graph.digest)  # older plans hold the latter
        if self.graph_digest is not None and self.graph_digest not in known:
            raise PlanError(
                f"{source}: is for another graph: graph_digest is {self.graph_digest[:12]}..., "
                f"that of {graph.name!r} is {known[0][:12]}..."
            )


def digest_of_graph(graph: Graph) -> str:
    """Returns what a plan knows its graph by: all that a placement can depend on, neither its name nor measured times.

    One step has several names: that of its class in Python, that of its function on the command line.
    """
    return replace(graph, name="").untimed_digest
