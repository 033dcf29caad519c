"""An evaluator that runs placements for real, in a worker process that a placement may crash.

`Measurer` is the evaluator. `Runner` is the worker's side: it holds the model, and runs its step as it is placed.
"""

import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from threading import Lock, Timer
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import ExecutionError, InputError, PlacewiseError, WorkerDied, one_line
from placewise.core.problem import Problem
from placewise.evaluate.pool import MakeEvaluator, ProcessPool
from placewise.machines.slices import Cut, format_cut
from placewise.run.step.failures import is_out_of_memory, step_failure
from placewise.simulate.simulator import Simulator

if TYPE_CHECKING:
    from placewise.graph_capture.capture import CapturedStep
    from placewise.graph_capture.training_step import TrainingStep

NOT_RUN = np.inf  # step seconds of a placement without a measurement

FAILED_COST = 2.0  # times what a placement that does not fit costs at least: as if it overflowed by all memory

DEVICE_LOST = ("CUDA error",)  # in the message of an error that ends a device's context

Judged = tuple[float, float, int]  # cost, step seconds, overflow bytes

RunSteps = Callable[..., tuple[Floats, Mapping[str, int]]]  # `run_steps` of placewise.measure.steps


@dataclass(frozen=True)
class Measure:
    """How a placement is measured: the median of some steps, after a warm-up."""

    steps: int = 3
    warm_up: int = 1
    timeout_seconds: float = 60.0  # for all steps of a placement, and for compiling it
    virtual: Mapping[str, Cut] = field(default_factory=dict)  # GPUs that are cut into slices: {"cuda:0": 4}

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warm_up < 0 or not self.timeout_seconds > 0:
            raise InputError(
                "measure: needs at least 1 step, 0 or more steps of warm-up and a timeout above 0 s, "
                f"it has {self.steps}, {self.warm_up} and {self.timeout_seconds}"
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        return asdict(self) | {"virtual": {name: format_cut(cut) for name, cut in self.virtual.items()}}


@final
class Measurer:
    """Measures placements one after the other in one worker process, which holds the model.

    A placement that the simulator finds too large is not run. One that runs out of memory, crashes the process or takes
    too long counts as one that does not fit: its step seconds are infinite, its overflow is at least a byte, and `report`
    gets a line with the reason. A process that has died is replaced.
    """

    def __init__(
        self,
        problem: Problem,
        make: MakeEvaluator,
        order: str = "priority",
        timeout_seconds: float = 60.0,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._simulator = Simulator(problem, order)
        self._pool = _one_process(make)
        self._timeout_seconds, self._report = timeout_seconds, report
        self.num_measured = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker."""
        self._pool.close()

    def __call__(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        """Returns the evaluation of a batch."""
        return measure_fitting(self._simulator, placements, orders, self._measure, self._timeout_seconds)

    def _measure(self, placement: Ints, order: Ints) -> Judged:
        """Runs a placement, and returns how it is judged."""
        self._wait_for_worker(placement)
        self.num_measured += 1
        try:
            with _Deadline(self._pool, self._timeout_seconds) as deadline:
                found = self._pool(placement[None], order[None])
        except WorkerDied as death:
            why = f"took over {self._timeout_seconds:g} s" if deadline.has_passed else str(death).rpartition(": ")[2]
            return self._fail(f"{why}; its process is replaced", 1)
        seconds, overflow = float(found.step_seconds[0]), int(found.overflow_bytes[0])
        if overflow:
            return self._fail("ran out of memory", overflow)
        return seconds, seconds, 0

    def _fail(self, why: str, overflow_bytes: int) -> Judged:
        self._report(f"measurement {self.num_measured} failed: {why}")
        return judge_failed(self._simulator, overflow_bytes, self._timeout_seconds)

    def _wait_for_worker(self, placement: Ints) -> None:
        """Returns when a worker has started: loading its model does not count as measuring."""
        nothing = placement[None][:0]
        try:
            self._pool(nothing)
        except WorkerDied:  # just now, after its last answer
            self._pool(nothing)


def measure_fitting(
    simulator: Simulator,
    placements: Ints,
    orders: Ints | None,
    measure: Callable[[Ints, Ints], Judged],
    longest_seconds: float,
) -> Evaluation:
    """Returns the evaluation of a batch: placements that the simulator finds too large are not run, all others measured.

    No measured step takes longer than `longest_seconds`, so one that does not fit costs more.
    """
    simulated = simulator.simulate(placements, orders, keep_orders=True)
    predicted = simulator.evaluation(simulated.step_seconds, simulated.peak_bytes, longest_seconds)
    assert simulated.orders is not None
    rows = []
    for row, placement in enumerate(np.asarray(placements)):
        if predicted.overflow_bytes[row]:
            rows.append((float(predicted.cost[row]), NOT_RUN, int(predicted.overflow_bytes[row])))
        else:
            rows.append(measure(placement, simulated.orders[row].astype(np.int64)))
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    cost, step_seconds, overflow_bytes = columns
    return Evaluation(np.array(cost, np.float64), np.array(step_seconds, np.float64), np.array(overflow_bytes, np.int64))


def judge_failed(simulator: Simulator, overflow_bytes: int, longest_seconds: float) -> Judged:
    """Returns how a placement is judged that could not be run; no measured step takes longer than `longest_seconds`."""
    return FAILED_COST * max(simulator.failing_seconds, longest_seconds), NOT_RUN, overflow_bytes


def _one_process(make: MakeEvaluator) -> ProcessPool:
    try:
        return ProcessPool(make, workers=1, attempts=1)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise InputError(
            f"measure: the step can't be sent to the process that measures ({one_line(problem)}): define its model and "
            "its loss in a module, not in a function"
        ) from None


class _Deadline:
    """Kills the pool's processes if the block takes longer than these seconds."""

    def __init__(self, pool: ProcessPool, seconds: float) -> None:
        self._pool, self._timer = pool, Timer(seconds, self._end)
        self._lock, self._is_over = Lock(), False
        self.has_passed = False

    def __enter__(self) -> Self:
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over = True
        self._timer.cancel()

    def _end(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self.has_passed = True
            for process_id in self._pool.process_ids:
                with suppress(ProcessLookupError):
                    os.killpg(process_id, signal.SIGKILL)  # a worker leads its own process group


# --- in the worker ---


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs placements: an Evaluator. One that needs more memory than there is has an overflow, and no time."""

    captured: "CapturedStep"
    problem: Problem
    measure: Measure
    run_steps: RunSteps

    def __call__(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        """Returns the evaluation of a batch; the median of the steps counts."""
        found = [
            self._run(placement, np.arange(self.problem.num_ops) if orders is None else orders[row % len(orders)])
            for row, placement in enumerate(placements)
        ]
        seconds = np.array([entry[0] for entry in found], np.float64)
        return Evaluation(seconds, seconds, np.array([entry[1] for entry in found], np.int64))

    def _run(self, placement: Ints, order: Ints) -> tuple[float, int]:
        """Returns the step seconds and the overflow of a placement."""
        names, how = self.problem.expand(placement), self.measure
        try:
            times, peaks = self.run_steps(
                self.captured, self.problem.cluster, names, order, how.warm_up, how.steps, how.virtual
            )
        except PlacewiseError:
            raise
        except Exception as problem:
            if any(words in str(problem) for words in DEVICE_LOST):  # only a new process can use it again
                print(f"placewise: {problem}", file=sys.stderr)
                os._exit(1)
            if not is_out_of_memory(problem):
                raise step_failure(self.problem.graph.name, problem) from problem
            del problem  # its traceback's frames hold tensors
        else:
            devices = self.problem.cluster.devices
            overflow = sum(max(peaks.get(device.name, 0) - device.memory_bytes, 0) for device in devices)
            return float(np.median(times)), overflow
        _give_memory_back()
        return float("inf"), 1


def make_runner(model: "str | TrainingStep", problem: Problem, measure: Measure, run_steps: RunSteps) -> Runner:
    """Returns a runner with the model loaded; its step must be the one that the problem was made from.

    `model` is what the command line calls MODEL, or the step itself.
    """
    captured = _load(model, problem.graph.name)
    if captured.graph.untimed_digest != problem.graph.untimed_digest:
        raise ExecutionError(
            f"the step {problem.graph.name!r} can't be measured: it was captured differently in another process"
        )
    return Runner(captured, problem, measure, run_steps)


def _load(model: "str | TrainingStep", name: str) -> "CapturedStep":
    if isinstance(model, str):
        from placewise.measure.random_batch import load_with_weights, random_batch

        captured = load_with_weights(model)
        return replace(captured, step=replace(captured.step, batch=random_batch(captured)))
    from placewise.graph_capture.capture import capture_step

    return capture_step(model, name)


def _give_memory_back() -> None:
    """Frees what a failed placement has left behind."""
    import torch

    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
