"""The ops of a captured step, each with what it needs to run alone: its call, its signature and random inputs.

An op's time depends on its signature: the function, the shapes, strides and types of its tensors, and its plain arguments.
A graph does not have these, so they come from running the recorded program once on the meta device.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from placewise.graph_capture.meta_kernels import MetaKernels
from placewise.graph_capture.op_costs import SHAPE_ONLY, OpFacts, OwnFacts
from placewise.graph_capture.own_ops import OwnOp
from placewise.graph_capture.program import HERE, Call, Layout, Program, Resident, fill_slots
from placewise.graph_capture.random_draws import without_state
from placewise.rewrite.augmented_program import AloneBatchNorm
from placewise.rewrite.channels_last import ChannelsLast
from placewise.rewrite.piece import Piece
from placewise.run.piece_kernels import kernel_of

LOW, HIGH = 0.05, 0.95  # of random floats: they can be probabilities, and have roots and logarithms

MAX_RANDOM = 1 << 22  # elements; larger tensors repeat this many random numbers, because drawing them on a CPU is slow

NUM_INDEXED: dict[str, Callable[[tuple[Any, ...]], int]] = {  # how many entries the integer inputs of an op choose from
    "embedding": lambda args: args[0].size(0),
    "embedding_dense_backward": lambda args: args[2],
    "nll_loss_forward": lambda args: args[0].size(-1),
    "nll_loss_backward": lambda args: args[1].size(-1),
    "nll_loss2d_forward": lambda args: args[0].size(1),
    "nll_loss2d_backward": lambda args: args[1].size(1),
    "index_select": lambda args: args[0].size(args[1]),
    "gather": lambda args: args[0].size(args[1]),
    "index_add_": lambda args: args[0].size(args[1]),
    "scatter_add_": lambda args: args[0].size(args[1]),
}


@dataclass(frozen=True, eq=False)
class OpCall:
    """The call of an op with all its arguments: tensors are on the meta device, the host's numbers are real."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]  # HERE stands for the device
    signature: str


def op_calls(program: Program, num_ops: int) -> list[OpCall]:
    """Returns the call of each op: [ops]."""
    values: list[Any] = [None] * program.num_slots
    for resident in program.residents:
        values[resident.slot] = _meta_value(resident)
    kernels, facts = MetaKernels(), dict[Any, OpFacts]()
    found: dict[int, OpCall] = {}
    with torch.no_grad():
        for call in map(without_state, program.calls):
            args = fill_slots(call.args, values)
            kwargs = {key: fill_slots(value, values) for key, value in call.kwargs.items()}
            if isinstance(call.function, AloneBatchNorm | ChannelsLast):  # it is timed as its original
                changed = call.function
                call, args = call._replace(function=changed.function), changed.arguments(*args)
            if call.op >= 0:
                found[call.op] = OpCall(call.function, args, kwargs, _signature(call, args, kwargs))
            result = _run_on_meta(call, args, kwargs, kernels, facts)
            made = [r for r in result if isinstance(r, Tensor)] if isinstance(result, (tuple, list)) else [result]
            for slot, value in zip(call.results, made, strict=True):
                values[slot] = _laid_out(value, program.layouts[slot]) if call.op >= 0 and program.layouts else value
    return [found[op] for op in range(num_ops)]


def _meta_value(resident: Resident) -> Any:
    """Returns a resident on the meta device; one that the host keeps gets a value to calculate with."""
    if resident.tensor >= 0:
        assert resident.like is not None
        return resident.like
    if resident.value is not None:
        return resident.value.clone() if isinstance(resident.value, Tensor) else resident.value
    return 1.0 if resident.like is None else torch.ones(resident.like.shape, dtype=resident.like.dtype)


def _run_on_meta(call: Call, args: Any, kwargs: dict[str, Any], kernels: MetaKernels, facts: dict[Any, OpFacts]) -> Any:
    kwargs = {key: "meta" if value is HERE else value for key, value in kwargs.items()}
    if call.op < 0 and call.function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
        return 1.0  # a number that the host reads from a tensor of the step
    if isinstance(call.function, OwnOp):
        return call.function.on_meta(*args, **kwargs)
    if isinstance(call.function, Piece):
        return call.function.on_meta()
    if not isinstance(call.function, torch._ops.OpOverload) or not _has_meta(args, kwargs):
        return call.function(*args, **kwargs)  # the host's own arithmetic
    if call.function not in facts:
        facts[call.function] = OpFacts(call.function)
    return kernels.run(call.function, facts[call.function], args, kwargs)


def _laid_out(value: Any, layout: Layout | None) -> Any:
    """Returns what an op has made with the strides that the program says."""
    if layout is None or not isinstance(value, Tensor) or not value.is_meta:
        return value
    if value.stride() == tuple(layout.strides) or value.size() != tuple(layout.sizes):
        return value
    return torch.empty_strided(layout.sizes, layout.strides, dtype=value.dtype, device="meta")


