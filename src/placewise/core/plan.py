"""A plan: where each group runs, in which order the ops are launched, and how the search found it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.errors import InputError, PlanError
from placewise.core.graph import Graph, as_graph
from placewise.core.problem import Problem
from placewise.core.quantities import format_count, format_percent_rounded_up, format_seconds

REWRITTEN = {  # what a rewrite means for a user
    "fuse": "fused: results differ from eager's by rounding",
    "options": "what the backward pass reads may be computed again, or wait elsewhere: results are eager's",
    "recompute": "what the backward pass reads may be computed again: results are eager's",
    "park": "what the backward pass reads may wait elsewhere: results are eager's",
}


@dataclass(frozen=True)
class Simplicity:
    """What a plan gave for being simple: how complicated it is, and the fastest plan was."""

    tolerance: float
    cuts: int
    copies: int
    devices: int
    fastest_seconds: float
    fastest_cuts: int
    fastest_copies: int
    fastest_devices: int

    def in_words(self, step_seconds: float) -> str:
        """Returns one line: `9 cuts instead of 166 for 1.1% more time`; empty if the plan is the fastest one."""
        if (self.cuts, self.copies) == (self.fastest_cuts, self.fastest_copies):
            return ""
        cost = step_seconds / self.fastest_seconds - 1 if self.fastest_seconds else 0.0
        price = f"for {cost:.1%} more time" if cost >= 0.0005 else "in the same time"
        copies = f"{self.copies:,} {'copy' if self.copies == 1 else 'copies'} instead of {self.fastest_copies:,}"
        if self.cuts == self.fastest_cuts:
            return f"{copies} {price}"
        return f"{format_count(self.cuts, 'cut')} instead of {self.fastest_cuts:,} {price} ({copies})"


@dataclass(frozen=True)
class Plan:
    """A device for each of a graph's own groups, a launch order, and what the search found. Only placement is required."""

    placement: tuple[str | None, ...]  # [the graph's own groups], device names; None: optional ops that do not run
    order: tuple[int, ...] | None = None  # [ops], None: program order
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
    history: tuple[tuple[int, float], ...] = ()  # (evaluations so far, seconds of the best step)
    predicted_seconds: float | None = None  # if step_seconds was measured: the simulated step; else None
    interval_seconds: tuple[float, float] | None = None  # between which eight of ten steps are if times are off by 10%
    simplicity: Simplicity | None = None  # how much simpler it is than the fastest plan found
    groups: tuple[str, ...] = ()  # [the graph's own groups], names by which other graphs find them: of their first ops
    rewrites: tuple[str, ...] = ()  # what made its graph of the captured one, with versions: "fuse 2"
    cuda_graphs: bool = False  # it is predicted with CUDA graphs, and runs with them
    machine: Cluster | None = field(default=None, compare=False)  # the cluster itself, unless it is a preset

    def save(self, path: str | Path) -> None:
        """Writes the plan to a file."""
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
        lines += [f"  {line}" for line in self.trust()]
        lines += ["  with CUDA graphs"] * self.cuda_graphs
        lines += [f"  {REWRITTEN.get(name.partition(' ')[0], 'rewritten')} ({name})" for name in self.rewrites]
        width = max(map(len, self.peak_bytes), default=0)
        for device, peak in self.peak_bytes.items():
            lines.append(f"  {device:<{width}}  {self.placement.count(device):>7,} groups  {peak / 2**30:8.2f} GiB peak")
        return "\n".join(lines)

    def trust(self) -> list[str]:
        """Returns lines on what the plan gave for being simple, and what it takes if times are off; as far as is known."""
        lines = []
        if self.simplicity is not None and self.step_seconds is not None:
            lines += [self.simplicity.in_words(self.step_seconds)]
        if self.interval_seconds is not None:
            low, high = map(format_seconds, self.interval_seconds)
            lines += [f"{low} to {high} if times are off by 10%" if low != high else ""]
        return [line for line in lines if line]

    def __repr__(self) -> str:
        return f"Plan({len(self.placement):,} groups: {str(self).splitlines()[0]})"

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Returns the plan in a file; a PlanError names the file, the field and the rule that does not hold."""
        from placewise.formats.plan_file import read_plan

        return read_plan(path)

    def compile(
        self, step: Any, cluster: Any = None, *, virtual: Mapping[str, int | tuple[int, ...]] | None = None,
        cuda_graphs: bool | None = None, weights: Any = None,
    ) -> Any:  # fmt: skip
        """Returns a TrainStep that runs the captured step on this machine as planned: `loss = train_step(batch)`.

        The default cluster is the plan's own, or else this machine. `virtual` cuts GPUs into several devices: {"cuda:0": 4},
        or {"cuda:0": (32, 64)} for slices of so many multiprocessors.
        `cuda_graphs` replays sequences of GPU ops as CUDA graphs, which uses more memory (docs/run.md); the default is what
        the plan was made for.
        `weights` are the `placewise.DeferredWeights()` that the model was built in; "empty" makes room for a checkpoint.
        """
        from placewise.run.step.compiling import compile_plan

        return compile_plan(self, step, cluster, virtual, cuda_graphs, weights)

    def device_map(self, step: Any) -> dict[str, Any]:
        """Returns the plan as a device_map for Hugging Face Accelerate; `step` is the captured step or its graph.

        If the plan splits modules over devices there is none: an ExecutionError names them.
        """
        from placewise.run.device_map import export_device_map

        graph = as_graph(step)
        self._check_graph(graph, "plan")
        if len(self.placement) != graph.num_groups:
            raise PlanError(f"plan: placement has {len(self.placement)} entries, the graph has {graph.num_groups} groups")
        return export_device_map(graph, [name for name in self.placement if name is not None])

    def resolve(self, problem: Problem, source: str = "plan") -> tuple[Ints, Ints | None]:
        """Returns the placement [groups] and the order [ops] or None, if they are valid for this problem."""
        self._check_graph(problem.graph, source)
        try:
            placement = problem.contract(self.placement)
            return placement, None if self.order is None else problem.check_plan(placement, np.array(self.order, np.int64))
        except InputError as rule:
            raise PlanError(f"{source}: {rule}") from None

    def _check_graph(self, graph: Graph, source: str) -> None:
        known = (digest_of_graph(graph), graph.untimed_digest, graph.digest)  # older plans have one of the latter
        if self.graph_digest is not None and self.graph_digest not in known:
            raise PlanError(
                f"{source}: is for another graph: graph_digest is {self.graph_digest[:12]}..., "
                f"that of {graph.name!r} is {known[0][:12]}..."
            )


def digest_of_graph(graph: Graph) -> str:
    """Returns the digest that identifies a plan's graph, without its name and its given times.

    The same step has several names: that of its class in Python, that of its function on the command line.
    """
    return replace(graph, name="").untimed_digest
