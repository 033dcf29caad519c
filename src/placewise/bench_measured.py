"""Predicted beside measured: what the simulator says of placements with measured op times, and what they take for real."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from placewise.capture.training import CapturedStep
from placewise.core.arrays import Floats
from placewise.core.cluster import Cluster
from placewise.core.errors import StrategyError
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.core.profile import Profile
from placewise.execute.compiling import compile_placement
from placewise.execute.examples import random_batch, real_step
from placewise.execute.machine import real_devices
from placewise.execute.measured_worker import is_out_of_memory
from placewise.execute.measuring import Measurement, measure_steps
from placewise.execute.profile import apply_profile, measure_profile
from placewise.execute.together import schedule_together
from placewise.placing import Request, run
from placewise.search import Budget
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator

STRATEGIES = ("gpu-only", "expert", "balanced", "m-etf", "auto")


@dataclass(frozen=True)
class Trial:
    """How strategies are tried: they search with simulated, profiled times; what they find is run."""

    strategies: tuple[str, ...] = STRATEGIES
    plans: tuple[str, ...] = ()  # files, of measured searches for example
    evaluations: int = 2400
    seconds: float = 10.0  # of auto
    warm_up: int = 2
    steps: int = 7
    virtual: Mapping[str, int] = field(default_factory=dict)


def bench_measured(model: str, cluster: Cluster, trial: Trial) -> list[dict[str, Any]]:
    """Returns a row for each placement, and one with the median error and the rank correlation."""
    plans = {path: Plan.load(path) for path in trial.plans}
    captured = real_step(model)
    for path, plan in plans.items():
        plan.resolve(Problem.of(captured.graph, cluster), path)  # wrong ones are refused before any work
    profile = measure_profile(captured, cluster, trial.virtual).profile
    problem = Problem.of(*apply_profile(captured, cluster, profile))
    rows = []
    for name, schedule in _found(problem, trial, plans).items():
        rows.append({"placement": name, **_row(captured, problem, profile, schedule, trial)})
    ran = [row for row in rows if row["measured ms"] != "-"]
    errors = [abs(row["error %"]) for row in ran]
    both = [np.array([row[column] for row in ran]) for column in ("together ms", "measured ms")]
    rows.append({
        **dict.fromkeys(rows[0], ""),
        "placement": "median error, rank correlation",
        "error %": float(np.median(errors)) if errors else "-",
        "measured ms": rank_correlation(*both) if len(ran) > 1 else "-",
    })  # fmt: skip
    return rows


def rank_correlation(first: Floats, second: Floats) -> float:
    """Returns Spearman's coefficient; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: Floats = ((last - counts + 1 + last) / 2.0)[inverse]
    return ranks


def _found(problem: Problem, trial: Trial, plans: Mapping[str, Plan]) -> dict[str, Schedule]:
    """Returns what each strategy finds, and each plan says, as the simulator's timeline of devices alone."""
    simulator, found = Simulator(problem), {}
    for name in trial.strategies:
        budget = Budget(seconds=trial.seconds) if name == "auto" else Budget(trial.evaluations)
        try:
            outcome = run(problem, Request(name, budget=budget), simulator)
        except StrategyError:
            continue  # this one does not suit the problem, or is not installed
        if outcome.placement is not None:
            found[name] = simulator.schedule(outcome.placement, outcome.order)
    for path, plan in plans.items():
        found[path] = simulator.schedule(*plan.resolve(problem, path))
    return found


def _row(captured: CapturedStep, problem: Problem, profile: Profile, alone: Schedule, trial: Trial) -> dict[str, Any]:
    together = schedule_together(problem, profile, alone.placement, alone.order)
    predicted = together.step_seconds * 1e3
    row: dict[str, Any] = {
        "alone ms": alone.step_seconds * 1e3,
        "together ms": predicted,
        "measured ms": "-",
        "error %": "-",
    }
    row |= {"peak MiB": alone.peak_bytes.max() / 2**20, "measured MiB": "-"}
    try:
        found = _run(captured, alone, trial)
    except RuntimeError as trouble:
        if not is_out_of_memory(trouble):
            raise
        return row
    measured = float(np.median(found.step_seconds)) * 1e3
    row |= {"measured ms": measured, "error %": (predicted / measured - 1) * 100}
    return {**row, "measured MiB": found.schedule.peak_bytes.max() / 2**20}


def _run(captured: CapturedStep, alone: Schedule, trial: Trial) -> Measurement:
    devices = real_devices(alone.problem.cluster, trial.virtual)
    train_step = compile_placement(alone.problem, alone.placement, alone.order, captured, devices)
    try:
        return measure_steps(train_step, alone, random_batch(captured), trial.steps, trial.warm_up)
    finally:
        train_step.close()
