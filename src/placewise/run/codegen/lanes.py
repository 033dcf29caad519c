"""Writes the lanes of a placed step: straight-line functions, one for each thread that launches.

Every device with a thread of its own has a lane; the host's lane, on the calling thread, launches for all other devices; and
a pinning lane copies what a thread makes for those devices into pinned memory. A value is a local variable, `del` frees it,
and views are made where they are first needed. Tensors pass from lane to lane in a mailbox.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from placewise.core.errors import ExecutionError
from placewise.graph_capture.call_slots import slots_of
from placewise.graph_capture.fused_updates import FusedUpdate
from placewise.graph_capture.program import Call, Check, Slot
from placewise.graph_capture.resolved_program import HOST_VALUE
from placewise.rewrite.piece import Piece
from placewise.run.backends.cpu_threads import Cancellation, Signal
from placewise.run.backends.protocol import Network, Streams
from placewise.run.codegen.host_arithmetic import HostArithmetic
from placewise.run.codegen.result_layouts import ResultLayouts
from placewise.run.codegen.source import Source
from placewise.run.codegen.update_gate import UpdateGate
from placewise.run.lower.instructions import CopyTensor, FreeTensor, RunOp
from placewise.run.lower.neighbours import NUMBER, find_rows, likeness
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.lower.waits import Waits
from placewise.run.piece_kernels import kernel_of
from placewise.run.storage_copies import clone_storage, same_view

HOST_LANE = -1

NO_DEVICE = -1

PAUSE_EVERY = 64  # instructions: an accelerator's queue holds about a thousand kernels, and an op may have ten

PARAMETERS = ("residents", "scalars", "mailbox", "outputs", "trace")


@dataclass(frozen=True, eq=False)
class Lanes:
    """The functions of one step: by device, by its `pinning_lane`, or HOST_LANE. Each takes PARAMETERS."""

    functions: dict[int, Callable[..., None]]
    mailbox_size: int


class LaneSetup(NamedTuple):
    """What all lanes of a step are written from: plain, traced and recorded ones."""

    placed: PlacedStep
    arithmetic: HostArithmetic
    positions: dict[Slot, int]  # a resident's slot -> its place in the list of residents
    streams: Streams | None
    cancellation: Cancellation
    gate: UpdateGate
    layouts: ResultLayouts
    network: Network | None = None


class LaneWriter:
    """Writes the lanes of a placed step.

    With `is_traced` they also add everything that ran, and what it made, to a trace: each op by itself. With `pause`, the
    host's lane calls it at the start and every PAUSE_EVERY instructions; a trace then has rows as a usual step launches
    them, under their first instructions, and not what they made.
    """

    def __init__(self, setup: LaneSetup, is_traced: bool = False, pause: Callable[[], None] | None = None) -> None:
        placed, self.arithmetic, self.positions, self.streams, cancellation, self.gate, self.layouts, self.network = setup
        self.placed, self.resolved, self.is_traced, self.pause = placed, placed.resolved, is_traced, pause
        self.tensor_devices, self.from_host = placed.tensor_devices.tolist(), placed.launches_from_host
        self.synchronization = Synchronization(placed.waits, self.from_host, self.streams, cancellation, placed.last_reads)
        self.sources: dict[int, Source] = {}
        self.view_names = ViewNames(placed, self.positions, self._source_of)
        self.mails: dict[tuple[int, int, Slot], str] = {}  # (tensor, target, slot) -> its place in the mailbox
        self.pinned_signals: dict[tuple[int, int], Signal] = {}  # (tensor, target) -> set when its mail is pinned
        self.arrivals: dict[int, list[str]] = {}  # device with a thread -> lines that take copies from the mailbox
        self.entered = NO_DEVICE  # whose stream is the current one
        self.late_names: set[str] = set()
        self.have_scalars: set[str] = set()  # lanes
        self.rows: dict[int, tuple[int, ...]] = {}  # instruction -> all that one call launches with it
        self.gate_signals: list[Signal] | None = None  # of the lanes that wait at the gate; None before the gate is written

    def write(self) -> Lanes:
        """Returns the lanes."""
        if not self.is_traced or self.pause is not None:
            self.rows = find_rows(self.placed, self._part_of)
        for (number, _), sends in self._sends.items():
            if number < 0:
                self._send_far(sends)
        for number, instruction in enumerate(self.placed.instructions.sequence):
            if number == self.placed.first_gated:
                self._return_outputs()
                self._write_gate()
            if self.pause is not None and number % PAUSE_EVERY == 0:
                self._begun(HOST_LANE).add_call("pause", self.pause)
            match instruction:
                case RunOp():
                    self._run(number, instruction)
                case CopyTensor() if self.placed.is_remote[instruction.source] or self.placed.is_remote[instruction.target]:
                    self._copy_between_processes(number, instruction)
                case CopyTensor() if self.from_host[instruction.source] or self.from_host[instruction.target]:
                    self._copy_by_host(number, instruction)
                case CopyTensor():
                    self._copy_by_reader(number, instruction)
                case FreeTensor():
                    self._free(instruction)
        if self.placed.first_gated is None:
            self._return_outputs()
        for number in sorted(self.placed.last_reads):
            self.synchronization.wait_for_end(number, self._begun(HOST_LANE))
        del self.view_names  # a cycle with this writer, which would keep it alive
        return Lanes({lane: source.build() for lane, source in self.sources.items()}, len(self.mails))

    def _source(self, device: int) -> Source:
        """Returns where the lines of a device's ops go."""
        return self._lane(device)

    def _lane(self, device: int) -> Source:
        """Returns the lane that launches for a device."""
        return self._begun(HOST_LANE if self.from_host[device] else device)

    def _begun(self, lane: int) -> Source:
        """Returns a lane, which begins here if it has not yet."""
        if lane not in self.sources:
            source = self.sources[lane] = Source(_lane_name(lane), PARAMETERS)
            source.names |= {"clone_storage": clone_storage, "same_view": same_view, "now": perf_counter}
            source.names["count_write"] = increment_version
            if self.streams is not None:
                source.names["pin"] = self.streams.pin
            if self.gate_signals is not None:
                self._wait_at_gate(source, self.gate_signals)
        return self.sources[lane]

    # --- ops ---

    def _source_of(self, tensor: int, device: int) -> Source:
        """Returns where the lines go that use a tensor on a device: the host's lane, if it keeps the tensor for others."""
        return self._begun(HOST_LANE) if (tensor, device) in self.placed.held else self._source(device)

    def _run(self, number: int, run: RunOp) -> None:
        if run.op in self.placed.held_ops:
            self._hold(number, run)
            return
        source = self._lane(run.device)
        self.synchronization.wait(number, source)
        for copy in self.placed.waits.unsent.get(number, ()):
            source.add_call(f"finish_{copy}", self._network.finisher(self._copy(copy)))
        for line in self.arrivals.pop(run.device, ()):
            source.add(line)
        self._enter(run.device)
        self._call(number, run)
        for tensor, target in self._hand_overs.get(run.op, ()):
            self._hand_over(tensor, run.device, target)
        self._send_far(self._sends.get((number, run.device), ()))
        self.synchronization.signal(number, source)

    def _hold(self, number: int, run: RunOp) -> None:
        """Keeps a tensor in the host's memory, under another name."""
        source, call, read = self._begun(HOST_LANE), self.resolved.op_calls[run.op], self.placed.held_ops[run.op]
        given = [
            self.view_names.find(slot, read, run.device)
            if (read, run.device) in self.placed.held
            else f"residents[{self.positions[slot]}]"
            for slot in slots_of(call)
        ]
        for slot, name in zip(call.results, given, strict=True):
            source.add(f"{self.view_names.target(slot, self.resolved.storages[slot], run.device)} = {name}")
        if self.is_traced:
            source.add(f"trace({number}, now(), now(), {', '.join(given)})")

    def _hand_over(self, tensor: int, device: int, target: int) -> None:
        """Puts what a thread has made into the mailbox; the pinning lane pins it if the host copies it."""
        source, bases = self._lane(device), self.placed.copied_bases[tensor, target]
        for base in bases:
            source.add(f"{self._mail(tensor, target, base)} = {self.view_names.find(base, tensor, device)}")
        if self.from_host[target]:
            made, pinned = self.synchronization.new_signal(), self.synchronization.new_signal()
            source.add_call(f"made_{tensor}_{target}", made.set)
            pinning, mail = self._begun(pinning_lane(device)), self._mail(tensor, target, bases[0])
            pinning.add_call(f"made_{tensor}_{target}", made.wait)
            pinning.add(f"{mail} = pin({mail})")
            pinning.add_call(f"pinned_{tensor}_{target}", pinned.set)
            self.pinned_signals[tensor, target] = pinned

    def _enter(self, device: int) -> None:
        """Makes a device's stream the current one."""
        if self.streams is not None and self.from_host[device] and self.entered != device:
            self._lane(device).add_call(f"enter_{device}", self.streams.enter(device))
            self.entered = device

    def _part_of(self, number: int, op: int) -> Any:
        """Returns what the instructions that one call launches must share."""
        return self.placed.first_gated is not None and number >= self.placed.first_gated

    def _call(self, number: int, run: RunOp) -> None:
        """Adds the call of an op, or of the row that begins with it."""
        row = self.rows.get(number, (number,))
        if len(row) == 1:
            self._call_alone(number, run)
        elif number == row[0]:
            sequence = self.placed.instructions.sequence
            self._call_together([instruction for n in row if isinstance(instruction := sequence[n], RunOp)], row)

    def _call_together(self, runs: list[RunOp], row: tuple[int, ...]) -> None:
        """Adds one call for ops that do the same to different tensors; `row` are their instructions."""
        source, alike = self._source(runs[0].device), likeness(self.resolved, runs[0].op)
        assert alike is not None
        calls = [self.resolved.op_calls[run.op] for run in runs]

        def texts(values: list[Any]) -> list[str]:
            return [
                source.literal(value, partial(self._argument, run.op, run.device))
                for run, value in zip(runs, values, strict=True)
            ]

        def joined(values: list[str]) -> str:
            return f"[{', '.join(values)}]"

        given: list[str] = []
        numbers = [""]
        for kind, values in zip(alike.arguments, zip(*[call.args for call in calls], strict=True), strict=True):
            found = texts(list(values))
            numbers = found if kind is NUMBER else numbers
            is_shared = type(kind) is Slot or (kind is NUMBER and len(set(found)) == 1)
            given.append(found[0] if is_shared else joined(found))
        for key, kind in alike.keywords:
            found = texts([call.kwargs[key] for call in calls])
            if kind is NUMBER:
                numbers = found
                given.append(found[0] if len(set(found)) == 1 else joined(found))
            else:
                given.append(f"{key}={found[0]}")
        if isinstance(alike.function, FusedUpdate):
            function: Any = alike.function.together
        else:
            function = alike.foreach(len(set(numbers)) == 1)
        over = _in_place(function) if self._may_write_over(calls, runs[0].device, row[-1]) else None
        expression = f"{source.function(over or function)}({', '.join(given)})"
        storages, view_names = self.resolved.storages, self.view_names
        targets = [
            [view_names.target(slot, storages[slot], run.device) for slot in call.results]
            for run, call in zip(runs, calls, strict=True)
        ]
        names = [name for made in targets for name in made]
        self._trace_start(row[0], runs[0].device)
        if over is not None:
            source.add(expression)
            source.add(f"{', '.join(names)}, = {given[0]}")
        elif all(name == "_" for name in names):
            source.add(expression)
        else:
            source.add(f"{', '.join(names)}, = {expression}")
        self._trace_end(row[0], runs[0].device, [])
        if "_" in names and len(set(names)) > 1:
            source.add("_ = None")
        self._count_writes(runs)
        for run, made in zip(runs, targets, strict=True):
            if self.layouts.concerns(run.op):
                self._fit(run, made)

    def _may_write_over(self, calls: list[Call], device: int, last: int) -> bool:
        """Whether each call can write its result over its first argument, which nobody else reads.

        Another device may copy it later than this one frees it.
        """
        freed = self._freed_after(last, device)
        layouts, shapes, storages = (
            self.resolved.program.layouts,
            self.resolved.graph.tensors.shape_of,
            self.resolved.storages,
        )
        num_reads = Counter(storages[slot] for call in calls for slot in slots_of(call))
        for call in calls:
            first, results = call.args[0], call.results
            if type(first) is not Slot or len(results) != 1 or first in self.resolved.views:
                return False
            before, after = storages[first], storages[results[0]]
            if before not in freed or before == after or num_reads[before] != 1 or (before, device) in self._copied:
                return False
            shape, new_shape = shapes(before), shapes(after)
            if layouts[first] != layouts[results[0]] or shape is None or new_shape is None or shape.dtype != new_shape.dtype:
                return False
            if self.resolved.graph.producer[before] < 0 or self.view_names.count(before, device) != 1:
                return False
        return True

    @cached_property
    def _copied(self) -> set[tuple[int, int]]:
        """The (storage, device) of which other devices get copies."""
        storages = self.resolved.graph.storage.tolist()
        return {
            (storages[copy.tensor], copy.source)
            for copy in self.placed.instructions.sequence
            if isinstance(copy, CopyTensor)
        }

    def _freed_after(self, number: int, device: int) -> set[int]:
        """Returns the tensors that a device frees between an op and its next one."""
        found: set[int] = set()
        for instruction in islice(self.placed.instructions.sequence, number + 1, None):
            if isinstance(instruction, RunOp) and instruction.device == device:
                break
            if isinstance(instruction, FreeTensor) and instruction.device == device:
                found.add(instruction.tensor)
        return found

    def _call_alone(self, number: int, run: RunOp) -> None:
        """Adds the call of an op."""
        source, call = self._source(run.device), self.resolved.op_calls[run.op]
        torch_device = torch.device(self.placed.devices[run.device].torch_device)
        runnable = call
        if isinstance(call.function, Piece):
            device = self.placed.devices[run.device]
            runnable = call._replace(function=kernel_of(call.function, device.torch_device, device.threads))
        expression = source.call(runnable, partial(self._argument, run.op, run.device), torch_device)  # adds views first
        targets = [self.view_names.target(slot, self.resolved.storages[slot], run.device) for slot in call.results]
        self._trace_start(number, run.device)
        source.assign(call, targets, expression)
        self._count_writes([run])
        if self.layouts.concerns(run.op):
            self._fit(run, targets)
        self._trace_end(number, run.device, [target for target in targets if target != "_"])
        for check in self.resolved.checks.get(run.op, ()):
            function = f"check_{check.slot:d}"
            source.names[function] = _verifier(check)
            source.add(f"{function}({self.view_names.find(check.slot, self.resolved.storages[check.slot], run.device)})")

    def _count_writes(self, runs: list[RunOp]) -> None:
        """Counts the writes that PyTorch does not count, so that a step that fails can say what has changed."""
        names = [self._argument(run.op, run.device, s) for run in runs for s in self.resolved.unmarked_writes(run.op)]
        if names:
            self._source(runs[0].device).add(f"count_write(({', '.join(names)},))")

    def _fit(self, run: RunOp, targets: list[str]) -> None:
        """Gives what an op has made the strides that it had when it was recorded."""
        source, call = self._source(run.device), self.resolved.op_calls[run.op]
        for slot, target in zip(call.results, targets, strict=True):
            layout = self.resolved.program.layouts[slot]
            if target != "_" and layout is not None and layout.sizes:
                name = f"fit_{slot:d}"
                source.names[name] = self.layouts.fitter(run.op, layout)
                source.add(f"{target} = {name}({target})")

    def _free(self, free: FreeTensor) -> None:
        """Forgets all views of a storage."""
        if names := self.view_names.pop(free.tensor, free.device):
            self._source_of(free.tensor, free.device).add(f"del {', '.join(names)}")

    def _return_outputs(self) -> None:
        for i, slot in enumerate(self.resolved.program.outputs):
            device = self.tensor_devices[self.resolved.storages[slot]]
            if not self.placed.is_remote[device]:
                self._return(i, slot, device)

    def _return(self, i: int, slot: Slot, device: int) -> None:
        """Returns an output of the step."""
        self._lane(device).add(f"outputs[{i}] = {self.view_names.find(slot, self.resolved.storages[slot], device)}")

    @cached_property
    def _hand_overs(self) -> dict[int, list[tuple[int, int]]]:
        """For each op on a thread: the (tensor, target) that it puts into the mailbox."""
        makers = self.resolved.graph.producer.tolist()
        found: dict[int, list[tuple[int, int]]] = {}
        for copy in self.placed.instructions.sequence:
            if isinstance(copy, CopyTensor) and self.placed.is_handed_over(copy):
                found.setdefault(makers[copy.tensor], []).append((copy.tensor, copy.target))
        return found

    def _argument(self, op: int, device: int, slot: Slot) -> str:
        """Returns the name of what an op reads."""
        storage = self.resolved.storages[slot]
        if storage != HOST_VALUE:
            return self.view_names.find(slot, self.resolved.read_versions[op][storage], device)
        if slot in self.resolved.late_calls:
            return self._late_number(op, device, slot)
        lane = self._lane(device)
        if lane.name not in self.have_scalars:
            self.have_scalars.add(lane.name)
            lane.add("scalars = scalars.get()")
        return f"scalars[{self.arithmetic.position(op, slot)}]"

    def _late_number(self, op: int, device: int, slot: Slot) -> str:
        """Returns the name of a number that depends on a tensor of the step; adds the line that computes it, once."""
        name = f"n{slot:d}"
        if name not in self.late_names:
            self.late_names.add(name)
            source = self._source(device)
            source.add(f"{name} = {source.call(self.resolved.late_calls[slot], partial(self._argument, op, device), None)}")
        return name

    # --- the gate ---

    def _write_gate(self) -> None:
        """Ends all lanes here if the gate is closed: the lane that has the value decides, the others wait for it."""
        gate = self.resolved.program.gate
        assert gate is not None
        storage = self.resolved.storages[gate.slot]
        device = self.tensor_devices[storage]
        deciding, self.gate_signals = self._lane(device), []
        self._enter(device)
        deciding.names["decide"] = self.gate.decider(self.gate_signals)
        deciding.add(f"if not decide({self.view_names.find(gate.slot, storage, device)}): return")
        for source in self.sources.values():
            if source is not deciding:
                self._wait_at_gate(source, self.gate_signals)

    def _wait_at_gate(self, source: Source, signals: list[Signal]) -> None:
        signals.append(self.synchronization.new_signal())
        source.names["is_open"] = self.gate.waiter(signals[-1])
        source.add("if not is_open(): return")

    # --- copies ---

    def _mail(self, tensor: int, target: int, base: Slot) -> str:
        return self.mails.setdefault((tensor, target, base), f"mailbox[{len(self.mails)}]")

    def _handed(self, copy: CopyTensor, base: Slot) -> tuple[str, str]:
        """Returns where a copy finds a view that a thread has made or holds, and the line that forgets it there."""
        if self.resolved.graph.producer[copy.tensor] < 0:
            return f"residents[{self.positions[base]}]", ""
        mail = self._mail(copy.tensor, copy.target, base)
        return mail, f"{mail} = None"

    def _copy_by_reader(self, number: int, copy: CopyTensor) -> None:
        """Copies between two threads, in the lane of the one that reads."""
        source = self._lane(copy.target)
        self.synchronization.wait(number, source)
        self._trace_start(number, copy.target)
        first = ""
        for base in self.placed.copied_bases[copy.tensor, copy.target]:
            name, (handed, forget) = self.view_names.target(base, copy.tensor, copy.target), self._handed(copy, base)
            source.add(f"{name} = same_view({first}, {handed})" if first else f"{name} = clone_storage({handed})")
            first = first or name
            if forget:
                source.add(forget)
        self._trace_end(number, copy.target, [first])
        self.synchronization.signal(number, source)

    def _copy_between_processes(self, number: int, copy: CopyTensor) -> None:
        """Sends to another process, if the host launches for the source, or receives from it."""
        if not self.placed.is_remote[copy.target]:
            self._receive(number, copy)
        elif self.from_host[copy.source]:
            self._send_by_host(number, copy)

    def _receive(self, number: int, copy: CopyTensor) -> None:
        """Receives from another process, in the lane of the device that reads; the host copies it on to a device."""
        source, by_host = self._lane(copy.target), self.from_host[copy.target]
        self.synchronization.wait(number, source)
        empty = self.streams.empty if by_host and self.streams is not None else torch.empty_strided
        source.names[f"receive_{number}"] = self._network.receiver(copy, empty)
        bases = self.placed.copied_bases[copy.tensor, copy.target]
        names = [self.view_names.target(base, copy.tensor, copy.target) for base in bases]
        source.add(f"{', '.join(names)}, = receive_{number}()")
        if by_host:
            assert self.streams is not None
            function, channel = f"copy_{copy.source}_{copy.target}", (copy.source, copy.target)
            source.names[function] = self.streams.copy(*channel)
            self._trace_start(number, copy.target, channel)
            source.add(f"arrived = {function}({names[0]})")
            for name in names[1:]:
                source.add(f"{name} = same_view(arrived, {name})")
            source.add(f"{names[0]} = arrived")
            source.add("arrived = None")
            self._trace_end(number, copy.target, [names[0]], channel)
            self.entered = NO_DEVICE
        self.synchronization.signal(number, source)

    def _send_far(self, numbers: Sequence[int]) -> None:
        """Begins to send to other processes what a thread has just made, or holds when the step starts."""
        for number in numbers:
            copy = self._copy(number)
            source, bases = self._lane(copy.source), self.placed.copied_bases[copy.tensor, copy.target]
            source.names[f"send_{number}"] = self._network.sender(copy)
            given = [self.view_names.find(base, copy.tensor, copy.source) for base in bases]
            source.add(f"send_{number}({', '.join(given)})")

    def _send_by_host(self, number: int, copy: CopyTensor) -> None:
        """Copies from a device that the host launches on into pinned memory, from where a thread sends it."""
        assert self.streams is not None
        source, channel = self._lane(copy.source), (copy.source, copy.target)
        sending, launched = (
            self._begun(sending_lane(copy.source, len(self.placed.devices))),
            self.synchronization.new_signal(),
        )
        self.synchronization.wait(number, source)
        source.names[f"copy_{copy.source}_{copy.target}"] = self.streams.copy(*channel)
        self._trace_start(number, copy.source, channel)
        mails = list[str]()
        for base in self.placed.copied_bases[copy.tensor, copy.target]:
            given, mail = self.view_names.find(base, copy.tensor, copy.source), self._mail(copy.tensor, copy.target, base)
            made = f"same_view({mails[0]}, {given})" if mails else f"copy_{copy.source}_{copy.target}({given})"
            source.add(f"{mail} = {made}")
            mails.append(mail)
        self._trace_end(number, copy.source, [mails[0]], channel)
        self.entered = NO_DEVICE
        source.add_call(f"staged_{number}", self.streams.record(number, channel))
        source.add_call(f"launched_{number}", launched.set)
        sending.add_call(f"launched_{number}", launched.wait)
        sending.add_call(f"ended_{number}", self.streams.synchronize(number))
        sending.names[f"send_{number}"] = self._network.sender(copy)
        sending.add(f"send_{number}({', '.join(mails)})")
        sending.add(f"{' = '.join(mails)} = None")
        self.synchronization.signal(number, source)

    def _copy(self, number: int) -> CopyTensor:
        copy = self.placed.instructions.sequence[number]
        assert isinstance(copy, CopyTensor)
        return copy

    @property
    def _network(self) -> Network:
        assert self.network is not None
        return self.network

    @cached_property
    def _sends(self) -> dict[tuple[int, int], list[int]]:
        """For each (instruction, device) after which a thread sends to other processes: the numbers of these copies.

        A channel's copies are sent in launch order, each when it and those before it are made: after instruction -1 if they
        are there when the step starts.
        """
        makers, made = self.resolved.graph.producer.tolist(), dict[int, int]()
        last: dict[tuple[int, int], int] = {}  # channel -> the instruction after which its last copy is sent
        found: dict[tuple[int, int], list[int]] = {}
        for number, instruction in enumerate(self.placed.instructions.sequence):
            if isinstance(instruction, RunOp):
                made[instruction.op] = number
            elif isinstance(instruction, CopyTensor) and self._is_sent_by_thread(instruction):
                channel = (instruction.source, instruction.target)
                last[channel] = max(last.get(channel, -1), made.get(makers[instruction.tensor], -1))
                found.setdefault((last[channel], instruction.source), []).append(number)
        return found

    def _is_sent_by_thread(self, copy: CopyTensor) -> bool:
        return self.placed.is_remote[copy.target] and not self.from_host[copy.source]

    def _copy_by_host(self, number: int, copy: CopyTensor) -> None:
        """Copies from or to a device that the host launches on, in the channel's stream."""
        assert self.streams is not None
        at = copy.source if self.from_host[copy.source] else copy.target
        source, channel = self._lane(at), (copy.source, copy.target)
        self.synchronization.wait(number, source)
        if pinned := self.pinned_signals.get((copy.tensor, copy.target)):
            source.add_call(f"pinned_{copy.tensor}_{copy.target}", pinned.wait)
        function = f"copy_{copy.source}_{copy.target}"
        source.names[function] = self.streams.copy(*channel)
        self._trace_start(number, at, channel)
        made = self._fetch(copy, function) if self.from_host[copy.target] else self._send(copy, function)
        self._trace_end(number, at, [made], channel)
        self.entered = NO_DEVICE
        self.synchronization.signal(number, source)

    def _fetch(self, copy: CopyTensor, function: str) -> str:
        """Copies to a device that the host launches on, and returns the name of the copy."""
        source, first = self._lane(copy.target), ""
        for base in self.placed.copied_bases[copy.tensor, copy.target]:
            is_held = (copy.tensor, copy.source) in self.placed.held
            if self.from_host[copy.source] or is_held:
                given = whole = self.view_names.find(base, copy.tensor, copy.source)
                forget = ""
                resident = self.placed.resident_of(copy.tensor)
                if is_held and resident != copy.tensor and resident not in self.placed.pinned:
                    whole = f"pin({given})"
            else:
                given, forget = self._handed(copy, base)
                is_pinned = forget or copy.tensor in self.placed.pinned  # what is in the mailbox is pinned
                whole = given if is_pinned else f"pin({given})"
            name = self.view_names.target(base, copy.tensor, copy.target)
            self._assign_copy(copy, name, *("same_view", first, given) if first else (function, whole))
            if forget:
                source.add(forget)
            first = first or name
        return first

    def _assign_copy(self, copy: CopyTensor, name: str, function: str, *args: str) -> None:
        """Assigns a view of a copy to its name."""
        self._lane(copy.target).add(f"{name} = {function}({', '.join(args)})")

    def _send(self, copy: CopyTensor, function: str) -> str:
        """Copies to a device with a thread, into the mailbox, and returns the copy's place there.

        What the host keeps for others is a local variable instead.
        """
        if (copy.tensor, copy.target) in self.placed.held:
            return self._keep_copy(copy, function)
        source, arrivals, first = self._lane(copy.source), self.arrivals.setdefault(copy.target, []), ""
        bases = self.placed.copied_bases[copy.tensor, copy.target]
        for base in bases:
            given, mail = self.view_names.find(base, copy.tensor, copy.source), self._mail(copy.tensor, copy.target, base)
            name = self.view_names.target(base, copy.tensor, copy.target)
            source.add(f"{mail} = {given}" if first else f"{mail} = {function}({given})")
            arrivals += [f"{name} = same_view({first}, {mail})" if first else f"{name} = {mail}", f"{mail} = None"]
            first = first or name
        return self._mail(copy.tensor, copy.target, bases[0])

    def _keep_copy(self, copy: CopyTensor, function: str) -> str:
        source, first = self._lane(copy.source), ""
        for base in self.placed.copied_bases[copy.tensor, copy.target]:
            given = self.view_names.find(base, copy.tensor, copy.source)
            name = self.view_names.target(base, copy.tensor, copy.target)
            source.add(f"{name} = same_view({first}, {given})" if first else f"{name} = {function}({given})")
            first = first or name
        return first

    # --- the trace ---

    def _trace_start(self, number: int, device: int, channel: tuple[int, ...] = ()) -> None:
        if self.is_traced and self.from_host[device]:
            assert self.streams is not None
            self._source(device).add_call(f"start_{number}", self.streams.mark(number, False, channel or (device,)))
        elif self.is_traced:
            self._source(device).add("begin = now()")

    def _trace_end(self, number: int, device: int, made: list[str], channel: tuple[int, ...] = ()) -> None:
        source = self._source(device)
        if self.is_traced and self.from_host[device]:
            assert self.streams is not None
            source.add_call(f"end_{number}", self.streams.mark(number, True, channel or (device,)))
        if self.is_traced:
            times = "None, None" if self.from_host[device] else "begin, now()"
            source.add(f"trace({', '.join([str(number), times, *made])})")


