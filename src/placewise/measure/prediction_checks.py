"""Checks of a profile: placements of different kinds, predicted with it and then run.

One wrong number of a profile can throw off the prediction of every placement that depends on it, and leave the others right.
So what is run differs in what it depends on: one device, layers one after the other, batches side by side, random blocks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.errors import StrategyError
from placewise.core.problem import Problem
from placewise.core.profile import CheckedPrediction, Profile
from placewise.graph_capture.capture import CapturedStep
from placewise.machines.slices import Cut
from placewise.measure.contended_schedule import schedule_together
from placewise.measure.profiler import apply_profile
from placewise.measure.steps import step_times
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
    virtual: Mapping[str, Cut] | None = None,
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
            if (times := step_times(captured, predicted, virtual or {}, STEPS, MOST_SECONDS)) is not None:
                checks.append(CheckedPrediction(name, predicted.step_seconds, float(np.median(times))))
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
