"""A training step for batches of any shape: captured, placed and compiled at the first batch of each."""

import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from placewise.core.cluster import Cluster, as_cluster
from placewise.core.errors import ExecutionError, InputError, OtherBranch, StepChanged
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.core.quantities import format_count
from placewise.graph_capture.capture import CapturedStep, capture_step
from placewise.graph_capture.training_step import TrainingStep
from placewise.machines.slices import Cut
from placewise.machines.variants import with_cuda_graphs
from placewise.run.step.batches import describe_batch, signature_of
from placewise.run.step.compiling import compile_plan
from placewise.run.step.train_step import TrainStep
from placewise.run.step.turn import Turn
from placewise.search.budget import DEFAULT_SECONDS, Budget
from placewise.search.planner import Planner, continue_from
from placewise.search.request import Request
from placewise.strategies.auto.continued import Continued

HERE = "here"

NEXT_SECONDS = 1.0  # for the search of a plan that starts from another one

PATIENCE, NEXT_PATIENCE = 4000, 400  # evaluations without a better placement, after which a search ends early

EVALUATION = "evaluation"


def train_step(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    optimizer: torch.optim.Optimizer,
    *,
    cluster: Cluster | str | Path = HERE,
    micro_batches: int = 1,
    autocast: torch.dtype | torch.autocast | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    outputs: bool = False,
    fuse: bool = False,
    whole_layers: bool = False,
    seconds: float = DEFAULT_SECONDS,
    seed: int = 0,
    max_plans: int = 16,
    virtual: Mapping[str, Cut] | None = None,
    cuda_graphs: bool = False,
    report: Callable[[str], None] | None = None,
) -> "PlannedSteps":
    """Returns a function that trains on batches of any shape and returns their loss.

    The first batch of each structure and shape is captured, placed on the cluster ("here" is this machine) and compiled;
    `seconds` is for the search of the first plan, later ones start from it and take about a second. `max_plans` limits
    their number. A later batch whose rows can't be split into `micro_batches` equal parts is split into fewer. A line for
    each plan goes to `report`, by default to standard error. The other arguments are those of `pw.capture` and
    `Plan.compile`.
    """
    options = TrainingStep(
        model,
        loss_fn,
        optimizer,
        None,
        micro_batches,
        autocast,
        clip_grad_norm,
        clip_grad_value,
        grad_scaler,
        outputs,
        fuse,
        whole_layers,
    )
    for name, value, least, types in (
        ("seconds", seconds, 0, (int, float)), ("max_plans", max_plans, 1, (int,)), ("seed", seed, 0, (int,)),
    ):  # fmt: skip
        if not isinstance(value, types) or isinstance(value, bool) or not least <= value < float("inf"):
            number = "a number" if float in types else "a whole number"
            raise InputError(f"{name} must be {number} of at least {least}, got {value!r}")
    machine = Cluster.detect() if cluster == HERE else as_cluster(cluster)
    if cuda_graphs and any(device.kind == "gpu" for device in machine.devices):
        machine = with_cuda_graphs(machine)
    compiling = {"virtual": virtual, "cuda_graphs": cuda_graphs}
    return PlannedSteps(options, machine, seconds, seed, max_plans, compiling, report or _print_to_stderr)


