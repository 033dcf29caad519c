"""Checks of a profile: placements of different kinds, predicted with it and then run.

One wrong number of a profile can throw off the prediction of every placement that depends on it, and leave the others right.
So what is run differs in what it depends on: one device, layers one after the other, batches side by side, random blocks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.core.profile import CheckedPrediction, Profile
from placewise.graph_capture.capture import CapturedStep
from placewise.measure.contended_schedule import schedule_together
from placewise.measure.profiler import apply_profile
from placewise.measure.random_batch import random_batch
from placewise.measure.steps import time_step
from placewise.run.devices import real_devices
from placewise.run.step.compiling import compile_placement
from placewise.run.step.failures import is_out_of_memory
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.blocks import Blocks
from placewise.strategies.sampling import Choices

CHECKED = ("gpu-only", "cpu-only", "expert", "towers", "balanced")  # and random blocks

RANDOM_BLOCKS = "coarse:16"

STEPS, MOST_SECONDS = 3, 5.0  # of a placement, after its warm-up; fewer steps if they take longer than that

MOST_STEP_SECONDS = 10.0  # predicted; a longer step is not run


def check_predictions(
    captured: CapturedStep,
    cluster: Cluster,
    profile: Profile,
    virtual: Mapping[str, int] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Profile:
    """Returns the profile with its checks; placements that don't fit, or take too long, are left out.

    This trains the step's own model. `report` gets a line before each placement is run.
    """
    problem = Problem.of(*apply_profile(captured, cluster, profile))
    checks: list[CheckedPrediction] = []
    seen: list[Ints] = []
    for name, placement in _placements(problem):
        if any(np.array_equal(placement, other) for other in seen):
            continue
        seen.append(placement)
        predicted = schedule_together(problem, profile, placement)
        if predicted.fits and 0 < predicted.step_seconds <= MOST_STEP_SECONDS:
            report(f"check of {name}")
            if (seconds := _measure(captured, predicted, virtual or {})) is not None:
                checks.append(CheckedPrediction(name, predicted.step_seconds, seconds))
    return replace(profile, checks=tuple(checks))


def _placements(problem: Problem) -> Iterator[tuple[str, Ints]]:
    """Yields the name and the fastest of the first proposals of each strategy, and random blocks."""
    simulator = Simulator(problem)
    for name in CHECKED:
        try:
            proposal = next(make(name).search(problem, np.random.default_rng(0)))
        except StrategyError:
            continue
        yield name, proposal.placements[simulator(proposal.placements).cost.argmin()]
    blocks = Blocks.of(problem, RANDOM_BLOCKS)
    yield "random blocks", blocks.expand(Choices.among(blocks.allowed).draw(np.random.default_rng(0), 1))[0]


def _measure(captured: CapturedStep, predicted: Schedule, virtual: Mapping[str, int]) -> float | None:
    """Returns the median time of some steps; None if they run out of memory."""
    problem = predicted.problem
    devices = real_devices(problem.cluster, virtual)
    try:
        with closing(compile_placement(problem, predicted.placement, predicted.order, captured, devices)) as train_step:
            batch, times = train_step.bring_home(random_batch(captured)), list[float]()
            for _ in range(train_step.warm_up_steps):
                time_step(train_step, batch)
            while not times or (len(times) < STEPS and sum(times) < MOST_SECONDS):
                times.append(time_step(train_step, batch)[1])
    except (RuntimeError, MemoryError) as trouble:
        if not is_out_of_memory(trouble):
            raise
        return None
    return float(np.median(times))
