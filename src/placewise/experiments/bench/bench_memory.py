"""Steps on a GPU of which they may use only a part, against what users do then: `placewise bench memory`.

Each step is profiled and placed on this machine, its GPU limited; then eager PyTorch, which may use the whole GPU, the ways
that spare memory and our plan take turns, each in a process of its own.
"""

import multiprocessing
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from placewise.core.errors import InputError, PlacewiseError
from placewise.core.quantities import format_bytes, format_seconds
from placewise.experiments.bench import Benchmark, Findings, Rows, option, table_of
from placewise.experiments.bench.bench_speed import (
    CHECKPOINTED,
    EAGER,
    NO_FIGURE,
    ON_CPU,
    PLAN,
    SHARDED,
    compare_ways,
    started,
)
from placewise.experiments.bench.speed_pages import machine_words
from placewise.report.markdown_tables import markdown_table

if TYPE_CHECKING:
    from placewise.core.cluster import Cluster

GIB = 2**30


class LimitedStep(NamedTuple):
    """A step, and how much of the GPU it may use."""

    name: str
    model: str
    memory_bytes: int
    ways: tuple[str, ...]  # what users do


STEPS = (
    LimitedStep("resnet", "resnet:batch=32", 2 * GIB, (CHECKPOINTED, ON_CPU)),
    LimitedStep("inception-v3", "inception-v3:batch=32", 2 * GIB, (CHECKPOINTED, ON_CPU)),
    LimitedStep("gpt", "gpt:batch=8,length=512,micro_batches=8", GIB, (SHARDED,)),
    LimitedStep("nmt", "nmt:layers=4,hidden=2048,batch=64,length=12", 6 * GIB, (SHARDED,)),
)

KINDS = {  # of plans, of which the fastest counts: whether tensors may wait, and whether the CPU computes where it need not
    "recompute": (False, False),
    "recompute and wait": (True, False),
    "recompute, ops on the CPU": (False, True),
    "all": (True, True),
}

UNWANTED = 1.0  # seconds that an op on the CPU counts more, where it need not compute

TRIED_STEPS = 5

USED, MOST_LEFT = 0.93, 112 * 2**20  # a plan leaves 7% of what a step may use to libraries' workspaces, at most so much

PAGE = "docs/results/memory.md"

ABOUT = """\
# Steps in a part of a GPU
    placewise bench memory -o docs/results/memory.md

writes this page. Each step may use only a part of the GPU. It is profiled and placed there four times, and the plan that
runs fastest counts: tensors may wait in the CPU's memory, or are only recomputed; and ops may run on the CPU as freely as
their times say, or only where they must. (While a CPU device computes, its thread and the host's take turns in Python, and
launches take longer than predicted.) Then the ways
take turns, each in a process of its own: eager PyTorch, which may use the whole GPU, and what users do when it is too small.
A plan leaves 7% of what it may use, 112 MiB at most, because the allocator's peak has the workspaces of libraries, too.
Times are medians of {rounds} steps, peaks those of PyTorch's allocator.

{machine}
"""


@dataclass(frozen=True)
class LimitedMemory(Benchmark):
    """Steps on a GPU of which they may use only a part: our plans, eager PyTorch and what users do, in turns."""

    names: tuple[str, ...] = option("names", f"only these of {', '.join(step.name for step in STEPS)}", "STEP", default=())
    folder: str = option(
        "folder", "keeps profiles and plans; those that are there are used", "FOLDER", default="bench-memory"
    )
    seconds: float = option("seconds", "time to search for each plan", default=8.0)
    rounds: int = option("positive", "steps of each way that are measured, after the warm-up", default=9)
    output: str | None = option("file", f"write the page of the docs ({PAGE}), again after each step", "PAGE.MD")

    def run(self) -> Findings:
        """Profiles, places and measures one step after the other."""
        import torch

        from placewise.formats.files import write_bytes

        known = {step.name: step for step in STEPS}
        for name in self.names:
            if name not in known:
                raise InputError(f"there is no step {name!r}: the steps are {', '.join(known)}")
        if not torch.cuda.is_available():
            raise InputError("bench memory: PyTorch finds no GPU here")
        chosen = [known[name] for name in self.names or known]
        plans = {step.name: self._plan(step) for step in chosen}
        rows: Rows = []
        warnings: list[str] = []
        with ExitStack() as stack:
            ends = {step.name: stack.enter_context(ExitStack()) for step in chosen}
            count = sum(len(step.ways) + 2 for step in chosen)
            runners = {
                step.name: {
                    way: ends[step.name].enter_context(started(step.model, way, "gpu", 0, str(plans[step.name]), count))
                    for way in (EAGER, *step.ways, PLAN)
                }
                for step in chosen
            }
            for step in chosen:
                for runner in runners[step.name].values():
                    runner.wait()
                found, problems = compare_ways(step.model, runners[step.name], self.rounds)
                ends[step.name].close()
                rows += [_row(step, row, plans[step.name]) for row in found]
                warnings += problems
                if self.output is not None:
                    write_bytes(self.output, ("\n".join(memory_page(rows, self.rounds)) + "\n").encode())
        return Findings({self.name(): rows}, table_of(rows), tuple(warnings))

    def _plan(self, step: LimitedStep) -> Path:
        """Returns the file with the step's plan, which is made if it is not there."""
        path = Path(self.folder) / f"{step.name}.plan.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            context = multiprocessing.get_context("spawn")  # so that its memory on the GPU is given back
            process = context.Process(target=make_plan, args=(step, path, self.seconds))
            process.start()
            process.join()
            if not path.exists():
                raise InputError(f"{step.model}: no plan was made")
        return path


