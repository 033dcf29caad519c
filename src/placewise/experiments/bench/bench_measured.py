"""How well the simulator predicts real steps: `placewise bench measured`.

Strategies search in the simulator with profiled times. What they find is predicted again, alone and with devices that share
hardware slowing each other down, and then run.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from placewise.core.errors import InputError, StrategyError
from placewise.core.quantities import format_count
from placewise.experiments.bench import Benchmark, Findings, Rows, option, required, table_of
from placewise.search.budget import Budget

if TYPE_CHECKING:
    from placewise.core.arrays import Floats, Ints
    from placewise.core.cluster import Cluster
    from placewise.core.plan import Plan
    from placewise.core.problem import Problem
    from placewise.core.profile import Profile
    from placewise.evaluate.measured import Judged
    from placewise.graph_capture.capture import CapturedStep
    from placewise.measure.steps import MeasuredSteps
    from placewise.search.driver import Outcome
    from placewise.search.request import Request
    from placewise.simulate.schedule import Schedule

STRATEGIES = ("gpu-only", "expert", "balanced", "m-etf", "auto", "post")

MEASURING = "post"  # continues with measurements when its search in the simulator has ended


@dataclass(frozen=True)
class Prediction(Benchmark):
    """Predicted and measured step times: MODEL is profiled on CLUSTER, and what strategies find is run."""

    model: str = required("run-model")
    cluster: str = required("cluster")
    strategies: tuple[str, ...] = option(
        "strategies", f"names or families (default: {','.join(STRATEGIES)})", default=STRATEGIES
    )
    seconds: float = option("seconds", "time for auto", default=10.0)
    budget: int = option("positive", "evaluations for all others", default=2400)
    virtual: tuple[tuple[str, int], ...] = option("virtual", default=())
    plan: tuple[str, ...] = option("repeated", "run this plan.json too", "PLAN", default=())
    measurements: int = option("count", "placements that Post measures after its search in the simulator", default=60)
    rounds: int = option("positive", "how often to profile, and to run what was found", default=1)
    cuda_graphs: bool = option("flag", "run everything a second time, with CUDA graphs", default=False)
    keep: str | None = option("folder", "write the profile, and a plan for each placement, into this folder", "DIR")
    measuring_seconds: float = 90.0  # at most, for the measurements of Post
    busy: float = 1.0  # share of the time in which a search takes other devices on the same hardware to be busy
    warm_up: int = 2
    steps: int = 5

    def run(self) -> Findings:
        """Returns a row for each placement, and how well the predictions and their order agree with what was measured."""
        from placewise.core.cluster import Cluster

        cluster = Cluster.load(self.cluster)
        if self.cuda_graphs and all(device.kind != "gpu" for device in cluster.devices):
            raise InputError(f"--cuda-graphs: cluster {cluster.name!r} has no GPU")
        rows, is_complete = predict_and_measure(self, cluster, lambda line: print(line, file=sys.stderr, flush=True))
        quality = prediction_quality(rows)
        lines = (f"{name}: {'-' if value is None else f'{value:.3g}'}" for name, value in quality.items())
        data = {self.name(): rows, **quality, "is_complete": is_complete}
        return Findings(data, "\n".join([table_of(rows), "", *lines]), is_complete=is_complete)


def predict_and_measure(options: Prediction, cluster: "Cluster", tell: Callable[[str], None]) -> tuple[Rows, bool]:
    """Returns a row for each placement, and whether these are all: Ctrl-C ends it with the rows so far.

    Strategies search with the first round's profile. With several rounds, figures are medians over all of them. Each
    placement is reported to `tell` when it is done.
    """
    from placewise.core.plan import Plan
    from placewise.core.problem import Problem
    from placewise.measure.profiler import apply_profile
    from placewise.measure.random_batch import load_with_weights
    from placewise.simulate.simulator import Simulator

    plans = {path: Plan.load(path) for path in options.plan}
    captured = load_with_weights(options.model)
    for path, plan in plans.items():
        plan.resolve(Problem.of(captured.graph, cluster), path)  # refuses wrong ones before any work
    found: list[tuple[str, bytes]] = []  # a name, and the placement and the order as a key
    ran: dict[bytes, list[_Ran]] = {}  # several strategies may find the same placement
    is_complete = False
    try:
        profile, problem = _profile(captured, cluster, options, tell)
        searched = Problem.of(*apply_profile(captured, cluster, profile, options.busy))
        kept = _Kept.of(options, profile)
        for name, placement, order in _found(captured, searched, options, plans, tell):
            schedule, same = Simulator(problem).schedule(placement, order), placement.tobytes() + order.tobytes()
            if kept is not None:
                kept.add(name, schedule)
            if same not in ran:
                ran[same] = [_Ran.of(captured, profile, schedule, options)]
            found.append((name, same))
            tell(f"{name}: {_in_one_line(_row(ran[same], options))}")
        for number in range(2, options.rounds + 1):
            profile, problem = _profile(captured, cluster, options, tell)
            for same, rounds in ran.items():
                schedule = Simulator(problem).schedule(rounds[0].alone.placement, rounds[0].alone.order)
                rounds.append(_Ran.of(captured, profile, schedule, options))
                names = ", ".join(name for name, its in found if its == same)
                tell(f"round {number} of {options.rounds}, {names}: {_in_one_line(_row(rounds[-1:], options))}")
        is_complete = True
    except KeyboardInterrupt:
        if not found:
            raise
    if not found:
        raise StrategyError(f"bench measured: nothing to run: {', '.join(options.strategies)} found no placement")
    return [{"placement": name, **_row(ran[same], options)} for name, same in found], is_complete


def prediction_quality(rows: Rows) -> dict[str, float | None]:
    """Returns the median error, and the rank correlation of predicted and measured times.

    They are None if too few placements ran, or if all take the same time.
    """
    import numpy as np

    ran = [row for row in rows if row["measured ms"] != "-"]
    both = [np.array([row[column] for row in ran]) for column in ("together ms", "measured ms")]
    return {
        "median error %": float(np.median([abs(row["error %"]) for row in ran])) if ran else None,
        "rank correlation": round(rank_correlation(*both), 6) if all(len(set(side)) > 1 for side in both) else None,
    }


def rank_correlation(first: "Floats", second: "Floats") -> float:
    """Returns Spearman's coefficient; equal values share the mean of their ranks."""
    import numpy as np

    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: "Floats") -> "Floats":
    import numpy as np

    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = ((last - counts + 1 + last) / 2.0)[inverse]
    return ranks


