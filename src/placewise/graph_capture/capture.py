"""Captures a training step: a copy of it runs once on the meta device and is recorded as a graph and a program."""

import gc
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from placewise.core.errors import CaptureError, one_line
from placewise.core.graph import Graph
from placewise.graph_capture.autocast import recorded_autocast
from placewise.graph_capture.graph_builder import BACKWARD, FORWARD, UPDATE
from placewise.graph_capture.host_scalars import HostScalar
from placewise.graph_capture.meta_copies import SWITCHES, adopt_state, meta_copy, meta_parts
from placewise.graph_capture.meta_kernels import CachedMetaMode
from placewise.graph_capture.meta_modes import MetaMode, MetaStateMode
from placewise.graph_capture.model_guard import ModelGuard, refuse_hooks
from placewise.graph_capture.program import Program, Resident
from placewise.graph_capture.recorder import Recorder
from placewise.graph_capture.training_step import TrainingStep


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A captured training step: the graph to place, the program to run, and the step itself."""

    graph: Graph
    program: Program
    step: TrainingStep
    guard: ModelGuard

    def __repr__(self) -> str:
        return f"CapturedStep({self.graph!r})"


def capture(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    optimizer: torch.optim.Optimizer,
    example_batch: Any,
    *,
    micro_batches: int = 1,
    autocast: torch.dtype | None = None,
    name: str = "",
) -> CapturedStep:
    """Records a whole training step on the meta device: forward, backward and update.

    Nothing is allocated or computed, and the arguments are not changed. `TrainingStep` describes how the model is called
    with a batch. With `micro_batches` = M the batch is split into M parts, whose gradients accumulate before the update.
    With `autocast` = torch.bfloat16 model and loss run with the casts of `torch.autocast("cuda", torch.bfloat16)`.
    """
    return capture_step(TrainingStep(model, loss_fn, optimizer, example_batch, micro_batches, autocast), name)


def capture_inference(model: nn.Module, example_batch: Any, *, micro_batches: int = 1, name: str = "") -> CapturedStep:
    """Records the forward pass on the meta device; if the batch is a tuple, it is the model's positional arguments."""
    return capture_step(TrainingStep(model, None, None, example_batch, micro_batches), name)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Turns off Python's cyclic garbage collection: recording creates many objects that stay, and few cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_garbage_collection()
def capture_step(step: TrainingStep, name: str = "") -> CapturedStep:
    """Records a training step on the meta device; nothing is allocated or computed, and the step is not changed."""
    if step.optimizer is not None:
        refuse_hooks(step.model, step.optimizer)
    recorder, guard = Recorder(), ModelGuard(step.model, step.loss_fn)
    meta_step = meta_copy(step, recorder)
    parts = meta_parts(step, recorder)
    _track_modules(meta_step.model, recorder)
    _track_modules(meta_step.loss_fn, recorder, "loss")
    try:
        buffers = dict(meta_step.model.named_buffers())
        outputs = _record_forward_and_backward(meta_step, parts, recorder)
        if meta_step.optimizer is not None and step.optimizer is not None:
            _record_update(meta_step.model, meta_step.optimizer, step.optimizer, recorder)
        _record_replaced_buffers(buffers, meta_step.model, recorder)
    except Exception as problem:
        raise _located(problem, recorder) from (None if isinstance(problem, CaptureError) else problem)
    graph = recorder.graph.to_graph([recorder.tensor_of(t) for t in outputs], name or type(step.model).__name__)
    program = recorder.program.to_program([recorder.views.find_or_record(t).slot for t in outputs])
    return CapturedStep(graph, program, step, guard)


# --- forward and backward ---


