"""From a training step to a graph and a program: a copy of it runs once on the meta device and is recorded."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from placewise.capture.host import HostScalar, Redirect
from placewise.capture.meta_kernels import QuickMeta
from placewise.capture.program import Program
from placewise.capture.recorder import BACKWARD, FORWARD, UPDATE, Recorded, Recorder, user_frame
from placewise.capture.step import TrainingStep
from placewise.core.arrays import Ints, Ragged
from placewise.core.errors import CaptureError
from placewise.core.graph import TENSOR_KINDS, Graph, Ops, Tensors
from placewise.core.sets import merge_sets


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A recorded step: the graph to place, and the program to run."""

    graph: Graph
    program: Program
    step: TrainingStep


def capture_step(step: TrainingStep, name: str = "") -> CapturedStep:
    """Returns the recorded step; nothing is allocated or computed, and what was given is not changed."""
    recorder = Recorder()
    redirect = Redirect(recorder)
    recorder.scalars = lambda: redirect.scalars
    model, optimizer = _meta_twins(step, recorder)
    parts = _meta_parts(step, recorder)
    try:
        with _no_garbage_collection(), _named_modules(model, recorder), _named_modules(step.loss_fn, recorder, "loss"):
            if optimizer is None:
                outputs = _record_inference(model, parts, recorder, redirect)
            else:
                outputs = _record_training(step, model, optimizer, parts, recorder, redirect)
    except CaptureError as problem:
        place = user_frame(problem)
        raise CaptureError(f"{problem}{f' ({place})' if place else ''}") from None
    kept = [recorder.tensor_of(tensor) for tensor in outputs]
    graph = _graph(recorder.graph, kept, name or type(step.model).__name__)
    slots = tuple(recorder.slot_of(tensor) for tensor in outputs)
    program = Program(tuple(recorder.calls), tuple(recorder.residents), slots, recorder.num_slots)
    return CapturedStep(graph, program, step)


# --- stand-ins on the meta device ---


def _meta_twins(step: TrainingStep, recorder: Recorder) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Returns copies of model and optimizer without data; their tensors are made known to the recorder."""
    memo: dict[int, Any] = {}
    for kind, named in (("parameter", step.model.named_parameters()), ("buffer", step.model.named_buffers())):
        for name, tensor in named:
            twin = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = twin
            recorder.add_resident(twin, kind, name, owner=name if kind == "parameter" else "")
            if not tensor.is_meta:
                recorder.forbidden[id(tensor)] = name
    if step.optimizer is not None:
        for state in step.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and (value.dim() or value.device.type not in ("cpu", "meta")):
                    memo[id(value)] = torch.empty_like(value, device="meta")
    try:
        return copy.deepcopy(step.model, memo), copy.deepcopy(step.optimizer, memo)
    except Exception as problem:
        raise CaptureError(f"the model or its optimizer can't be copied: {problem}") from None


def _meta_parts(step: TrainingStep, recorder: Recorder) -> list[Any]:
    """Returns a stand-in of the batch for each micro-batch."""
    count = step.micro_batches
    if count < 1:
        raise CaptureError(f"micro_batches must be at least 1, it is {count}")

    def part(value: Any, path: str, number: int) -> Any:
        if isinstance(value, Tensor):
            rows = value.shape[0] if value.dim() else 1
            if rows % count:
                raise CaptureError(f"{path} has {rows} rows, which {count} micro-batches do not divide")
            shape = (rows // count, *value.shape[1:]) if value.dim() else ()
            twin = torch.empty(shape, dtype=value.dtype, device="meta")
            recorder.add_resident(twin, "input", path, number if count > 1 else -1)
            return twin
        if isinstance(value, dict):
            return {key: part(entry, f"{path}[{key!r}]", number) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            entries = [part(entry, f"{path}[{i}]", number) for i, entry in enumerate(value)]
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        return value

    return [part(step.batch, "batch", number) for number in range(count)]


# --- running it once ---


def _record_training(
    step: TrainingStep, model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Any], recorder: Recorder,
    redirect: Redirect,
) -> list[Tensor]:  # fmt: skip
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(parameter) not in names for parameter in parameters):
        raise CaptureError("the optimizer has a parameter that is not one of the model's")
    optimizer.zero_grad(set_to_none=True)
    losses = []
    with redirect, recorder:
        for number, part in enumerate(parts):
            recorder.micro_batch = number if len(parts) > 1 else -1
            recorder.phase = FORWARD
            loss = _loss(step.loss_fn, model, part)
            if len(parts) > 1:
                loss = loss / len(parts)
            losses.append(loss.detach())
            recorder.phase = BACKWARD
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if not trained:
        raise CaptureError("no parameter of the optimizer gets a gradient")
    with QuickMeta(recorder.kernels):
        _make_state(optimizer, trained)
    for parameter in trained:
        _add_state(optimizer, parameter, names[id(parameter)], recorder)
    for number, group in enumerate(optimizer.param_groups):
        if isinstance(group["lr"], Tensor):
            recorder.add_host_resident(group["lr"], "hyper-parameter", "lr", number)
        else:
            group["lr"] = HostScalar.of(group["lr"], recorder, recorder.add_hyper_parameter("lr", number))
    recorder.phase, recorder.micro_batch, recorder.path = UPDATE, -1, ""
    with redirect, recorder:
        optimizer.step()
    return losses


def _record_inference(model: nn.Module, parts: list[Any], recorder: Recorder, redirect: Redirect) -> list[Tensor]:
    outputs: list[Tensor] = []
    with torch.no_grad(), redirect, recorder:
        for number, part in enumerate(parts):
            recorder.micro_batch = number if len(parts) > 1 else -1
            outputs += _tensors(_call(model, part))
    return outputs


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _loss(loss_fn: Callable[..., Tensor] | None, model: nn.Module, batch: Any) -> Tensor:
    """Returns the loss of a batch; TrainingStep says how the batch tells the model's arguments."""
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and loss_fn is not None
    output = _call(model, batch[0] if pair else batch)
    if loss_fn is not None:
        output = loss_fn(output, batch[1]) if pair else loss_fn(output)
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        raise CaptureError(
            "the loss must be one number that depends on the model's parameters, it is "
            + (f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(output).__name__}")
        )
    return loss


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors of nested lists, tuples and tables."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for entry in value for tensor in _tensors(entry)] if isinstance(value, (list, tuple)) else []