def _found(
    captured: "CapturedStep",
    problem: "Problem",
    options: Prediction,
    plans: "Mapping[str, Plan]",
    tell: Callable[[str], None],
) -> "Iterator[tuple[str, Ints, Ints]]":
    """Yields the name, placement and order of what each strategy finds, and of each plan."""
    from placewise.search.driver import unless_stopped
    from placewise.search.planner import Planner
    from placewise.search.request import Request
    from placewise.simulate.simulator import Simulator

    simulator = Simulator(problem)
    for name in options.strategies:
        request = Request(name, budget=Budget(seconds=options.seconds) if name == "auto" else Budget(options.budget))
        try:
            outcome = unless_stopped(Planner(problem, request).search(evaluator=simulator))
        except StrategyError as why:  # it does not suit the problem, or is not installed
            tell(f"{name}: {why}")
            continue
        if outcome.placement is None:
            if outcome.closest is not None:  # the prediction can be checked all the same
                yield f"{name} (does not fit)", outcome.closest, simulator.schedule(outcome.closest).order
            continue
        yield name, outcome.placement, simulator.schedule(outcome.placement, outcome.order).order
        if name == MEASURING and options.measurements:
            found = _go_on_measuring(captured, problem, options, request, outcome)
            tell(f"{name}, measured: {format_count(found.evaluations, 'measurement')}")
            if found.placement is not None:
                yield f"{name}, measured", found.placement, simulator.schedule(found.placement, found.order).order
    for path, plan in plans.items():
        placement, order = plan.resolve(problem, path)
        yield path, placement, simulator.schedule(placement, order).order


