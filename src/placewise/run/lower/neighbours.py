"""Updates of many parameters by few launches: neighbours that do the same to different tensors go out as one call.

In the graph an update is one parameter's, so that it can be placed. Eager code updates all parameters by a few calls of
`torch._foreach_...` or of a fused kernel. Here the updates that a device makes without an exchange with another device
are put side by side, each kind of op in a row; then the lanes launch each row by one such call.

The order that a plan was simulated in stays as it is but for these ops. Their temporary results live together for a while,
so only as many parameters share a row as raise no device's peak.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from placewise.core.arrays import Ints
from placewise.core.problem import Problem
from placewise.graph_capture.call_slots import slots_of
from placewise.graph_capture.fused_updates import FusedUpdate
from placewise.graph_capture.graph_builder import UPDATE
from placewise.graph_capture.program import Call, Slot
from placewise.graph_capture.resolved_program import HOST_VALUE, ResolvedProgram
from placewise.run.lower.instructions import CopyTensor, FreeTensor, Instruction, Instructions, RunOp
from placewise.run.lower.lowering import lower
from placewise.run.lower.placed_step import PlacedStep

CACHED_BYTES = 1 << 20  # of the tensors of a row's parameters on a thread: a row of larger ones would miss its caches

FOREACH = {  # ops that `torch._foreach_...` calls do to lists, with the number of their tensors
    **dict.fromkeys(("sqrt", "sqrt_", "rsqrt", "neg", "abs", "sign", "reciprocal", "zero_"), 1),
    **dict.fromkeys(("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "maximum", "minimum", "copy_"), 2),
    **dict.fromkeys(("lerp", "lerp_"), 2),
    **dict.fromkeys(("addcmul", "addcmul_", "addcdiv", "addcdiv_"), 3),
}

# What an argument is, for all calls in a row: a tensor of each, one tensor for all, or a number.
EACH, NUMBER = "each", "number"


@dataclass(frozen=True)
class Likeness:
    """What calls must have in common to go out as one, and that one call."""

    function: OpOverload | FusedUpdate
    arguments: tuple[Any, ...]  # EACH, NUMBER, or the slot of a tensor that all share
    keywords: tuple[tuple[str, Any], ...]
    dtypes: tuple[str, ...]  # of the tensors, because kernels take lists of one type

    def foreach(self, has_one_number: bool) -> OpOverload:
        """Returns the function of lists; it gets one number for all calls, or a list of them."""
        assert isinstance(self.function, OpOverload)
        packet = getattr(torch.ops.aten, f"_foreach_{self.function._overloadpacket.__name__}")
        if NUMBER in self.arguments or ("value", NUMBER) in self.keywords:
            return getattr(packet, "Scalar" if has_one_number else "ScalarList")  # type: ignore[no-any-return]
        if any(type(argument) is Slot for argument in self.arguments):
            return packet.Tensor  # type: ignore[no-any-return]
        names = packet.overloads()
        return getattr(packet, next(name for name in ("default", "List", "Scalar") if name in names))  # type: ignore[no-any-return]


def likeness(resolved: ResolvedProgram, op: int) -> Likeness | None:
    """Returns what an op must have in common with its neighbours; None if it is launched alone."""
    call = resolved.op_calls[op]
    shapes = resolved.graph.tensors.shape_of
    found = [shapes(resolved.storages[slot]) for slot in slots_of(call) if resolved.storages[slot] != HOST_VALUE]
    dtypes = tuple(["" if shape is None else shape.dtype for shape in found])
    if isinstance(call.function, FusedUpdate):
        return Likeness(call.function, (EACH,) * len(call.args), tuple(call.kwargs.items()), dtypes)
    if not isinstance(call.function, OpOverload):
        return None
    num_tensors = FOREACH.get(call.function._overloadpacket.__name__)
    if num_tensors is None or call.function._overloadname not in ("default", "Tensor", "Scalar"):
        return None
    arguments = tuple([_argument(resolved, call, value) for value in call.args])
    keywords = tuple([(key, NUMBER if key == "value" else value) for key, value in call.kwargs.items()])
    tensors = [argument for argument in arguments if argument is not NUMBER]
    has_number = NUMBER in arguments or ("value", NUMBER) in keywords
    if None in tensors or arguments[:1] != (EACH,) or arguments[1:].count(NUMBER) > 1:
        return None
    if not (set(call.kwargs) <= {"alpha", "value"} and all(_is_number(resolved, v) for v in call.kwargs.values())):
        return None
    if len(tensors) != num_tensors and not (num_tensors == 2 and has_number and len(tensors) == 1):
        return None
    is_shared = any(type(argument) is Slot for argument in tensors)
    if ((has_number or num_tensors > 2 or call.kwargs) and is_shared) or (has_number and "alpha" in call.kwargs):
        return None
    found_likeness = Likeness(call.function, arguments, keywords, dtypes)
    return found_likeness if _exists(found_likeness, has_number) else None


def _exists(likeness: Likeness, has_number: bool) -> bool:
    """Returns whether the installed PyTorch has the function of lists."""
    try:
        return all(likeness.foreach(is_one) is not None for is_one in ((True, False) if has_number else (True,)))
    except (AttributeError, StopIteration):
        return False


def _argument(resolved: ResolvedProgram, call: Call, value: Any) -> Any:
    """Returns what an argument is in a row; None if it can't be in one."""
    if type(value) is Slot and resolved.storages[value] != HOST_VALUE:
        layouts = resolved.program.layouts
        layout, first = layouts[value], layouts[call.args[0]]
        is_scalar = layout is not None and not layout.sizes and first is not None and bool(first.sizes)
        return value if is_scalar else EACH
    return NUMBER if _is_number(resolved, value) else None