def _in_place(function: Any) -> OpOverload | None:
    """Returns the overload of lists that writes over its first argument."""
    if not isinstance(function, OpOverload):
        return None
    packet = getattr(torch.ops.aten, f"{function._overloadpacket.__name__}_", None)
    found: OpOverload | None = getattr(packet, function._overloadname, None)
    return found


def _verifier(check: Check) -> Callable[[Tensor], None]:
    """Returns the function that reads a condition, and fails if the captured step was another one."""

    def verify(value: Tensor) -> None:
        if bool(value) != check.outcome:
            raise ExecutionError(check.text)

    return verify


def pinning_lane(device: int) -> int:
    """Returns the lane that pins what a device with a thread makes for those that the host launches on."""
    return -2 - device


def sending_lane(device: int, num_devices: int) -> int:
    """Returns the lane that sends to other processes what a device has made that the host launches on."""
    return num_devices + device


def _lane_name(lane: int) -> str:
    if lane == HOST_LANE:
        return "lane_host"
    return f"lane_{lane}" if lane >= 0 else f"lane_{-2 - lane}_pinning"


class ViewNames:
    """The names that views have now, by the storage that they are of.

    `s5` is slot 5 on its home device, `c5_7_1` the same view of the copy of tensor 7 on device 1.
    """

    def __init__(self, placed: PlacedStep, positions: dict[Slot, int], source_of: Callable[[int, int], Source]) -> None:
        self._resolved, self._tensor_devices = placed.resolved, placed.tensor_devices.tolist()
        self._positions, self._source_of = positions, source_of  # of residents in their list; where a device's lines go
        self._names: dict[tuple[int, int], dict[str, None]] = {}  # (storage or copied tensor, device) -> its views
        self._found: dict[int, dict[str, dict[str, None]]] = {}  # device in a scope -> views made by `find` -> their dicts
        self.inner: set[str] = set()  # names that were last given in a scope

    def target(self, slot: Slot, tensor: int, device: int) -> str:
        """Returns the name for a new view; "_" if it has its name already."""
        name, names = self._name(slot, tensor, device)
        if name in names:
            return "_"
        names[name] = None
        (self.inner.add if device in self._found else self.inner.discard)(name)
        return name

    def find(self, slot: Slot, tensor: int, device: int) -> str:
        """Returns the name of a view on a device; adds the lines that make it when it is first needed."""
        name, names = self._name(slot, tensor, device)
        if name in names:
            return name
        source = self._source_of(tensor, device)
        if slot in self._resolved.views:
            call = self._resolved.views[slot]
            expression = source.call(call, lambda other: self.find(other, tensor, device), None)
            targets = [self.target(result, tensor, device) for result in call.results]
            source.assign(call, targets, expression)
        else:
            targets = [self.target(slot, tensor, device)]
            source.add(f"{name} = residents[{self._positions[slot]}]")
        if device in self._found:
            self._found[device] |= {target: names for target in targets if target != "_"}
        return name

    def pop(self, tensor: int, device: int) -> list[str]:
        """Forgets all views of a storage or of a copy, and returns their names."""
        names = list(self._names.pop((tensor, device), ()))
        for name in names:
            self._found.get(device, {}).pop(name, None)
        return names

    def count(self, tensor: int, device: int) -> int:
        """Returns how many views of a storage or of a copy have names now."""
        return len(self._names.get((tensor, device), ()))

    def open_scope(self, device: int) -> None:
        """Begins a part of a device's lines of which views are not seen outside: they are made again there."""
        self._found[device] = {}

    def close_scope(self, device: int) -> list[str]:
        """Ends that part; forgets the views that `find` has made in it, and returns their names."""
        found = self._found.pop(device)
        for name, names in found.items():
            del names[name]
        return list(found)

    def _name(self, slot: Slot, tensor: int, device: int) -> tuple[str, dict[str, None]]:
        """Returns the name of a view, and all names of views of that storage or copy."""
        if self._tensor_devices[tensor] == device:
            return f"s{slot:d}", self._names.setdefault((self._resolved.storages[slot], device), {})
        return f"c{slot:d}_{tensor}_{device}", self._names.setdefault((tensor, device), {})


