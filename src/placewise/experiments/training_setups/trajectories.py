"""Four steps of a setup, as an eager loop trains them and as placewise does, and all that they leave behind."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import StepChanged
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.experiments.training_setups.training_setup import Setup, StepOptions, Task
from placewise.graph_capture.autocast import recorded_autocast
from placewise.graph_capture.capture import capture
from placewise.run.devices import real_devices
from placewise.run.step.compiling import compile_placement

SEED = 19

DEVICES = ("cpu:0", "cpu:1")
TWO_CPUS = Cluster(
    "two-cpus",
    tuple(Device(name, "cpu", 2**40, 3e10, 1e10) for name in DEVICES),
    tuple(Link(a, b, 1e10, 5e-5) for a in DEVICES for b in DEVICES if a != b),
)


Choose = Callable[[np.random.Generator, int, int], Ints]  # groups, devices -> a device for each group


@dataclass(frozen=True, eq=False)
class Trajectory:
    """What a training leaves behind: losses, norms and outputs of its steps; parameters, buffers and state at its end."""

    values: Mapping[str, Any]  # by name
    has_learned: bool  # the losses are finite and a parameter has moved
    num_captures: int = 1  # more if the optimizer or a batch decided for another step


def at_random(rng: np.random.Generator, num_groups: int, num_devices: int) -> Ints:
    """Places each group at random."""
    return rng.integers(num_devices, size=num_groups)


def train_eagerly(setup: Setup, device: str = "cpu") -> Trajectory:
    """Trains with the loop that a user would write."""
    with _one_thread():
        loop = _Loop.of(setup, device)
        return _train(loop, lambda batch: _eager_step(loop, batch))


def train_placed(setup: Setup, cluster: Cluster = TWO_CPUS, choose: Choose = at_random) -> Trajectory:
    """Captures the step, places its groups, by default at random on two CPU devices, and trains with it."""
    with _one_thread():
        loop = _Loop.of(setup)
        steps = _PlacedSteps(
            loop, cluster, lambda n: choose(np.random.default_rng(crc32(setup.name.encode())), n, len(cluster.devices))
        )
        try:
            trajectory = _train(loop, steps)
        finally:
            steps.close()
        return replace(trajectory, num_captures=steps.num_captures)


# --- what both have in common ---


@dataclass(frozen=True, eq=False)
class _Loop:
    """What a training loop works with; it always starts with the same random weights and batches."""

    task: Task
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    options: StepOptions
    device: str = "cpu"

    @classmethod
    def of(cls, setup: Setup, device: str = "cpu") -> "_Loop":
        _seed()
        task, recipe, scale = setup.build(), setup.optimizer, setup.options.grad_scale
        if device != "cpu":
            task.model.to(device)
            batches = tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, list(task.batches))
            task = replace(task, batches=batches)
        optimizer = recipe.make(task.model)
        scheduler = None if recipe.schedule is None else recipe.schedule(optimizer)
        scaler = None if scale is None else torch.amp.GradScaler(device.partition(":")[0], init_scale=scale)
        return cls(task, optimizer, scheduler, scaler, setup.options, device)


def _seed() -> None:
    """Seeds every generator that models draw from."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002
    torch.manual_seed(SEED)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Gives each op one thread, because sums may depend on the number of threads."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _train(loop: _Loop, run_step: Callable[[Any], dict[str, Any]]) -> Trajectory:
    """Runs a step for each batch."""
    task, optimizer = loop.task, loop.optimizer
    values: dict[str, Any] = {}
    losses = []
    before = [_copied(parameter).cpu() for parameter in task.model.parameters()]
    _seed()
    for number, batch in enumerate(task.batches, start=1):
        found = run_step(batch)
        if loop.scheduler is not None:
            loop.scheduler.step()
        task.after_step()
        if loop.scaler is not None:
            found["scale"] = loop.scaler.get_scale()
        losses.append(float(found["loss"]))
        for key, value in found.items():
            values |= _flat(f"{key} of step {number}", value)
    after = [parameter.detach().cpu() for parameter in task.model.parameters()]
    has_learned = bool(np.isfinite(losses).all()) and not all(map(torch.equal, before, after))
    for name, module in {"": task.model, **task.companions}.items():
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            values[f"{name} {key}".strip()] = _copied(tensor)
    for key, parameter in task.model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            values |= _flat(f"{kind} of {key}", value)
    return Trajectory(values, has_learned)


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Returns the tensors and numbers in nested structures and objects by name, and the types around them."""
    if isinstance(value, Tensor):
        return {name: _copied(value)}
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, (list, tuple)):
        entries = list(enumerate(value))
    elif type(value).__module__ != "builtins" and hasattr(value, "__dict__"):  # a cache of keys and values, for example
        entries = list(vars(value).items())
    else:
        return {name: value}
    found: dict[str, Any] = {f"type of {name}": type(value).__name__}
    for key, entry in entries:
        found |= _flat(f"{name}.{key}", entry)
    return found


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


# --- the eager loop ---


def _eager_step(loop: _Loop, batch: Any) -> dict[str, Any]:
    """Runs one step: accumulation, autocast, scaling and clipping as PyTorch's recipes have them."""
    optimizer, scaler, options = loop.optimizer, loop.scaler, loop.options
    found: dict[str, Any] = {}
    if isinstance(optimizer, torch.optim.LBFGS):
        return {"loss": optimizer.step(lambda: _closure(loop, batch))}  # type: ignore[no-untyped-call]
    losses = []
    optimizer.zero_grad()
    for number in range(options.micro_batches):
        with nullcontext() if options.autocast is None or loop.device != "cpu" else _gpu_casts():
            with nullcontext() if options.autocast is None else torch.autocast("cuda", options.autocast):
                output, loss = _forward(loop.task, _micro_batch(batch, number, options.micro_batches))
            if options.micro_batches > 1:
                loss = loss / options.micro_batches
            torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
        losses.append(loss.detach())
        if options.outputs:
            found["output"] = output
    found["loss"] = sum(losses[1:], losses[0])
    if scaler is not None:
        scaler.unscale_(optimizer)
    if options.clip_grad_norm is not None:
        found["norm"] = nn.utils.clip_grad_norm_(loop.task.model.parameters(), options.clip_grad_norm)
    if options.clip_grad_value is not None:
        nn.utils.clip_grad_value_(loop.task.model.parameters(), options.clip_grad_value)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    return found