def _is_number(resolved: ResolvedProgram, value: Any) -> bool:
    return value in resolved.host_numbers if type(value) is Slot else type(value) in (int, float)


# --- the order ---


def lower_side_by_side(
    problem: Problem, placement: Ints, order: Ints | None, resolved: ResolvedProgram, has_thread: Sequence[bool]
) -> Instructions:
    """Lowers a placement and an order, with neighbouring updates of a device in rows; `has_thread` is by device.

    No device's peak is higher than in the given order; where it would be, the given order is lowered as it is.
    """
    launches = list(range(problem.num_ops)) if order is None else np.asarray(order).tolist()
    given = lower(problem, placement, order)
    devices = np.asarray(placement)[problem.op_groups].tolist()
    before = _Memory(given, resolved)
    rows = _Rows(resolved, devices, before, has_thread)
    arranged = rows.arranged(launches)
    if not rows.found:
        return given
    new = _freed_after_rows(lower(problem, placement, np.array(arranged, np.int64)), rows.found)
    return new if _Memory(new, resolved).is_within(before) else given


def _freed_after_rows(instructions: Instructions, rows: list[tuple[int, ...]]) -> Instructions:
    """Frees what the ops of a row were the last to use after the whole row, which is one call."""
    last_of = {op: row[-1] for row in rows for op in row}
    waiting: dict[int, list[FreeTensor]] = {}  # device -> what is freed after its row
    sequence: list[Instruction] = []
    in_row: set[int] = set()  # devices
    for instruction in instructions.sequence:
        if isinstance(instruction, FreeTensor) and instruction.device in in_row:
            waiting.setdefault(instruction.device, []).append(instruction)
            continue
        sequence.append(instruction)
        if isinstance(instruction, RunOp):
            op, device = instruction.op, instruction.device
            if last_of.get(op, op) == op:
                sequence += waiting.pop(device, [])
                in_row.discard(device)
            else:
                in_row.add(device)
    return Instructions(instructions.device_names, tuple(sequence))