def _make_state(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    """Lets the optimizer make its state, as its first step does, and update parameter by parameter from now on."""
    for group in optimizer.param_groups:
        group.update({key: False for key in ("foreach", "fused", "capturable") if key in group})
    if not all(optimizer.state.get(parameter) for parameter in trained):
        optimizer.step()


def _add_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, recorder: Recorder) -> None:
    """Makes a parameter's gradient and optimizer state known."""
    assert parameter.grad is not None
    recorder.set_owner(parameter.grad, name)
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.is_meta:
            recorder.add_resident(value, "state", name, key, owner=name)
        elif isinstance(value, Tensor):
            recorder.add_host_resident(value, "state", name, key)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps Python from looking for cycles: recording makes many objects that all stay, and few cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _named_modules(model: Any, recorder: Recorder, prefix: str = "") -> Iterator[None]:
    """Lets the recorder know which module runs."""
    if not isinstance(model, nn.Module):
        yield
        return
    stack: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.append(recorder.path)
            recorder.path = path

        return hook

    def leave(*_: Any) -> None:
        recorder.path = stack.pop()

    handles = []
    for name, module in model.named_modules():
        path = ".".join(filter(None, (prefix, name)))
        handles.append(module.register_forward_pre_hook(enter(path)))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- the graph ---


def _graph(g: Recorded, outputs: list[int], name: str) -> Graph:
    storages = _storages(g.alias_of)
    writes = Ragged.of(g.writes)
    groups = _colocated(g, storages)
    home = np.full(len(storages), -1, np.int64)
    home[storages[writes.values]] = groups[writes.rows]
    home[writes.values] = -1  # what the step makes has no home
    tensors = Tensors(
        tuple(g.tensor_names),
        np.array(g.tensor_bytes, np.int64),
        np.array([TENSOR_KINDS.index(kind) for kind in g.tensor_kinds], np.int64),
        home,
        np.array(g.alias_of, np.int64),
    )
    ops = Ops(
        names=tuple(g.op_names),
        kinds=tuple(g.op_kinds),
        phases=np.array(g.phases, np.int64),
        groups=groups,
        reads=Ragged.of(g.reads),
        writes=writes,
        after=Ragged.of(g.after),
        flops=np.array(g.flops, np.float64),
        bytes_moved=np.array(g.bytes_moved, np.float64),
        devices=tuple(g.devices),
        micro_batches=np.array(g.micro_batches, np.int64),
    )
    return Graph(name, tensors, ops, np.array(outputs, np.int64))


def _storages(alias_of: list[int]) -> Ints:
    """Returns the tensor that owns each tensor's memory; an alias stands behind what it shares: [tensors]."""
    storages = list(range(len(alias_of)))
    for tensor, alias in enumerate(alias_of):
        if alias >= 0:
            storages[tensor] = storages[alias]
    return np.array(storages, np.int64)


def _colocated(g: Recorded, storages: Ints) -> Ints:
    """Returns the smallest groups: ops that write one storage, and a parameter's whole update: [ops]."""
    first: dict[int | str, int] = {}  # storage, or parameter -> the first op that writes it or belongs to it
    pairs = []
    for op, (writes, owner) in enumerate(zip(g.writes, g.owners, strict=True)):
        shared: list[int | str] = [int(storages[tensor]) for tensor in writes]
        pairs += [(first.setdefault(key, op), op) for key in ([*shared, owner] if owner else shared)]
    return merge_sets(len(g.op_names), pairs)
