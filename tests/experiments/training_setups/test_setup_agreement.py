"""What counts as the same training: another kernel's rounding does, another training does not."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from placewise.experiments.training_setups import agreement
from placewise.experiments.training_setups.agreement import (
    DIFFERENT,
    EQUAL_BITS,
    EQUAL_TO_ROUNDING,
    FAILED,
    Agreement,
    find_agreement,
    find_differences,
)
from placewise.experiments.training_setups.optimizer_recipes import ADAMW, recipe
from placewise.experiments.training_setups.rounding_noise import RoundingNoise
from placewise.experiments.training_setups.training_setup import Setup, StepOptions, Task
from placewise.experiments.training_setups.trajectories import Trajectory, train_eagerly, train_placed


class Attention(nn.Module):
    """A block with attention, dropout and a norm."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 4), nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1)
        result: Tensor = self.out(self.dropout(mixed)).mean(1)
        return result


def task(dropout: float = 0.0) -> Task:
    batches = [(torch.randn(6, 5, 16), torch.randn(6, 4)) for _ in range(4)]
    return Task(Attention(dropout), batches, nn.MSELoss())


def setup(build: Callable[[], Task] = task, **changes: Any) -> Setup:
    return replace(Setup("attention", "torch", "attention", ADAMW, build), **changes)


def between(ours: Setup, theirs: Setup) -> Agreement:
    """Returns how a training that is not placewise's at all, but eager code of another setup, agrees with eager code."""
    return find_agreement(lambda: train_eagerly(ours), lambda: train_eagerly(theirs))


def test_the_same_loop_has_the_same_bits() -> None:
    assert between(setup(), setup()) == Agreement(EQUAL_BITS)


def test_another_kernel_rounds_differently_and_is_found() -> None:
    """Eager code has a fused attention kernel; the placed step is recorded where it is switched off.

    A key's bias adds the same to all scores and changes nothing: its gradient is rounding alone, of which AdamW makes steps.
    """

    def train_with_products() -> Trajectory:
        with sdpa_kernel(SDPBackend.MATH):
            return train_placed(setup())

    found = find_agreement(train_with_products, lambda: train_eagerly(setup()))
    assert found.result == EQUAL_TO_ROUNDING
    assert found.kernels == "fused attention"
    assert found.difference is not None
    assert 0 < found.difference < 1e-2
    assert found.noise_ratio is not None
    assert found.noise_ratio < agreement.MARGIN


def test_sums_in_another_order_are_rounding() -> None:
    """Two micro-batches of equal size have the mean of the whole batch."""
    found = between(setup(options=StepOptions(micro_batches=2)), setup())
    assert (found.result, found.kernels) == (EQUAL_TO_ROUNDING, "")


