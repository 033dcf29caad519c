"""Numbers that Python code reads from the tensors of a step with `item()`: they may leave the step, not decide in it."""

from typing import Any, NoReturn

from torch import Tensor

from placewise.core.errors import CaptureError


class StepNumber(float):
    """A number that every step computes again. While the step is recorded it is not known, and computing with it fails."""

    __slots__ = ("problem", "tensor")
    tensor: Tensor  # that it was read from
    problem: CaptureError  # if it is used in the step

    @classmethod
    def of(cls, tensor: Tensor, problem: CaptureError) -> "StepNumber":
        """Returns the number in a tensor."""
        number = cls("nan")
        number.tensor, number.problem = tensor.detach(), problem
        return number

    __hash__ = float.__hash__


def _refuse(self: StepNumber, *_: Any) -> NoReturn:
    raise self.problem


_USES = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow neg pos abs round "
    "trunc floor ceil int float bool lt le gt ge eq ne"
)
for _use in _USES.split():
    setattr(StepNumber, f"__{_use}__", _refuse)
