"""Recurrent layers as one op forward and one backward, if the step asks for it: cuDNN's on a GPU, PyTorch's own on a CPU.

Otherwise nn.LSTM, nn.GRU and nn.RNN are recorded cell by cell, as several thousand small ops, which can be placed apart. The
forward op runs the call under autograd for this call alone, and the backward op asks autograd for the gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from placewise.graph_capture.autocast import attention_type
from placewise.graph_capture.whole_passes import (
    SavedPass,
    is_hooked,
    record_backward,
    refuse_second_derivatives,
    saved_tensors_of,
)

if TYPE_CHECKING:
    from placewise.graph_capture.recorder import Recorder

LAYERS: dict[str, Callable[..., Any]] = {
    name: getattr(torch._C._VariableFunctions, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
}

OPTIONS = ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")  # after the weights, in order

GATES = {"lstm": 4, "gru": 3}


class SavedLayers(SavedPass):
    """What a forward pass leaves for its backward pass: autograd's record of that call, and its inputs."""

    __slots__ = ("edges",)

    def __init__(self, edges: list[GradientEdge], inputs: list[Tensor], known_storages: frozenset[int]) -> None:
        super().__init__(edges[0], inputs, known_storages)
        self.edges = edges

    def own_tensors(self) -> list[Tensor]:
        """Returns the tensors that the call has saved besides what it was given and returned; only traces ask."""
        return saved_tensors_of(self.edges, self.known_storages)


