"""The names that windows have in the lanes, and the lines that make one where it is first needed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter

import torch

from placewise.graph_capture.program import Slot
from placewise.run.backends.cpu_threads import Alarm, Gate
from placewise.run.backends.protocol import Streams
from placewise.run.codegen.host_scalar_code import HostScalars
from placewise.run.codegen.source import Source
from placewise.run.lower.instructions import Copy, Free, Run
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.lower.slots import HOST
from placewise.run.lower.waits import Waits
from placewise.run.whole_storages import copy_window, share_window


class ViewNames:
    """Every window that has a name now, by the memory that it is on.

    `s5` is slot 5 at its home, `c5_7_1` the same window on the copy of tensor 7 on device 1.
    """

    def __init__(self, placed: PlacedStep, positions: dict[Slot, int], source_of: Callable[[int], Source]) -> None:
        self._values, self._homes = placed.values, placed.homes.tolist()
        self._positions, self._source_of = positions, source_of  # where each resident stands in its list; a device's lane
        self._names: dict[tuple[int, int], dict[str, None]] = {}  # (storage or copied tensor, device) -> windows on it
        self._found: dict[int, dict[str, dict[str, None]]] = {}  # device -> names of `find` since `open`, and where they are
        self.inner: set[str] = set()  # names that were last given between `open` and `close`

    def target(self, slot: Slot, tensor: int, device: int) -> str:
        """Returns the name that a new window is given, or "_" for one that has its name already."""
        name, names = self._name(slot, tensor, device)
        if name in names:
            return "_"
        names[name] = None
        (self.inner.add if device in self._found else self.inner.discard)(name)
        return name

    def find(self, slot: Slot, tensor: int, device: int) -> str:
        """Returns the name of a window on a device; it is made there when it is first needed."""
        name, names = self._name(slot, tensor, device)
        if name in names:
            return name
        source = self._source_of(device)
        if slot in self._values.views:
            call = self._values.views[slot]
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
        """Forgets all windows on a piece of memory, and returns their names."""
        names = list(self._names.pop((tensor, device), ()))
        for name in names:
            self._found.get(device, {}).pop(name, None)
        return names

    def open(self, device: int) -> None:
        """Lets a device begin a part of its own: what it finds there is made again elsewhere."""
        self._found[device] = {}

    def close(self, device: int) -> list[str]:
        """Ends a device's part; forgets what it has found there, and returns the names."""
        found = self._found.pop(device)
        for name, names in found.items():
            del names[name]
        return list(found)

    def _name(self, slot: Slot, tensor: int, device: int) -> tuple[str, dict[str, None]]:
        """Returns the name of a window on a tensor, and all names on that memory."""
        if self._homes[tensor] == device:
            return f"s{slot:d}", self._names.setdefault((self._values.storages[slot], device), {})
        return f"c{slot:d}_{tensor}_{device}", self._names.setdefault((tensor, device), {})


HOST_LANE = -1


def pinning_lane(device: int) -> int:
    """Returns the lane that pins what a CPU device makes for GPUs."""
    return -2 - device


def lane_name(lane: int) -> str:
    """Returns what a lane's function is called."""
    if lane == HOST_LANE:
        return "lane_host"
    return f"lane_{lane}" if lane >= 0 else f"lane_{-2 - lane}_pinning"


