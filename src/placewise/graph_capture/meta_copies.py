"""Copies a training step to the meta device: the model, the loss, the optimizer and the batch."""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import IOBase
from threading import Lock, RLock, Thread, local
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from placewise.core.errors import CaptureError
from placewise.graph_capture.module_attributes import INTERNAL
from placewise.graph_capture.recorder import Recorder, meta_like
from placewise.graph_capture.structures import entries_in, tensors_in
from placewise.graph_capture.training_step import TrainingStep

UNCOPYABLE = (  # or too large: the data of a trainer
    torch.jit.ScriptFunction, type(Lock()), type(RLock()), local, Thread, GeneratorType, IOBase, Dataset, DataLoader,
    _BaseDataLoaderIter,
)  # fmt: skip

SWITCHES = ("foreach", "fused", "capturable")  # options of an optimizer, off: it then updates parameter by parameter


def meta_copy(step: TrainingStep, recorder: Recorder) -> TrainingStep:
    """Returns a copy of the step without data and without optimizer state; adds its tensors to the recorder."""
    recorder.home = next((p.device.type for p in step.model.parameters() if not p.is_meta), "cpu")
    memo: dict[int, Any] = {}
    copied: dict[int, list[tuple[Tensor, Tensor]]] = {}  # storage -> the user's tensors on it, and their copies
    for kind, named in (("parameter", step.modules.named_parameters()), ("buffer", step.modules.named_buffers())):
        for name, tensor in named:
            _refuse_sparse(tensor, name)
            shared = copied.setdefault(tensor.untyped_storage()._cdata, [])
            data = _meta_data(tensor, shared, name)
            meta = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data
            for hook in (tensor._backward_hooks or {}).values():
                meta.register_hook(hook)  # type: ignore[no-untyped-call]  # so that it is recorded
            shared.append((tensor, meta))
            memo[id(tensor)] = meta
            owner, real = (name, None) if kind == "parameter" else ("", tensor)
            recorder.add_resident(meta, kind, name, owner=owner, real=real)
            recorder.originals[tensor.untyped_storage()._cdata] = name
    if step.optimizer is not None and not all(id(p) in memo for g in step.optimizer.param_groups for p in g["params"]):
        raise CaptureError(
            "the optimizer has a parameter that is neither in the model nor in a loss that is a module: "
            "make it one of the model"
        )
    for name, module in step.modules.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:  # weight_norm and prune leave what they have computed
                memo[id(value)] = meta_like(value)
                recorder.left[memo[id(value)].untyped_storage()._cdata] = f"{name}.{key}" if name else key
            elif key not in INTERNAL:  # constants, which stay the user's own: each step reads them
                memo |= {id(tensor): tensor for tensor in _constants_in(value) if id(tensor) not in memo}
        memo |= _uncopyable_in(vars(module))
    memo |= {id(tensor): tensor for tensor in _constants_in(step.loss_fn) if id(tensor) not in memo}
    memo |= _uncopyable_in(getattr(step.loss_fn, "__self__", step.loss_fn))
    try:
        model = copy.deepcopy(step.model, memo)
        optimizer = None if step.optimizer is None else copy_optimizer(step.optimizer, memo)
        loss_fn = copy.deepcopy(step.loss_fn, memo)  # a method of the model becomes a method of its copy
    except Exception as problem:
        raise CaptureError(f"the model, its loss or its optimizer can't be copied: {problem}") from None
    return replace(step, model=model, loss_fn=loss_fn, optimizer=optimizer)


def _constants_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors with values in an attribute that nothing trains."""
    return (
        tensor
        for tensor in tensors_in(value)
        if isinstance(tensor, Tensor) and not (tensor.is_meta or tensor.requires_grad or isinstance(tensor, nn.Parameter))
    )


def _uncopyable_in(value: Any) -> dict[int, Any]:
    """Returns what can't be copied by its id, so that the copy shares it: the locks and files of a trainer, say."""
    return {id(entry): entry for entry in entries_in(value) if isinstance(entry, UNCOPYABLE)}


def _refuse_sparse(tensor: Tensor, name: str) -> None:
    if tensor.layout is not torch.strided:
        raise CaptureError(f"{name} has layout {tensor.layout}, only dense (strided) tensors can be recorded")


def _meta_data(tensor: Tensor, others: list[tuple[Tensor, Tensor]], name: str) -> Tensor:
    """Returns the meta copy of a tensor: that of another tensor with the same memory, if there is one, or a new one."""

    def geometry(tensor: Tensor) -> Any:
        return tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype

    def span(tensor: Tensor) -> range:
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        return range(int(tensor.storage_offset()), int(tensor.storage_offset()) + length)

    for other, meta in others:
        if geometry(other) == geometry(tensor):
            return meta.detach()
        if max(span(other).start, span(tensor).start) < min(span(other).stop, span(tensor).stop):
            raise CaptureError(f"{name} shares part of its memory with another parameter or buffer")
    return meta_like(tensor)


def copy_optimizer(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Returns a copy without state that updates parameter by parameter."""
    memo[id(optimizer.state)] = defaultdict(dict)
    copied = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        is_wrapped_method = callable(value) and hasattr(type(optimizer), name)  # as schedules wrap `step`
        if name not in vars(copied) and not is_wrapped_method:  # a subclass's attribute, which Optimizer does not copy
            setattr(copied, name, copy.deepcopy(value, memo))
    for group in copied.param_groups:
        group.update({key: False for key in SWITCHES if key in group})
    return copied


def adopt_state(optimizer: torch.optim.Optimizer, parameter: Tensor, given: Mapping[str, Any]) -> None:
    """Makes a parameter's state in the copy like the given one: the sizes of tensors, and the values of host numbers."""
    state = optimizer.state[parameter]
    for key, value in given.items():
        if not isinstance(value, Tensor):
            state[key] = value
            continue
        made = state.get(key)
        is_counter = not value.dim() and (key == "step" or bool(parameter.dim()))
        on_host = not made.is_meta if isinstance(made, Tensor) else is_counter
        if not on_host:
            state[key] = meta_like(value)
        elif not value.is_meta:
            state[key] = value.detach().cpu().clone()


def meta_parts(step: TrainingStep, recorder: Recorder) -> list[Any]:
    """Returns a meta copy of the batch for each micro-batch."""
    count = step.micro_batches
    if count < 1:
        raise CaptureError(f"micro_batches must be at least 1, got {count}")

    def part(value: Any, path: str, number: int) -> Any:
        if isinstance(value, Tensor):
            meta = _meta_part(value, path, count)
            real = None if value.is_meta else value if count == 1 or not value.dim() else value.chunk(count)[number]
            recorder.add_resident(meta, "input", path, number if count > 1 else -1, real=real)
            return meta.requires_grad_(value.requires_grad)
        if isinstance(value, Mapping):
            return {key: part(entry, f"{path}[{key!r}]", number) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            entries = [part(entry, f"{path}[{i}]", number) for i, entry in enumerate(value)]
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise CaptureError(
                f"{path} is a {type(value).__name__}: a batch consists of tensors, numbers, strings, lists, tuples and dicts"
            )
        return value

    return [part(step.batch, "batch", number) for number in range(count)]


def _meta_part(value: Tensor, path: str, count: int) -> Tensor:
    rows = value.shape[0] if value.dim() else count
    if rows % count:
        raise CaptureError(f"{path} has {rows} rows, which can't be split into {count} micro-batches")
    shape = (rows // count, *value.shape[1:]) if value.dim() else ()
    return torch.empty_strided(shape, value.stride(), dtype=value.dtype, device="meta")
