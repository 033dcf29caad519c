"""Captures a training step: a copy of it runs once on the meta device and is recorded as a graph and a program."""

import gc
import importlib
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, nn

from placewise.core.errors import CaptureError, one_line
from placewise.core.graph import Graph
from placewise.core.quantities import format_count
from placewise.graph_capture.autocast import recorded_autocast
from placewise.graph_capture.cpu_composites import composites_of
from placewise.graph_capture.graph_builder import BACKWARD, FORWARD
from placewise.graph_capture.meta_copies import meta_copy, meta_parts
from placewise.graph_capture.meta_modes import MetaMode
from placewise.graph_capture.model_guard import ModelGuard, refuse_hooks
from placewise.graph_capture.module_attributes import ModuleAttributes, has_tensors, modules_by_path
from placewise.graph_capture.program import Gate, Program, Slot
from placewise.graph_capture.python_values import PythonValues
from placewise.graph_capture.random_tape import HostGenerators
from placewise.graph_capture.recorded_update import record_update
from placewise.graph_capture.recorder import Recorder
from placewise.graph_capture.recurrent_layers import recorded_layers
from placewise.graph_capture.returned import Returned, ReturnedOutput, SetAttribute
from placewise.graph_capture.structures import Leaf, Structure, tensors_in
from placewise.graph_capture.training_step import StepModules, TrainingStep
from placewise.graph_capture.views import View
from placewise.graph_capture.whole_passes import recorded_attention


@dataclass(frozen=True, eq=False)
class CapturedStep:
    """A captured training step: the graph to place, the program to run, and the step itself."""

    graph: Graph
    program: Program
    step: TrainingStep
    guard: ModelGuard
    returned: Returned
    captured: "CapturedStep | None" = None  # of a rewritten step: the one that was recorded

    def __repr__(self) -> str:
        return f"CapturedStep({self.graph!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:  # what copy, deepcopy and pickle call
        raise CaptureError(
            "a captured step can't be copied or pickled, because it holds your model and optimizer: save the plan "
            "(plan.save), and capture again where it is run"
        )


def capture(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    optimizer: torch.optim.Optimizer,
    example_batch: Any,
    *,
    micro_batches: int = 1,
    autocast: torch.dtype | torch.autocast | None = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    outputs: bool = False,
    fuse: bool = False,
    whole_layers: bool = False,
    name: str = "",
) -> CapturedStep:
    """Records a whole training step on the meta device: forward, backward and update.

    Nothing is allocated or computed, and the arguments are not changed. `TrainingStep` describes how the model is called
    with a batch. With `micro_batches` = M the batch is split into M parts, whose gradients accumulate before the update.
    With `autocast` = torch.bfloat16 model and loss run with the casts of `torch.autocast("cuda", torch.bfloat16)`; it may
    also be a `torch.autocast` itself, such as `torch.autocast("cpu", torch.bfloat16)`.
    Gradients are clipped by their norm or by value, and scaled by `grad_scaler`, as PyTorch's own functions do it. With
    `outputs` the step returns what the model returned, beside the loss. With `fuse` chains of small ops become one
    op each, which Inductor compiles to a kernel when the step is compiled: its results are eager's to rounding. With
    `whole_layers` an nn.LSTM, nn.GRU or nn.RNN is one op each way, on a GPU by cuDNN; without it their cells are
    many small ops, which can be placed apart.
    """
    return capture_step(
        TrainingStep(
            model, loss_fn, optimizer, example_batch, micro_batches, autocast, clip_grad_norm, clip_grad_value, grad_scaler,
            outputs, fuse, whole_layers,
        ),
        name,
    )  # fmt: skip


def capture_inference(
    model: nn.Module, example_batch: Any, *, micro_batches: int = 1, fuse: bool = False, name: str = ""
) -> CapturedStep:
    """Records the forward pass on the meta device; if the batch is a tuple, it is the model's positional arguments."""
    return capture_step(TrainingStep(model, None, None, example_batch, micro_batches, fuse=fuse), name)


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
    captured = _record(step, name)
    if not step.fuse:
        return captured
    from placewise.rewrite.rewritten_steps import FUSE, rewrite

    return rewrite(captured, [FUSE])


