"""The slots of a call: those that it reads, and those whose memory it changes."""

from collections.abc import Iterator
from typing import Any

from torch._ops import OpOverload

from placewise.graph_capture.own_ops import OwnOp
from placewise.graph_capture.program import Call, Slot


def slots_of(call: Call) -> Iterator[Slot]:
    """Yields the slots among a call's arguments, in order."""
    return _slots((*call.args, *call.kwargs.values()))


def _slots(value: Any) -> Iterator[Slot]:
    if type(value) is Slot:
        yield value
    elif type(value) in (list, tuple):
        for entry in value:
            yield from _slots(entry)


def written_slots(call: Call) -> list[Slot]:
    """Returns the slots whose memory a call changes in place."""
    if isinstance(call.function, OwnOp):
        return [call.args[position] for position in sorted(call.function.mutated)]
    if not isinstance(call.function, OpOverload):
        return []
    found = []
    for position, argument in enumerate(call.function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
            found += list(_slots(given))
    return found
