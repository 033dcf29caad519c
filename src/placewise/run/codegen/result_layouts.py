"""Gives the results of ops the strides that they had when the step was recorded.

The meta device does not always know which strides a kernel gives its result, and kernels of different devices differ. Views
were recorded for known strides, and would show the wrong elements of a tensor with others.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from placewise.graph_capture.program import Layout


class ResultLayouts:
    """Which ops give a result other strides than the recorded ones; the first step looks at all of them."""

    def __init__(self) -> None:
        self.is_known = False
        self.differing: set[int] = set()  # ops

    def concerns(self, op: int) -> bool:
        """Whether the results of an op are looked at."""
        return not self.is_known or op in self.differing

    def fitter(self, op: int, layout: Layout) -> Callable[[Tensor | None], Tensor | None]:
        """Returns the function that returns a result of an op with this layout.

        A gradient that nobody needs is None, and what a pass saves is no tensor.
        """
        sizes, strides = layout

        def fit(tensor: Tensor | None) -> Tensor | None:
            if not isinstance(tensor, Tensor) or tensor.stride() == strides or tensor.size() != sizes:
                return tensor
            if _same_elements(tensor, strides):
                fitted = tensor.as_strided(tensor.size(), strides)
                if suggest_memory_format(fitted) != suggest_memory_format(tensor):  # which kernels ask for
                    self.differing.add(op)
                return fitted
            self.differing.add(op)
            return torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

        return fit


def _same_elements(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    """Returns whether only the strides of dimensions differ that have a single entry."""
    return all(size == 1 or a == b for size, a, b in zip(tensor.size(), tensor.stride(), strides, strict=True))
