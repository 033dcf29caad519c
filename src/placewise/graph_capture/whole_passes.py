"""Attention as one op forward and one op backward, so that each device runs its own kernel for it.

PyTorch chooses the kernel of `scaled_dot_product_attention` by device: flash, memory-efficient or cuDNN attention on a GPU,
one of its own on a CPU. They save a row of numbers for the backward pass, not a matrix. On the meta device its parts would
be recorded, and every device would compute plain products. So the forward op calls the function itself and lets autograd
save what that device's kernel needs; the backward op runs autograd for this call alone. Both are in one group.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from placewise.core.errors import CaptureError
from placewise.graph_capture.autocast import attention_type

if TYPE_CHECKING:
    from placewise.graph_capture.recorder import Recorder

ATTENTION: Callable[..., Tensor] = F.scaled_dot_product_attention

NAME = "scaled_dot_product_attention"

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # that the kernels of all devices compute in


def saved_tensors_of(edges: list[GradientEdge], known_storages: frozenset[int]) -> list[Tensor]:
    """Returns what autograd has saved for these edges and all that they lead to, each storage once, but for known ones."""
    nodes, seen = [edge.node for edge in edges], dict[Any, None]()
    while nodes:
        node: Any = nodes.pop()
        if node is not None and node not in seen:
            seen[node] = None
            nodes += [following for following, _ in node.next_functions]
    saved = [getattr(node, name) for node in seen for name in dir(node) if name.startswith("_saved_")]
    flat = [entry for value in saved for entry in (value if isinstance(value, (list, tuple)) else [value])]
    tensors = {entry.untyped_storage()._cdata: entry for entry in flat if isinstance(entry, Tensor)}
    return [tensor for storage, tensor in tensors.items() if storage not in known_storages]


class SavedPass:
    """What a forward pass leaves for its backward pass: autograd's record of that call, and its inputs."""

    __slots__ = ("edge", "inputs", "known_storages")

    def __init__(self, edge: GradientEdge, inputs: list[Tensor], known_storages: frozenset[int]) -> None:
        self.edge, self.inputs, self.known_storages = edge, inputs, known_storages

    def own_tensors(self) -> list[Tensor]:
        """Returns the tensors that the kernel has saved besides what it was given and returned; only traces ask."""
        return saved_tensors_of([self.edge], self.known_storages)