class PlannedSteps:
    """Trains a model on batches of any shape, and evaluates it; `pw.train_step` makes one.

    What was captured is captured again when the model or the optimizer has changed so that its step is another one.
    """

    def __init__(
        self, options: TrainingStep, cluster: Cluster, seconds: float, seed: int, max_plans: int,
        compiling: Mapping[str, Any], report: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.cluster, self.max_plans = cluster, max_plans
        self._options, self._seconds, self._seed, self._compiling, self._report = options, seconds, seed, compiling, report
        self._steps: dict[Hashable, list[TrainStep]] = {}  # by the shape of the batch; several if the batch decides
        self._plans: dict[Hashable, tuple[CapturedStep, Plan]] = {}
        self._grad_norm: Tensor | None = None
        self._turn = Turn()  # steps of two shapes would change the same parameters

    def __repr__(self) -> str:
        model = type(self._options.model).__name__
        return f"PlannedSteps({model!r}: {format_count(len(self._plans), 'plan')} on {self.cluster.name})"

    def __call__(self, batch: Any) -> Any:
        """Runs one training step, and returns its loss; a StepResult, if `outputs` was set."""
        step, result = self._run(self._options, batch)
        self._grad_norm = step.grad_norm
        return result

    def evaluate(self, batch: Any) -> Any:
        """Returns what the model returns for its inputs, without training, on the devices where its parameters are.

        Switch the model to `eval()` before, and back to `train()` after.
        """
        inference = replace(
            self._options, loss_fn=None, optimizer=None, grad_scaler=None, clip_grad_norm=None, clip_grad_value=None,
            micro_batches=1,
        )  # fmt: skip
        return self._run(inference, batch, EVALUATION)[1]

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last step's gradients before they were clipped; None without clip_grad_norm."""
        return self._grad_norm

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans made so far, in order."""
        return tuple(plan for _, plan in self._plans.values())

    def synchronize(self) -> None:
        """Returns when all devices have finished their work."""
        for step in chain.from_iterable(self._steps.values()):
            step.synchronize()

    def close(self) -> None:
        """Ends all threads; the next batch plans again."""
        for step in chain.from_iterable(self._steps.values()):
            step.close()
        self._steps.clear()

    def _run(self, options: TrainingStep, batch: Any, kind: str = "") -> tuple[TrainStep, Any]:
        """Runs the step that was captured for batches like this one, or captures one; refuses a second thread meanwhile."""
        return self._turn.run(lambda: self._run_alone(options, batch, kind))

    def _run_alone(self, options: TrainingStep, batch: Any, kind: str) -> tuple[TrainStep, Any]:
        key = (kind, signature_of(batch))
        known = self._steps.setdefault(key, [])
        for step in list(known):
            try:
                result = step(batch)
            except OtherBranch:
                continue  # the batch decides for another step
            except StepChanged as change:
                self._report(f"placewise: {str(change).partition(', and the captured')[0]}; capturing again")
                known.remove(step)
                step.close()
            else:
                return step, result
        step = self._plan((*key, len(known)), replace(options, batch=batch), batch)
        known.append(step)
        return step, step(batch)

    def _plan(self, key: Hashable, options: TrainingStep, batch: Any) -> TrainStep:
        """Captures, places and compiles the step for a batch."""
        if key not in self._plans and len(self._plans) >= self.max_plans:
            raise ExecutionError(
                f"this batch ({describe_batch(batch)}) would need plan {len(self._plans) + 1}: pad batches to fewer shapes, "
                f"or raise max_plans, which is {self.max_plans}"
            )
        began = perf_counter()
        if self._plans:
            options = replace(options, micro_batches=_parts(batch, options.micro_batches))
        captured = capture_step(options)
        plan = self._search(captured, key)
        step = compile_plan(plan, captured, self.cluster, **self._compiling)
        self._plans[key] = (captured, plan)
        used = [name for name in self.cluster.device_names if name in plan.placement]
        predicted = f"{(plan.step_seconds or 0) * 1e3:.3g} ms a step predicted on {', '.join(used)}"
        spent = f"captured and placed in {perf_counter() - began:.1f} s"
        number = list(self._plans).index(key) + 1
        parts = self._options.micro_batches
        is_fewer = options.optimizer is not None and options.micro_batches < parts
        fewer = f" in {options.micro_batches} instead of {parts} micro-batches" if is_fewer else ""
        self._report(f"placewise: plan {number} for {describe_batch(batch)}{fewer}: {predicted}; {spent}")
        return step

    def _search(self, captured: CapturedStep, key: Hashable) -> Plan:
        """Returns the plan of a step; one that is like an earlier one starts from its plan."""
        problem = Problem.of(captured.graph, self.cluster)
        request = Request(budget=_budget(self._seconds, PATIENCE), seed=self._seed, cluster=self.cluster.name)
        earlier = self._plans.get(key) or next(reversed(self._plans.values()), None)
        strategy: Continued | None = None
        if problem.num_devices == 1:
            strategy = Continued(np.zeros(problem.num_groups, np.int64))
            request = replace(request, budget=Budget(1))
        elif earlier is not None:
            strategy = continue_from(problem, earlier[0].graph, earlier[1])
            request = replace(request, budget=_budget(min(self._seconds, NEXT_SECONDS), NEXT_PATIENCE))
        planner = Planner(problem, request, strategy=strategy)
        return planner.plan(planner.search())


def _parts(batch: Any, most: int) -> int:
    """Returns into how many equal parts all tensors of a batch can be split along their rows."""
    rows = [leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    return next(count for count in range(most, 0, -1) if not any(number % count for number in rows))


def _budget(seconds: float, patience: int) -> Budget:
    """Returns the budget of a search; without time, it judges one placement."""
    return Budget(seconds=seconds, patience=patience) if seconds else Budget(1)


def _print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
