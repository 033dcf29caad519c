"""A recorded step as calls that can be made again, with real tensors, on any device.

The program keeps what the graph leaves out: arguments, views, and the host's own arithmetic (learning rate, step
counters). Every value has a slot. Running the calls in order, with the residents' slots filled, is one training step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class Slot(int):
    """The number of a value of the program; in a call's arguments it stands for the value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"%{int(self)}"


HERE = "here"  # the device of an op that makes a tensor from nothing: the one that runs it


class Call(NamedTuple):
    """One call of the program. Views and the host's arithmetic belong to no op of the graph."""

    function: Callable[..., Any]  # an ATen overload, or a function of the operator module
    args: tuple[Any, ...]  # slots, plain values, and lists of them
    kwargs: dict[str, Any]
    results: tuple[Slot, ...]  # for the tensors that it returns, in order
    op: int  # the graph's op, or -1


class Resident(NamedTuple):
    """Where the value of a slot is before the step starts."""

    slot: Slot
    tensor: int  # the graph's tensor, or -1 for a value that the host keeps (a step counter, a learning rate)
    kind: str  # parameter, buffer, state, input, constant, or hyper-parameter
    name: str  # the parameter's or buffer's name; an input's path in the batch
    key: str | int = ""  # of a state: its name; of an input: the micro-batch; of a hyper-parameter: the parameter group
    value: Tensor | None = None  # of a constant; None where the model had it on the meta device, without a value
    like: Tensor | None = None  # on the meta device: size, strides and type of a tensor; None for a plain number


@dataclass(frozen=True, eq=False)
class Program:
    """The calls of one step, the values that they start from, and those that they are made for."""

    calls: tuple[Call, ...]
    residents: tuple[Resident, ...]
    outputs: tuple[Slot, ...]  # the loss of each micro-batch, or what the model returned
    num_slots: int
    updates: tuple[tuple[Resident, Slot], ...] = ()  # numbers of the optimizer's state that the host replaces at the end