@dataclass(frozen=True)
class ForwardPass:
    """Attention, with gradients for some of query, key and value."""

    trained: tuple[bool, bool, bool]
    name = NAME
    mutated: ClassVar[frozenset[int]] = frozenset()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> tuple[Any, ...]:
        """Returns the result, and what the backward pass needs; without gradients the result alone."""
        if not any(self.trained):
            return (ATTENTION(query, key, value, mask, **options),)
        given = [t.detach().requires_grad_(trained) for t, trained in zip((query, key, value), self.trained, strict=True)]
        with torch.enable_grad():
            out = ATTENTION(*given, mask, **options)
        known = [*given, out] if mask is None else [*given, out, mask]
        saved = SavedPass(
            get_gradient_edge(out),
            [tensor for tensor in given if tensor.requires_grad],
            frozenset(tensor.untyped_storage()._cdata for tensor in known),
        )
        return out.detach(), saved

    def on_meta(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
        """Returns what the call would return; of what is saved, the logarithms of the sums of exponentials."""
        out = _as_kernels_make_it(query)
        if not any(self.trained):
            return (out,)
        if "dropout_p" in options:
            return out, query.new_empty(self._saved_bytes(query, key, value, mask, options), dtype=torch.uint8)
        return out, query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))

    def _saved_bytes(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> int:
        """Returns what is saved where no kernel drops, as on CPUs; a GPU's kernel saves less."""
        given = [t.detach().requires_grad_(trained) for t, trained in zip((query, key, value), self.trained, strict=True)]
        with torch.enable_grad():
            out = ATTENTION(*given, mask, **options)
        known = frozenset(t.untyped_storage()._cdata for t in (*given, mask, out) if t is not None)
        tensors = saved_tensors_of([get_gradient_edge(out)], known)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def flops(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
        """Returns the flops of two products for each pair of a query and a key, as PyTorch counts them."""
        return 2 * 2 * query.numel() * key.size(-2)

    def runnable(self, *args: Any, **options: Any) -> Callable[[], Any]:
        """Returns the call with real tensors, to be timed."""
        return lambda: self(*args, **options)


@dataclass(frozen=True)
class BackwardPass:
    """The gradients of attention, for those of query, key and value that need one."""

    trained: tuple[bool, bool, bool]
    retains: bool = False  # another backward op reads the same
    name = f"{NAME}_backward"
    mutated: ClassVar[frozenset[int]] = frozenset()

    def __call__(
        self, gradient: Tensor, out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Any,
        saved: "SavedPass | LeanPass",
        **options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Returns the gradients; `saved` has all else that they need, and the others say until when they live."""
        if isinstance(saved, LeanPass):
            return saved.gradients(gradient, (query, key, value, mask, out), self.retains)
        return torch.autograd.grad(saved.edge, saved.inputs, gradient, retain_graph=self.retains)

    def on_meta(self, gradient: Tensor, out: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns what the call would return."""
        return tuple(_as_kernels_make_it(t) for t, trained in zip(args[:3], self.trained, strict=True) if trained)

    def flops(self, gradient: Tensor, out: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> int:
        """Returns the flops of five products for each pair of a query and a key, as PyTorch counts them."""
        return 2 * 5 * query.numel() * key.size(-2)

    def runnable(self, gradient: Tensor, out: Tensor, *args: Any, **options: Any) -> Callable[[], Any]:
        """Returns the call with real tensors, to be timed; the forward pass runs now."""
        _, saved = ForwardPass(self.trained)(*args[:4], **options)
        return lambda: torch.autograd.grad(saved.edge, saved.inputs, gradient, retain_graph=True)


Pass = ForwardPass | BackwardPass


class _Saved:
    """What autograd saves of a call whose inputs and result may go meanwhile: all but these, which are given again."""

    __slots__ = ("given", "kept")

    def __init__(self) -> None:
        self.kept: list[_Kept] = []
        self.given: tuple[Tensor | None, ...] = ()

    def keep(self, tensor: Tensor) -> "_Kept":
        """Keeps what autograd saves."""
        self.kept.append(_Kept(tensor))
        return self.kept[-1]

    def find(self, kept: "_Kept") -> Tensor:
        """Returns what autograd has saved; of what has gone meanwhile, the same view of the tensor that was given again."""
        base = kept.tensor if kept.number is None else self.given[kept.number]
        assert base is not None
        return base if kept.number is None else base.as_strided(*kept.layout, kept.offset + base.storage_offset())


class _Kept:
    """A tensor that autograd has saved, or which view it is of a tensor that is given again."""

    __slots__ = ("layout", "number", "offset", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.layout, self.offset = (tensor.size(), tensor.stride()), tensor.storage_offset()
        self.number: int | None = None  # of the tensor that is given again

    def forget(self, tensors: tuple[Tensor | None, ...]) -> None:
        """Forgets the tensor if one of these holds it too."""
        assert self.tensor is not None
        storage = self.tensor.untyped_storage()._cdata
        for number, tensor in enumerate(tensors):
            if tensor is not None and tensor.untyped_storage()._cdata == storage and tensor.dtype == self.tensor.dtype:
                self.number, self.tensor = number, None
                self.offset -= tensor.storage_offset()
                return


class LeanPass:
    """What a forward pass leaves for a backward pass that gets its inputs and its result again, or equal ones."""

    __slots__ = ("edge", "inputs", "saved")

    def __init__(self, edge: GradientEdge, inputs: list[GradientEdge], saved: _Saved) -> None:
        self.edge, self.inputs, self.saved = edge, inputs, saved

    def own_tensors(self) -> list[Tensor]:
        """Returns the tensors that the kernel has saved besides what it was given and returned; only traces ask."""
        return [kept.tensor for kept in self.saved.kept if kept.tensor is not None]

    def gradients(self, gradient: Tensor, given: tuple[Tensor | None, ...], retains: bool) -> tuple[Tensor, ...]:
        """Returns the gradients; `given` are query, key, value, mask and result."""
        self.saved.given = given
        try:
            return torch.autograd.grad(self.edge, self.inputs, gradient, retain_graph=retains)
        finally:
            self.saved.given = ()


class _Entry(torch.autograd.Function):
    """A tensor as the start of a record of autograd, which does not hold it."""

    @staticmethod
    def forward(*given: Any) -> Tensor:
        tensor: Tensor = given[-1]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(*_: Any) -> Any:
        return None, None


@dataclass(frozen=True)
class LeanForwardPass(ForwardPass):
    """The same attention, whose inputs and result may go before the backward pass, which then gets them again."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> tuple[Any, ...]:
        """Returns the result, and what the backward pass needs besides it and the inputs."""
        saved, inputs = _Saved(), (query, key, value)
        start = torch.zeros((), requires_grad=True)
        with torch.enable_grad(), saved_tensors_hooks(saved.keep, saved.find):
            given = [
                _Entry.apply(start, tensor) if trained else tensor  # type: ignore[no-untyped-call]
                for tensor, trained in zip(inputs, self.trained, strict=True)
            ]
            out = ATTENTION(*given, mask, **options)
        edges = [get_gradient_edge(tensor) for tensor, trained in zip(given, self.trained, strict=True) if trained]
        for kept in saved.kept:
            kept.forget((*inputs, mask, out))
        return out.detach(), LeanPass(get_gradient_edge(out), edges, saved)


_forward_pass, _backward_pass = cache(ForwardPass), cache(BackwardPass)


def _as_kernels_make_it(like: Tensor) -> Tensor:
    """Returns a tensor [batch, heads, length, width] with the strides that most kernels give what is like this input.

    cuDNN keeps the order of the dimensions in memory. Others put the heads inside of the positions, which is the order of
    most inputs; and where the input is in the plain order, what follows asks for that one.
    """
    order = sorted(range(3), key=lambda dim: (-like.stride()[dim], dim))
    if like.is_contiguous() or like.stride(-1) != 1:
        order = [0, 2, 1]
    made = like.new_empty([*(like.size(dim) for dim in order), like.size(-1)])
    return made.permute(*(order.index(dim) for dim in range(3)), 3)


# --- recording ---


@contextmanager
def recorded_attention(recorder: "Recorder") -> Iterator[None]:
    """Records attention as one op where every device has a kernel for it, else as its parts.

    The function is replaced, because modes don't see into torch's own layers, nor what checkpointing computes again.
    """

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        out = _record(recorder, *args, **kwargs)
        return ATTENTION(*args, **kwargs) if out is None else out

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = ATTENTION


def _record(recorder: "Recorder", *args: Any, **kwargs: Any) -> Tensor | None:
    """Records a call as one op; returns its result, or None if not all devices have a kernel for it."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    mask, dropout = given.pop("attn_mask", None), given.pop("dropout_p", 0.0)
    tensors = [given.pop(name) for name in ("query", "key", "value")]
    if dropout:
        given["dropout_p"] = dropout
        if not torch.is_grad_enabled() or recorder.tape.is_back:
            return None  # checkpointing may run it again, or does so now
    if is_hooked(bool(dropout)) or not _has_kernels(*tensors, mask=mask, is_grouped=bool(given.get("enable_gqa"))):
        return None
    if (dtype := attention_type()) is not None:
        tensors = [tensor.to(dtype) for tensor in tensors]
        mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    is_trained = torch.is_grad_enabled()
    trained = tuple(is_trained and tensor.requires_grad for tensor in tensors)
    result: Tensor = _Attention.apply(recorder, trained, given, *tensors, mask)  # type: ignore[no-untyped-call]
    if dropout:
        recorder.tape.add_unrepeatable(NAME, recorder.last_op, len(recorder.program.calls))
    return result


def is_hooked(draws: bool) -> bool:
    """Returns whether the user handles what is saved for the backward pass, or calls under vmap and its like.

    What a kernel saves is known to that kernel alone. Checkpointing only drops it, and saves it again; but what a kernel
    draws it can't draw again.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    is_checkpointing = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint" and not draws
    return (hooks is not None and not is_checkpointing) or torch._C._functorch.peek_interpreter_stack() is not None


def _has_kernels(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, is_grouped: bool) -> bool:
    """Returns whether a CPU has a kernel for it, and so PyTorch's choice is not the plain products."""
    tensors, lower = (query, key, value), attention_type()

    def is_like_query(tensor: Tensor) -> bool:
        """Whether it has the query's type, at the latest when autocast has cast both."""
        castable = lower is not None and tensor.is_floating_point() and torch.float64 not in (tensor.dtype, query.dtype)
        return tensor.dtype == query.dtype or castable

    settings: Any = torch.backends.cuda
    if not settings.flash_sdp_enabled() or not settings.mem_efficient_sdp_enabled():
        return False  # the user has chosen
    if any(not t.is_meta or t.dim() != 4 or not is_like_query(t) or not t.numel() or t.stride(-1) != 1 for t in tensors):
        return False
    if query.dtype not in DTYPES or any(t.size(0) != query.size(0) or t.size(-1) != query.size(-1) for t in tensors):
        return False
    heads, others = query.size(1), key.size(1)
    if key.shape[:3] != value.shape[:3] or (heads % others if is_grouped else heads != others):
        return False
    if mask is None:
        return True
    is_typed = (mask.dtype == torch.bool or is_like_query(mask)) and not mask.requires_grad and mask.is_meta
    return (
        is_typed
        and mask.dim() in (2, 4)
        and all(
            size in (1, full)
            for size, full in zip(reversed(mask.shape), (key.size(2), query.size(2), heads, query.size(0)), strict=False)
        )
    )


class _Attention(torch.autograd.Function):
    """Attention on the meta device, as autograd sees it while a step is recorded."""

    @staticmethod
    def forward(
        ctx: Any, recorder: "Recorder", trained: Any, options: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any
    ) -> Tensor:
        given = (query, key, value, mask)
        out, *saved = recorder.record_own(_forward_pass(trained), given, options)
        if saved:
            ctx.recorder, ctx.trained, ctx.options = recorder, trained, options
            ctx.save_for_backward(*given, out, *saved)  # autograd refuses what changes them in place, and checkpoints them
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *given, out, saved = ctx.saved_tensors
        refuse_second_derivatives("attention", "run it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)")
        found = iter(record_backward(ctx, _backward_pass(ctx.trained), (gradient, out, *given, saved)))
        return (None, None, None, *(next(found) if trained else None for trained in ctx.trained), None)


def refuse_second_derivatives(what: str, advice: str) -> None:
    """Refuses to record a backward op that will itself be differentiated: it has no gradients, which autograd can't know."""
    if torch.is_grad_enabled():
        raise CaptureError(f"the step differentiates the gradients of {what} (create_graph), which is one op: {advice}")


def record_backward(ctx: Any, function: Any, args: tuple[Any, ...]) -> list[Tensor]:
    """Records a backward op in the group of the op that made its last argument; returns the gradients.

    Autograd may run it again (retain_graph). Then all of these ops leave what was saved as it is, in whichever order.
    """
    recorder: Recorder = ctx.recorder
    maker = recorder.maker(args[-1])  # under checkpointing not the forward op of the first pass, but that of the second
    calls, earlier = recorder.program.calls, getattr(ctx, "backward_calls", [])
    found = recorder.record_own(replace(function, retains=True) if earlier else function, args, ctx.options)
    for number in earlier:
        calls[number] = calls[number]._replace(function=replace(calls[number].function, retains=True))
    ctx.backward_calls = [*earlier, len(calls) - 1]
    recorder.graph.colocated.append((maker, recorder.last_op))
    return found