def _closure(loop: _Loop, batch: Any) -> Tensor:
    """Returns the loss, with the gradients computed; LBFGS asks for them several times in a step."""
    loop.optimizer.zero_grad()
    loss = _forward(loop.task, batch)[1]
    torch.autograd.backward(loss)
    return loss


def _forward(task: Task, batch: Any) -> tuple[Any, Tensor]:
    """Returns the model's output and the loss."""
    is_pair = isinstance(batch, tuple) and task.loss_fn is not None
    inputs = batch[0] if is_pair else batch
    if isinstance(inputs, dict):
        output = task.model(**inputs)
    else:
        output = task.model(*inputs) if isinstance(inputs, tuple) else task.model(inputs)
    loss = output
    if task.loss_fn is not None:
        loss = task.loss_fn(output, batch[1]) if is_pair else task.loss_fn(output)
    return output, loss if isinstance(loss, Tensor) else loss.loss


def _micro_batch(batch: Any, number: int, count: int) -> Any:
    return batch if count == 1 else tree_map(lambda t: t.chunk(count)[number] if isinstance(t, Tensor) else t, batch)


@contextmanager
def _gpu_casts() -> Iterator[None]:
    """Makes `torch.autocast("cuda")` cast on the CPU too, where PyTorch leaves it out, also in checkpointed modules."""
    with recorded_autocast(), patch.object(torch.utils.checkpoint, "_infer_device_type", lambda *_: "cuda"):
        yield


# --- placewise ---


def _capture_options(loop: _Loop) -> dict[str, Any]:
    """Returns what `capture` is told besides model, loss, optimizer and batch."""
    given = asdict(loop.options)
    del given["grad_scale"]
    defaults = asdict(StepOptions())
    changed = {name: value for name, value in given.items() if value != defaults[name]}
    return changed if loop.scaler is None else {**changed, "grad_scaler": loop.scaler}


class _PlacedSteps:
    """A compiled step, captured again where the message of a refused one says so, as `pw.train_step` does."""

    def __init__(self, loop: _Loop, cluster: Cluster, choose: Callable[[int], Ints]) -> None:
        self._loop, self._cluster, self._choose = loop, cluster, choose
        self._step: Any = None
        self.num_captures = 0

    def __call__(self, batch: Any) -> dict[str, Any]:
        if self._step is None:
            self._compile(batch)
        try:
            returned = self._step(batch)
        except StepChanged:
            self.close()
            self._compile(batch)
            returned = self._step(batch)
        options = self._loop.options
        found: dict[str, Any] = {}
        if options.outputs:
            found["output"] = returned.output
        found["loss"] = returned.loss if options.outputs else returned
        if options.clip_grad_norm is not None:
            found["norm"] = self._step.grad_norm
        return found

    def _compile(self, batch: Any) -> None:
        """Captures the step with this batch; CPU devices alone get one thread each, so that bits can be equal."""
        task = self._loop.task
        captured = capture(task.model, task.loss_fn, self._loop.optimizer, batch, **_capture_options(self._loop))
        problem = Problem.of(captured.graph, self._cluster)
        names = self._cluster.device_names
        plan = Plan(tuple(names[device] for device in self._choose(captured.graph.num_groups)))
        devices = real_devices(self._cluster)
        if not any(device.launches_from_host for device in devices):
            devices = tuple(replace(device, threads=1) for device in devices)
        self._step = compile_placement(problem, plan.resolve(problem)[0], None, captured, devices)
        self.num_captures += 1

    def close(self) -> None:
        if self._step is not None:
            self._step.close()