class _Memory:
    """The bytes in use: before each op, on its device, and at the peak of each device."""

    def __init__(self, instructions: Instructions, resolved: ResolvedProgram) -> None:
        graph = resolved.graph
        sizes, storages, writes = graph.tensors.nbytes.tolist(), graph.storage.tolist(), graph.ops.writes.lists()
        self.before: dict[int, int] = {}
        self.freed: dict[int, int] = {}  # op -> the bytes that its device frees after it
        last: dict[int, int] = {}  # device -> its last op
        self.peaks = [0] * len(instructions.device_names)
        used = [0] * len(instructions.device_names)
        for instruction in instructions.sequence:
            match instruction:
                case RunOp(op, device):
                    self.before[op], self.freed[op], last[device] = used[device], 0, op
                    used[device] += sum([sizes[tensor] for tensor in writes[op] if storages[tensor] == tensor])
                case CopyTensor(tensor, _, device):
                    used[device] += sizes[tensor]
                case FreeTensor(tensor, device):
                    used[device] -= sizes[tensor]
                    self.freed[last[device]] += sizes[tensor]
            self.peaks[device] = max(self.peaks[device], used[device])

    def is_within(self, other: "_Memory") -> bool:
        return all(mine <= its for mine, its in zip(self.peaks, other.peaks, strict=True))


@dataclass
class _Run:
    """Updates that follow each other on a device, by the group that they are in."""

    chains: dict[int, list[int]] = field(default_factory=dict)
    group_of: dict[int, int] = field(default_factory=dict)
    makers: dict[int, int] = field(default_factory=dict)  # tensor -> op of this run


class _Rows:
    """Arranges the updates of each device in rows."""

    def __init__(self, resolved: ResolvedProgram, devices: list[int], memory: _Memory, has_thread: Sequence[bool]) -> None:
        self.resolved, self.devices, self.memory, self.has_thread = resolved, devices, memory, has_thread
        ops, tensors = resolved.graph.ops, resolved.graph.tensors
        self.reads, self.writes, self.after = ops.reads.lists(), ops.writes.lists(), ops.after.lists()
        self.groups, self.sizes, self.storages = (
            ops.groups.tolist(),
            tensors.nbytes.tolist(),
            resolved.graph.storage.tolist(),
        )
        self.is_update = (ops.phases == UPDATE).tolist()
        self.exchanging = self._exchanging()
        gate = resolved.program.gate
        self.first_gated = len(ops) if gate is None else gate.first_op
        self.found: list[tuple[int, ...]] = []  # rows of more than one op

    def _exchanging(self) -> set[int]:
        """Returns the updates that wait for another device, or that another device waits for."""
        makers, found = self.resolved.graph.producer.tolist(), set[int]()
        homes = [self.devices[maker] if maker >= 0 else -1 for maker in makers]
        for op, device in enumerate(self.devices):
            for tensor in self.reads[op]:
                if homes[tensor] not in (-1, device):
                    found |= {op, makers[tensor]}
            for earlier in self.after[op]:
                if self.devices[earlier] != device:
                    found |= {op, earlier}
        return found

    def arranged(self, launches: list[int]) -> list[int]:
        """Returns the launches with each device's runs in rows, in the places of these runs."""
        new = list(launches)
        places: dict[int, list[int]] = {}  # device -> where its launches are
        for place, op in enumerate(launches):
            places.setdefault(self.devices[op], []).append(place)
        for found in places.values():
            for chunk in self._runs(launches, found):
                ops = self._in_rows([launches[place] for place in chunk])
                for place, op in zip(chunk, ops, strict=True):
                    new[place] = op
        return new

    def _runs(self, launches: list[int], places: list[int]) -> list[list[int]]:
        """Returns the places of each run: updates without an exchange, that depend on no other group of the run."""
        runs: list[list[int]] = []
        run, is_open, is_gated = _Run(), False, False
        for place in places:
            op = launches[place]
            if not self.is_update[op] or op in self.exchanging:
                is_open = False
                continue
            needs = [run.makers.get(tensor, -1) for tensor in self.reads[op]] + self.after[op]
            joins = all(run.group_of.get(need, self.groups[op]) == self.groups[op] for need in needs)
            if not is_open or not joins or is_gated != (op >= self.first_gated):
                run, is_open, is_gated = _Run(), True, op >= self.first_gated
                runs.append([])
            runs[-1].append(place)
            run.group_of[op] = self.groups[op]
            run.makers |= dict.fromkeys(self.writes[op], op)
        return runs

    def _in_rows(self, ops: list[int]) -> list[int]:
        chains: dict[int, list[int]] = {}
        for op in ops:
            chains.setdefault(self.groups[op], []).append(op)
        alike: dict[Any, list[list[int]]] = {}
        for chain in chains.values():
            alike.setdefault(tuple([self._kind(op) for op in chain]), []).append(chain)
        device, found = self.devices[ops[0]], list[int]()
        room = self.memory.peaks[device] - self.memory.before[ops[0]]
        for chosen in alike.values():
            for batch in self._batches(chosen, room, self.has_thread[device]):
                levels = list(zip(*batch, strict=True))
                found += [op for level in levels for op in level]
                self.found += [level for level in levels if len(level) > 1]
        return found

    def _kind(self, op: int) -> Any:
        found = likeness(self.resolved, op)
        return (self.resolved.op_calls[op].function, op) if found is None else found

    def _batches(self, chains: list[list[int]], room: int, has_thread: bool) -> list[list[list[int]]]:
        """Returns chains that may be in rows together: as many as fit into the room, and into a thread's cache."""
        batches: list[list[list[int]]] = []
        touched, used = 0, [0] * len(chains[0])  # by row
        for chain in sorted(chains, key=lambda chain: max(self._uses(chain))):  # the small ones first: most of them fit
            tensors = {self.storages[t] for op in chain for t in (*self.reads[op], *self.writes[op])}
            touches, uses = sum(self.sizes[tensor] for tensor in tensors), self._uses(chain)
            touched, used = touched + touches, [sum(pair) for pair in zip(used, uses, strict=True)]
            if not batches or max(used) > room or (has_thread and touched > CACHED_BYTES):
                batches.append([])
                touched, used = touches, uses
            batches[-1].append(chain)
        return batches

    def _uses(self, chain: list[int]) -> list[int]:
        """Returns the bytes that the ops of a chain have taken by each of them, less what those before have freed."""
        made = [sum(self.sizes[t] for t in self.writes[op] if self.storages[t] == t) for op in chain]
        freed = [0, *[self.memory.freed[op] for op in chain[:-1]]]
        return list(accumulate(takes - gives for takes, gives in zip(made, freed, strict=True)))


