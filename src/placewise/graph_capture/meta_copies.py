"""Stand-ins on the meta device for what the user gave: the model, the loss, the optimizer and the batch."""

import copy
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from placewise.core.errors import CaptureError
from placewise.graph_capture.recorder import Recorder
from placewise.graph_capture.training_step import TrainingStep

SWITCHES = ("foreach", "fused", "capturable")  # of an optimizer: off, so that it updates parameter by parameter


def meta_copy(step: TrainingStep, recorder: Recorder) -> TrainingStep:
    """Returns a copy of the step without data, and without optimizer state; its tensors are made known to the recorder."""
    memo: dict[int, Any] = {}
    known: dict[int, list[tuple[Tensor, Tensor]]] = {}  # storage -> the user's tensors on it, and their stand-ins
    for kind, named in (("parameter", step.model.named_parameters()), ("buffer", step.model.named_buffers())):
        for name, tensor in named:
            _refuse_sparse(tensor, name)
            shared = known.setdefault(tensor.untyped_storage()._cdata, [])
            data = _shared_twin(tensor, shared, name)
            twin = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
            shared.append((tensor, twin))
            memo[id(tensor)] = twin
            recorder.add_resident(twin, kind, name, owner=name if kind == "parameter" else "")
            recorder.forbidden[tensor.untyped_storage()._cdata] = name
    if step.optimizer is not None and not all(id(p) in memo for g in step.optimizer.param_groups for p in g["params"]):
        raise CaptureError("the optimizer has a parameter that is not one of the model's")
    try:
        model = copy.deepcopy(step.model, memo)
        optimizer = None if step.optimizer is None else copy_optimizer(step.optimizer, memo)
        loss_fn = copy.deepcopy(step.loss_fn, memo)  # a method of the model becomes one of its copy
    except Exception as problem:
        raise CaptureError(f"the model, its loss or its optimizer can't be copied: {problem}") from None
    return replace(step, model=model, loss_fn=loss_fn, optimizer=optimizer)


def _refuse_sparse(tensor: Tensor, name: str) -> None:
    if tensor.layout is not torch.strided:
        raise CaptureError(f"{name} has layout {tensor.layout}, only dense tensors can be recorded")


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _shared_twin(tensor: Tensor, others: list[tuple[Tensor, Tensor]], name: str) -> Tensor:
    """Returns the stand-in of a tensor: that of the same numbers in memory, if there is one, or a new one."""

    def window(tensor: Tensor) -> Any:
        return tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype

    def span(tensor: Tensor) -> range:
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        return range(int(tensor.storage_offset()), int(tensor.storage_offset()) + length)

    for other, twin in others:
        if window(other) == window(tensor):
            return twin.detach()
        if max(span(other).start, span(tensor).start) < min(span(other).stop, span(tensor).stop):
            raise CaptureError(f"{name} shares a part of its memory with another parameter or buffer")
    return _empty(tensor)


def copy_optimizer(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Returns a copy that has no state yet and updates parameter by parameter."""
    memo[id(optimizer.state)] = defaultdict(dict)
    twin = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(twin) and not callable(value):  # a subclass's own, which Optimizer leaves out
            setattr(twin, name, copy.deepcopy(value, memo))
    for group in twin.param_groups:
        group.update({key: False for key in SWITCHES if key in group})
    return twin


def adopt_state(optimizer: torch.optim.Optimizer, parameter: Tensor, given: Mapping[str, Any]) -> None:
    """Makes a parameter's state in the copy like the given one: sizes of tensors, and values of what the host keeps."""
    state = optimizer.state[parameter]
    for key, value in given.items():
        if not isinstance(value, Tensor):
            state[key] = value
            continue
        made = state.get(key)
        is_counter = not value.dim() and (key == "step" or bool(parameter.dim()))
        on_host = not made.is_meta if isinstance(made, Tensor) else is_counter
        if not on_host:
            state[key] = _empty(value)
        elif not value.is_meta:
            state[key] = value.detach().cpu().clone()


def meta_parts(step: TrainingStep, recorder: Recorder) -> list[Any]:
    """Returns a stand-in of the batch for each micro-batch."""
    count = step.micro_batches
    if count < 1:
        raise CaptureError(f"micro_batches must be at least 1, got {count}")

    def part(value: Any, path: str, number: int) -> Any:
        if isinstance(value, Tensor):
            twin = _part(value, path, count)
            recorder.add_resident(twin, "input", path, number if count > 1 else -1)
            return twin.requires_grad_(value.requires_grad)
        if isinstance(value, Mapping):
            return {key: part(entry, f"{path}[{key!r}]", number) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            entries = [part(entry, f"{path}[{i}]", number) for i, entry in enumerate(value)]
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise CaptureError(
                f"{path} is a {type(value).__name__}: a batch is made of tensors, numbers, words, lists, tuples and tables"
            )
        return value

    return [part(step.batch, "batch", number) for number in range(count)]


def _part(value: Tensor, path: str, count: int) -> Tensor:
    rows = value.shape[0] if value.dim() else count
    if rows % count:
        raise CaptureError(f"{path} has {rows} rows, which {count} micro-batches do not divide")
    shape = (rows // count, *value.shape[1:]) if value.dim() else ()
    return torch.empty_strided(shape, value.stride(), dtype=value.dtype, device="meta")