CASTS = StepOptions(autocast=torch.bfloat16)
OTHERS: dict[str, tuple[Setup, Setup]] = {
    "beta1": (setup(optimizer=recipe("", torch.optim.AdamW, lr=1e-3, betas=(0.89, 0.999))), setup()),
    "weight decay": (setup(optimizer=recipe("", torch.optim.AdamW, lr=1e-3, weight_decay=0.012)), setup()),
    "learning rate": (setup(optimizer=recipe("", torch.optim.AdamW, lr=1.001e-3)), setup()),
    "dropout rate": (setup(partial(task, 0.1)), setup()),
    "no clipping": (setup(), setup(options=StepOptions(clip_grad_value=1e-2))),
    "other clipping": (
        setup(options=StepOptions(clip_grad_norm=0.101)),
        setup(options=StepOptions(clip_grad_norm=0.1)),
    ),
    "casts": (setup(options=CASTS), setup()),
    "beta1 in bfloat16": (
        setup(
            optimizer=recipe("", torch.optim.AdamW, lr=1e-3, betas=(0.8, 0.999)),
            options=StepOptions(autocast=torch.bfloat16),
        ),
        setup(options=StepOptions(autocast=torch.bfloat16)),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_training_is_different(name: str) -> None:
    found = between(*OTHERS[name])
    assert found.result == DIFFERENT
    assert found.where
    assert found.noise_ratio is not None
    assert found.noise_ratio > agreement.MARGIN


def test_other_dropout_masks_are_different() -> None:
    def shifted() -> Trajectory:
        forward = Attention.forward

        def drawn(self: Attention, x: Tensor) -> Tensor:
            torch.rand(1)
            return forward(self, x)

        Attention.forward = drawn  # type: ignore[method-assign]
        try:
            return train_eagerly(setup(partial(task, 0.5)))
        finally:
            Attention.forward = forward  # type: ignore[method-assign]

    assert find_agreement(shifted, lambda: train_eagerly(setup(partial(task, 0.5)))).result == DIFFERENT


NOT_ROUNDING = "whole numbers differ, or where it is NaN or infinite"


def trained(**values: Any) -> Trajectory:
    return Trajectory({"loss of step 1": torch.tensor(1.0), **values}, has_learned=True)


@pytest.mark.parametrize(
    ("found", "expected", "why"),
    [
        ({}, {"mean": torch.ones(2)}, "only eager code has it"),
        ({"mean": torch.ones(2)}, {}, "only placewise has it"),
        ({"mean": torch.ones(2)}, {"mean": torch.ones(3)}, "torch.float32 [2], expected torch.float32 [3]"),
        ({"mean": torch.ones(2).half()}, {"mean": torch.ones(2)}, "torch.float16 [2], expected torch.float32 [2]"),
        ({"count": torch.tensor(3)}, {"count": torch.tensor(4)}, NOT_ROUNDING),
        (
            {"mean": torch.tensor(1.0)},
            {"mean": torch.tensor(torch.nan)},
            "whole numbers differ, or where it is NaN or infinite",
        ),
        ({"type of output": "list"}, {"type of output": "tuple"}, "'list', expected 'tuple'"),
        ({"step": 3}, {"step": 3.0}, "3, expected 3.0"),
    ],
)
def test_what_can_not_be_rounding_is_different(found: dict[str, Any], expected: dict[str, Any], why: str) -> None:
    outcome = find_agreement(lambda: trained(**found), lambda: trained(**expected))
    assert (outcome.result, outcome.why) == (DIFFERENT, why)
    assert (outcome.difference, outcome.noise_ratio) == (None, None), "JSON has no infinity"


def test_nans_and_infinities_in_the_same_places_are_equal() -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    assert find_differences({"a": special}, {"a": special.clone()}) == {}
    assert find_differences({"a": special + 0.5}, {"a": special}) == {"a": 0.5}


def test_a_loop_that_learns_nothing_proves_nothing() -> None:
    frozen = setup(optimizer=recipe("", torch.optim.SGD, lr=0.0))
    assert between(frozen, frozen).result == FAILED
    wild = setup(optimizer=recipe("", torch.optim.SGD, lr=1e30))
    assert between(wild, wild).result == FAILED


def test_noise_is_one_unit_in_the_last_place_of_what_an_op_computes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        a = torch.rand(100, dtype=torch.float64).to(dtype) + 1
        with RoundingNoise(0):
            product, moved, whole = a * a, a[:10].clone(), torch.floor(a.abs().float())
        ratio = (product.to(torch.complex128) / (a * a).to(torch.complex128) - 1).abs() / torch.finfo(dtype).eps
        assert 0.4 < float(ratio.max()) <= 1.5, dtype
        assert torch.equal(moved, a[:10])
        assert torch.equal(whole, whole.round())


def test_noise_leaves_the_models_own_random_numbers_alone() -> None:
    torch.manual_seed(0)
    expected = [torch.rand(3), torch.nn.functional.dropout(torch.ones(50), 0.5) > 0]
    torch.manual_seed(0)
    with RoundingNoise(0):
        found = [torch.rand(3), torch.nn.functional.dropout(torch.ones(50), 0.5) > 0]
    assert all(map(torch.equal, found, expected))
