"""Builds the program of a step while it is recorded: slots, calls, residents, and the host's numbers."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from placewise.graph_capture.program import Branch, Call, Check, Gate, Layout, Precondition, Program, Resident, Slot


class ProgramBuilder:
    """The calls and residents recorded so far."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.residents: list[Resident] = []
        self.checks: list[Check] = []
        self.preconditions: dict[tuple[Slot, str], Precondition] = {}
        self.layouts: list[Layout | None] = []  # [slots], of tensors on the meta device
        self.scalars: dict[float, Slot] = {}  # host scalars among the arguments of the present call, by value
        self._updates: list[tuple[Resident, Slot]] = []
        self._branches: dict[Any, Branch] = {}
        self._subjects: dict[Slot, str] = {}  # of hyper-parameters
        self._unread: dict[Slot, Any] = {}  # hyper-parameters that nothing has read yet -> value
        self._known_calls: dict[Any, Slot] = {}  # arithmetic of the host -> the slot of its result
        self._unused: dict[Slot, None] = {}  # numbers that the host has computed and nothing has used yet
        self._late: dict[Slot, tuple[Slot, ...]] = {}  # numbers that depend on tensors of the step -> the slots of these
        self._host_slots: dict[int, Slot] = {}  # id of a host tensor -> its slot
        self._host_tensors: list[Tensor] = []  # keeps their ids from being reused

    def new_slot(self, layout: Layout | None = None) -> Slot:
        """Returns a slot for a new value; a tensor of the graph has a layout."""
        self.layouts.append(layout)
        return Slot(len(self.layouts) - 1)

    def call(self, function: Any, args: Any, kwargs: dict[str, Any], results: Iterable[Slot], op: int = -1) -> None:
        """Records a call; `op` is -1 if it belongs to no op of the graph."""
        self.calls.append(Call(function, args, kwargs, tuple(results), op))

    def to_program(self, outputs: Iterable[Slot], gate: Gate | None = None) -> Program:
        """Returns the program."""
        for slot, value in list(self._unread.items()):  # perhaps read in a way that can't be recorded: it must not change
            self.branch(operator.eq, slot, value, True)
        return Program(
            tuple(self.calls),
            tuple(self.residents),
            tuple(outputs),
            len(self.layouts),
            tuple(self._updates),
            tuple(self._branches.values()),
            gate,
            tuple(self.checks),
            tuple(self.preconditions.values()),
            tuple(self.layouts),
        )

    # --- tensors on the host: step counters, and numbers that are combined with tensors ---

    def add_host_resident(self, tensor: Tensor, kind: str, name: str, key: str | int) -> None:
        """Adds a resident tensor that stays on the host."""
        self.residents.append(Resident(self._add_host_tensor(tensor), -1, kind, name, key, None, tensor.detach().to("meta")))

    def host_slot(self, tensor: Tensor) -> Slot:
        """Returns the slot of a host tensor; a new one is added as a constant."""
        slot = self._host_slots.get(id(tensor))
        if slot is None:
            slot = self._add_host_tensor(tensor)
            self.residents.append(Resident(slot, -1, "constant", f"host_{slot}", "", tensor.clone()))
        return slot

    def result_slot(self, tensor: Tensor) -> Slot:
        """Returns the slot of a call's result on the host, which may be one of its arguments."""
        slot = self._host_slots.get(id(tensor))
        return self._add_host_tensor(tensor) if slot is None else slot

    def has_host_tensor(self, tensor: Tensor) -> bool:
        """Returns whether a host tensor has a slot: its value may change from step to step."""
        return id(tensor) in self._host_slots

    def _add_host_tensor(self, tensor: Tensor) -> Slot:
        slot = self._host_slots[id(tensor)] = self.new_slot()
        self._host_tensors.append(tensor)
        return slot

    # --- numbers on the host ---

    def add_number(self, kind: str, name: str, key: str | int, value: Any = None) -> Resident:
        """Adds a number that the host reads from the optimizer in every step."""
        resident = Resident(self.new_slot(), -1, kind, name, key, value)
        self.residents.append(resident)
        return resident

    def add_hyper_parameter(self, name: str, group: int, value: Any) -> Slot:
        """Adds a hyper-parameter of a parameter group; one that no call reads must keep its value.

        Except lr: an optimizer may ignore it (Rprop, after its first step), and schedules change it all the same.
        """
        slot = self.add_number("hyper-parameter", name, group, value).slot
        self._subjects[slot] = f"{name!r} of parameter group {group}"
        if name != "lr":
            self._unread[slot] = value
        return slot

    def update_hyper_parameter(self, name: str, group: int, slot: Slot) -> None:
        """Records that a counter of a parameter group gets this slot's value at the end of the step."""
        resident = next(r for r in self.residents if (r.kind, r.name, r.key) == ("hyper-parameter", name, group))
        if isinstance(resident.value, int):
            slot = self.host_call(int, (slot,))
        self.update_number(resident, slot)

    def branch(self, function: Callable[[Any, Any], Any], slot: Slot, other: Any, outcome: bool) -> None:
        """Records that a comparison of a host value decided how the step goes on."""
        subject = self._subjects.get(slot, "a number that the optimizer computes")
        args = (self.use(slot), self.use(other))
        self._branches.setdefault((function, slot, type(other), repr(other)), Branch(function, args, outcome, subject))

    def update_number(self, resident: Resident, slot: Slot) -> None:
        """Records that a resident number gets this slot's value at the end of the step."""
        self._unused.pop(slot, None)
        self._updates.append((resident, slot))

    def host_call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Slot:
        """Records a call on the host; returns the slot of its result."""
        slot = self.new_slot()
        self.call(function, tuple(map(self.use, args)), {}, (slot,))
        self._unused[slot] = None
        if behind := [tensor for arg in args if type(arg) is Slot for tensor in self.tensors_behind(arg)]:
            self._late[slot] = tuple(dict.fromkeys(behind))
        return slot

    def late_number(self, tensor: Slot) -> Slot:
        """Records that the host reads a number from a tensor of the graph in the middle of the step."""
        slot = self.new_slot()
        self.call(torch.ops.aten._local_scalar_dense.default, (tensor,), {}, (slot,))
        self._late[slot] = (tensor,)
        return slot

    def is_late(self, slot: Slot) -> bool:
        """Returns whether a number depends on tensors of the step."""
        return slot in self._late

    def tensors_behind(self, slot: Slot) -> tuple[Slot, ...]:
        """Returns the tensors that a number was computed from."""
        return self._late.get(slot, ())

    def host_arithmetic(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Slot:
        """Records arithmetic on host scalars; the same for many parameters (1 - beta) is computed once in a step."""
        key = (function, *((type(arg), repr(arg)) for arg in args))
        if key not in self._known_calls:
            self._known_calls[key] = self.host_call(function, args)
        return self._known_calls[key]

    def host_tensor(self, scalar: float, slot: Slot, dtype: torch.dtype | None) -> Tensor:
        """Returns a host scalar as a host tensor."""
        tensor = torch.tensor(float.__float__(scalar), dtype=dtype, device="cpu")
        self.call(torch.tensor, (self.use(slot),), {"dtype": tensor.dtype}, (self._add_host_tensor(tensor),))
        return tensor

    def use(self, argument: Any) -> Any:
        """Returns an argument of a call, and marks it as used if it is a slot."""
        if type(argument) is Slot:
            self._unused.pop(argument, None)
            self._unread.pop(argument, None)
        return argument

    def scalar(self, value: float) -> Any:
        """Returns a float argument of a call, or the slot of the host scalar with this value."""
        return self.use(self.scalars.get(value, value))

    @property
    def has_lost_numbers(self) -> bool:
        """Whether the host computed a number that no call uses: numpy, say, has taken its value as a constant."""
        return bool(self._unused)
