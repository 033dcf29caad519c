"""Checks before a step that the batch and the buffers decide for the captured step."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from placewise.core.errors import OtherBranch
from placewise.graph_capture.early_values import compute_early
from placewise.graph_capture.program import Precondition, Slot


def check_preconditions(preconditions: Sequence[Precondition], residents: Sequence[Any], positions: dict[Slot, int]) -> None:
    """Raises OtherBranch if a value that decided at capture is another one now; `positions` are those of the residents."""
    for condition in preconditions:
        leaves: dict[Slot, Tensor] = {leaf: residents[positions[leaf]] for leaf in condition.leaves}
        value = compute_early(condition.slot, condition.calls, leaves)
        outcome = list(value.shape) if condition.sizes_only else value.tolist()
        if outcome != condition.outcome:
            raise OtherBranch(
                f"{condition.text}: it was {_short(condition.outcome)} when the step was captured and is {_short(outcome)} "
                "now: capture and compile the step again"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"{text[:36]} ..."
