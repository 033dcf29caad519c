"""A program with its slots resolved: each is a view of one of the graph's storages, or a value that the host keeps."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tag, Tensor
from torch._ops import OpOverload

from placewise.core.errors import ExecutionError
from placewise.core.graph import Graph
from placewise.graph_capture.call_slots import slots_of, written_slots
from placewise.graph_capture.capture import CapturedStep
from placewise.graph_capture.fused_updates import FusedUpdate
from placewise.graph_capture.program import Call, Check, Program, Slot
from placewise.graph_capture.random_draws import without_state
from placewise.graph_capture.recurrent_layers import ForwardLayers
from placewise.graph_capture.whole_passes import ForwardPass

HOST_VALUE = -1  # instead of a storage

UNCOUNTED = (torch.ops.aten._batch_norm_with_update.default,)  # the schema names what it writes, yet that is not counted

READ_NUMBER = torch.ops.aten._local_scalar_dense.default


@dataclass(frozen=True, eq=False)
class ResolvedProgram:
    """The program of a captured step, with the storage that each of its slots is a view of.

    A slot is a view, whatever the storage holds at the time: when an op writes in place, the slot stays the same and the
    graph has a new tensor. So it takes a slot and a tensor to know which value an op reads.
    """

    graph: Graph
    program: Program
    storages: tuple[int, ...]  # [slots], the graph's tensor that owns the storage, or HOST_VALUE
    op_calls: tuple[Call, ...]  # [ops]
    views: dict[Slot, Call]  # how a view is made from another view of the same storage
    host_calls: tuple[Call, ...]  # in program order
    late_calls: dict[Slot, Call]  # how a number is computed that the host reads from a tensor in the middle of the step

    @classmethod
    def of(cls, step: CapturedStep) -> "ResolvedProgram":
        """Returns the program of a captured step, with its slots resolved."""
        return cls.of_program(step.graph, step.program)

    @classmethod
    def of_program(cls, graph: Graph, program: Program) -> "ResolvedProgram":
        """Returns the program of a graph, with its slots resolved."""
        storages = [HOST_VALUE] * program.num_slots
        owners = graph.storage.tolist()
        known = {resident.slot for resident in program.residents}
        for resident in program.residents:
            storages[resident.slot] = owners[resident.tensor] if resident.tensor >= 0 else HOST_VALUE
        op_calls: list[Call] = [None] * len(graph.ops)  # type: ignore[list-item]
        views: dict[Slot, Call] = {}
        host_calls = []
        late_calls: dict[Slot, Call] = {}
        for call in program.calls:
            fresh = [slot for slot in dict.fromkeys(call.results) if slot not in known]
            known.update(fresh)
            if call.op >= 0:
                op_calls[call.op] = call
                for slot, storage in zip(fresh, _made(graph, call, len(fresh)), strict=True):
                    storages[slot] = storage
                continue
            source = next((storages[slot] for slot in slots_of(call) if storages[slot] != HOST_VALUE), HOST_VALUE)
            reads_tensor = call.function is READ_NUMBER and source != HOST_VALUE
            if reads_tensor or any(slot in late_calls for slot in slots_of(call)):
                late_calls |= dict.fromkeys(call.results, call)
                continue
            if source == HOST_VALUE:
                host_calls.append(call)
            for slot in fresh:
                storages[slot] = source
                if source != HOST_VALUE:
                    views[slot] = call
        return cls(graph, program, tuple(storages), tuple(op_calls), views, tuple(host_calls), late_calls)

    @cached_property
    def read_versions(self) -> tuple[dict[int, int], ...]:
        """For each op, by each storage that it reads: the graph's tensor that the storage holds then."""
        storages, reads = self.graph.storage.tolist(), self.graph.ops.reads.lists()
        return tuple({storages[tensor]: tensor for tensor in row} for row in reads)

    def host_slots(self, op: int) -> list[Slot]:
        """Returns the host's values that an op needs, also those from which late numbers are computed, each once."""
        found: dict[Slot, None] = {}
        waiting = list(slots_of(self.op_calls[op]))
        while waiting:
            slot = waiting.pop()
            if slot in self.late_calls:
                waiting += slots_of(self.late_calls[slot])
            elif self.storages[slot] == HOST_VALUE:
                found[slot] = None
        return list(found)

    @cached_property
    def host_numbers(self) -> frozenset[Slot]:
        """The host's values that are numbers of Python, and known before the step's first launch."""
        on_host = [r for r in self.program.residents if r.tensor < 0]
        found = {r.slot for r in on_host if r.like is None and not isinstance(r.value, Tensor)}
        for call in self.host_calls:
            makes_tensor = isinstance(call.function, OpOverload) or call.function is torch.tensor
            if call.function is READ_NUMBER or not makes_tensor:
                found.update(call.results)
        return frozenset(found)

    def base_of(self, slot: Slot) -> Slot:
        """Returns the slot that a view was made from in the first place: a resident's, or one that an op made."""
        while slot in self.views:
            slot = next(source for source in slots_of(self.views[slot]) if self.storages[source] != HOST_VALUE)
        return slot

    @cached_property
    def checks(self) -> dict[int, list[Check]]:
        """The conditions that each op makes, by op."""
        found: dict[int, list[Check]] = {}
        for check in self.program.checks:
            found.setdefault(int(self.graph.producer[self.storages[check.slot]]), []).append(check)
        return found

    @cached_property
    def written_storages(self) -> frozenset[int]:
        """The storages that an op writes in place."""
        graph = self.graph
        written = graph.ops.writes.values
        return frozenset(graph.storage[written[graph.tensors.alias_of[written] >= 0]].tolist())

    def unmarked_writes(self, op: int) -> list[Slot]:
        """Returns what an op writes in place without PyTorch's counting it, as batch norm does its running statistics."""
        written, call = self.graph.ops.writes[op], self.op_calls[op]
        storages = self.graph.storage[written[self.graph.tensors.alias_of[written] >= 0]].tolist()
        if not storages:
            return []
        is_counted = call.function not in UNCOUNTED and not isinstance(call.function, FusedUpdate)
        marked = written_slots(call) if is_counted else []
        return [slot for slot in slots_of(call) if self.storages[slot] in storages and slot not in marked]


def _made(graph: Graph, call: Call, count: int) -> list[int]:
    """Returns the storage of each of the slots that an op makes."""
    made = [tensor for tensor in graph.ops.writes[call.op].tolist() if graph.tensors.alias_of[tensor] < 0]
    if len(made) == 1:
        return made * count  # several views of one storage
    if len(made) < count:
        raise ExecutionError(
            f"ops[{call.op}] {graph.ops.names[call.op]!r}: returns tensors that share memory, which can't be run"
        )
    return made[:count]


def is_random(call: Call) -> bool:
    """Whether a call draws from a random generator."""
    function = without_state(call).function
    if isinstance(function, ForwardPass):
        return "dropout_p" in call.kwargs
    if isinstance(function, ForwardLayers):
        return bool(call.kwargs["train"] and call.kwargs["dropout"] and call.kwargs["num_layers"] > 1)
    return isinstance(function, OpOverload) and Tag.nondeterministic_seeded in function.tags