# --- what is launched together ---


def find_rows(placed: PlacedStep, part_of: Callable[[int, int], Any]) -> dict[int, tuple[int, ...]]:
    """Returns the instructions that one call launches, by the number of each of them.

    `part_of` returns what the instructions of a row must share, for an instruction's number and its op.
    """
    resolved, ops = placed.resolved, placed.resolved.graph.ops
    reads, writes, after = ops.reads.lists(), ops.writes.lists(), ops.after.lists()
    storages, waits = resolved.graph.storage.tolist(), placed.waits
    is_update = (ops.phases == UPDATE).tolist()
    open_rows: dict[int, tuple[Any, list[int], set[int], set[int]]] = {}  # device -> kind, numbers, ops, what they write
    found: list[list[int]] = []
    for number, instruction in enumerate(placed.instructions.sequence):
        match instruction:
            case FreeTensor(_, device):
                row = open_rows.get(device)
                if row is not None and any(storages[tensor] == tensor for tensor in row[3]):
                    del open_rows[device]  # it would be freed after the whole row has its memory
            case CopyTensor(_, source, target):
                open_rows.pop(source, None)
                open_rows.pop(target, None)
            case RunOp(op, device):
                alike = likeness(resolved, op) if is_update[op] else None
                if alike is None:
                    open_rows.pop(device, None)
                    continue
                kind = (alike, part_of(number, op))
                row = open_rows.get(device)
                waiting = bool(waits.before[number] or waits.unsent.get(number))
                if (
                    row is None or row[0] != kind or waiting
                    or not row[2].isdisjoint(after[op]) or not row[3].isdisjoint(reads[op])
                ):  # fmt: skip
                    row = open_rows[device] = (kind, [], set(), set())
                    found.append(row[1])
                row[1].append(number)
                row[2].add(op)
                row[3].update(writes[op])
                if number in waits.awaited:
                    del open_rows[device]
    rows = [tuple(row) for row in found if len(row) > 1]
    return {number: row for row in rows for number in row}
