"""An evaluator that runs placements for real, in a worker process that can be lost."""

import os
import pickle
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from threading import Lock, Timer
from typing import Any, Self, final

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import InputError, WorkerDied, one_line
from placewise.core.problem import Problem
from placewise.evaluate.processes import Pooled
from placewise.evaluate.worker_process import Make
from placewise.simulate.simulator import Simulator

NOT_RUN = np.inf  # step seconds of a placement without a measurement

FAILED_COST = 2.0  # over the simulator's failing seconds: as one that overflows by the memory of all devices

Judged = tuple[float, float, int]  # cost, step seconds, overflow


@dataclass(frozen=True)
class Measure:
    """How a placement is measured: the papers drop the first steps and take the median, or the mean, of some more."""

    steps: int = 3
    warm_up: int = 1
    timeout_seconds: float = 60.0  # for all steps of a placement, and for getting it ready
    virtual: Mapping[str, int] = field(default_factory=dict)  # GPUs that are cut into slices: {"cuda:0": 4}

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warm_up < 0 or not self.timeout_seconds > 0:
            raise InputError(
                "measure: needs at least 1 step, no less than 0 steps of warm-up and some seconds, "
                f"there are {self.steps}, {self.warm_up} and {self.timeout_seconds}"
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        return asdict(self)


@final
class MeasuredEvaluator:
    """Measures placements one after the other in one worker process, which holds the model.

    What the simulator says does not fit is not run. A placement that runs out of memory, ends its process or takes too
    long counts as one that does not fit: its step seconds are infinite and its overflow is at least a byte; `report` gets
    a line that says why. A process that is gone is replaced.
    """

    def __init__(
        self,
        problem: Problem,
        make: Make,
        order: str = "priority",
        timeout_seconds: float = 60.0,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._simulator = Simulator(problem, order)
        self._pool = _one_worker(make)
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
        return measure_fitting(self._simulator, placements, orders, self._measure)

    def _measure(self, placement: Ints, order: Ints) -> Judged:
        """Returns the cost, the step seconds and the overflow of a placement that is run."""
        self._wait_for_worker(placement)
        self.num_measured += 1
        try:
            with _Deadline(self._pool, self._timeout_seconds) as deadline:
                found = self._pool(placement[None], order[None])
        except WorkerDied as death:
            why = f"took over {self._timeout_seconds:g} s" if deadline.has_passed else str(death).rpartition(": ")[2]
            return self._failed(f"{why}; its process is replaced", 1)
        seconds, overflow = float(found.step_seconds[0]), int(found.overflow_bytes[0])
        if overflow:
            return self._failed("ran out of memory", overflow)
        return seconds, seconds, 0

    def _failed(self, why: str, overflow_bytes: int) -> Judged:
        self._report(f"measurement {self.num_measured} failed: {why}")
        return failed(self._simulator, overflow_bytes)

    def _wait_for_worker(self, placement: Ints) -> None:
        """Returns when a worker has started: making its model does not count as measuring."""
        nothing = placement[None][:0]
        try:
            self._pool(nothing)
        except WorkerDied:  # it died idle: after its last answer
            self._pool(nothing)


def measure_fitting(
    simulator: Simulator, placements: Ints, orders: Ints | None, measure: Callable[[Ints, Ints], Judged]
) -> Evaluation:
    """Returns the evaluation of a batch: what the simulator says does not fit is not run, all others are measured."""
    simulated = simulator.simulate(placements, orders, keep_orders=True)
    predicted = simulator.evaluation(simulated.step_seconds, simulated.peak_bytes)
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


def failed(simulator: Simulator, overflow_bytes: int) -> Judged:
    """Returns how a placement is judged that could not be run."""
    return FAILED_COST * simulator.failing_seconds, NOT_RUN, overflow_bytes


@dataclass(frozen=True, eq=False)
class MeasuredFactory:
    """Makes a MeasuredEvaluator on another machine, with a worker process there."""

    problem: Problem
    make: Make
    order: str
    timeout_seconds: float

    def __call__(self) -> MeasuredEvaluator:
        """Returns the evaluator."""
        return MeasuredEvaluator(self.problem, self.make, self.order, self.timeout_seconds)


def _one_worker(make: Make) -> Pooled:
    try:
        return Pooled(make, workers=1, attempts=1)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise InputError(
            f"measure: the step can't be sent to the process that measures ({one_line(problem)}): define its model and "
            "its loss in a module, not in a function"
        ) from None


class _Deadline:
    """Ends the pool's processes when the seconds have passed before the block has ended."""

    def __init__(self, pool: Pooled, seconds: float) -> None:
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
                    os.killpg(process_id, signal.SIGKILL)  # a worker leads its own group
