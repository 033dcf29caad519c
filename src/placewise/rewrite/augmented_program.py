"""Adds optional ops to the graph and the program of a step, and leaves out those that a placement has nowhere.

A repeated op is the call of its original with other slots; where it would draw zeros and ones again it copies those that
were kept. One that waits, or visits, is a call that returns what it is given: on another device that is the copy. Views are
made again, from the slot that they are of now.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from placewise.core.graph import Graph
from placewise.core.problem import Present
from placewise.graph_capture.program import Call, Layout, Program, Slot
from placewise.graph_capture.resolved_program import HOST_VALUE, ResolvedProgram
from placewise.graph_capture.whole_passes import BackwardPass, ForwardPass, LeanForwardPass
from placewise.rewrite.augmented_graph import CAPTURED, KEEPING, TAKING, WAITING, AugmentedGraph, add_options
from placewise.rewrite.optional_tensors import OptionalTensors
from placewise.rewrite.piece import Piece


@dataclass(frozen=True, eq=False)
class AugmentedProgram(Program):
    """A program with calls of optional ops."""

    roots: Mapping[Slot, int] = field(default_factory=dict)  # of the added slots: the tensor that owns their memory
    instead: Mapping[Slot, Slot] = field(default_factory=dict)  # what is read instead of each while that is not there


@dataclass(frozen=True)
class AloneBatchNorm:
    """A batch norm in training that leaves the running statistics alone: its kernel updates others, which are forgotten."""

    function: Callable[..., Any]  # an ATen overload
    positions: tuple[int, ...]  # of the running statistics among its arguments
    dtypes: tuple[torch.dtype, ...]

    def __call__(self, *args: Any) -> Any:
        """Returns what the op returns."""
        return self.function(*self.arguments(*args))

    def arguments(self, x: Tensor, *args: Any) -> tuple[Any, ...]:
        """Returns the op's arguments, with other statistics."""
        given = [x, *args]
        for position, dtype in zip(self.positions, self.dtypes, strict=True):
            given[position] = torch.zeros(x.size(1), dtype=dtype, device=x.device)
        return tuple(given)


def wait(tensor: Tensor) -> Tensor:
    """Returns a tensor as it is: where this runs, it waits."""
    return tensor