class Synchronization:
    """Gates between lanes, and events between streams."""

    def __init__(self, waits: Waits, is_gpu: list[bool], streams: Streams | None, alarm: Alarm) -> None:
        self._waits, self._is_gpu, self._streams, self._alarm = waits, is_gpu, streams, alarm
        self._gates: dict[int, dict[int, Gate]] = {}  # instruction -> lane that waits for it -> gate
        for number, needs in waits.before.items():
            waiting = self.lane_of(number)
            for need in needs:
                if self.lane_of(need) != waiting:
                    self._gates.setdefault(need, {})[waiting] = Gate(alarm)

    def lane_of(self, number: int) -> int:
        """Returns the lane that an instruction is in: its CPU device's own, or the host's."""
        queue = self._waits.queues[number]
        return HOST_LANE if any(self._is_gpu[device] for device in queue) else queue[0]

    def wait(self, number: int, source: Source) -> None:
        """Adds what an instruction has to wait for."""
        lane = self.lane_of(number)
        for need in self._waits.before[number]:
            gate = self._gates.get(need, {}).get(lane)
            if gate is not None:
                source.add_call(f"wait_{need}", gate.wait)
            if self._streams is None or self.lane_of(need) != HOST_LANE:
                continue
            if lane == HOST_LANE:
                source.add_call(f"after_{need}_{number}", self._streams.wait(need, self._waits.queues[number]))
            else:
                source.add_call(f"ended_{need}", self._streams.synchronize(need))

    def gate(self) -> Gate:
        """Returns one more gate between two lanes."""
        return Gate(self._alarm)

    def tell(self, number: int, source: Source) -> None:
        """Adds what tells the others that an instruction has ended or, on a GPU, that it is in its queue."""
        if number in self._waits.awaited and self._streams is not None and self.lane_of(number) == HOST_LANE:
            source.add_call(f"record_{number}", self._streams.record(number, self._waits.queues[number]))
        for lane, gate in self._gates.get(number, {}).items():
            source.add_call(f"open_{number}_{lane + 1}", gate.open)


PAUSE_EVERY = 400  # instructions: a GPU's queue holds about a thousand launches, then the host has to wait

PARAMETERS = ("residents", "numbers", "mail", "outputs", "note")


@dataclass(frozen=True, eq=False)
class Lanes:
    """The functions of one step: by CPU device, its `pinning_lane`, or HOST_LANE. Each takes PARAMETERS."""

    functions: dict[int, Callable[..., None]]
    num_mails: int


