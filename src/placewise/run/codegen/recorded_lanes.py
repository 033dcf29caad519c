"""Lanes with recorded segments: one set of lanes records the launches of each segment, another replays them.

The lines of a segment are written together, where its last op would be launched. In the recording lanes they run between
`begin` and `end`; in the replaying lanes one `replay` replaces them. What others read of a segment is in `kept`, by name.
"""

from typing import Any

from placewise.graph_capture.program import Slot
from placewise.run.backends.protocol import LaunchRecorder
from placewise.run.codegen.lanes import HOST_LANE, LaneSetup, LaneWriter
from placewise.run.codegen.recorded_segments import Segments
from placewise.run.codegen.source import Source
from placewise.run.lower.instructions import CopyTensor, FreeTensor, RunOp


class RecordingWriter(LaneWriter):
    """Writes lanes that run a step once and record its segments."""

    def __init__(self, setup: LaneSetup, segments: Segments, recorder: LaunchRecorder, kept: dict[str, Any]) -> None:
        super().__init__(setup)
        self.segments, self.recorder, self.kept = segments, recorder, kept
        self.segment_of = {op: number for number, ops in enumerate(segments.ops) for op in ops}
        self.bodies: dict[int, Source] = {}  # device -> the lines of the segment that it is in

    def _part_of(self, number: int, op: int) -> Any:
        return super()._part_of(number, op), self.segment_of.get(op, -1)

    def _source(self, device: int) -> Source:
        return self.bodies[device] if device in self.bodies else self._lane(device)

    def _lane(self, device: int) -> Source:
        lane = super()._lane(device)
        lane.names["kept"] = self.kept
        return lane

    def _run(self, number: int, run: RunOp) -> None:
        segment = self.segment_of.get(run.op, -1)
        if segment < 0:
            super()._run(number, run)
            return
        lane = self._lane(run.device)
        self.synchronization.wait(number, lane)
        if run.device not in self.bodies:
            self.bodies[run.device] = lane.branch()
            self.view_names.open_scope(run.device)
        self._call(number, run)
        if run.op == self.segments.ops[segment][-1]:
            self._enter(run.device)
            self._close(segment, run.device)
        self.synchronization.signal(number, lane)

    def _close(self, segment: int, device: int) -> None:
        """Puts the lines of a segment into its lane."""
        lane, body = self._lane(device), self.bodies.pop(device)
        lane.add_call(f"begin_{segment}", self.recorder.begin(segment, device))
        lane.lines += body.lines
        if names := self.view_names.close_scope(device):
            lane.add(f"del {', '.join(names)}")
        lane.add_call(f"end_{segment}", self.recorder.end(segment))
        for name in self._escaping(segment):
            lane.add(f"kept[{name!r}] = {name}")

    def _escaping(self, segment: int) -> list[str]:
        """Returns the names of what a segment makes for others."""
        made = (slot for op in self.segments.ops[segment] for slot in self._allocates(op))
        return [f"s{slot:d}" for slot in made if self.resolved.storages[slot] in self.segments.escaping]

    def _allocates(self, op: int) -> list[Slot]:
        """Returns the slots that are new memory, of those that an op returns."""
        makers, storages = self.resolved.graph.producer, self.resolved.storages
        made = dict.fromkeys(self.resolved.op_calls[op].results)
        return [slot for slot in made if slot not in self.resolved.views and makers[storages[slot]] == op]

    def _assign_copy(self, copy: CopyTensor, name: str, function: str, *args: str) -> None:
        super()._assign_copy(copy, name, function, *args)
        self.view_names.inner.discard(name)  # a copy is not part of a segment, though its device may be in one
        if (copy.tensor, copy.target) in self.segments.copies:
            self._lane(copy.target).add(f"kept[{name!r}] = {name}")

    def _return(self, i: int, slot: Slot, device: int) -> None:
        self._enter(device)
        super()._return(i, slot, device)
        self._lane(device).add(f"outputs[{i}] = outputs[{i}].clone()")  # the next step will overwrite it


class ReplayWriter(RecordingWriter):
    """Writes lanes that replay what was recorded."""

    def _close(self, segment: int, device: int) -> None:
        lane = self._lane(device)
        self.bodies.pop(device)
        self.view_names.close_scope(device)
        lane.add_call(f"replay_{segment}", self.recorder.replay(segment))
        for name in self._escaping(segment):
            lane.add(f"{name} = kept[{name!r}]")

    def _free(self, free: FreeTensor) -> None:
        names = self.view_names.pop(free.tensor, free.device)
        others = [name for name in names if name not in self.view_names.inner]
        if others:
            lane = self._begun(HOST_LANE) if (free.tensor, free.device) in self.placed.held else self._lane(free.device)
            lane.add(f"del {', '.join(others)}")

    def _assign_copy(self, copy: CopyTensor, name: str, function: str, *args: str) -> None:
        self.view_names.inner.discard(name)
        if (copy.tensor, copy.target) not in self.segments.copies:
            LaneWriter._assign_copy(self, copy, name, function, *args)
        elif function == "same_view":
            self._lane(copy.target).add(f"{name} = kept[{name!r}]")
        else:
            LaneWriter._assign_copy(self, copy, name, function, *args, f"kept[{name!r}]")
