"""What a whole step says and single ops do not: the host's launches on a GPU, and ops on a CPU with cold caches."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from placewise.core.cluster import Cluster, Device
from placewise.core.problem import Problem
from placewise.core.profile import Timing
from placewise.graph_capture.capture import CapturedStep
from placewise.measure.random_batch import random_batch
from placewise.measure.step_times import time_step
from placewise.run.devices import RealDevice
from placewise.run.lower.instructions import RunOp
from placewise.run.step.compiling import compile_placement
from placewise.run.step.failures import is_out_of_memory
from placewise.run.step.train_step import TrainStep

STEPS, FEWEST_NOTED, ENOUGH_SECONDS = 5, 2, 10.0  # behind a first one; fewer where they take longer

KEEPS_UP = 1.03  # a GPU that ends so soon behind the last launch has waited for the host all the time


def launch_in_a_step(captured: CapturedStep, device: Device, place: RealDevice) -> float | None:
    """Returns the host's seconds for a launch of the whole step on a GPU; None where that has not the memory."""
    with _step_on(captured, device, place) as train_step:
        batch = train_step.bring_home(random_batch(captured))
        launched, ended = _median_step(train_step, batch)
        seconds = launched if ended < KEEPS_UP * launched else train_step.host_seconds(batch)  # else its queues are full
        return seconds / len(captured.graph.ops)
    return None


def times_in_a_step(
    captured: CapturedStep, device: Device, place: RealDevice, signatures: Sequence[str]
) -> dict[str, Timing]:
    """Returns how long the ops take on a CPU device in a whole step, by their signatures [ops]; none where memory is short.

    An op's time is until the next one starts, for what it was the last to read is freed behind it.
    """
    with _step_on(captured, device, place) as train_step:
        batch = train_step.bring_home(random_batch(captured))
        _, ended = _median_step(train_step, batch)
        found: dict[str, list[float]] = {}
        begun, count = time.perf_counter(), 0
        while count < FEWEST_NOTED or (count < STEPS and time.perf_counter() - begun < ENOUGH_SECONDS):
            for op, seconds in _times_of_ops(train_step, batch, ended).items():
                found.setdefault(signatures[op], []).append(seconds)
            count += 1
        return {signature: Timing.of(times) for signature, times in found.items()}
    return {}


def _times_of_ops(train_step: TrainStep, batch: Any, usual: float) -> dict[int, float]:
    """Returns the seconds from each op's start to the next one's, without what the noting takes beyond a usual step."""
    steps, times = train_step.placed.instructions.sequence, train_step.trace(batch).times
    if not times:
        return {}
    numbers = sorted(times, key=lambda number: times[number][0])
    starts = [times[number][0] for number in numbers]
    gaps = np.diff([*starts, times[numbers[-1]][1]])
    noting = max(gaps.sum() - usual, 0.0) / len(gaps)
    alone = [end - start for start, end in (times[number] for number in numbers)]
    ops = [step.op for step in (steps[number] for number in numbers) if isinstance(step, RunOp)]
    return dict(zip(ops, np.maximum(gaps - noting, alone).tolist(), strict=True))


def _median_step(train_step: TrainStep, batch: Any) -> tuple[float, float]:
    """Returns the seconds until a step is launched, and until it has ended."""
    times: list[tuple[float, float]] = []
    while len(times) < 2 or (len(times) < 1 + STEPS and sum(ended for _, ended in times) < ENOUGH_SECONDS):
        times.append(time_step(train_step, batch))
    launched, ended = np.median(times[1:], axis=0).tolist()
    return launched, ended


@contextmanager
def _step_on(captured: CapturedStep, device: Device, place: RealDevice) -> Iterator[TrainStep]:
    """Gives the step on one device; what follows is left without a word where that has not the memory."""
    alone = Cluster("one", (replace(device, memory_bytes=2**50),), ())
    problem = Problem.of(captured.graph, alone)
    train_step = compile_placement(problem, np.zeros(problem.num_groups, np.int64), None, captured, (place,))
    try:
        yield train_step
    except (RuntimeError, MemoryError) as trouble:
        if not is_out_of_memory(trouble):
            raise
    finally:
        train_step.close()
