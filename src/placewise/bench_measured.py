"""Predicted beside measured: what the simulator says of placements with measured op times, and what they take for real."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from placewise.capture.training import CapturedStep
from placewise.core.arrays import Floats, Ints
from placewise.core.cluster import Cluster
from placewise.core.errors import StrategyError
from placewise.core.plan import Plan, digest_of_graph
from placewise.core.problem import Problem
from placewise.core.profile import Profile
from placewise.core.profile_file import write_profile
from placewise.core.text import counted
from placewise.execute.compiling import compile_placement
from placewise.execute.examples import random_batch, real_step
from placewise.execute.machine import real_devices
from placewise.execute.measured import Judged, Measure, failed, measure_fitting
from placewise.execute.measured_worker import Runner, is_out_of_memory
from placewise.execute.measuring import Measurement, measure_steps
from placewise.execute.profile import apply_profile, measure_profile
from placewise.execute.run_steps import run_steps
from placewise.execute.together import schedule_together
from placewise.placing import make_plan, predict, run
from placewise.request import Request
from placewise.search import Budget, Outcome, unless_stopped
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator

STRATEGIES = ("gpu-only", "expert", "balanced", "m-etf", "auto", "post")
MEASURING = "post"  # it goes on with measurements from where it has ended in the simulator


@dataclass(frozen=True)
class Trial:
    """How strategies are tried: they search with simulated, profiled times; what they find is run."""

    strategies: tuple[str, ...] = STRATEGIES
    plans: tuple[str, ...] = ()  # files, of measured searches for example
    evaluations: int = 2400
    seconds: float = 10.0  # of auto
    measurements: int = 60  # of the search that measures; 0: there is none
    measuring_seconds: float = 90.0  # that these may take
    busy: float = 1.0  # the share of the time in which a search takes neighbours on the same hardware to work
    warm_up: int = 2
    steps: int = 5
    virtual: Mapping[str, int] = field(default_factory=dict)
    cuda_graphs: bool = False  # run everything a second time, with stretches as CUDA graphs
    kept: str | None = None  # a folder for the profile, and a plan for each placement


def bench_measured(
    model: str, cluster: Cluster, trial: Trial, tell: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Returns a row for each placement; tells how far it is."""
    plans = {path: Plan.load(path) for path in trial.plans}
    captured = real_step(model)
    for path, plan in plans.items():
        plan.resolve(Problem.of(captured.graph, cluster), path)  # wrong ones are refused before any work
    measurements = measure_profile(captured, cluster, trial.virtual, runs_step=True)
    tell(
        f"{len(captured.graph.ops):,} ops with {measurements.num_signatures:,} signatures, "
        f"{measurements.seconds:.1f} s to profile"
    )
    profile = measurements.profile
    problem = Problem.of(*apply_profile(captured, cluster, profile))
    searched = Problem.of(*apply_profile(captured, cluster, profile, trial.busy))
    kept = _Kept.of(trial)
    if kept is not None:
        write_profile(profile, kept.folder / "profile.json")
    rows, measured = [], dict[bytes, dict[str, Any]]()
    for name, placement, order in _found(captured, searched, trial, plans, tell):
        schedule = Simulator(problem).schedule(placement, order)
        if kept is not None:
            _plan(name, schedule).save(kept.file_of(name))
        same = placement.tobytes() + order.tobytes()  # several strategies may find one and the same
        if same not in measured:
            measured[same] = _row(captured, problem, profile, schedule, trial)
        rows.append({"placement": name, **measured[same]})
        figures = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in rows[-1].items()}
        tell(f"{figures.pop('placement')}: {', '.join(f'{key} {value}' for key, value in figures.items())}")
    if not rows:
        raise StrategyError(f"bench measured: there is nothing to run: {', '.join(trial.strategies)} found no placement")
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Returns the median error, and how far the predicted order of the placements is the measured one; None: too few ran."""
    ran = [row for row in rows if row["measured ms"] != "-"]
    both = [np.array([row[column] for row in ran]) for column in ("together ms", "measured ms")]
    return {
        "median error %": float(np.median([abs(row["error %"]) for row in ran])) if ran else None,
        "rank correlation": round(rank_correlation(*both), 6) if len(ran) > 1 else None,
    }


def rank_correlation(first: Floats, second: Floats) -> float:
    """Returns Spearman's coefficient; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = ((last - counts + 1 + last) / 2.0)[inverse]
    return ranks


def _found(
    captured: CapturedStep, problem: Problem, trial: Trial, plans: Mapping[str, Plan], tell: Callable[[str], None]
) -> Iterator[tuple[str, Ints, Ints]]:
    """Yields the placement and the order that each strategy finds, and each plan says."""
    simulator = Simulator(problem)
    for name in trial.strategies:
        request = Request(name, budget=Budget(seconds=trial.seconds) if name == "auto" else Budget(trial.evaluations))
        try:
            outcome = unless_stopped(run(problem, request, simulator))
        except StrategyError as why:  # this one does not suit the problem, or is not installed
            tell(f"{name}: {why}")
            continue
        if outcome.placement is None:
            if outcome.closest is not None:  # the simulator's word about it can be checked all the same
                yield f"{name} (does not fit)", outcome.closest, simulator.schedule(outcome.closest).order
            continue
        yield name, outcome.placement, simulator.schedule(outcome.placement, outcome.order).order
        if name == MEASURING and trial.measurements:
            found = _go_on_measuring(captured, problem, trial, request, outcome)
            tell(f"{name}, measured: {counted(found.evaluations, 'measurement')}")
            if found.placement is not None:
                yield f"{name}, measured", found.placement, simulator.schedule(found.placement, found.order).order
    for path, plan in plans.items():
        placement, order = plan.resolve(problem, path)
        yield path, placement, simulator.schedule(placement, order).order


