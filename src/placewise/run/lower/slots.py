"""What each slot of a program is: a window on one of the graph's storages, or a value that the host keeps."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tag
from torch._ops import OpOverload

from placewise.core.errors import ExecutionError
from placewise.core.graph import Graph
from placewise.graph_capture.capture import CapturedStep
from placewise.graph_capture.program import Call, Program, Slot

HOST = -1  # in the place of a storage


@dataclass(frozen=True, eq=False)
class Slots:
    """A captured step, with the memory that each of its values is in.

    A slot is a window, whatever is in the memory at the time: where an op writes in place, the slot stays and the graph's
    tensor changes. So a slot and a tensor together say which value an op reads.
    """

    graph: Graph
    program: Program
    storages: tuple[int, ...]  # [slots], the graph's tensor that owns the memory, or HOST
    op_calls: tuple[Call, ...]  # [ops]
    views: dict[Slot, Call]  # how a window is made of another one on the same storage
    host_calls: tuple[Call, ...]  # in program order

    @classmethod
    def of(cls, step: CapturedStep) -> "Slots":
        """Returns the values of a captured step."""
        graph, program = step.graph, step.program
        storages = [HOST] * program.num_slots
        owners = graph.storage.tolist()
        known = {resident.slot for resident in program.residents}
        for resident in program.residents:
            storages[resident.slot] = owners[resident.tensor] if resident.tensor >= 0 else HOST
        op_calls: list[Call] = [None] * len(graph.ops)  # type: ignore[list-item]
        views: dict[Slot, Call] = {}
        host_calls = []
        for call in program.calls:
            fresh = [slot for slot in dict.fromkeys(call.results) if slot not in known]
            known.update(fresh)
            if call.op >= 0:
                op_calls[call.op] = call
                for slot, storage in zip(fresh, _made(graph, call, len(fresh)), strict=True):
                    storages[slot] = storage
                continue
            source = next((storages[slot] for slot in slots_of(call) if storages[slot] != HOST), HOST)
            if source == HOST:
                host_calls.append(call)
            for slot in fresh:
                storages[slot] = source
                if source != HOST:
                    views[slot] = call
        return cls(graph, program, tuple(storages), tuple(op_calls), views, tuple(host_calls))

    @cached_property
    def read_versions(self) -> tuple[dict[int, int], ...]:
        """For each op and each storage that it reads: the graph's tensor that is in it then."""
        storages, reads = self.graph.storage.tolist(), self.graph.ops.reads.lists()
        return tuple({storages[tensor]: tensor for tensor in row} for row in reads)

    def base_of(self, slot: Slot) -> Slot:
        """Returns the window that a view was made of in the end: a resident's, or one that an op made."""
        while slot in self.views:
            slot = next(source for source in slots_of(self.views[slot]) if self.storages[source] != HOST)
        return slot

    @cached_property
    def written_storages(self) -> frozenset[int]:
        """The storages that an op writes in place."""
        graph = self.graph
        written = graph.ops.writes.values
        return frozenset(graph.storage[written[graph.tensors.alias_of[written] >= 0]].tolist())


def _made(graph: Graph, call: Call, count: int) -> list[int]:
    """Returns the storage of each of the windows that an op makes."""
    made = [tensor for tensor in graph.ops.writes[call.op].tolist() if graph.tensors.alias_of[tensor] < 0]
    if len(made) == 1:
        return made * count  # several windows on one storage
    if len(made) < count:
        raise ExecutionError(f"ops[{call.op}] {graph.ops.names[call.op]!r}: returns tensors that share their memory")
    return made[:count]


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
    if not isinstance(call.function, OpOverload):
        return []
    found = []
    for position, argument in enumerate(call.function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
            found += list(_slots(given))
    return found


def is_random(call: Call) -> bool:
    """Whether a call draws from a generator."""
    return isinstance(call.function, OpOverload) and Tag.nondeterministic_seeded in call.function.tags