def limited_machine(memory_bytes: int | None = None) -> "Cluster":
    """Returns this machine's first GPU, of which so much can be used, with the CPU."""
    from placewise.core.cluster import Cluster

    cluster = Cluster.detect()
    kept = [next(d for d in cluster.devices if d.kind == kind) for kind in ("gpu", "cpu")]
    names = {device.name for device in kept}
    links = tuple(link for link in cluster.links if {link.source, link.target} <= names)
    found = replace(cluster, name="one-gpu", devices=tuple(kept), links=links)
    return found if memory_bytes is None else found.limited({kept[0].name: memory_bytes})


def make_plan(step: LimitedStep, path: Path, seconds: float) -> None:
    """Profiles and places a step, runs a plan of each kind, and writes the fastest."""
    import numpy as np

    from placewise.formats.profile_file import read_profile, write_profile
    from placewise.measure.profiler import apply_profile, measure_profile
    from placewise.measure.random_batch import load_with_weights
    from placewise.search.planner import place

    _tell(f"{step.model}: profile")
    captured, whole = load_with_weights(step.model), limited_machine()
    kept = path.with_name(f"{step.name}.profile.json")
    if kept.exists():
        profile = read_profile(str(kept))
    else:
        profile = measure_profile(captured, whole, runs_step=True).profile
        write_profile(profile, str(kept))
    graph, cluster = apply_profile(captured, whole, profile)
    limited = cluster.limited({cluster.device_names[0]: max(int(USED * step.memory_bytes), step.memory_bytes - MOST_LEFT)})
    tried: list[tuple[float, str]] = []
    plans: dict[str, Any] = {}
    for kind, (park, computes) in KINDS.items():
        on_cpu = graph.ops.seconds["cpu:0"]
        times = {**graph.ops.seconds, "cpu:0": on_cpu if computes else np.nan_to_num(on_cpu) + UNWANTED}
        slowed = replace(graph, ops=replace(graph.ops, seconds=times))
        try:
            plans[kind] = _predicted(place(slowed, limited, seconds=seconds, simple=0.0, park=park), graph, limited)
        except PlacewiseError as problem:
            _tell(f"{step.model}, {kind}: {problem}")
            continue
        tried.append((_seconds(plans[kind], captured), kind))
        _tell(f"{step.model}, {kind}: {tried[-1][0] * 1e3:.1f} ms, {plans[kind].step_seconds * 1e3:.1f} predicted")
    if tried:
        plans[min(tried)[1]].save(path)


def _predicted(plan: Any, graph: Any, cluster: "Cluster") -> Any:
    """Returns a plan with the step time that a graph's own times give it."""
    from placewise.core.problem import Problem
    from placewise.rewrite.memory_options import graph_of_plan
    from placewise.simulate.simulator import Simulator

    problem = Problem.of(graph_of_plan(graph, plan), cluster)
    placement, order = plan.resolve(problem)
    return replace(plan, step_seconds=Simulator(problem, "program").schedule(placement, order).step_seconds)


def _seconds(plan: Any, captured: Any) -> float:
    """Returns the least seconds of a few steps of a plan."""
    from placewise.measure.random_batch import random_batch
    from placewise.measure.steps import time_step

    train_step = plan.compile(captured)
    try:
        batch = train_step.bring_home(random_batch(captured))
        for _ in range(train_step.warm_up_steps):
            train_step(batch)
        return min(time_step(train_step, batch)[1] for _ in range(TRIED_STEPS))
    finally:
        train_step.close()


def _row(step: LimitedStep, row: dict[str, Any], plan_file: Path) -> dict[str, Any]:
    """Returns the figures of a way, with what was predicted if it is ours."""
    from placewise.core.plan import Plan

    predicted: tuple[Any, Any] = (NO_FIGURE, NO_FIGURE)
    if row["way"] == PLAN:
        plan = Plan.load(str(plan_file))
        predicted = ((plan.step_seconds or 0.0) * 1e3, (plan.peak_bytes or {}).get("gpu:0", 0) / 2**20)
    more = {"may use MiB": step.memory_bytes / 2**20, "predicted ms": predicted[0], "predicted MiB": predicted[1]}
    return {name: row[name] for name in row if name != "memory / eager"} | more


def memory_page(rows: Rows, rounds: int) -> list[str]:
    """Returns the lines of the docs page."""
    lines = [ABOUT.format(rounds=rounds, machine=machine_words("gpu"))]
    header = ["step", "may use", "way", "step time", "of eager", "predicted", "peak", "predicted"]
    cells = []
    for row in rows:
        first = row["way"] == EAGER
        limit = format_bytes(int(row["may use MiB"] * 2**20))
        times = [_time(row["ms"]), NO_FIGURE if isinstance(row["time / eager"], str) else f"{row['time / eager']:.2f}"]
        peaks = [_time(row["predicted ms"]), _mib(row["peak MiB"]), _mib(row["predicted MiB"])]
        cells.append([f"`{row['model']}`" if first else "", limit if first else "", row["way"], *times, *peaks])
    return [*lines, *markdown_table(header, cells)]


def _time(milliseconds: Any) -> str:
    return milliseconds if isinstance(milliseconds, str) else format_seconds(milliseconds / 1e3)


def _mib(size: Any) -> str:
    return size if isinstance(size, str) else f"{size:,.0f} MiB"


def _tell(line: str) -> None:
    """Prints a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