def _record_forward_and_backward(step: TrainingStep, parts: list[Any], recorder: Recorder) -> list[Tensor]:
    """Returns the loss of each micro-batch; without an optimizer, all tensors that the model returns."""
    outputs: list[Tensor] = []
    if torch._C._is_any_autocast_enabled():
        raise CaptureError("autocast is on around the capture: use it inside the model, or pass autocast=torch.bfloat16")
    with ExitStack() as modes:
        modes.enter_context(recorded_autocast())
        if step.optimizer is None:
            modes.enter_context(torch.no_grad())
        modes.enter_context(_transformers_tracing())
        modes.enter_context(MetaMode(recorder))
        modes.enter_context(recorder)
        for number, part in enumerate(parts):
            recorder.micro_batch = number if len(parts) > 1 else -1
            recorder.phase = FORWARD
            if step.optimizer is None:
                with _autocast(step):
                    output = _call(step.model, part)
                outputs += [t if t.is_meta else recorder.meta_constant(t) for t in _tensors(output)]
                continue
            with _autocast(step):
                loss = _loss(step.loss_fn, step.model, part)
            if len(parts) > 1:
                loss = loss / len(parts)
            outputs.append(loss.detach())
            recorder.phase = BACKWARD
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
    return outputs


def _autocast(step: TrainingStep) -> AbstractContextManager[Any]:
    """Returns autocast as on a GPU, if the step asks for it."""
    return nullcontext() if step.autocast is None else torch.autocast("cuda", step.autocast)


@contextmanager
def _transformers_tracing() -> Iterator[None]:
    """Tells models of transformers that they are being traced, so that they don't read the values of an attention mask."""
    module = sys.modules.get("transformers.utils.import_utils")
    is_jit_tracing = getattr(module, "is_jit_tracing", None)
    if module is None or is_jit_tracing is None:
        yield
        return
    module.is_jit_tracing = lambda: True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_jit_tracing = is_jit_tracing  # type: ignore[attr-defined]


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def _loss(loss_fn: Callable[..., Tensor] | None, model: nn.Module, batch: Any) -> Tensor:
    """Returns the loss of a batch; TrainingStep describes how the model is called."""
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and loss_fn is not None
    output = _call(model, batch[0] if pair else batch)
    if loss_fn is not None:
        output = loss_fn(output, batch[1]) if pair else loss_fn(output)
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        raise CaptureError(
            "the loss must be a scalar tensor that depends on the model's parameters, got "
            + (f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(output).__name__}")
        )
    return loss


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in nested lists, tuples and dicts; pytree would overlook those in a subclass of dict."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for entry in value for tensor in _tensors(entry)] if isinstance(value, (list, tuple)) else []


# --- the update ---


def _record_update(
    model: nn.Module, optimizer: torch.optim.Optimizer, original: torch.optim.Optimizer, recorder: Recorder
) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    if not trained:
        raise CaptureError("no parameter of the optimizer gets a gradient")
    recorder.phase, recorder.micro_batch, recorder.path = UPDATE, -1, ""
    _make_state(optimizer, original, recorder)
    numbers = [entry for p in trained for entry in _add_state(optimizer, p, names[id(p)], recorder)]
    for number, group in enumerate(optimizer.param_groups):
        for key in [key for key in group if key not in ("params", "param_names", *SWITCHES)]:
            group[key] = _live_hyper_parameter(group[key], key, number, recorder)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    with MetaMode(recorder, track_scalars=True), recorder:
        optimizer.step()
    _record_replaced_numbers(numbers, recorder)
    for number, (group, before) in enumerate(zip(optimizer.param_groups, settings, strict=True)):
        if changed := [key for key, value in before.items() if group[key] is not value]:
            raise CaptureError(f"the optimizer's step changes {changed[0]!r} of its parameter group {number}")
    if recorder.program.has_lost_numbers:
        raise CaptureError(
            "the optimizer computes with a number that changes from step to step (its step counter, the learning rate) in "
            "a way that can't be recorded: use Python's + - * / ** or the methods of tensors, not the math module"
        )