@dataclass(frozen=True)
class _Kept:
    """The folder of --keep, and the file names in it that are taken."""

    folder: Path
    taken: set[str]

    @classmethod
    def of(cls, options: Prediction, profile: "Profile") -> "_Kept | None":
        """Returns the folder, made if it is missing, with the profile; plans that were given are not overwritten in it."""
        from placewise.formats.profile_file import write_profile

        if options.keep is None:
            return None
        folder = Path(options.keep).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        write_profile(profile, folder / "profile.json")
        given = (Path(path).resolve() for path in options.plan)
        return cls(folder, {"profile.json", *(path.name for path in given if path.parent == folder)})

    def add(self, name: str, schedule: "Schedule") -> None:
        """Writes a placement as a plan, into a file of its own."""
        stem = Path(name).stem.replace(", ", "-").replace(" ", "-")
        every = (f"{stem}.json" if i == 1 else f"{stem}-{i}.json" for i in count(1))
        file = next(file for file in every if file not in self.taken)
        self.taken.add(file)
        _plan(name, schedule).save(self.folder / file)


def _plan(name: str, schedule: "Schedule") -> "Plan":
    from placewise.core.plan import Plan, digest_of_graph

    problem, order = schedule.problem, tuple(schedule.order.tolist())
    placement = problem.expand(schedule.placement)
    digest = digest_of_graph(problem.graph)
    return Plan(placement, order=order, graph_digest=digest, cluster=problem.cluster.name, strategy=name)


def _go_on_measuring(
    captured: "CapturedStep", problem: "Problem", options: Prediction, request: "Request", outcome: "Outcome"
) -> "Outcome":
    """Returns what a strategy finds by measuring, starting from what it has found in the simulator."""
    import numpy as np

    from placewise.evaluate.measured import Measure, Runner, judge_failed, measure_fitting
    from placewise.measure.random_batch import random_batch
    from placewise.measure.steps import run_steps
    from placewise.search.driver import unless_stopped
    from placewise.search.planner import Planner
    from placewise.search.request import Request
    from placewise.simulate.simulator import Simulator

    captured = replace(captured, step=replace(captured.step, batch=random_batch(captured)))
    runner = Runner(captured, problem, Measure(steps=1, warm_up=1, virtual=dict(options.virtual)), run_steps)
    simulator, longest_seconds = Simulator(problem), runner.measure.timeout_seconds

    def measure(placement: "Ints", order: "Ints") -> "Judged":
        seconds = float(runner(placement[None], order[None]).step_seconds[0])
        return (seconds, seconds, 0) if np.isfinite(seconds) else judge_failed(simulator, 1, longest_seconds)

    with TemporaryDirectory() as folder:
        path = f"{folder}/plan.json"
        Planner(problem, request).plan(outcome).save(path)
        budget = Budget(options.measurements, options.measuring_seconds)
        settings = {**request.settings, "start": path}
        request = Request(request.strategy, settings, budget, measure=runner.measure)
        return unless_stopped(
            Planner(problem, request).search(
                evaluator=lambda placements, orders=None: measure_fitting(
                    simulator, placements, orders, measure, longest_seconds
                )
            )
        )


def _profile(
    captured: "CapturedStep", cluster: "Cluster", options: Prediction, tell: Callable[[str], None]
) -> "tuple[Profile, Problem]":
    """Returns a new profile, and the problem with its times."""
    from placewise.core.problem import Problem
    from placewise.measure.profiler import apply_profile, measure_profile

    found = measure_profile(captured, cluster, dict(options.virtual), runs_step=True)
    tell(f"{len(captured.graph.ops):,} ops with {found.num_signatures:,} signatures, {found.seconds:.1f} s to profile")
    return found.profile, Problem.of(*apply_profile(captured, cluster, found.profile))


