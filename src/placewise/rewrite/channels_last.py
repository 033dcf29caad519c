"""Lays the tensors around convolutions out with their channels last, which a GPU's convolutions compute in.

Given images with their channels first, cuDNN converts them before and after most convolutions. So each convolution gets its
images and weights channels last, as Inductor gives them, and what is computed from its result follows: pointwise ops, batch
norm, pooling. The program's layouts say so, and its views are made of tensors with these layouts; a tensor with a view that
would not be possible keeps its layout. Parameters, inputs and what the step returns keep theirs: weights are converted when
a convolution reads them.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from placewise.core.graph import PHASES
from placewise.graph_capture.call_slots import slots_of
from placewise.graph_capture.meta_kernels import MetaKernels
from placewise.graph_capture.op_costs import OpFacts
from placewise.graph_capture.program import HERE, Call, Layout, Program, Slot
from placewise.graph_capture.resolved_program import HOST_VALUE, ResolvedProgram
from placewise.rewrite.fusable_ops import is_fusable

aten = torch.ops.aten

CONVOLUTIONS: dict[Any, int] = {aten.convolution.default: 2, aten.convolution_backward.default: 3}  # -> tensors to lay out

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions

BY_STRIDES = (aten.as_strided.default, aten._reshape_alias.default)  # views that name strides

MOST_CALLS = 300  # for each convolution: with more it is a small part of the step

SMALL = 64  # channels

UPDATE = PHASES.index("update")


@dataclass(frozen=True)
class ChannelsLast:
    """A convolution, forward or backward, of tensors that it first lays out with their channels last."""

    function: OpOverload
    count: int  # of its first arguments

    def __call__(self, *args: Any) -> Any:
        """Returns what the convolution returns."""
        return self.function(*self.arguments(*args))

    def arguments(self, *args: Any) -> tuple[Any, ...]:
        """Returns the convolution's arguments, laid out."""
        given = [tensor.contiguous(memory_format=FORMATS[tensor.dim()]) for tensor in args[: self.count]]
        return (*given, *args[self.count :])

    def __str__(self) -> str:
        return f"{self.function} channels last"


def lay_out(values: ResolvedProgram) -> Program:
    """Returns the program with the layouts of channels-last convolutions, if they are likely to be faster."""
    if not is_worth_it(values):
        return values.program
    contiguous: set[int] = set()
    while True:
        layouts, failed = _Layouts(values, contiguous).find()
        if not failed:
            break
        contiguous |= failed
    calls = [
        call._replace(function=_laid_out(call.function)) if _is_convolution(call) else call for call in values.program.calls
    ]
    return replace(values.program, calls=tuple(calls), layouts=tuple(layouts))


def is_worth_it(values: ResolvedProgram) -> bool:
    """Whether Inductor lays out such convolutions with their channels last (its `decide_layout_opt`)."""
    layouts = values.program.layouts
    weights = []
    for call in values.program.calls:
        if call.function is aten.convolution.default:
            weight = layouts[call.args[1]]
            assert weight is not None
            if len(weight.sizes) not in FORMATS:
                return False
            weights.append((weight.sizes, call.args[8]))
    if not weights or len(values.program.calls) >= MOST_CALLS * len(weights):
        return False
    is_grouped = any(groups > 1 and sizes[1] > 1 for sizes, groups in weights)
    is_narrowing = any(sizes[0] * 2 <= sizes[1] and sizes[2] > 1 for sizes, _ in weights)
    is_small = all(sizes[0] <= SMALL and sizes[1] <= SMALL for sizes, _ in weights)
    return not (is_grouped or is_narrowing or is_small)


def _laid_out(convolution: Any) -> ChannelsLast:
    return ChannelsLast(convolution, CONVOLUTIONS[convolution])


def _is_convolution(call: Call) -> bool:
    return call.op >= 0 and call.function in CONVOLUTIONS


