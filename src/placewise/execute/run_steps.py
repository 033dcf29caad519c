"""Runs a placement for real and times its steps: what measuring evaluators do."""

from collections.abc import Mapping, Sequence

import numpy as np

from placewise.capture.training import CapturedStep
from placewise.core.arrays import Floats, Ints
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.execute.compiling import compile_placement
from placewise.execute.machine import real_devices
from placewise.execute.measuring import time_step


def run_steps(
    captured: CapturedStep,
    cluster: Cluster,
    placement: Sequence[str],
    order: Ints,
    warm_up: int,
    steps: int,
    virtual: Mapping[str, int],
) -> tuple[Floats, Mapping[str, int]]:
    """Returns the seconds of each step behind the warm-up [steps], and the peak bytes by device, where they are known.

    The step's own model is trained by it. Peaks are those of whole GPUs: slices of one, and the CPUs, share an allocator.
    """
    problem = Problem.of(captured.graph, cluster)
    devices = real_devices(cluster, virtual)
    train_step = compile_placement(problem, problem.contract(placement), order, captured, devices)
    try:
        seconds, batch = [], train_step.bring_home(captured.step.batch)
        train_step.reset_peaks()
        for _ in range(warm_up + steps):
            seconds.append(time_step(train_step, batch)[1])
        peaks = train_step.allocated_bytes()
    finally:
        train_step.close()
    return np.array(seconds[warm_up:], np.float64), peaks
