"""Which ops of a step are recorded: segments of launches for one device that wait for no other queue on the way.

A replay reads everything at the addresses of the recording. So an op can be recorded if all that it reads stays in place
from step to step: the model's own tensors, copies into memory that is kept, and what other recorded ops make. It must
neither read a host scalar that changes nor draw random numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tag
from torch._ops import OpOverload

from placewise.graph_capture.call_slots import slots_of
from placewise.graph_capture.fused_updates import FusedUpdate
from placewise.graph_capture.resolved_program import HOST_VALUE, is_random
from placewise.rewrite.piece import Piece
from placewise.run.codegen.host_arithmetic import HostArithmetic
from placewise.run.lower.instructions import CopyTensor, FreeTensor, RunOp
from placewise.run.lower.placed_step import PlacedStep

FEWEST_OPS = 4  # of a segment: a replay takes the host about as long as one op, but recording many segments takes long

UNKNOWN_SIZES = (Tag.dynamic_output_shape, Tag.data_dependent_output)  # of ops that make the host wait for their values

INDEXING = (  # these make the host wait for a mask, not for indices
    "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"
)  # fmt: skip

WAITING = ("linalg_", "_linalg_")  # how the names of ops begin whose libraries make the host wait for their results


@dataclass(frozen=True)
class Segments:
    """The segments of a step, and what they share with everything else."""

    ops: tuple[tuple[int, ...], ...]  # [segments], in launch order; each is on one device
    escaping: frozenset[int]  # storages that segments make and others read
    copies: frozenset[tuple[int, int]]  # (tensor, target) that segments read
    residents: frozenset[int]  # storages of residents that segments read or write
    scalars: frozenset[int]  # host scalars that segments read, by position


def find_segments(placed: PlacedStep, arithmetic: HostArithmetic, changing: frozenset[int]) -> Segments:
    """Returns the segments of a step; `changing` are the positions of host scalars that differ from step to step."""
    return _Finder(placed, arithmetic, changing).find()


class _Finder:
    def __init__(self, placed: PlacedStep, arithmetic: HostArithmetic, changing: frozenset[int]) -> None:
        self.placed, self.resolved, self.arithmetic = placed, placed.resolved, arithmetic
        self.tensor_devices, self.makers = placed.tensor_devices.tolist(), placed.resolved.graph.producer.tolist()
        self.from_host = placed.launches_from_host
        self.runs = [s for s in placed.instructions.sequence if isinstance(s, RunOp) and self.from_host[s.device]]
        self.devices = {run.op: run.device for run in self.runs}
        self.moving = {  # storages of residents that are allocated again in every step
            resident.tensor
            for resident in self.resolved.program.residents
            if resident.kind == "constant" and resident.tensor in self.resolved.written_storages
        }
        self.is_recordable = {run.op: self._is_recordable(run.op, changing) for run in self.runs}

    def find(self) -> Segments:
        while True:
            segments = list(self._cut(self._in_place()))
            short = [op for segment in segments if len(segment) < FEWEST_OPS for op in segment]
            if not short:
                return self._describe(segments)
            for op in short:
                self.is_recordable[op] = False

    # --- each op alone ---

    def _is_recordable(self, op: int, changing: frozenset[int]) -> bool:
        call = self.resolved.op_calls[op]
        if isinstance(call.function, Piece):
            return op not in self.resolved.checks and changing.isdisjoint(self._read_scalars(op))
        if not isinstance(call.function, OpOverload | FusedUpdate) or is_random(call) or op in self.resolved.checks:
            return False
        if self._makes_the_host_wait(call.function, call.args):
            return False
        if any(slot in self.resolved.late_calls for slot in slots_of(call)):
            return False
        return changing.isdisjoint(self._read_scalars(op))

    def _makes_the_host_wait(self, function: OpOverload | FusedUpdate, args: tuple[Any, ...]) -> bool:
        if isinstance(function, FusedUpdate):
            return False
        name = function._schema.name.partition("::")[2]
        if name not in INDEXING:
            return name.startswith(WAITING) or any(tag in function.tags for tag in UNKNOWN_SIZES)
        storages = [self.resolved.storages[index] for index in args[1] if index is not None]
        shapes = [None if storage == HOST_VALUE else self.resolved.graph.tensors.shape_of(storage) for storage in storages]
        return any(shape is None or not shape.dtype.startswith("int") for shape in shapes)

    def _read_scalars(self, op: int) -> list[int]:
        return [self.arithmetic.position(op, slot) for slot in self.resolved.host_slots(op)]

    def _reads(self, op: int) -> list[tuple[int, int]]:
        """Returns the (storage, tensor) of all that an op reads or writes in place."""
        storages = dict.fromkeys(self.resolved.storages[slot] for slot in slots_of(self.resolved.op_calls[op]))
        return [(storage, self.resolved.read_versions[op][storage]) for storage in storages if storage != HOST_VALUE]

    def _in_place(self) -> set[int]:
        """Returns the recordable ops that read nothing that is at another address in every step."""
        found: set[int] = set()
        for run in self.runs:
            if self.is_recordable[run.op] and all(
                self.tensor_devices[tensor] != run.device  # a copy, into memory that is kept
                or (storage not in self.moving if self.makers[storage] < 0 else self.makers[storage] in found)
                for storage, tensor in self._reads(run.op)
            ):
                found.add(run.op)
        return found

    # --- ops in a row ---

    def _cut(self, in_place: set[int]) -> Iterator[tuple[int, ...]]:
        """Yields the ops of each segment; it ends where its device waits for another or is waited for, or the host waits."""
        waits, open_ops = self.placed.waits, dict[int, list[int]]()
        for number, instruction in enumerate(self.placed.instructions.sequence):
            if isinstance(instruction, FreeTensor) or not self._is_launched(number):
                continue
            if number == self.placed.first_gated:
                for device in list(open_ops):
                    yield from _end(open_ops, device)
            needs = waits.before[number]
            ending: list[int] = []
            is_handed_over = isinstance(instruction, CopyTensor) and self.placed.is_handed_over(instruction)
            host_waits = is_handed_over or not all(map(self._is_launched, needs))
            if host_waits:
                ending = list(open_ops)  # for a thread: what can be launched is launched before
            elif isinstance(instruction, CopyTensor) or needs or instruction.op not in in_place:
                ending = [instruction.source if isinstance(instruction, CopyTensor) else instruction.device]
            for device in ending:
                yield from _end(open_ops, device)
            if isinstance(instruction, RunOp) and instruction.op in in_place:
                open_ops.setdefault(instruction.device, []).append(instruction.op)
                if number in waits.awaited:
                    yield from _end(open_ops, instruction.device)
        for device in list(open_ops):
            yield from _end(open_ops, device)

    def _is_launched(self, number: int) -> bool:
        """Whether the host launches an instruction."""
        return any(self.from_host[device] for device in self.placed.waits.queues[number])

    def _describe(self, segments: list[tuple[int, ...]]) -> Segments:
        inside = {op for segment in segments for op in segment}
        storages = self.resolved.graph.storage.tolist()
        outside = {self.resolved.storages[slot] for slot in self.resolved.program.outputs}
        outside |= {storages[s.tensor] for s in self.placed.instructions.sequence if isinstance(s, CopyTensor)}
        outside |= {storage for run in self.runs if run.op not in inside for storage, _ in self._reads(run.op)}
        read = [(self.devices[op], *pair) for op in inside for pair in self._reads(op)]
        not_copied = {storage for device, storage, tensor in read if self.tensor_devices[tensor] == device}
        return Segments(
            tuple(segments),
            frozenset(storage for storage in outside if storage != HOST_VALUE and self.makers[storage] in inside),
            frozenset((tensor, device) for device, _, tensor in read if self.tensor_devices[tensor] != device),
            frozenset(storage for storage in not_copied if self.makers[storage] < 0),
            frozenset(scalar for op in inside for scalar in self._read_scalars(op)),
        )


def _end(open_ops: dict[int, list[int]], device: int) -> Iterator[tuple[int, ...]]:
    if ops := open_ops.pop(device, None):
        yield tuple(ops)