@dataclass(frozen=True)
class _Kept:
    """A folder for plans, and the names of files there that are none of theirs."""

    folder: Path
    taken: set[str]

    @classmethod
    def of(cls, trial: Trial) -> "_Kept | None":
        """Returns the trial's folder, made where there is none; plans that were given may lie in it."""
        if trial.kept is None:
            return None
        folder = Path(trial.kept).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        given = (Path(path).resolve() for path in trial.plans)
        return cls(folder, {"profile.json", *(path.name for path in given if path.parent == folder)})

    def file_of(self, name: str) -> Path:
        """Returns the file of a placement's plan, which is no other's."""
        stem = Path(name).stem.replace(", ", "-").replace(" ", "-")
        every = (f"{stem}.json" if i == 1 else f"{stem}-{i}.json" for i in count(1))
        file = next(file for file in every if file not in self.taken)
        self.taken.add(file)
        return self.folder / file


def _plan(name: str, schedule: Schedule) -> Plan:
    """Returns a placement as a plan."""
    problem, order = schedule.problem, tuple(schedule.order.tolist())
    placement = problem.expand(schedule.placement)
    digest = digest_of_graph(problem.graph)
    return Plan(placement, order=order, graph_digest=digest, cluster=problem.cluster.name, strategy=name)


def _go_on_measuring(captured: CapturedStep, problem: Problem, trial: Trial, request: Request, outcome: Outcome) -> Outcome:
    """Returns what a strategy finds by measuring when it starts near what it has found in the simulator."""
    captured = replace(captured, step=replace(captured.step, batch=random_batch(captured)))
    runner = Runner(captured, problem, Measure(steps=1, warm_up=1, virtual=trial.virtual), run_steps)
    simulator = Simulator(problem)

    def measure(placement: Ints, order: Ints) -> Judged:
        seconds = float(runner(placement[None], order[None]).step_seconds[0])
        return (seconds, seconds, 0) if np.isfinite(seconds) else failed(simulator, 1)

    with TemporaryDirectory() as folder:
        path = f"{folder}/plan.json"
        make_plan(problem, request, outcome, predict(problem, request, outcome), None).save(path)
        budget = Budget(trial.measurements, trial.measuring_seconds)
        settings = {**request.settings, "start": path}
        request = Request(request.strategy, settings, budget, measure=runner.measure)
        return unless_stopped(
            run(problem, request, lambda placements, orders=None: measure_fitting(simulator, placements, orders, measure))
        )


def _row(captured: CapturedStep, problem: Problem, profile: Profile, alone: Schedule, trial: Trial) -> dict[str, Any]:
    together = schedule_together(problem, profile, alone.placement, alone.order)
    predicted = together.step_seconds * 1e3
    row: dict[str, Any] = {
        "alone ms": alone.step_seconds * 1e3,
        "together ms": predicted,
        "measured ms": "-",
        "spread %": "-",
        "error %": "-",
    }
    row |= {"peak MiB": alone.peak_bytes.max() / 2**20, "measured MiB": "-"}
    row |= {"GPUs MiB": "-", "allocator's MiB": "-"}
    if found := _run(captured, alone, trial):
        measured = _median_ms(found)
        row |= {"measured ms": measured, "spread %": float(np.ptp(found.step_seconds)) * 1e5 / measured}
        row |= {"error %": (predicted / measured - 1) * 100, "measured MiB": found.schedule.peak_bytes.max() / 2**20}
        if found.allocated_bytes:
            allocated = sum(found.allocated_bytes.values())
            row |= {"GPUs MiB": _gpu_bytes(alone) / 2**20, "allocator's MiB": allocated / 2**20}
    if trial.cuda_graphs:
        graphed = _run(captured, alone, trial, cuda_graphs=True)
        row |= {"with graphs ms": _median_ms(graphed) if graphed else "-"}
    return row


def _median_ms(found: Measurement) -> float:
    return float(np.median(found.step_seconds)) * 1e3


def _gpu_bytes(schedule: Schedule) -> int:
    """Returns the most bytes that all GPUs have in use together."""
    is_gpu = [device.kind == "gpu" for device in schedule.problem.cluster.devices]
    return int(schedule.memory[:, is_gpu].sum(axis=1).max(initial=0))


def _run(captured: CapturedStep, alone: Schedule, trial: Trial, cuda_graphs: bool = False) -> Measurement | None:
    """Returns some measured steps of a placement; None where they run out of memory."""
    devices = real_devices(alone.problem.cluster, trial.virtual)
    if any(device.is_gpu for device in devices):
        from placewise.execute.cuda import forget_workspaces

        forget_workspaces()  # so that the allocator's peak is this placement's
    try:
        with closing(
            compile_placement(alone.problem, alone.placement, alone.order, captured, devices, cuda_graphs)
        ) as train_step:
            warm_up = max(trial.warm_up, train_step.warm_up_steps)
            return measure_steps(train_step, alone, random_batch(captured), trial.steps, warm_up)
    except RuntimeError as trouble:
        if not is_out_of_memory(trouble):
            raise
        return None
