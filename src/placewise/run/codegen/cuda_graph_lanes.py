"""Lanes whose stretches are CUDA graphs: one set that records them, and one that replays them.

A stretch's lines stand together, where its last op would be launched. While it is recorded they run between `begin` and
`end`; afterwards one `replay` is in their place. What others read of it is in `kept`, by name.
"""

from collections.abc import Callable
from typing import Any, Protocol

from placewise.graph_capture.program import Slot
from placewise.run.codegen.graph_segments import Segments
from placewise.run.codegen.lanes import LaneWriter
from placewise.run.codegen.source import Source
from placewise.run.lower.instructions import Copy, Run


class Graphs(Protocol):
    """What the lanes need of CUDA graphs; `backends/cuda_graphs.py` has the real ones. Methods return what a step calls."""

    def begin(self, stretch: int, device: int) -> Callable[[], Any]:
        """Begins to record what is launched in a device's stream, which is the current one."""

    def end(self, stretch: int) -> Callable[[], Any]:
        """Ends the recording, and launches what was recorded."""

    def replay(self, stretch: int) -> Callable[[], Any]:
        """Launches what was recorded, in the current stream."""

    def give_up(self) -> None:
        """Ends a recording that has failed."""

    def reset(self) -> None:
        """Gives back what the graphs hold; they can't be replayed any more."""


class RecordingWriter(LaneWriter):
    """Writes lanes that run a step once and record its stretches."""

    def __init__(self, *given: Any, stretches: Segments, graphs: Graphs, kept: dict[str, Any]) -> None:
        super().__init__(*given)
        self.stretches, self.graphs, self.kept = stretches, graphs, kept
        self.numbers_of = {op: number for number, ops in enumerate(stretches.ops) for op in ops}
        self.bodies: dict[int, Source] = {}  # device -> the lines of the stretch that it is in

    def _source(self, device: int) -> Source:
        return self.bodies[device] if device in self.bodies else self._lane(device)

    def _lane(self, device: int) -> Source:
        lane = super()._lane(device)
        lane.names["kept"] = self.kept
        return lane

    def _run(self, number: int, step: Run) -> None:
        stretch = self.numbers_of.get(step.op, -1)
        if stretch < 0:
            super()._run(number, step)
            return
        lane = self._lane(step.device)
        self.meetings.wait(number, lane)
        if step.device not in self.bodies:
            self.bodies[step.device] = lane.branch()
            self.windows.open(step.device)
        self._call(number, step)
        if step.op == self.stretches.ops[stretch][-1]:
            self._enter(step.device)
            self._close(stretch, step.device)
        self.meetings.tell(number, lane)

    def _makes(self, op: int) -> list[Slot]:
        """Returns the windows on new memory among those that an op returns."""
        makers, storages = self.values.graph.producer, self.values.storages
        made = dict.fromkeys(self.values.op_calls[op].results)
        return [slot for slot in made if slot not in self.values.views and makers[storages[slot]] == op]

    def _close(self, stretch: int, device: int) -> None:
        """Puts the lines of a stretch into its lane."""
        lane, body = self._lane(device), self.bodies.pop(device)
        lane.add_call(f"begin_{stretch}", self.graphs.begin(stretch, device))
        lane.lines += body.lines
        if names := self.windows.close(device):
            lane.add(f"del {', '.join(names)}")
        lane.add_call(f"end_{stretch}", self.graphs.end(stretch))
        for name in self._escaping(stretch):
            lane.add(f"kept[{name!r}] = {name}")

    def _escaping(self, stretch: int) -> list[str]:
        """Returns the names of what a stretch makes for others."""
        made = (slot for op in self.stretches.ops[stretch] for slot in self._makes(op))
        return [f"s{slot:d}" for slot in made if self.values.storages[slot] in self.stretches.escaping]

    def _land(self, step: Copy, name: str, function: str, *args: str) -> None:
        super()._land(step, name, function, *args)
        self.windows.inner.discard(name)  # copies are no part of a stretch, though its device may be in one
        if (step.tensor, step.target) in self.stretches.copies:
            self._lane(step.target).add(f"kept[{name!r}] = {name}")

    def _return(self, i: int, slot: Slot, device: int) -> None:
        self._enter(device)
        super()._return(i, slot, device)
        self._lane(device).add(f"outputs[{i}] = outputs[{i}].clone()")  # the next step will write over it


class ReplayWriter(RecordingWriter):
    """Writes lanes that replay what was recorded."""

    def _close(self, stretch: int, device: int) -> None:
        lane = self._lane(device)
        self.bodies.pop(device)
        self.windows.close(device)
        lane.add_call(f"replay_{stretch}", self.graphs.replay(stretch))
        for name in self._escaping(stretch):
            lane.add(f"{name} = kept[{name!r}]")

    def _free(self, names: list[str], device: int) -> None:
        others = [name for name in names if name not in self.windows.inner]
        if others:
            self._lane(device).add(f"del {', '.join(others)}")

    def _land(self, step: Copy, name: str, function: str, *args: str) -> None:
        self.windows.inner.discard(name)
        if (step.tensor, step.target) not in self.stretches.copies:
            LaneWriter._land(self, step, name, function, *args)
        elif function == "share_window":
            self._lane(step.target).add(f"{name} = kept[{name!r}]")
        else:
            LaneWriter._land(self, step, name, function, *args, f"kept[{name!r}]")
