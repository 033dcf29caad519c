"""Whether placewise trains as eager code does: the same bits, the same up to rounding, or something else.

What rounding can do is measured, not assumed: the eager loop trains again with noise of one unit in the last place on what
every op computes. A difference is rounding if it is at most `MARGIN` times the largest that the noise makes of the same
tensor. So it follows each model's own sensitivity: Adam divides by the size of a gradient, and a gradient that is 0 but for
rounding moves its parameter by a whole step, in eager code too.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations
from math import inf, isfinite
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from placewise.experiments.training_setups.rounding_noise import RoundingNoise, is_inexact, wide
from placewise.experiments.training_setups.trajectories import Trajectory

EQUAL_BITS, EQUAL_TO_ROUNDING, REFUSED, NOT_INSTALLED = "equal bits", "equal to rounding", "refused", "not installed"

DIFFERENT, FAILED = "DIFFERENT", "FAILED"  # these two end the command with an error

MARGIN = 3.0  # other kernels make about 1 times the difference of the noise; a weight decay of 0.011 for 0.01 makes 14 times

NOISY_RUNS = 4

UNDETERMINED = 0.1  # noise moves a tensor by more than this part of its size: eager code leaves it to rounding

Train = Callable[[], Trajectory]
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Agreement:
    """How a training compares with eager code, and why."""

    result: str
    difference: float | None = None  # the largest one, divided by the largest element of its tensor; None if it has none
    where: str = ""  # the name of the value that has it
    noise_ratio: float | None = None  # the largest difference, divided by that which rounding noise makes of the same value
    kernels: str = ""  # eager code's kernels that make the difference: without them the bits are equal
    num_undetermined: int = 0  # values that eager code leaves to rounding; they have no part in the largest difference
    num_captures: int = 1  # of the step; more if the optimizer or a batch decided for another one
    why: str = ""  # it is refused, different or failed


def find_agreement(placed: Train, eager: Train, *, finds_kernels: bool = True) -> Agreement:
    """Trains with both, several times if their bits differ, and compares all that they leave behind.

    To find the kernels whose rounding it is takes most of the time.
    """
    start = eager()
    if not start.has_learned:
        return Agreement(FAILED, why="the eager loop learns nothing: a loss is not finite, or no parameter moves")
    expected, trained = start.values, placed()
    found, captures = trained.values, trained.num_captures
    differences = find_differences(found, expected)
    if not differences:
        return Agreement(EQUAL_BITS, num_captures=captures)
    noise = measure_noise(eager, expected)
    parts = {name: difference / (_size(expected.get(name)) or 1.0) for name, difference in differences.items()}
    ratios = {name: difference / _noise_of(name, expected, noise) for name, difference in differences.items()}
    worst = max(ratios, key=ratios.__getitem__)
    if ratios[worst] > MARGIN:
        why = _in_words(worst, found, expected, ratios[worst])
        if not isfinite(ratios[worst]):
            return Agreement(DIFFERENT, where=worst, why=why)
        return Agreement(DIFFERENT, parts[worst], worst, ratios[worst], why=why)
    determined = {name: part for name, part in parts.items() if noise.get(name, 0.0) <= UNDETERMINED * _size(expected[name])}
    if lost := [name for name in parts if name.startswith("loss") and name not in determined]:
        return Agreement(FAILED, why=f"eager code leaves the {lost[0]} to rounding: nothing can be compared")
    where = max(determined, key=determined.__getitem__, default="")
    kernels = _find_kernels(placed, eager) if finds_kernels else ""
    others = len(parts) - len(determined)
    return Agreement(EQUAL_TO_ROUNDING, determined.get(where, 0.0), where, ratios[worst], kernels, others, captures)


def _in_words(name: str, found: Values, expected: Values, ratio: float) -> str:
    if name not in found or name not in expected:
        return f"only {'eager code' if name in expected else 'placewise'} has it"
    if isfinite(ratio):
        return f"{ratio:.3g} times what rounding makes of it"
    ours, theirs = (_described(values[name]) for values in (found, expected))
    return f"{ours}, expected {theirs}" if ours != theirs else "whole numbers differ, or where it is NaN or infinite"


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


# --- differences ---


def find_differences(found: Values, expected: Values) -> dict[str, float]:
    """Returns the largest absolute difference of each value whose bits differ; infinite if it can't be told."""
    names = dict.fromkeys([*expected, *found])
    differences = {name: _difference(found.get(name), expected.get(name)) for name in names}
    return {name: difference for name, difference in differences.items() if difference}


def _difference(found: Any, expected: Any) -> float:
    if isinstance(found, float) and isinstance(expected, float):
        found, expected = (torch.tensor(value, dtype=torch.float64) for value in (found, expected))
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return 0.0 if type(found) is type(expected) and found == expected else inf
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return inf
    if not is_inexact(found):
        return 0.0 if torch.equal(found, expected) else inf
    differs = ~((found == expected) | (found.isnan() & expected.isnan()))
    gaps = (wide(found)[differs] - wide(expected)[differs]).abs()
    return 0.0 if not gaps.numel() else float(gaps.max()) if bool(gaps.isfinite().all()) else inf


def _size(value: Any) -> float:
    """Returns the largest finite magnitude of a tensor's elements; 0 for other values."""
    if isinstance(value, float):
        value = torch.tensor(value, dtype=torch.float64)
    if not is_inexact(value):
        return 0.0
    sizes = wide(value).abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0


# --- what rounding can do ---


def measure_noise(eager: Train, expected: Values) -> dict[str, float]:
    """Returns the largest difference that noise makes of each value, with eager code's kernels and with plain ones."""
    noise: dict[str, float] = {}
    for seed in range(NOISY_RUNS):
        with RoundingNoise(seed), _plain_kernels(KERNELS if seed % 2 else ()):
            found = eager().values
        for name, difference in find_differences(found, expected).items():
            noise[name] = max(noise.get(name, 0.0), difference)
    return noise


def _noise_of(name: str, expected: Values, noise: dict[str, float]) -> float:
    """Returns the noise of a value, at least one unit in the last place of its largest element."""
    value = expected.get(name)
    unit = (
        torch.finfo(value.dtype).eps if isinstance(value, Tensor) and is_inexact(value) else torch.finfo(torch.float32).eps
    )
    return max(noise.get(name, 0.0), unit * _size(value)) or 1.0


# --- whose rounding it is ---


def _math_attention() -> AbstractContextManager[Any]:
    return sdpa_kernel(SDPBackend.MATH)


@contextmanager
def _no_one_dnn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about TF32, which is for Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _plain_updates() -> AbstractContextManager[Any]:
    adam: Any = import_module("torch.optim.adam")
    return patch.object(adam, "_fused_adam", adam._single_tensor_adam)


KERNELS = {  # whose rounding it can be -> what puts plain kernels in their place
    "fused attention": _math_attention,
    "fused updates": _plain_updates,
    "oneDNN": _no_one_dnn,
}


@contextmanager
def _plain_kernels(kernels: Iterable[str]) -> Iterator[None]:
    """Puts plain kernels in the place of these."""
    with ExitStack() as stack:
        for kernel in kernels:
            stack.enter_context(KERNELS[kernel]())
        yield


def _find_kernels(placed: Train, eager: Train) -> str:
    """Returns the fewest kernels that make the difference: without them the bits are equal; '' if there are none."""
    for count in range(1, len(KERNELS) + 1):
        for kernels in combinations(KERNELS, count):
            with _plain_kernels(kernels):
                if not find_differences(placed().values, eager().values):
                    return " and ".join(kernels)
    return ""
