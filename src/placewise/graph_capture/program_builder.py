"""The program while it grows: its slots, its calls, what is there when it starts, and the host's own numbers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from placewise.graph_capture.program import Call, Program, Resident, Slot


class ProgramBuilder:
    """Calls and residents, one behind the other."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.residents: list[Resident] = []
        self.num_slots = 0
        self.scalars: dict[float, Slot] = {}  # the host's numbers among the arguments of the call under way, by value
        self._updates: list[tuple[Resident, Slot]] = []
        self._unused: dict[Slot, None] = {}  # numbers that the host has computed, and nothing has used
        self._host_slots: dict[int, Slot] = {}  # id of a tensor that the host keeps -> its slot
        self._host_tensors: list[Tensor] = []  # keeps their ids from being used again

    def new_slot(self) -> Slot:
        """Returns the slot of a new value."""
        self.num_slots += 1
        return Slot(self.num_slots - 1)

    def call(self, function: Any, args: Any, kwargs: dict[str, Any], results: Iterable[Slot], op: int = -1) -> None:
        """Records a call; one that belongs to no op of the graph has op -1."""
        self.calls.append(Call(function, args, kwargs, tuple(results), op))

    def program(self, outputs: Iterable[Slot]) -> Program:
        """Returns what was recorded."""
        return Program(tuple(self.calls), tuple(self.residents), tuple(outputs), self.num_slots, tuple(self._updates))

    # --- tensors that the host keeps: step counters, and numbers that meet tensors ---

    def add_host_resident(self, tensor: Tensor, kind: str, name: str, key: str | int) -> None:
        """Makes a tensor known that the host keeps."""
        self.residents.append(Resident(self._add_host_tensor(tensor), -1, kind, name, key, None, tensor.detach().to("meta")))

    def host_slot(self, tensor: Tensor) -> Slot:
        """Returns the slot of a tensor that the host keeps; one that is new is a constant."""
        slot = self._host_slots.get(id(tensor))
        if slot is None:
            slot = self._add_host_tensor(tensor)
            self.residents.append(Resident(slot, -1, "constant", f"host_{slot}", "", tensor.clone()))
        return slot

    def result_slot(self, tensor: Tensor) -> Slot:
        """Returns the slot of what a call on the host's tensors has returned, which may be one of them."""
        slot = self._host_slots.get(id(tensor))
        return self._add_host_tensor(tensor) if slot is None else slot

    def is_live(self, tensor: Tensor) -> bool:
        """Whether a tensor's value changes from step to step."""
        return id(tensor) in self._host_slots

    def _add_host_tensor(self, tensor: Tensor) -> Slot:
        slot = self._host_slots[id(tensor)] = self.new_slot()
        self._host_tensors.append(tensor)
        return slot

    # --- the host's numbers ---

    def add_number(self, kind: str, name: str, key: str | int) -> Resident:
        """Makes a number known that the host reads from the optimizer in every step."""
        resident = Resident(self.new_slot(), -1, kind, name, key)
        self.residents.append(resident)
        return resident

    def update_number(self, resident: Resident, slot: Slot) -> None:
        """Says that the step leaves a new number in the place of a resident one."""
        self._unused.pop(slot, None)
        self._updates.append((resident, slot))

    def host_call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Slot:
        """Records a call of the host and returns the slot of its result."""
        slot = self.new_slot()
        self.call(function, tuple(map(self.used, args)), {}, (slot,))
        self._unused[slot] = None
        return slot

    def host_tensor(self, scalar: float, slot: Slot, dtype: torch.dtype | None) -> Tensor:
        """Returns a host's number as a tensor that the host keeps."""
        tensor = torch.tensor(float(scalar), dtype=dtype, device="cpu")
        self.call(torch.tensor, (self.used(slot),), {"dtype": tensor.dtype}, (self._add_host_tensor(tensor),))
        return tensor

    def used(self, argument: Any) -> Any:
        """Returns an argument of a call; a number of the host's is used by it."""
        if type(argument) is Slot:
            self._unused.pop(argument, None)
        return argument

    def scalar(self, value: float) -> Any:
        """Returns an argument that is a float, or the slot of the host's number that it is."""
        return self.used(self.scalars.get(value, value))

    @property
    def has_lost_numbers(self) -> bool:
        """Whether the host computed a number that no call uses: its value must have got in as it was (math.sqrt)."""
        return bool(self._unused)