@dataclass(frozen=True)
class ForwardLayers:
    """The recurrent layers of one call, with gradients for some of input, states and weights."""

    name: str
    num_states: int  # two of an LSTM: hidden and cell states
    trained: tuple[bool, ...]
    mutated: ClassVar[frozenset[int]] = frozenset()

    def __call__(self, *tensors: Tensor, **options: Any) -> tuple[Any, ...]:
        """Returns the result, the last states, and what the backward pass needs; without gradients not that."""
        if not any(self.trained):
            return self._run(tensors, options)
        given = [t.detach().requires_grad_(trained) for t, trained in zip(tensors, self.trained, strict=True)]
        with torch.enable_grad():
            made = self._run(given, options)
        known = frozenset(tensor.untyped_storage()._cdata for tensor in (*given, *made))
        inputs = [tensor for tensor in given if tensor.requires_grad]
        return *[tensor.detach() for tensor in made], SavedLayers(list(map(get_gradient_edge, made)), inputs, known)

    def _run(self, tensors: Any, options: dict[str, Any]) -> tuple[Tensor, ...]:
        x, states, weights = tensors[0], tensors[1 : 1 + self.num_states], list(tensors[1 + self.num_states :])
        how = [options[name] for name in OPTIONS]
        made: tuple[Tensor, ...] = LAYERS[self.name](x, states if self.name == "lstm" else states[0], weights, *how)
        return made

    def on_meta(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        """Returns what the call would return; of what is saved, the gates and the results of all layers."""
        x, states = tensors[0], tensors[1 : 1 + self.num_states]
        rows, steps = (x.size(0), x.size(1)) if options["batch_first"] else (x.size(1), x.size(0))
        directions = 2 if options["bidirectional"] else 1
        out = x.new_empty(steps, rows, directions * states[0].size(-1))
        made = (out.transpose(0, 1) if options["batch_first"] else out, *[state.new_empty(state.shape) for state in states])
        if not any(self.trained):
            return made
        saved = (GATES.get(self.name, 1) + 1) * steps * rows * states[0].size(0) * states[-1].size(-1)
        return *made, x.new_empty(saved)

    def flops(self, *tensors: Tensor, **options: Any) -> int:
        """Returns the flops of the products with all weights, for each row of each step."""
        weights = tensors[1 + self.num_states :]
        return 2 * tensors[0].size(0) * tensors[0].size(1) * sum(w.numel() for w in weights if w.dim() == 2)

    def runnable(self, *tensors: Tensor, **options: Any) -> Callable[[], Any]:
        """Returns the call with real tensors, to be timed."""
        return lambda: self(*tensors, **options)


@dataclass(frozen=True)
class BackwardLayers:
    """The gradients of recurrent layers, for those of input, states and weights that need one.

    The arguments are the gradients of result and last states (None for one that has none), what the forward op was given,
    what it returned, and what it saved.
    """

    forward: ForwardLayers
    retains: bool = False  # another backward op reads the same
    mutated: ClassVar[frozenset[int]] = frozenset()

    @property
    def name(self) -> str:
        """The name of the op."""
        return f"{self.forward.name}_backward"

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns the gradients; what was saved has all that they need, the others say until when they live."""
        return self._gradients(args, self.retains)

    def _gradients(self, args: tuple[Any, ...], retains: bool) -> tuple[Tensor, ...]:
        saved: SavedLayers = args[-1]
        pairs = [(edge, g) for edge, g in zip(saved.edges, args, strict=False) if g is not None]
        edges, gradients = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
        return torch.autograd.grad(edges, saved.inputs, gradients, retain_graph=retains)

    def _given(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        num_made = 1 + self.forward.num_states
        return args[num_made : num_made + len(self.forward.trained)]

    def on_meta(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        """Returns what the call would return."""
        pairs = zip(self._given(args), self.forward.trained, strict=True)
        return tuple(tensor.new_empty(tensor.shape) for tensor, trained in pairs if trained)

    def flops(self, *args: Any, **options: Any) -> int:
        """Returns twice the flops of the forward pass: gradients of inputs, and of weights."""
        return 2 * self.forward.flops(*self._given(args), **options)

    def runnable(self, *args: Any, **options: Any) -> Callable[[], Any]:
        """Returns the call with real tensors, to be timed; the forward pass runs now."""
        *_, saved = self.forward(*self._given(args), **options)
        return lambda: self._gradients((*args[:-1], saved), retains=True)


Layers = ForwardLayers | BackwardLayers

_forward_layers, _backward_layers = cache(ForwardLayers), cache(BackwardLayers)


# --- recording ---


@contextmanager
def recorded_layers(recorder: "Recorder") -> Iterator[None]:
    """Records recurrent layers as one op, but for packed sequences, under autocast, and where they can't be drawn again."""
    with ExitStack() as patches:
        for name in LAYERS:
            patches.enter_context(patch.object(torch._VF, name, partial(_record, recorder, name), create=True))
        yield


def _record(recorder: "Recorder", name: str, *args: Any) -> Any:
    if len(args) != 9 or not isinstance(args[3], bool) or attention_type() is not None:
        return LAYERS[name](*args)
    x, states, weights, *how = args
    options = dict(zip(OPTIONS, how, strict=True))
    draws = bool(options["train"] and options["dropout"] and options["num_layers"] > 1)
    states = tuple(states) if name == "lstm" else (states,)
    tensors = (x, *states, *weights)
    can_draw = not draws or (torch.is_grad_enabled() and not recorder.tape.is_back)
    if is_hooked(draws) or not can_draw or not all(t.is_meta and t.is_floating_point() and t.numel() for t in tensors):
        return LAYERS[name](*args)
    trained = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors)
    made = _Recurrence.apply(recorder, _forward_layers(name, len(states), trained), options, *tensors)  # type: ignore[no-untyped-call]
    if draws:
        recorder.tape.add_unrepeatable(name, recorder.last_op, len(recorder.program.calls))
    return made


class _Recurrence(torch.autograd.Function):
    """Recurrent layers on the meta device, as autograd sees them while a step is recorded."""

    @staticmethod
    def forward(ctx: Any, recorder: "Recorder", function: ForwardLayers, options: Any, *tensors: Tensor) -> Any:
        made = recorder.record_own(function, tensors, options)
        results = made[: 1 + function.num_states]
        if len(made) > len(results):
            ctx.recorder, ctx.function, ctx.options = recorder, function, options
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*tensors, *made)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        kept = ctx.saved_tensors
        refuse_second_derivatives("recurrent layers", "capture without whole_layers")
        found = iter(record_backward(ctx, _backward_layers(ctx.function), (*gradients, *kept)))
        return (None, None, None, *(next(found) if trained else None for trained in ctx.function.trained))