class _Layouts:
    """The layout of each slot if convolutions compute with channels last; some storages keep theirs."""

    def __init__(self, values: ResolvedProgram, contiguous: set[int]) -> None:
        self.values, self.contiguous = values, contiguous
        self.before = values.program.layouts
        self.now = list(self.before)
        self.changed: set[Slot] = set()
        self.failed: set[int] = set()  # storages that must keep their layout
        self.phases = values.graph.ops.phases.tolist()
        self.kept = {values.storages[slot] for slot in values.program.outputs}
        self.kernels, self.facts = MetaKernels(), dict[Any, OpFacts]()

    def find(self) -> tuple[list[Layout | None], set[int]]:
        """Returns the layouts, and the storages that should have kept theirs: [slots]."""
        known = {resident.slot for resident in self.values.program.residents}
        with torch.no_grad():
            for call in self.values.program.calls:
                fresh = [slot for slot in call.results if slot not in known]
                known.update(fresh)
                if call.op >= 0 and self.phases[call.op] != UPDATE:
                    if _is_convolution(call) or not self.changed.isdisjoint(slots_of(call)):
                        self._compute(call, fresh)
                elif call.op < 0 and not self.changed.isdisjoint(slots_of(call)):
                    self._view(call)
        return self.now, self.failed

    def _compute(self, call: Call, fresh: list[Slot]) -> None:
        """Lays out what an op makes as its kernels do, as far as the meta device knows."""
        function: Any = call.function
        if not isinstance(function, OpOverload):
            return
        args = self._tensors(call.args)
        if function in CONVOLUTIONS:
            args = _laid_out(function).arguments(*args)
        made = self._run(function, args, self._tensors(call.kwargs))
        if made is None or len(made) != len(call.results):
            return
        weight = _weight_gradient(call)
        for number, (slot, tensor) in enumerate(zip(call.results, made, strict=True)):
            if slot in fresh and self._may_change(slot, tensor) and (number != weight or self._is_for_kernels(slot)):
                self._set(slot, tensor)

    def _may_change(self, slot: Slot, tensor: Tensor) -> bool:
        """Whether a result may have a tensor's layout: a dense one of images, whose storage is not needed as it is."""
        layout, storage = self.before[slot], self.values.storages[slot]
        if layout is None or tensor.dim() not in FORMATS or tuple(tensor.size()) != tuple(layout.sizes):
            return False
        is_free = storage not in self.contiguous and storage not in self.kept and storage != HOST_VALUE
        return is_free and tensor.is_contiguous(memory_format=FORMATS[tensor.dim()]) and _is_dense(layout)

    def _is_for_kernels(self, slot: Slot) -> bool:
        """Whether only ops that are compiled read a tensor; others want a gradient laid out as its weights are."""
        return all(is_fusable(self.values.op_calls[op]) for op in self._readers.get(self.values.storages[slot], ()))

    @cached_property
    def _readers(self) -> dict[int, list[int]]:
        """The ops that read each storage."""
        found: dict[int, list[int]] = {}
        storages = self.values.graph.storage.tolist()
        for op, reads in enumerate(self.values.graph.ops.reads.lists()):
            for storage in dict.fromkeys(storages[tensor] for tensor in reads):
                found.setdefault(storage, []).append(op)
        return found

    def _view(self, call: Call) -> None:
        """Lays out a view of what is laid out anew."""
        source = next(slot for slot in slots_of(call) if self.values.storages[slot] != HOST_VALUE)
        function: Any = call.function
        made = None
        if isinstance(function, OpOverload) and function not in BY_STRIDES:
            made = self._run(function, self._tensors(call.args), self._tensors(call.kwargs))
        if made is None or len(made) != len(call.results):
            self.failed.add(self.values.storages[source])
            return
        for slot, tensor in zip(call.results, made, strict=True):
            if self.now[slot] is not None:
                self._set(slot, tensor)

    def _set(self, slot: Slot, tensor: Tensor) -> None:
        layout = Layout(tuple(tensor.size()), tuple(tensor.stride()))
        before = self.before[slot]
        if before is not None and layout.strides != tuple(before.strides):
            self.now[slot] = layout
            self.changed.add(slot)

    def _run(self, function: OpOverload, args: Any, kwargs: Any) -> list[Tensor] | None:
        """Returns the tensors that a call makes on the meta device, None if it can't be made."""
        if function not in self.facts:
            self.facts[function] = OpFacts(function)
        try:
            made = self.kernels.run(function, self.facts[function], args, kwargs)
        except (RuntimeError, NotImplementedError, ValueError, IndexError):
            return None
        return [made] if isinstance(made, Tensor) else [tensor for tensor in made if isinstance(tensor, Tensor)]

    def _tensors(self, value: Any) -> Any:
        """Returns arguments with meta tensors in the place of slots."""
        if type(value) is Slot:
            return self._tensor(value)
        if value is HERE:
            return "meta"
        if type(value) is dict:
            return {key: self._tensors(entry) for key, entry in value.items()}
        if type(value) in (list, tuple):
            return type(value)([self._tensors(entry) for entry in value])
        return value

    def _tensor(self, slot: Slot) -> Any:
        layout, storage = self.now[slot], self.values.storages[slot]
        shape = None if storage == HOST_VALUE else self.values.graph.tensors.shape_of(storage)
        if layout is None or shape is None:
            return 1.0
        return torch.empty_strided(layout.sizes, layout.strides, dtype=getattr(torch, shape.dtype), device="meta")


def _weight_gradient(call: Call) -> int | None:
    """Returns which result of a call is the gradient of a convolution's weights."""
    if call.function is not aten.convolution_backward.default:
        return None
    for_images, for_weights = call.args[10][:2]
    return int(for_images) if for_weights else None


def _is_dense(layout: Layout) -> bool:
    """Whether a tensor has all elements of its memory, each once."""
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(layout.sizes, layout.strides, strict=True))
    return spanned == prod(layout.sizes)
