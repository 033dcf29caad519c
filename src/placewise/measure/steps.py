"""Steps of a placement, run and timed: their seconds, their memory, and their timeline as a schedule."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from placewise.core.arrays import Floats, Ints, frozen
from placewise.core.cluster import Cluster
from placewise.core.errors import RandomOnSeveralHosts
from placewise.core.problem import Problem
from placewise.graph_capture.capture import CapturedStep
from placewise.machines.slices import Cut
from placewise.measure.random_batch import random_batch
from placewise.run.devices import real_devices
from placewise.run.lower.instructions import CopyTensor, FreeTensor, Instructions, RunOp
from placewise.run.lower.lowering import tensor_devices
from placewise.run.step.compiling import compile_part, compile_placement, is_distributed
from placewise.run.step.failures import is_out_of_memory
from placewise.run.step.train_step import TrainStep
from placewise.run.step_trace import StepTrace
from placewise.simulate.schedule import Schedule


@dataclass(frozen=True, eq=False)
class MeasuredSteps:
    """Some steps of a placement, run for real."""

    step_seconds: Floats  # [steps]
    launch_seconds: Floats  # [steps], until the call returned: GPUs may still be busy then
    schedule: Schedule  # of one more step, which was traced
    allocated_bytes: dict[str, int]  # the allocators' peaks by device; only whole GPUs have an allocator of their own


def measure_steps(
    train_step: TrainStep,
    predicted: Schedule,
    batch: Any,
    steps: int,
    warm_up: int = 2,
    report: Callable[[str], None] = lambda line: None,
) -> MeasuredSteps:
    """Returns the times of some steps after a warm-up, and the timeline of one more.

    `predicted` is the simulator's schedule of the same placement. Before each step, `report` gets its number.
    """
    batch = train_step.bring_home(batch)  # as in the simulator, where inputs are at home when a step starts
    train_step.reset_peaks()
    times, launches = [], []
    for number in range(1 - warm_up, steps + 1):
        report(f"step {number} of {steps}" if number > 0 else "warm-up")
        launched, ended = time_step(train_step, batch)
        launches.append(launched)
        times.append(ended)
    peaks = train_step.allocated_bytes()
    trace = train_step.trace(batch)
    schedule = measured_schedule(predicted, train_step.placed.instructions, trace)
    step_seconds, launch_seconds = (frozen(np.array(column[warm_up:]), np.float64) for column in (times, launches))
    return MeasuredSteps(step_seconds, launch_seconds, schedule, peaks)


def run_steps(
    captured: CapturedStep,
    cluster: Cluster,
    placement: Sequence[str],
    order: Ints,
    warm_up: int,
    steps: int,
    virtual: Mapping[str, Cut],
) -> tuple[Floats, Mapping[str, int]]:
    """Returns the seconds of each step after the warm-up [steps], and the allocators' peak bytes by device.

    This trains the step's own model. Only whole GPUs have peaks: slices of one share an allocator, and so do CPU devices.
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


def step_times(
    captured: CapturedStep,
    schedule: Schedule,
    virtual: Mapping[str, Cut],
    steps: int,
    most_seconds: float = math.inf,
    alone: AbstractContextManager[Any] | None = None,
) -> Floats | None:
    """Returns the seconds of each step of a schedule's placement, after a warm-up; None if they can't be run.

    They can't if they run out of memory, or if they draw random numbers on several hosts. There are fewer steps if they take
    longer than `most_seconds`; over hosts all ranks call this, and make all steps. This trains the step's own model on a
    random batch. What uses the devices happens inside of `alone`.
    """
    problem, placement, order = schedule.problem, schedule.placement, schedule.order
    over_hosts = len(problem.cluster.host_names) > 1 and is_distributed()
    try:
        compiled = (
            compile_part(problem, placement, order, captured, virtual=virtual)
            if over_hosts
            else compile_placement(problem, placement, order, captured, real_devices(problem.cluster, virtual))
        )
        with closing(compiled) as train_step:
            batch, times = random_batch(captured), list[float]()
            with nullcontext() if alone is None else alone:
                batch = train_step.bring_home(batch)
                for _ in range(train_step.warm_up_steps):
                    time_step(train_step, batch)
                while not times or (len(times) < steps and (over_hosts or sum(times) < most_seconds)):
                    times.append(time_step(train_step, batch)[1])
    except RandomOnSeveralHosts:
        return None
    except (RuntimeError, MemoryError) as trouble:
        if not is_out_of_memory(trouble):
            raise
        return None
    return np.array(times)


