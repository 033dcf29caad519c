"""Noise on the result of every op that rounds: what the same training gives when each op rounds a little otherwise.

This is Monte Carlo arithmetic (Parker, Pierce and Eggert 2000) with PyTorch's ops as its operations.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_EXACT_OPS = """
    _to_copy cat ceil clamp clamp_max clamp_min clone constant_pad_nd copy copy_ embedding fill fill_ flip floor gather
    index index_put index_put_ index_select masked_fill masked_fill_ neg new_empty new_full new_ones new_zeros ones_like
    empty_like full_like zeros_like relu relu_ repeat roll round scatter scatter_ select_scatter set_ sign slice_scatter sort
    stack threshold_backward topk tril triu trunc where zero_
"""  # ops that move, choose or write values, and those whose results are whole numbers

_EXACT = frozenset(_EXACT_OPS.split())


class RoundingNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Multiplies each element that an op computes by 1 + u, |u| <= one unit in the last place of its type."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}  # the default ones are the model's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _rounds(func) and any(is_inexact(value) for value in tree_leaves((args, kwargs))):
            for value in tree_leaves(out):
                if is_inexact(value):
                    self._shake(value)
        return out

    def _shake(self, value: Tensor) -> None:
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        generator = self._generators[value.device]
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64, device=value.device) * 2 - 1
        value.copy_(wide(value) * (1 + torch.finfo(value.dtype).eps * noise))


def _rounds(func: Any) -> bool:
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return not func.is_view and not is_random and func._schema.name.partition("::")[2] not in _EXACT


def is_inexact(value: Any) -> bool:
    """Returns whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def wide(value: Tensor) -> Tensor:
    """Returns a tensor in double precision."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)