class Synchronization:
    """The lines that wait for an instruction, and those that signal its end: signals of lanes, events of streams."""

    def __init__(
        self, waits: Waits, from_host: tuple[bool, ...], streams: Streams | None, cancellation: Cancellation,
        last_reads: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._last_reads = last_reads  # that the host waits for at the end
        self._waits, self._from_host, self._streams, self._cancellation = waits, from_host, streams, cancellation
        self._signals: dict[int, dict[int, Signal]] = {}  # instruction -> lane that waits for it -> signal
        for number, needs in waits.before.items():
            waiting = self._lane_of(number)
            for need in needs:
                if self._lane_of(need) != waiting:
                    self._signals.setdefault(need, {})[waiting] = self.new_signal()

    def wait(self, number: int, source: Source) -> None:
        """Adds what an instruction has to wait for."""
        lane = self._lane_of(number)
        for need in self._waits.before[number]:
            signal = self._signals.get(need, {}).get(lane)
            if signal is not None:
                source.add_call(f"wait_{need}", signal.wait)
            if self._streams is None or self._lane_of(need) != HOST_LANE:
                continue
            if lane == HOST_LANE:
                source.add_call(f"after_{need}_{number}", self._streams.wait(need, self._waits.queues[number]))
            else:
                source.add_call(f"ended_{need}", self._streams.synchronize(need))

    def signal(self, number: int, source: Source) -> None:
        """Adds what tells others that an instruction has ended or, if the host launches it, that it is in its stream."""
        is_awaited = number in self._waits.awaited or number in self._last_reads
        if is_awaited and self._streams is not None and self._lane_of(number) == HOST_LANE:
            source.add_call(f"record_{number}", self._streams.record(number, self._waits.queues[number]))
        for lane, signal in self._signals.get(number, {}).items():
            source.add_call(f"signal_{number}_{lane + 1}", signal.set)

    def wait_for_end(self, number: int, source: Source) -> None:
        """Adds that the host waits for an instruction itself."""
        if self._streams is not None:
            source.add_call(f"ended_{number}", self._streams.synchronize(number))

    def new_signal(self) -> Signal:
        """Returns one more signal between two lanes."""
        return Signal(self._cancellation)

    def _lane_of(self, number: int) -> int:
        """Returns the lane of an instruction: a thread's own, or the host's."""
        queue = self._waits.queues[number]
        if any(self._from_host[device] for device in queue):
            return HOST_LANE
        return queue[0]