def wait_together(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns several views of one storage as they are."""
    return tensors


def augment(graph: Graph, program: Program, choice: OptionalTensors | None = None) -> tuple[Graph, AugmentedProgram]:
    """Returns the graph and the program of a step with optional ops for the tensors that are worth it."""
    augmented = add_options(graph, choice)
    return augmented.graph, _Writer(program, augmented).program()


class _Writer:
    """The calls of the augmented program so far."""

    def __init__(self, program: Program, augmented: AugmentedGraph) -> None:
        self.captured, self.augmented = program, augmented
        self.resolved = ResolvedProgram.of_program(augmented.captured, program)
        self.storages = self.resolved.storages
        self.owners = augmented.graph.storage.tolist()
        self.values = augmented.tensors.tolist()
        self.reads, self.writes = augmented.graph.ops.reads.lists(), augmented.graph.ops.writes.lists()
        self.calls: list[Call] = []
        self.layouts: list[Layout | None] = list(program.layouts)
        self.known: dict[tuple[int, Slot], Slot] = {}  # (owner of the memory, captured slot) -> slot
        self.roots: dict[Slot, int] = {}
        self.instead: dict[Slot, Slot] = {}
        self.captured_slots: dict[Slot, Slot] = {}  # new slot -> the captured one that it is the same view as
        self.kept: dict[int, Slot] = {}  # captured op that draws -> what is kept of it
        self.bases: dict[int, list[Slot]] = {}  # storage -> the slots that are not made from others
        for number, storage in enumerate(self.storages):
            if storage != HOST_VALUE and Slot(number) not in self.resolved.views:
                self.bases.setdefault(storage, []).append(Slot(number))

    def program(self) -> AugmentedProgram:
        """Returns the program; the calls of the captured one keep their order."""
        origins, roles = self.augmented.ops.tolist(), self.augmented.roles.tolist()
        number = {origin: op for op, (origin, role) in enumerate(zip(origins, roles, strict=True)) if role == CAPTURED}
        added = 0  # how many ops of the augmented graph have their call
        captured = self.captured
        for call in captured.calls:
            if call.op < 0:
                self.calls.append(call)
                continue
            for op in range(added, number[call.op]):
                if roles[op] == WAITING:
                    self._wait(op)
                elif roles[op] == KEEPING:
                    self._keep_draw(op, self.resolved.op_calls[origins[op]])
                elif roles[op] == TAKING:
                    self._take_draw(op, self.resolved.op_calls[origins[op]])
                else:
                    self._repeat(op, self.resolved.op_calls[origins[op]])
            added = number[call.op] + 1
            self._keep(number[call.op], call)
        self._find_instead()
        gate = captured.gate
        changed = {
            "calls": tuple(self.calls),
            "num_slots": len(self.layouts),
            "layouts": tuple(self.layouts),
            "gate": None if gate is None else gate._replace(first_op=number[gate.first_op]),
        }
        return AugmentedProgram(**{**vars(captured), **changed}, roots=self.roots, instead=self.instead)

    def _keep(self, op: int, call: Call) -> None:
        """Adds a call of the captured program, which reads what optional ops have made."""
        tensors = self._tensors(op)
        if all(self.owners[t] == self.storages_of(t) for t in tensors.values()):
            self.calls.append(call._replace(op=op))
            return
        args, kwargs = self._arguments(call, tensors)
        self.calls.append(call._replace(args=args, kwargs=kwargs, op=op))

    def _repeat(self, op: int, call: Call) -> None:
        """Adds the call of a repeated op."""
        tensors = self._tensors(op)
        function, given = call.function, call.args
        changed = {self.storages_of(t) for t in self.augmented.captured.ops.writes[call.op].tolist()} - set(tensors)
        if changed:  # running statistics
            positions = [i for i, arg in enumerate(given) if type(arg) is Slot and self.storages[arg] in changed]
        if changed and isinstance(function, Piece):
            function = function.without_statistics()
            given = tuple([arg for i, arg in enumerate(given) if i not in positions])
        elif changed:
            like = {r.slot: r.like for r in self.captured.residents}
            dtypes = [found.dtype for i in positions if (found := like[given[i]]) is not None]
            function = AloneBatchNorm(function, tuple(positions), tuple(dtypes))
            given = tuple([None if i in positions else arg for i, arg in enumerate(given)])
        args, kwargs = self._arguments(call._replace(args=given), tensors)
        results = [self._slot(self.owners[tensors[self.storages[slot]]], slot, True) for slot in call.results]
        self.calls.append(Call(function, args, kwargs, tuple(results), op))

    def _keep_draw(self, op: int, call: Call) -> None:
        """Adds the call that keeps drawn zeros and ones as bytes."""
        (drawn,), (kept,) = call.results, self.writes[op]
        self.kept[call.op] = self._slot(kept, drawn, True)
        keep = torch.ops.aten._to_copy.default
        self.calls.append(Call(keep, (drawn,), {"dtype": torch.bool}, (self.kept[call.op],), op))

    def _take_draw(self, op: int, call: Call) -> None:
        """Adds the call that copies what was kept into the tensor that is made again."""
        (drawn,), (made,) = call.results, self.writes[op]
        slot = self._slot(self.owners[made], drawn)
        self.calls.append(Call(torch.ops.aten.copy_.default, (slot, self.kept[call.op]), {}, (slot,), op))

    def _wait(self, op: int) -> None:
        """Adds the call of a tensor that waits, or visits."""
        (read,), (made,) = self.reads[op], self.writes[op]
        bases = self.bases[self.storages_of(read)]
        given = [self._slot(self.owners[read], base) for base in bases]
        results = [self._slot(made, base, True) for base in bases]
        function = wait if len(bases) == 1 else wait_together
        self.calls.append(Call(function, tuple(given), {}, tuple(results), op))

    def storages_of(self, tensor: int) -> int:
        """Returns the captured storage whose value a tensor has."""
        return int(self.augmented.captured.storage[self.values[tensor]])

    def _tensors(self, op: int) -> dict[int, int]:
        """Returns which tensor an op reads, or else writes, in place of each captured storage."""
        return {self.storages_of(t): t for t in (*self.writes[op], *self.reads[op])}

    def _arguments(self, call: Call, tensors: dict[int, int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call with the slots of these tensors."""

        def convert(slot: Slot) -> Slot:
            storage = self.storages[slot]
            return slot if storage == HOST_VALUE else self._slot(self.owners[tensors[storage]], slot)

        return _with_slots(call.args, convert), {key: _with_slots(value, convert) for key, value in call.kwargs.items()}

    def _slot(self, owner: int, slot: Slot, is_made: bool = False) -> Slot:
        """Returns the slot of the same view of another tensor's memory; adds the call that makes the view when it is new."""
        if owner == self.storages[slot] or (owner, slot) in self.known:
            return self.known.get((owner, slot), slot)
        if is_made or slot not in self.resolved.views:
            return self._add_slot(owner, slot)
        call = self.resolved.views[slot]

        def convert(source: Slot) -> Slot:
            return source if self.storages[source] == HOST_VALUE else self._slot(owner, source)

        args = _with_slots(call.args, convert)
        kwargs = {key: _with_slots(value, convert) for key, value in call.kwargs.items()}
        results = [self.known.get((owner, result)) or self._add_slot(owner, result) for result in call.results]
        self.calls.append(Call(call.function, args, kwargs, tuple(results), -1))
        return self.known[owner, slot]

    def _add_slot(self, owner: int, slot: Slot) -> Slot:
        made = self.known[owner, slot] = Slot(len(self.layouts))
        self.layouts.append(self.captured.layouts[slot] if self.captured.layouts else None)
        self.roots[made], self.captured_slots[made] = owner, slot
        return made

    def _find_instead(self) -> None:
        """Finds what is read instead of each new slot: the same view of what its tensor's newest version stands for."""
        newest = dict(zip(self.owners, range(len(self.owners)), strict=True))  # owner -> the last version of its memory
        stands_for = self.augmented.graph.tensors.stands_for.tolist()
        waiting = list(self.roots)
        while waiting:
            made = waiting.pop()
            other = self.owners[stands_for[newest[self.roots[made]]]]
            before = len(self.layouts)
            self.instead[made] = self._slot(other, self.captured_slots[made])
            waiting += map(Slot, range(before, len(self.layouts)))


def _with_slots(value: Any, convert: Callable[[Slot], Slot]) -> Any:
    """Returns arguments with other slots."""
    if type(value) is Slot:
        return convert(value)
    if type(value) in (list, tuple):
        return type(value)([_with_slots(entry, convert) for entry in value])
    return value


def leave_out_calls(program: AugmentedProgram, present: Present) -> Program:
    """Returns what is left of a program where some groups are nowhere: the program of the present graph."""
    is_there = set(present.tensors.tolist())
    number = {op: n for n, op in enumerate(present.ops.tolist())}

    def convert(slot: Slot) -> Slot:
        while (root := program.roots.get(slot)) is not None and root not in is_there:
            slot = program.instead[slot]
        return slot

    calls = []
    lean: set[Slot] = set()  # what attention saves, whose inputs its backward pass reads from elsewhere
    for call in program.calls:
        if call.op >= 0 and call.op not in number:
            continue
        if call.op < 0 and call.results and all(convert(slot) != slot for slot in call.results):
            continue  # a view of what is not there
        args = _with_slots(call.args, convert)
        kwargs = {key: _with_slots(value, convert) for key, value in call.kwargs.items()} if call.kwargs else call.kwargs
        if isinstance(call.function, BackwardPass) and any(type(arg) is Slot and arg in program.roots for arg in args):
            lean.add(args[-1])
        calls.append(call._replace(args=args, kwargs=kwargs, op=number.get(call.op, -1)))
    for n, call in enumerate(calls):
        if isinstance(call.function, ForwardPass) and not lean.isdisjoint(call.results):
            calls[n] = call._replace(function=LeanForwardPass(call.function.trained))
    left = {f.name: getattr(program, f.name) for f in fields(Program)} | {"calls": tuple(calls)}
    gate = program.gate
    return Program(**left | {"gate": None if gate is None else gate._replace(first_op=number[gate.first_op])})