def time_step(train_step: TrainStep, batch: Any) -> tuple[float, float]:
    """Runs a step, and returns the seconds until the call returned and until the step ended."""
    begin = time.perf_counter()
    train_step(batch)
    launched = time.perf_counter() - begin
    train_step.synchronize()
    return launched, time.perf_counter() - begin


# --- the timeline ---


def measured_schedule(predicted: Schedule, instructions: Instructions, trace: StepTrace) -> Schedule:
    """Returns the schedule with the times and sizes of a traced step, from 0 on, instead of the predicted ones."""
    t = predicted.timeline
    begin = min((start for start, _ in trace.times.values()), default=0.0)
    times = {number: (start - begin, end - begin) for number, (start, end) in trace.times.items()}
    start, end = np.array(t.start), np.array(t.end)
    copies = []
    for number, instruction in enumerate(instructions.sequence):
        if isinstance(instruction, RunOp):
            start[instruction.op], end[instruction.op] = times[number]
        elif isinstance(instruction, CopyTensor):
            copies.append(times[number])
    copy_start, copy_end = np.array(copies, np.float64).reshape(-1, 2).T
    timeline = t._replace(start=start, end=end, copy_start=copy_start, copy_end=copy_end)
    memory = measured_memory(predicted, instructions, trace)
    residents = predicted.memory[0] if len(memory) else predicted.peak_bytes
    peaks = memory.max(axis=0, initial=0) if len(memory) else residents
    return replace(predicted, timeline=timeline, memory=memory, peak_bytes=frozen(peaks, np.int64))


def measured_memory(predicted: Schedule, instructions: Instructions, trace: StepTrace) -> Ints:
    """Returns the bytes in use on each device at each launch, from the sizes of real storages: [ops, devices].

    Resident tensors count with the graph's sizes.
    """
    graph = predicted.problem.graph
    used = _resident_bytes(predicted, instructions)
    sizes: dict[tuple[int, int], int] = {}  # (tensor, device) -> bytes
    rows = []
    for number, instruction in enumerate(instructions.sequence):
        match instruction:
            case RunOp(op, device):
                made = [tensor for tensor in graph.ops.writes[op].tolist() if graph.tensors.alias_of[tensor] < 0]
                for tensor in made:  # the trace has one size for all outputs of an op: each gets its share by the graph
                    share = graph.tensors.nbytes[tensor] / max(graph.tensors.nbytes[made].sum(), 1)
                    sizes[tensor, device] = round(trace.nbytes[number] * share)
                    used[device] += sizes[tensor, device]
                rows.append(used.copy())
            case CopyTensor(tensor, _, target):
                sizes[tensor, target] = trace.nbytes[number]
                used[target] += trace.nbytes[number]
            case FreeTensor(tensor, device):
                used[device] -= sizes[tensor, device]
    return frozen(np.array(rows, np.int64).reshape(-1, len(used)), np.int64)


def _resident_bytes(predicted: Schedule, instructions: Instructions) -> Ints:
    """Returns the bytes on each device before the first launch: [devices]."""
    graph = predicted.problem.graph
    at_home = np.flatnonzero((graph.producer < 0) & (graph.tensors.alias_of < 0))
    homes = tensor_devices(predicted.problem, predicted.placement)
    used = np.zeros(len(instructions.device_names), np.int64)
    np.add.at(used, homes[at_home], graph.tensors.nbytes[at_home])
    return used