class LaneWriter:
    """Writes the lanes of a placed step.

    With `is_noted` they also note when everything ran, and what it made. With `pause`, which is for steps on GPUs, the host
    calls that at the start and now and then.
    """

    def __init__(
        self, placed: PlacedStep, numbers: HostScalars, positions: dict[Slot, int], streams: Streams | None, alarm: Alarm,
        is_noted: bool = False, pause: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.placed, self.values, self.numbers, self.positions = placed, placed.values, numbers, positions
        self.streams, self.is_noted, self.pause = streams, is_noted, pause
        self.homes = placed.homes.tolist()
        self.meetings = Synchronization(placed.waits, [device.is_gpu for device in placed.devices], streams, alarm)
        self.sources: dict[int, Source] = {}
        self.windows = ViewNames(placed, positions, self._source)
        self.mails: dict[tuple[int, int, Slot], str] = {}  # (tensor, target, window) -> its place in the mailbox
        self.pin_gates: dict[tuple[int, int], Gate] = {}  # (tensor, target) -> opens when what is in the mailbox is pinned
        self.arrivals: dict[int, list[str]] = {}  # CPU device -> lines that take copies from the mailbox
        self.entered = HOST  # the device whose stream is the current one

    def write(self) -> Lanes:
        """Returns the lanes."""
        for number, step in enumerate(self.placed.instructions.steps):
            if self.pause is not None and number % PAUSE_EVERY == 0:
                self._lane(next(i for i, device in enumerate(self.placed.devices) if device.is_gpu)).add_call(
                    "pause", self.pause
                )
            match step:
                case Run():
                    self._run(number, step)
                case Copy() if self.placed.devices[step.source].is_gpu or self.placed.devices[step.target].is_gpu:
                    self._copy_by_host(number, step)
                case Copy():
                    self._copy_by_reader(number, step)
                case Free():
                    self._free(self.windows.pop(step.tensor, step.device), step.device)
        for i, slot in enumerate(self.values.program.outputs):
            self._return(i, slot, self.homes[self.values.storages[slot]])
        del self.windows  # they know this writer, and would keep it and what it knows
        return Lanes({lane: source.build() for lane, source in self.sources.items()}, len(self.mails))

    def _source(self, device: int) -> Source:
        """Returns where the lines of a device's ops go."""
        return self._lane(device)

    def _lane(self, device: int) -> Source:
        """Returns the lane that launches for a device."""
        return self._begun(HOST_LANE if self.placed.devices[device].is_gpu else device)

    def _begun(self, lane: int) -> Source:
        """Returns a lane, which begins here if it has not yet."""
        if lane not in self.sources:
            source = self.sources[lane] = Source(lane_name(lane), PARAMETERS)
            source.names |= {"copy_window": copy_window, "share_window": share_window, "now": perf_counter}
            if self.streams is not None:
                source.names["pin"] = self.streams.pin
        return self.sources[lane]

    # --- ops ---

    def _run(self, number: int, step: Run) -> None:
        source = self._lane(step.device)
        self.meetings.wait(number, source)
        for line in self.arrivals.pop(step.device, ()):
            source.add(line)
        self._enter(step.device)
        self._call(number, step)
        for tensor, target in self._posts.get(step.op, ()):
            self._post(tensor, step.device, target)
        self.meetings.tell(number, source)

    def _post(self, tensor: int, device: int, target: int) -> None:
        """Hands what a CPU device has made to those who copy it; for a GPU it is pinned before."""
        source, bases = self._lane(device), self.placed.copied_bases[tensor, target]
        for base in bases:
            source.add(f"{self._mail(tensor, target, base)} = {self.windows.find(base, tensor, device)}")
        if self.placed.devices[target].is_gpu:
            made, pinned = self.meetings.gate(), self.meetings.gate()
            source.add_call(f"made_{tensor}_{target}", made.open)
            pinning, mail = self._begun(pinning_lane(device)), self._mail(tensor, target, bases[0])
            pinning.add_call(f"made_{tensor}_{target}", made.wait)
            pinning.add(f"{mail} = pin({mail})")
            pinning.add_call(f"pinned_{tensor}_{target}", pinned.open)
            self.pin_gates[tensor, target] = pinned

    def _enter(self, device: int) -> None:
        """Makes a GPU's stream the current one."""
        if self.streams is not None and self.placed.devices[device].is_gpu and self.entered != device:
            self._lane(device).add_call(f"enter_{device}", self.streams.enter(device))
            self.entered = device

    def _call(self, number: int, step: Run) -> None:
        """Adds the call of an op."""
        source, call = self._source(step.device), self.values.op_calls[step.op]
        torch_device = torch.device(self.placed.devices[step.device].torch_device)
        expression = source.call(call, partial(self._argument, step.op, step.device), torch_device)  # makes windows
        targets = [self.windows.target(slot, self.values.storages[slot], step.device) for slot in call.results]
        self._note_start(number, step.device)
        source.assign(call, targets, expression)
        self._note_end(number, step.device, [target for target in targets if target != "_"])

    def _free(self, names: list[str], device: int) -> None:
        """Forgets all windows on a piece of memory."""
        if names:
            self._source(device).add(f"del {', '.join(names)}")

    def _return(self, i: int, slot: Slot, device: int) -> None:
        """Hands out what the step was run for."""
        self._lane(device).add(f"outputs[{i}] = {self.windows.find(slot, self.values.storages[slot], device)}")

    @cached_property
    def _posts(self) -> dict[int, list[tuple[int, int]]]:
        """For each op of a CPU device: (tensor, target) that it hands to those who copy what it made."""
        makers = self.values.graph.producer.tolist()
        posts: dict[int, list[tuple[int, int]]] = {}
        for step in self.placed.instructions.steps:
            if isinstance(step, Copy) and self.placed.is_handed_over(step):
                posts.setdefault(makers[step.tensor], []).append((step.tensor, step.target))
        return posts

    def _argument(self, op: int, device: int, slot: Slot) -> str:
        """Returns the name of what an op reads."""
        storage = self.values.storages[slot]
        if storage != HOST:
            return self.windows.find(slot, self.values.read_versions[op][storage], device)
        return f"numbers[{self.numbers.wanted[self.numbers.reads[op][slot]]}]"

    # --- copies ---

    def _mail(self, tensor: int, target: int, base: Slot) -> str:
        return self.mails.setdefault((tensor, target, base), f"mail[{len(self.mails)}]")

    def _handed(self, step: Copy, base: Slot) -> tuple[str, str]:
        """Returns where a copy finds a window of a CPU device's, and the line that forgets it."""
        if self.values.graph.producer[step.tensor] < 0:
            return f"residents[{self.positions[base]}]", ""
        mail = self._mail(step.tensor, step.target, base)
        return mail, f"{mail} = None"

    def _copy_by_reader(self, number: int, step: Copy) -> None:
        """Copies between CPU devices, in the lane of the one that reads."""
        source = self._lane(step.target)
        self.meetings.wait(number, source)
        self._note_start(number, step.target)
        first = ""
        for base in self.placed.copied_bases[step.tensor, step.target]:
            name, (handed, forget) = self.windows.target(base, step.tensor, step.target), self._handed(step, base)
            source.add(f"{name} = share_window({first}, {handed})" if first else f"{name} = copy_window({handed})")
            first = first or name
            if forget:
                source.add(forget)
        self._note_end(number, step.target, [first])
        self.meetings.tell(number, source)

    def _copy_by_host(self, number: int, step: Copy) -> None:
        """Copies from or to a GPU, in the channel's stream."""
        assert self.streams is not None
        at = step.source if self.placed.devices[step.source].is_gpu else step.target
        source, channel = self._lane(at), (step.source, step.target)
        self.meetings.wait(number, source)
        if pinned := self.pin_gates.get((step.tensor, step.target)):
            source.add_call(f"pinned_{step.tensor}_{step.target}", pinned.wait)
        copy = f"copy_{step.source}_{step.target}"
        source.names[copy] = self.streams.copy(*channel)
        self._note_start(number, at, channel)
        made = self._fetch(step, copy) if self.placed.devices[step.target].is_gpu else self._send(step, copy)
        self._note_end(number, at, [made], channel)
        self.entered = HOST
        self.meetings.tell(number, source)

    def _fetch(self, step: Copy, copy: str) -> str:
        """Copies to a GPU, and returns the name of the copy."""
        source, first = self._lane(step.target), ""
        for base in self.placed.copied_bases[step.tensor, step.target]:
            if self.placed.devices[step.source].is_gpu:
                given = whole = self.windows.find(base, step.tensor, step.source)
                forget = ""
            else:
                given, forget = self._handed(step, base)
                is_pinned = forget or step.tensor in self.placed.pinned  # what came by mail is pinned
                whole = given if is_pinned else f"pin({given})"
            name = self.windows.target(base, step.tensor, step.target)
            self._land(step, name, *("share_window", first, given) if first else (copy, whole))
            if forget:
                source.add(forget)
            first = first or name
        return first

    def _land(self, step: Copy, name: str, function: str, *args: str) -> None:
        """Gives a window on a GPU's copy its name."""
        self._lane(step.target).add(f"{name} = {function}({', '.join(args)})")

    def _send(self, step: Copy, copy: str) -> str:
        """Copies from a GPU into the mailbox of a CPU device, and returns the copy's place in it."""
        source, arrivals, first = self._lane(step.source), self.arrivals.setdefault(step.target, []), ""
        bases = self.placed.copied_bases[step.tensor, step.target]
        for base in bases:
            given, mail = self.windows.find(base, step.tensor, step.source), self._mail(step.tensor, step.target, base)
            name = self.windows.target(base, step.tensor, step.target)
            source.add(f"{mail} = {given}" if first else f"{mail} = {copy}({given})")
            arrivals += [f"{name} = share_window({first}, {mail})" if first else f"{name} = {mail}", f"{mail} = None"]
            first = first or name
        return self._mail(step.tensor, step.target, bases[0])

    # --- notes ---

    def _note_start(self, number: int, device: int, channel: tuple[int, ...] = ()) -> None:
        if self.is_noted and self.placed.devices[device].is_gpu:
            assert self.streams is not None
            self._source(device).add_call(f"start_{number}", self.streams.mark(number, False, channel or (device,)))
        elif self.is_noted:
            self._source(device).add("begin = now()")

    def _note_end(self, number: int, device: int, made: list[str], channel: tuple[int, ...] = ()) -> None:
        source = self._source(device)
        if self.is_noted and self.placed.devices[device].is_gpu:
            assert self.streams is not None
            source.add_call(f"end_{number}", self.streams.mark(number, True, channel or (device,)))
        if self.is_noted:
            times = "None, None" if self.placed.devices[device].is_gpu else "begin, now()"
            source.add(f"note({', '.join([str(number), times, *made])})")