# --- what is run ---


@dataclass(frozen=True, eq=False)
class _Ran:
    """What was predicted for a placement, and what was measured; None if it ran out of memory."""

    alone: "Schedule"
    together_seconds: float
    plain: "MeasuredSteps | None"
    graphed: "MeasuredSteps | None"  # with --cuda-graphs

    @classmethod
    def of(cls, captured: "CapturedStep", profile: "Profile", alone: "Schedule", options: Prediction) -> "_Ran":
        """Runs a placement."""
        from placewise.measure.contended_schedule import schedule_together

        together = schedule_together(alone.problem, profile, alone.placement, alone.order).step_seconds
        plain = _measure(captured, alone, options)
        return cls(alone, together, plain, _measure(captured, alone, options, True) if options.cuda_graphs else None)


def _measure(
    captured: "CapturedStep", alone: "Schedule", options: Prediction, cuda_graphs: bool = False
) -> "MeasuredSteps | None":
    """Returns some measured steps of a placement; None if they run out of memory."""
    from placewise.measure.random_batch import random_batch
    from placewise.measure.steps import measure_steps
    from placewise.run.devices import real_devices
    from placewise.run.step.compiling import compile_placement
    from placewise.run.step.failures import is_out_of_memory

    devices = real_devices(alone.problem.cluster, dict(options.virtual))
    if any(device.kind == "gpu" for device in devices):
        from placewise.run.backends.cuda import forget_workspaces

        forget_workspaces()  # they would count in this placement's peak
    try:
        with closing(
            compile_placement(alone.problem, alone.placement, alone.order, captured, devices, cuda_graphs)
        ) as train_step:
            warm_up = max(options.warm_up, train_step.warm_up_steps)
            return measure_steps(train_step, alone, random_batch(captured), options.steps, warm_up)
    except RuntimeError as trouble:
        if not is_out_of_memory(trouble):
            raise
        return None


def _row(rounds: Sequence[_Ran], options: Prediction) -> dict[str, Any]:
    """Returns the figures of a placement: medians over the steps and the predictions of all rounds."""
    import numpy as np

    alone, together = np.median([(ran.alone.step_seconds, ran.together_seconds) for ran in rounds], axis=0).tolist()
    columns = ("measured ms", "spread %", "error %", "peak MiB", "measured MiB", "GPUs MiB", "allocator's MiB")
    row: dict[str, Any] = {"alone ms": alone * 1e3, "together ms": together * 1e3} | dict.fromkeys(columns, "-")
    row["peak MiB"] = rounds[0].alone.peak_bytes.max() / 2**20
    if found := [ran.plain for ran in rounds if ran.plain is not None]:
        seconds = np.concatenate([measurement.step_seconds for measurement in found])
        middle = float(np.median(seconds))
        row |= {"measured ms": middle * 1e3, "spread %": float(np.ptp(seconds)) / middle * 100}
        row |= {"error %": (together / middle - 1) * 100, "measured MiB": found[0].schedule.peak_bytes.max() / 2**20}
        if found[0].allocated_bytes:
            allocated = max(sum(measurement.allocated_bytes.values()) for measurement in found)
            row |= {"GPUs MiB": _gpu_bytes(rounds[0].alone) / 2**20, "allocator's MiB": allocated / 2**20}
    if options.cuda_graphs:
        graphed = [ran.graphed.step_seconds for ran in rounds if ran.graphed is not None]
        row["with graphs ms"] = float(np.median(np.concatenate(graphed))) * 1e3 if graphed else "-"
    return row


def _in_one_line(row: Mapping[str, Any]) -> str:
    """Returns a row as a line."""
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())


def _gpu_bytes(schedule: "Schedule") -> int:
    """Returns the most bytes that all GPUs have in use together."""
    is_gpu = [device.kind == "gpu" for device in schedule.problem.cluster.devices]
    return int(schedule.memory[:, is_gpu].sum(axis=1).max(initial=0))
