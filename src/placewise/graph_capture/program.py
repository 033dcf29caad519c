"""A recorded step as calls that can be repeated with real tensors on any device.

The program has what the graph leaves out: arguments, views, and the host's own arithmetic (learning rate, step counters).
Every value has a slot. To run a training step, fill the slots of the residents and make the calls in order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


class Slot(int):
    """The number of a value of the program; in the arguments of a call it stands for the value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"%{int(self)}"


def fill_slots(argument: Any, values: Any) -> Any:
    """Returns an argument of a call with the values of its slots; tree_map would take several times as long."""
    if type(argument) is Slot:
        return values[argument]
    if type(argument) in (list, tuple):
        return type(argument)([fill_slots(entry, values) for entry in argument])
    return argument


class Layout(NamedTuple):
    """The sizes and strides of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


HERE = "here"  # the device argument of an op that creates a tensor: the device that runs it


class Call(NamedTuple):
    """One call of the program. Views and the host's arithmetic belong to no op of the graph."""

    function: Callable[..., Any]  # an ATen overload, or a function of the operator module
    args: tuple[Any, ...]  # slots, plain values, and lists of them
    kwargs: dict[str, Any]
    results: tuple[Slot, ...]  # of the returned tensors, in order
    op: int  # the graph's op, or -1


class Resident(NamedTuple):
    """A value that exists before the step starts, and where it comes from."""

    slot: Slot
    tensor: int  # the graph's tensor, or -1 for a value on the host (a step counter, a learning rate)
    kind: str  # parameter, buffer, state, input, constant, hyper-parameter, or loss-scale
    name: str  # the name of the parameter or buffer; the path of an input in the batch; "lr" or "betas[0]"
    key: str | int = ""  # of a state: its key; of an input: the micro-batch; of a hyper-parameter: the parameter group
    value: Any = None  # of a constant: None if the model had it on the meta device; of a hyper-parameter: when captured
    like: Tensor | None = None  # a meta tensor with its sizes, strides and dtype; None for a plain number


class Branch(NamedTuple):
    """A comparison of host values that decided which ops were recorded; in every step it must have the same outcome."""

    function: Callable[[Any, Any], Any]
    args: tuple[Any, Any]  # slots and plain values
    outcome: bool
    subject: str  # what is compared, for the error: "'momentum' of parameter group 0"


class Check(NamedTuple):
    """A condition on data that decided which ops were recorded; in every step it must have the same outcome."""

    slot: Slot
    outcome: bool
    text: str  # what is wrong if it has another one


class Precondition(NamedTuple):
    """A value, computed from buffers and the batch, that decided which ops were recorded; every step must have the same."""

    slot: Slot
    calls: tuple[Call, ...]  # that compute it
    leaves: tuple[Slot, ...]  # the residents that it is computed from
    outcome: Any  # a number, a condition, or nested lists of them; the sizes, if only these matter
    text: str  # who asked for it, for the error
    sizes_only: bool = False


class Gate(NamedTuple):
    """The last ops of a step, which run only if a value is 0: the update, if no gradient has overflowed."""

    slot: Slot  # of the value, which is one of the program's outputs
    first_op: int  # this op of the graph and all after it


@dataclass(frozen=True, eq=False)
class Program:
    """The calls of one step, the values that they start from, and the outputs."""

    calls: tuple[Call, ...]
    residents: tuple[Resident, ...]
    outputs: tuple[Slot, ...]  # what the step returns
    num_slots: int
    updates: tuple[tuple[Resident, Slot], ...] = ()  # numbers in the optimizer's state that the host replaces at the end
    branches: tuple[Branch, ...] = ()  # the step is another one if an outcome differs
    gate: Gate | None = None
    checks: tuple[Check, ...] = ()
    preconditions: tuple[Precondition, ...] = ()
    layouts: tuple[Layout | None, ...] = ()  # [slots], of tensors on the meta device