def _record(step: TrainingStep, name: str) -> CapturedStep:
    if step.optimizer is not None:
        refuse_hooks(step.modules, step.optimizer)
    recorder = Recorder()
    meta_step = meta_copy(step, recorder)
    parts = meta_parts(step, recorder)
    _track_modules(meta_step.model, recorder)
    _track_modules(meta_step.loss_fn, recorder, "loss")
    kept, gate, generators = _Kept(recorder), None, HostGenerators()
    try:
        buffers = dict(meta_step.modules.named_buffers())
        scale = _loss_scale(step, recorder)
        attributes, values = ModuleAttributes(meta_step.model, meta_step.loss_fn), PythonValues(step.model, step.loss_fn)
        losses, output = _record_forward_and_backward(meta_step, parts, scale, kept, recorder)
        _record_replaced_buffers(buffers, meta_step.modules, recorder)
        returned = Returned(losses, output, attributes=_set_attributes(attributes, kept))
        _refuse_lost_state(meta_step, attributes, values, generators, recorder)
        if step.optimizer is not None:
            update = record_update(meta_step, step.optimizer, scale, recorder)
            if update.grad_norm is not None:
                returned = replace(returned, grad_norm=kept.add(update.grad_norm))
            if update.found_inf is not None:
                found_inf = kept.add(update.found_inf)
                returned, gate = replace(returned, found_inf=found_inf), Gate(kept.slots[found_inf], update.first_op)
    except Exception as problem:
        raise _located(problem, recorder) from (None if isinstance(problem, CaptureError) else problem)
    finally:
        generators.restore()
    _warn_of_lost_numbers(recorder, returned)
    modules = modules_by_path(step.model, step.loss_fn)
    changing = [(modules[attribute.path], attribute.name) for attribute in attributes.changed()]
    guard = ModelGuard(step.model, step.loss_fn, optimizer=step.optimizer, changing=changing)
    graph = recorder.graph.to_graph(kept.tensors(), name or type(step.model).__name__)
    return CapturedStep(graph, recorder.program.to_program(kept.slots, gate), step, guard, returned)


class _Kept:
    """The tensors that the step returns; they live to its end."""

    def __init__(self, recorder: Recorder) -> None:
        self.slots: list[Slot] = []
        self._recorder = recorder
        self._views: list[View] = []

    def add(self, leaf: Leaf) -> int:
        """Keeps a tensor, and returns its position among those that are kept."""
        tensor = _tensor_of(leaf)
        view = self._recorder.views.find_or_record(tensor if tensor.is_meta else self._recorder.meta_constant(tensor))
        if view.slot not in self.slots:
            self.slots.append(view.slot)
            self._views.append(view)
        return self.slots.index(view.slot)

    def tensors(self) -> list[int]:
        """Returns the graph's tensors that have the kept values at the end of the step."""
        return list(dict.fromkeys(self._recorder.views.newest[view.storage] for view in self._views))


# --- forward and backward ---


def _record_forward_and_backward(
    step: TrainingStep, parts: list[Any], scale: Tensor | None, kept: _Kept, recorder: Recorder
) -> tuple[tuple[int, ...], ReturnedOutput | None]:
    """Returns where the losses of the micro-batches are kept, and what the model returned, if the step returns it too."""
    losses, outputs = [], []
    if torch._C._is_any_autocast_enabled():
        raise CaptureError("autocast is on around the capture: use it inside the model, or pass autocast=torch.bfloat16")
    is_training = step.optimizer is not None
    with _recording(step, recorder):
        for number, part in enumerate(parts):
            recorder.micro_batch = number if len(parts) > 1 else -1
            recorder.phase = FORWARD
            with _autocast(step):
                loss, output = forward_loss(step, part)
            if step.outputs or not is_training:
                outputs.append(Structure.of(output))
            del output
            if loss is None:
                continue
            if len(parts) > 1:
                loss = loss / len(parts)
            losses.append(kept.add(loss.detach()))
            recorder.phase = BACKWARD
            (loss if scale is None else loss * scale).backward()  # type: ignore[no-untyped-call]
            del loss
    return tuple(losses), _returned_output(outputs, parts, kept) if outputs else None


@contextmanager
def _recording(step: TrainingStep, recorder: Recorder) -> Iterator[None]:
    """Records what runs inside, on the meta device."""
    with ExitStack() as modes:
        modes.enter_context(recorded_autocast())
        modes.enter_context(composites_of(recorder.home))
        if step.optimizer is None:
            modes.enter_context(torch.no_grad())
        modes.enter_context(_transformers_tracing(recorder))
        if "torch._dynamo" in sys.modules:  # what torch.compile has wrapped is recorded as its eager ops
            modes.enter_context(torch.compiler.set_stance("force_eager"))
        modes.enter_context(_scripts_as_python())
        modes.enter_context(recorder.tape.recording())
        modes.enter_context(recorded_attention(recorder))
        if step.whole_layers:
            modes.enter_context(recorded_layers(recorder))
        modes.enter_context(MetaMode(recorder))
        modes.enter_context(recorder)
        yield


