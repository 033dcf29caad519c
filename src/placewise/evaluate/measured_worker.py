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
from placewise.core.errors import ExecutionError, PlacewiseError
from placewise.core.problem import Problem
from placewise.evaluate.measured import Measure
from placewise.run.step.failures import is_out_of_memory, step_failure

if TYPE_CHECKING:
    from placewise.graph_capture.capture import CapturedStep
    from placewise.graph_capture.training_step import TrainingStep


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
        from placewise.measure.example_batch import random_batch, real_step

        captured = real_step(model)
        return replace(captured, step=replace(captured.step, batch=random_batch(captured)))
    from placewise.graph_capture.capture import capture_step

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


def _give_memory_back() -> None:
    """Leaves the process as it was before: nothing that failed is kept."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
