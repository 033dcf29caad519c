"""Values that are known before a step runs: it computes them from constants, buffers and the batch alone.

Python code may decide by them. What comes from constants is the same in every step; what comes from buffers or the batch is
a precondition, which every step checks before it starts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload

from placewise.graph_capture.call_slots import slots_of, written_slots
from placewise.graph_capture.program import HERE, Call, Slot

MOST_CALLS = 1000  # of what is computed a second time

MOST_ELEMENTS = 1 << 24


class EarlyValue(NamedTuple):
    """A value, and how it is computed."""

    value: Tensor
    calls: tuple[Call, ...]
    leaves: tuple[Slot, ...]  # the residents that it is computed from


def find_early(
    slot: Slot, calls: Sequence[Call], storages: Mapping[Slot, int], known: Mapping[Slot, Tensor]
) -> EarlyValue | None:
    """Returns the value of a slot; None if it is not computed from known residents alone, or by too much work.

    All calls that have written the memory behind it count; `storages` says which memory a slot is a view of. What was drawn
    at random is not known.
    """
    writers: dict[int, list[int]] = {}  # storage -> the calls that make it, a view of it, or write into it
    for number, call in enumerate(calls):
        for storage in dict.fromkeys(storages[s] for s in (*call.results, *written_slots(call)) if s in storages):
            writers.setdefault(storage, []).append(number)
    residents = {storages[leaf]: leaf for leaf in known if leaf in storages}
    needed: set[int] = set()
    leaves: dict[Slot, None] = {}
    seen, waiting = {storages[slot]}, [storages[slot]]
    while waiting:
        storage = waiting.pop()
        if storage in residents:
            leaves[residents[storage]] = None
        elif not any(_makes(calls[number], storage, storages) for number in writers.get(storage, ())):
            return None  # a parameter, or the optimizer's state
        for number in writers.get(storage, ()):
            call = calls[number]
            slots = list(slots_of(call))
            if not isinstance(call.function, OpOverload) or Tag.nondeterministic_seeded in call.function.tags:
                return None
            if not all(s in storages for s in slots):
                return None  # a number of the host
            needed.add(number)
            new = {storages[s] for s in slots} - seen
            seen |= new
            waiting += new
    if len(needed) > MOST_CALLS or sum(known[leaf].numel() for leaf in leaves) > MOST_ELEMENTS:
        return None
    chosen = tuple(calls[number] for number in sorted(needed))
    return EarlyValue(compute_early(slot, chosen, known), chosen, tuple(leaves))


def compute_early(slot: Slot, calls: Sequence[Call], residents: Mapping[Slot, Tensor]) -> Tensor:
    """Returns the value of a slot after these calls, on the CPU; the residents stay as they are."""
    values: dict[Slot, Any] = {}

    def fill(value: Any) -> Any:
        if type(value) is Slot:
            if value not in values:
                values[value] = residents[value].detach().cpu().clone()
            return values[value]
        if type(value) in (list, tuple):
            return type(value)([fill(entry) for entry in value])
        return torch.empty_like(value, device="cpu") if isinstance(value, Tensor) and value.is_meta else value

    for call in calls:
        kwargs = {key: "cpu" if value is HERE else fill(value) for key, value in call.kwargs.items()}
        made = call.function(*fill(call.args), **kwargs)
        found = [entry for entry in made if isinstance(entry, Tensor)] if isinstance(made, (tuple, list)) else [made]
        values |= dict(zip(call.results, found, strict=True))
    result: Tensor = fill(slot)
    return result


def _makes(call: Call, storage: int, storages: Mapping[Slot, int]) -> bool:
    """Returns whether a call makes a storage, and not only a view of it."""
    arguments = [storages[s] for s in list(slots_of(call)) if s in storages]
    return storage in [storages[s] for s in call.results] and storage not in arguments
