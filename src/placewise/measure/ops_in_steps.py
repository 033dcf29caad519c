"""Ops and launches timed inside whole steps, where single ops mislead: in a step an op finds cold caches.

On a GPU updates also go out in rows, many with one launch; the time of a row belongs to all of its ops.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from placewise.core.cluster import Cluster, Device
from placewise.core.problem import Problem
from placewise.core.profile import Timing
from placewise.graph_capture.capture import CapturedStep
from placewise.measure.random_batch import random_batch
from placewise.measure.steps import time_step
from placewise.run.devices import RealDevice
from placewise.run.lower.instructions import RunOp
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.step.compiling import compile_placement
from placewise.run.step.failures import is_out_of_memory
from placewise.run.step.train_step import TrainStep
from placewise.run.step_trace import StepTrace

STEPS, MIN_TRACED, ENOUGH_SECONDS = 5, 2, 10.0  # after a first one; fewer steps if they take longer than that

LAUNCHED_STEPS = 3  # on a GPU, of which the launches are timed, and then the ops


def launched_timings(
    captured: CapturedStep,
    device: Device,
    real: RealDevice,
    signatures: Sequence[str],
    alone: AbstractContextManager[Any] | None = None,
) -> tuple[dict[str, Timing], float | None]:
    """Returns the times of ops in whole steps on a GPU, by signature [ops], and the host's seconds to launch an op.

    There are none if the GPU has too little memory. While launches are timed, its queues are never full: a full one holds
    the host back, so that the GPU's time for an op would be taken for the host's. That a GPU ends soon after the last launch
    does not tell which of the two has waited. While ops are timed, the host stays ahead. What uses the device happens inside
    of `alone`.
    """
    with _step_on(captured, device, real) as train_step:
        batch = random_batch(captured)
        with nullcontext() if alone is None else alone:
            batch = train_step.bring_home(batch)
            for _ in range(train_step.warm_up_steps):
                train_step(batch)
            host_seconds = float(np.median(train_step.host_seconds(batch, LAUNCHED_STEPS)))
            traces = train_step.trace_ahead(batch, LAUNCHED_STEPS)
        found: dict[str, list[float]] = {}
        for trace in traces:
            for op, seconds in launched_op_seconds(train_step.placed, trace).items():
                found.setdefault(signatures[op], []).append(seconds)
        num_ops = max(len(captured.graph.ops), 1)
        return {signature: Timing.of(times) for signature, times in found.items()}, host_seconds / num_ops
    return {}, None


def launched_op_seconds(placed: PlacedStep, trace: StepTrace) -> dict[int, float]:
    """Returns the seconds of each op of a traced step; the ops of a row share its time by the bytes that they move."""
    sequence, moved = placed.instructions.sequence, placed.resolved.graph.ops.bytes_moved
    found: dict[int, float] = {}
    for number, (start, end) in trace.times.items():
        row = trace.rows.get(number, (number,))
        ops = [run.op for run in (sequence[n] for n in row) if isinstance(run, RunOp)]
        shares = moved[ops] / moved[ops].sum() if moved[ops].sum() > 0 else np.full(len(ops), 1 / max(len(ops), 1))
        found |= dict(zip(ops, ((end - start) * shares).tolist(), strict=True))
    return found


def op_timings_in_steps(
    captured: CapturedStep, device: Device, real: RealDevice, signatures: Sequence[str]
) -> dict[str, Timing]:
    """Returns the times of ops in whole steps on a CPU device, by signature [ops]; none if that has too little memory.

    An op's time lasts until the next one starts, because the tensors that it was the last to read are freed after it. All
    together take a whole step: what stalls any op now and then, such as a limit of the processor's time, no op's median has.
    """
    with _step_on(captured, device, real) as train_step:
        batch = train_step.bring_home(random_batch(captured))
        step_seconds = _median_step(train_step, batch)
        found: dict[str, list[float]] = {}
        begun, count = time.perf_counter(), 0
        while count < MIN_TRACED or (count < STEPS and time.perf_counter() - begun < ENOUGH_SECONDS):
            for op, seconds in traced_op_seconds(train_step, batch, step_seconds).items():
                found.setdefault(signatures[op], []).append(seconds)
            count += 1
        return timings_of_steps(found, count, step_seconds)
    return {}


def timings_of_steps(found: Mapping[str, Sequence[float]], num_steps: int, step_seconds: float) -> dict[str, Timing]:
    """Returns the median time of each signature, from its times in some steps; all ops together take a whole step."""
    timings = {signature: Timing.of(times) for signature, times in found.items()}
    together = sum(timing.seconds * timing.count / num_steps for timing in timings.values())
    stretch = max(step_seconds / together, 1.0) if together else 1.0
    return {signature: replace(timing, seconds=timing.seconds * stretch) for signature, timing in timings.items()}


def traced_op_seconds(train_step: TrainStep, batch: Any, step_seconds: float) -> dict[int, float]:
    """Returns the seconds from each op's start to the next one's, in a traced step.

    What tracing adds to the time of a usual step is taken off in equal parts, as far as the op itself leaves room.
    """
    sequence, times = train_step.placed.instructions.sequence, train_step.trace(batch).times
    if not times:
        return {}
    numbers = sorted(times, key=lambda number: times[number][0])
    starts = [times[number][0] for number in numbers]
    gaps = np.diff([*starts, times[numbers[-1]][1]])
    tracing = max(gaps.sum() - step_seconds, 0.0) / len(gaps)
    alone = [end - start for start, end in (times[number] for number in numbers)]
    ops = [instruction.op for instruction in (sequence[number] for number in numbers) if isinstance(instruction, RunOp)]
    return dict(zip(ops, np.maximum(gaps - tracing, alone).tolist(), strict=True))


def _median_step(train_step: TrainStep, batch: Any) -> float:
    """Returns the seconds of a step."""
    times: list[float] = []
    while len(times) < 2 or (len(times) < 1 + STEPS and sum(times) < ENOUGH_SECONDS):
        times.append(time_step(train_step, batch)[1])
    return float(np.median(times[1:]))


@contextmanager
def _step_on(captured: CapturedStep, device: Device, real: RealDevice) -> Iterator[TrainStep]:
    """Gives the step on one device; if that runs out of memory, the block ends there without an error."""
    alone = Cluster("one", (replace(device, memory_bytes=2**50),), ())
    problem = Problem.of(captured.graph, alone)
    train_step = compile_placement(problem, np.zeros(problem.num_groups, np.int64), None, captured, (real,))
    try:
        yield train_step
    except (RuntimeError, MemoryError) as trouble:
        if not is_out_of_memory(trouble):
            raise
    finally:
        train_step.close()