def _has_meta(args: Any, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, Tensor) and value.is_meta for value in (*args, *kwargs.values()))


# --- signatures ---


def _signature(call: Call, args: Any, kwargs: dict[str, Any]) -> str:
    words = [_word(arg) for arg in args] + [f"{key}={_word(value)}" for key, value in sorted(kwargs.items())]
    return f"{_name(call.function)}({', '.join(words)})"


def _name(function: Any) -> str:
    if isinstance(function, OwnOp | Piece):
        return str(function)
    return str(function) if isinstance(function, torch._ops.OpOverload) else f"{operator.__name__}.{function.__name__}"


def _word(value: Any) -> str:
    """Returns an argument as text; of a float, and of a tensor that the host keeps, only its type."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        if not value.is_meta:
            return f"host {kind}"
        return f"{kind}{list(value.size())}" + ("" if value.is_contiguous() else f" by {list(value.stride())}")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_word, value))}]"
    return "float" if isinstance(value, float) else str(value)


# --- inputs ---


class RunnableOp:
    """An op with real tensors on a device: random values that it accepts, and that stay finite if it runs often."""

    def __init__(self, call: OpCall, device: str) -> None:
        if isinstance(call.function, Piece):
            self._changed = self._prepare_piece(call.function, call.args, device)
            return
        is_own = isinstance(call.function, OwnOp)
        facts = OwnFacts(call.function) if is_own else OpFacts(call.function)
        num_indexed = NUM_INDEXED[facts.name](call.args) if facts.name in NUM_INDEXED else 1
        generator = torch.Generator(device).manual_seed(0)

        def real(value: Any) -> Any:
            is_meta = isinstance(value, Tensor) and value.is_meta
            return _random_like(value, device, num_indexed, generator) if is_meta else value

        keep = 1 if facts.name in SHAPE_ONLY else 0  # only the shape of its first argument counts
        self._args = (*call.args[:keep], *tree_map(real, call.args[keep:]))
        self._kwargs = {
            key: torch.device(device) if value is HERE else tree_map(real, value) for key, value in call.kwargs.items()
        }
        self._function = call.function if is_own else call.function._op  # without a layer of Python around it
        keys = sorted(facts.mutated, key=str)
        changed = [self._args[key] if isinstance(key, int) else self._kwargs.get(key) for key in keys]
        self._changed = [(value, value.clone()) for value in changed if isinstance(value, Tensor)]
        if is_own:
            self._function = call.function.runnable(*self._args, **self._kwargs)
            self._args, self._kwargs = (), {}

    def _prepare_piece(self, piece: Piece, given: tuple[Any, ...], device: str) -> list[tuple[Tensor, Tensor]]:
        """Sets what runs a piece; returns the tensors that it changes in place, each with its first value."""
        generator = torch.Generator(device).manual_seed(0)
        is_meta = [isinstance(value, Tensor) and value.is_meta for value in given]  # the rest are numbers of the host
        self._args = tuple(
            [
                _random_like(value, device, 1, generator) if meta else value
                for value, meta in zip(given, is_meta, strict=True)
            ]
        )
        self._kwargs = {}
        self._function = kernel_of(piece, device, torch.get_num_threads() if device == "cpu" else 0)
        return [(self._args[number], self._args[number].clone()) for number in piece.written]

    @property
    def changes_inputs(self) -> bool:
        """Whether it runs in place, so that its inputs drift with every run."""
        return bool(self._changed)

    def restore(self) -> None:
        """Gives the tensors that it changes in place their first values again."""
        for tensor, before in self._changed:
            tensor.copy_(before)

    def run(self) -> None:
        """Runs the op once."""
        self._function(*self._args, **self._kwargs)


def _random_like(like: Tensor, device: str, num_indexed: int, generator: torch.Generator) -> Tensor:
    """Returns a tensor of this shape, with these strides and of this type; its storage is just what they span."""
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(like.size(), like.stride(), strict=True))
    length = spanned if like.numel() else 0
    storage = torch.empty(length, dtype=like.dtype, device=device)
    head = storage[:MAX_RANDOM]
    if like.dtype.is_floating_point:
        head.copy_(torch.rand(head.shape, device=device, generator=generator) * (HIGH - LOW) + LOW)
    elif like.dtype == torch.bool:
        head.copy_(torch.rand(head.shape, device=device, generator=generator) < 0.5)
    else:
        head.copy_(torch.randint(max(num_indexed, 1), head.shape, device=device, generator=generator))
    for first in range(MAX_RANDOM, length, MAX_RANDOM):
        rest = storage[first : first + MAX_RANDOM]
        rest.copy_(head[: len(rest)])
    return storage.as_strided(like.size(), like.stride())
