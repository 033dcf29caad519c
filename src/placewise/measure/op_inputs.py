"""Real tensors in the place of recorded ones: values that every op can take, and that stay finite when it runs often."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from placewise.graph_capture.op_costs import SHAPE_ONLY, OpFacts
from placewise.graph_capture.program import HERE
from placewise.measure.signatures import OpCall

LOW, HIGH = 0.05, 0.95  # of floats: probabilities, and what has a root and a logarithm

MANY_ELEMENTS = 1 << 22  # larger tensors repeat a pattern of so many random numbers: drawing more takes long on a CPU

NUM_INDEXED: dict[str, Callable[[tuple[Any, ...]], int]] = {  # how many things the whole numbers of an op choose from
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


class Work:
    """An op with real tensors on a device, ready to run many times."""

    def __init__(self, call: OpCall, device: str) -> None:
        self._function = call.function._op  # the overload itself: no Python on the way
        facts = OpFacts(call.function)
        most = NUM_INDEXED[facts.name](call.args) if facts.name in NUM_INDEXED else 1
        generator = torch.Generator(device).manual_seed(0)

        def real(value: Any) -> Any:
            if isinstance(value, Tensor):
                return _random(value, device, most, generator) if value.is_meta else value
            return type(value)([real(entry) for entry in value]) if type(value) in (list, tuple) else value

        keep = 1 if facts.name in SHAPE_ONLY else 0  # only the shape of its first argument counts
        self._args = (*call.args[:keep], *map(real, call.args[keep:]))
        self._kwargs = {key: torch.device(device) if value is HERE else real(value) for key, value in call.kwargs.items()}
        changed = [self._args[key] if isinstance(key, int) else self._kwargs.get(key) for key in _ordered(facts.mutated)]
        self._changed = [(value, value.clone()) for value in changed if isinstance(value, Tensor)]

    @property
    def changes_inputs(self) -> bool:
        """Whether it runs in place: then what it changes drifts with every run."""
        return bool(self._changed)

    def restore(self) -> None:
        """Gives the tensors that it changes in place their first values again."""
        for tensor, before in self._changed:
            tensor.copy_(before)

    def run(self) -> None:
        """Runs the op once."""
        self._function(*self._args, **self._kwargs)


def _ordered(keys: frozenset[int | str]) -> list[int | str]:
    return sorted(keys, key=str)


def _random(like: Tensor, device: str, most: int, generator: torch.Generator) -> Tensor:
    """Returns a tensor of this shape, with these strides and of this type; its memory holds just what they span."""
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(like.size(), like.stride(), strict=True))
    length = spanned if like.numel() else 0
    memory = torch.empty(length, dtype=like.dtype, device=device)
    head = memory[:MANY_ELEMENTS]
    if like.dtype.is_floating_point:
        head.copy_(torch.rand(head.shape, device=device, generator=generator) * (HIGH - LOW) + LOW)
    elif like.dtype == torch.bool:
        head.copy_(torch.rand(head.shape, device=device, generator=generator) < 0.5)
    else:
        head.copy_(torch.randint(max(most, 1), head.shape, device=device, generator=generator))
    for first in range(MANY_ELEMENTS, length, MANY_ELEMENTS):
        rest = memory[first : first + MANY_ELEMENTS]
        rest.copy_(head[: len(rest)])
    return memory.as_strided(like.size(), like.stride())
