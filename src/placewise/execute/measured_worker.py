"""The side of a measuring evaluator that holds the model and the devices: it runs in a process of its own."""

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.cluster import Cluster
from placewise.core.contracts import Evaluation
from placewise.core.errors import ExecutionError, NothingFits, PlacewiseError
from placewise.core.files import one_line
from placewise.core.problem import Problem
from placewise.execute.measured import Measure

if TYPE_CHECKING:
    from placewise.capture.step import TrainingStep
    from placewise.capture.training import CapturedStep

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # what allocators say


class RunSteps(Protocol):
    """Runs a placement for real."""

    def __call__(
        self,
        captured: "CapturedStep",
        cluster: Cluster,
        placement: Sequence[str],
        order: Ints,
        warm_up: int,
        steps: int,
        virtual: Mapping[str, int],
    ) -> tuple[Floats, Mapping[str, int]]:
        """Returns the seconds of each step behind the warm-up [steps], and the peak bytes by device."""
        ...


@dataclass(frozen=True, eq=False)
class RunnerFactory:
    """Makes a Runner in another process; `model` is what the command line calls MODEL, or the step itself."""

    model: "str | TrainingStep"
    problem: Problem
    measure: Measure
    run_steps: RunSteps

    def __call__(self) -> "Runner":
        """Returns the runner, with the model loaded; its step must be the one that the problem was made from."""
        captured = _load(self.model, self.problem.graph.name)
        if captured.graph.untimed_digest != self.problem.graph.untimed_digest:
            raise ExecutionError(
                f"the step {self.problem.graph.name!r} can't be measured: it was captured differently in another process"
            )
        return Runner(captured, self.problem, self.measure, self.run_steps)


def _load(model: "str | TrainingStep", name: str) -> "CapturedStep":
    if isinstance(model, str):
        from placewise.execute.examples import random_batch, real_step

        captured = real_step(model)
        return replace(captured, step=replace(captured.step, batch=random_batch(captured)))
    from placewise.capture.training import capture_step

    return capture_step(model, name)


@dataclass(frozen=True, eq=False)
class Runner:
    """Measures placements: an Evaluator. One that needs more memory than there is has an overflow, and no time."""

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
        names, how = self.problem.expand(placement), self.measure
        try:
            times, peaks = self.run_steps(
                self.captured, self.problem.cluster, names, order, how.warm_up, how.steps, how.virtual
            )
        except PlacewiseError:
            raise
        except Exception as problem:
            if "CUDA error" in str(problem):  # the GPU's context is lost, and only a new process gets another
                print(f"placewise: {problem}", file=sys.stderr)
                os._exit(1)
            if not is_out_of_memory(problem):
                raise step_failure(self.problem.graph.name, problem) from problem
            del problem  # with it go the frames, and what they hold
        else:
            devices = self.problem.cluster.devices
            overflow = sum(max(peaks.get(device.name, 0) - device.memory_bytes, 0) for device in devices)
            return float(np.median(times)), overflow
        _give_memory_back()
        return float("inf"), 1


def step_failure(name: str, problem: Exception) -> PlacewiseError:
    """Returns what the error of an op means for who wants the step to run: it does not fit, or it can't be run."""
    if is_out_of_memory(problem):
        return NothingFits(f"{name}: the step runs out of memory: {one_line(problem)}")
    return ExecutionError(f"{name}: an op of the step fails: {type(problem).__name__}: {one_line(problem)}")


def is_out_of_memory(problem: BaseException) -> bool:
    """Returns whether an error says that memory was short, on a GPU or on the host."""
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return any(words in str(problem) for words in NO_MEMORY)


def _give_memory_back() -> None:
    """Leaves the process as it was before: nothing that failed is kept."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