def _autocast(step: TrainingStep) -> AbstractContextManager[Any]:
    """Returns autocast, if the step asks for it; with the casts of a GPU, if it only names a type."""
    if step.autocast is None:
        return nullcontext()
    if isinstance(step.autocast, torch.dtype):
        return torch.autocast("cuda", step.autocast)
    given: Any = step.autocast
    if given.device == "cuda" and not given._enabled and not torch.cuda.is_available():
        name = str(given.fast_dtype).removeprefix("torch.")
        raise CaptureError(f'torch.autocast("cuda") switches itself off where CUDA is missing: pass autocast=torch.{name}')
    return torch.autocast(given.device, given.fast_dtype, given._enabled, given._cache_enabled)


@contextmanager
def _transformers_tracing(recorder: Recorder) -> Iterator[None]:
    """Tells models of transformers that they are being traced, so that they don't read the values of an attention mask.

    What is the same in every step they may read: without a mask of the user's they find out like this that they need none.
    """
    module = sys.modules.get("transformers.utils.import_utils")

    def is_fake_tensor(tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and not recorder.is_same_in_every_step(tensor)

    def is_jit_tracing() -> bool:
        return sys._getframe(2).f_code.co_name == "torch_compilable_check"  # which then does not read what it checks

    told: dict[str, Any] = {f.__name__: f for f in (is_fake_tensor, is_jit_tracing) if hasattr(module, f.__name__)}
    with patch.multiple(module, **told) if told else nullcontext():
        yield


@contextmanager
def _scripts_as_python() -> Iterator[None]:
    """Calls the Python functions behind those that torch.jit.script has compiled: TorchScript would pass our modes by."""
    kind: Any = torch.jit.ScriptFunction
    original = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, "_torchdynamo_inline", partial(original, self))(*args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def forward_loss(step: TrainingStep, batch: Any) -> tuple[Tensor | None, Any]:
    """Returns the loss of a batch, None for inference, and the model's output; TrainingStep describes the call."""
    if step.optimizer is None:
        return None, _call(step.model, batch)
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2 and step.loss_fn is not None
    found = output = _call(step.model, batch[0] if pair else batch)
    if step.loss_fn is not None:
        found = step.loss_fn(output, batch[1]) if pair else step.loss_fn(output)
    loss = found if isinstance(found, Tensor) else getattr(found, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        raise CaptureError(
            "the loss must be a scalar tensor that depends on the model's parameters, got "
            + (f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(found).__name__}")
        )
    return loss, output


def _loss_scale(step: TrainingStep, recorder: Recorder) -> Tensor | None:
    """Returns the factor of the loss, which every step asks the GradScaler for; None without one."""
    if step.grad_scaler is None or not step.scales_loss:
        return None
    scale = torch.tensor(step.grad_scaler.get_scale())
    recorder.program.add_host_resident(scale, "loss-scale", "scale", "")
    return scale


def _returned_output(structures: list[Structure], parts: list[Any], kept: _Kept) -> ReturnedOutput:
    """Returns where the tensors of the model's output are kept; those of micro-batches must be rows that can be joined."""
    if len({len(structure.leaves) for structure in structures}) > 1:
        raise CaptureError("the model returns different structures for different micro-batches")
    rows = {tensor.shape[0] for tensor in tensors_in(parts[0]) if isinstance(tensor, Tensor) and tensor.dim()}
    positions = []
    for leaves in zip(*(structure.leaves for structure in structures), strict=True):
        found = tuple([kept.add(leaf) for leaf in leaves])
        is_same = len(set(found)) == 1  # a parameter, say
        shape = leaves[0].shape if isinstance(leaves[0], Tensor) else ()
        if not is_same and (shape[0] not in rows if shape else not leaves[0].is_floating_point()):
            raise CaptureError(
                f"the model returns a tensor of shape {list(shape)} for a micro-batch of {min(rows, default=0)} rows, which "
                "can't be joined with those of the others: use micro_batches=1"
            )
        positions.append(found[:1] if is_same else found)
    return ReturnedOutput(structures[0], tuple(positions))


def _record_replaced_buffers(buffers: dict[str, Tensor], modules: StepModules, recorder: Recorder) -> None:
    """Records a copy into each buffer that the step has replaced by another tensor (`self.mean = ...`)."""
    present = dict(modules.named_buffers(remove_duplicate=False))
    for name, buffer in buffers.items():
        value = present.get(name)
        if value is buffer:
            continue
        recorder.path = name.rpartition(".")[0]
        if value is None or value.size() != buffer.size() or value.dtype != buffer.dtype:
            raise CaptureError(
                f"the step replaces the buffer {name!r} by None or by a tensor of another shape or dtype: if only the first "
                "one does, run the model once in eager code before"
            )
        with torch.no_grad(), MetaMode(recorder), recorder:
            buffer.copy_(value)


# --- what the step leaves behind in Python ---


def _set_attributes(attributes: ModuleAttributes, kept: _Kept) -> tuple[SetAttribute, ...]:
    """Returns the attributes of modules in which the step leaves tensors, or numbers that it has read from some."""
    found = []
    for attribute in filter(has_tensors, attributes.changed()):
        structure = Structure.of(attribute.value)
        positions = tuple([kept.add(leaf) for leaf in structure.leaves])
        found.append(SetAttribute(attribute.path, attribute.name, structure, positions))
    return tuple(found)


def _refuse_lost_state(
    step: TrainingStep, attributes: ModuleAttributes, values: PythonValues, generators: HostGenerators, first: Recorder
) -> None:
    """Refuses a step that changes Python values from one time to the next, or reads what the last one has left.

    What is made only once and is the same in every step is fine: a cache, or a generator that the step seeds itself. So the
    forward pass runs a second time, without being recorded.
    """
    for name in first.reads_left:
        raise _reads_left(name)
    changed = [*attributes.changed(), *attributes.mutated()]
    if not changed and not generators.changed() and not values.changed_plainly():
        return
    recorder = Recorder()
    for name, tensor in (*step.modules.named_parameters(), *step.modules.named_buffers()):
        recorder.add_resident(tensor, "parameter", name, real=first.real_buffer(name))
    part = meta_parts(step, recorder)[0]
    kept = {str(attribute): list(map(_tensor_of, tensors_in(attribute.value))) for attribute in changed}
    recorder.left = {tensor.untyped_storage()._cdata: name for name, tensors in kept.items() for tensor in tensors}
    attributes, values = ModuleAttributes(step.model, step.loss_fn), PythonValues(step.model, step.loss_fn)
    generators = HostGenerators()
    with _recording(step, recorder), _autocast(step):
        forward_loss(step, part)
    if name := generators.changed():
        raise CaptureError(
            f"the model draws numbers from {name}, and a recorded step would repeat them: draw them with torch, or pass "
            "them in with the batch"
        )
    mutated = {str(attribute): attribute for attribute in attributes.mutated()}
    changed_again = {str(attribute): attribute for attribute in attributes.changed()} | mutated
    for name in recorder.reads_left:
        if name in changed_again or not all(map(first.is_same_in_every_step, kept[name])):
            raise _reads_left(name)
    for name, attribute in changed_again.items():
        if name in mutated or not has_tensors(attribute):
            raise CaptureError(
                f"the model changes its attribute {name!r} in every step, which a recorded step can't follow: "
                "make it a buffer, or change it between steps"
            )
    if name := values.changed_plainly():
        raise CaptureError(
            f"the step changes {name} each time that it runs, which a recorded step can't follow: count in a buffer of the "
            "model, or between steps"
        )


def _reads_left(name: str) -> CaptureError:
    return CaptureError(
        f"the model reads its attribute {name!r}, which an earlier step has set, and a recorded step can't follow that: "
        "make it a buffer (register_buffer)"
    )


def _tensor_of(leaf: Leaf) -> Tensor:
    return leaf if isinstance(leaf, Tensor) else leaf.tensor


def _warn_of_lost_numbers(recorder: Recorder, returned: Returned) -> None:
    """Warns of numbers that the step reads and neither returns nor keeps: what Python does with them is not recorded."""
    structures = [attribute.structure for attribute in returned.attributes]
    structures += [returned.output.structure] if returned.output is not None else []
    used = {id(leaf) for structure in structures for leaf in structure.leaves}
    lost = [number for number in recorder.numbers if id(number) not in used]
    if lost:
        warnings.warn(
            f"the step reads {format_count(len(lost), 'number')} with item(): what Python does with it (printing, "
            "logging) happens when the step is captured, not when it runs; return it, or keep it in an attribute",
            stacklevel=4,
        )


# --- where in the model, and where in the user's code ---


NOT_RECORDED = {  # what torch says of something that is not recorded -> what it is
    "HigherOrderOperator": "functions of torch that call a function of yours (cond, while_loop, scan) can't be recorded",
    "NestedTensorImpl": "nested tensors can't be recorded: pad them",
    "'lengths' argument should be": "packed sequences can't be recorded: pass padded ones",
}


def _located(problem: Exception, recorder: Recorder) -> CaptureError:
    """Returns the error of a step that can't be recorded, with the line of the user's code."""
    text = next((known + recorder.where() for sign, known in NOT_RECORDED.items() if sign in str(problem)), str(problem))
    if not isinstance(problem, CaptureError) and text == str(problem):
        text = (
            f"the step fails on the meta device: {type(problem).__name__}: {one_line(problem).rstrip('.')}{recorder.where()}"
        )
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
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'} is a module of torch.jit ({type(module).__name__}), whose ops can't be recorded: "
                "pass the Python module that it was made from"
            )
        module.register_forward_pre_hook(enter(".".join(filter(None, (prefix, name)))), prepend=True)
        module.register_forward_hook(leave)