def _live_hyper_parameter(value: Any, name: str, group: int, recorder: Recorder) -> Any:
    """Returns a hyper-parameter whose value every step reads again: as a number that is recorded, or one that must stay."""
    if isinstance(value, Tensor):
        recorder.program.add_host_resident(value, "hyper-parameter", name, group)
        return value
    if type(value) in (tuple, list):
        return type(value)([_live_hyper_parameter(v, f"{name}[{i}]", group, recorder) for i, v in enumerate(value)])
    slot = recorder.program.add_hyper_parameter(name, group, value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return HostScalar.of(value, slot, recorder.program) if is_number else value


def _make_state(optimizer: torch.optim.Optimizer, original: torch.optim.Optimizer, recorder: Recorder) -> None:
    """Lets the optimizer create its state, as in its first step; state that the original already has replaces it."""
    with MetaStateMode(recorder), CachedMetaMode(recorder.kernels):
        try:
            optimizer.step()
        except KeyError:  # state that its constructor creates (Adagrad in older torch): the original has it
            optimizer.state.clear()
    for group, given in zip(optimizer.param_groups, original.param_groups, strict=True):
        for parameter, key in zip(group["params"], given["params"], strict=True):
            if key in original.state:
                adopt_state(optimizer, parameter, original.state[key])


def _add_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, name: str, recorder: Recorder
) -> list[tuple[dict[str, Any], Resident, type]]:
    """Adds a parameter's gradient and optimizer state; returns the states that are Python numbers: dict, resident, type."""
    assert parameter.grad is not None
    recorder.set_owner(parameter.grad, name)
    state = optimizer.state.get(parameter, {})
    numbers = []
    for key, value in state.items():
        if isinstance(value, Tensor) and value.is_meta:
            recorder.add_resident(value, "state", name, key, owner=name)
        elif isinstance(value, Tensor):
            recorder.program.add_host_resident(value, "state", name, key)
        elif type(value) in (int, float):
            resident = recorder.program.add_number("state", name, key)
            state[key] = HostScalar.of(value, resident.slot, recorder.program)
            numbers.append((state, resident, type(value)))
    return numbers


def _record_replaced_numbers(numbers: list[tuple[dict[str, Any], Resident, type]], recorder: Recorder) -> None:
    """Records the Python numbers in the optimizer's state that the step has replaced."""
    for state, resident, kind in numbers:
        value = state[str(resident.key)]
        if type(value) is not HostScalar:
            raise CaptureError(f"the optimizer's step sets its state {resident.key!r} to a value that can't be recorded")
        if value.slot != resident.slot:
            slot = recorder.program.host_call(int, (value.slot,)) if kind is int else value.slot
            recorder.program.update_number(resident, slot)


def _record_replaced_buffers(buffers: dict[str, Tensor], model: nn.Module, recorder: Recorder) -> None:
    """Records a copy into each buffer that the step has replaced by another tensor (`self.mean = ...`)."""
    present = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in buffers.items():
        value = present.get(name)
        if value is buffer:
            continue
        recorder.path = name.rpartition(".")[0]
        if value is None or value.size() != buffer.size() or value.dtype != buffer.dtype:
            raise CaptureError(f"the step replaces the buffer {name!r} by None or by a tensor of another shape or dtype")
        with torch.no_grad(), MetaMode(recorder), recorder:
            buffer.copy_(value)


# --- where in the model, and where in the user's code ---


def _located(problem: Exception, recorder: Recorder) -> CaptureError:
    """Returns the error of a step that can't be recorded, with the line of the user's code."""
    text = str(problem)
    if not isinstance(problem, CaptureError):
        text = f"the step fails on the meta device: {type(problem).__name__}: {one_line(problem)}{recorder.where()}"
    line = user_frame(problem)
    return CaptureError(f"{text} ({line})" if line else text)


def user_frame(problem: BaseException) -> str:
    """Returns 'file.py:12', the innermost frame outside of torch, placewise and importlib, or ''."""
    folders = (Path(torch.__file__).parent, Path(inspect.getfile(importlib)).parent, Path(__file__).parents[1])
    libraries = (*map(str, folders), "<")
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        if not frame.filename.startswith(libraries):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def _track_modules(model: Any, recorder: Recorder, prefix: str = "") -> None:
    """Sets the recorder's module path while a module of the model runs."""
    stack: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.append(recorder.path)
            recorder.path = path

        return hook

    def leave(*_: Any) -> None:
        recorder.path = stack.pop()

    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        module.register_forward_pre_hook(enter(".".join(filter(None, (prefix, name)))), prepend=True)
        module.register_forward_hook(leave)
