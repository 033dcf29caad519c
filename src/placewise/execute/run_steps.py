"""Runs a placement for real and times its steps: what measuring evaluators do."""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from placewise.capture.training import CapturedStep
from placewise.core.arrays import Floats, Ints
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.execute.compiling import compile_placement
from placewise.execute.machine import RealDevice, real_devices


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
    problem, devices = Problem.of(captured.graph, cluster), real_devices(cluster, virtual)
    train_step = compile_placement(problem, problem.contract(placement), order, captured, devices)
    whole = [device for device in devices if device.is_gpu and device.slice is None]
    try:
        for device in whole:
            torch.cuda.reset_peak_memory_stats(device.torch_device)
        seconds = []
        for _ in range(warm_up + steps):
            begun = time.perf_counter()
            train_step(captured.step.batch)
            _wait_for(devices)
            seconds.append(time.perf_counter() - begun)
        peaks = {device.name: torch.cuda.max_memory_allocated(device.torch_device) for device in whole}
    finally:
        train_step.close()
    return np.array(seconds[warm_up:], np.float64), peaks


def _wait_for(devices: tuple[RealDevice, ...]) -> None:
    """Returns when all GPUs have ended their work; CPU devices have when a step returns."""
    for name in dict.fromkeys(device.torch_device for device in devices if device.is_gpu):
        torch.cuda.synchronize(name)
