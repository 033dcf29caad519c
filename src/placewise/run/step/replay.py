"""When the segments of a step are recorded, and whether the recording still holds."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from placewise.run.backends.protocol import LaunchRecorder
from placewise.run.codegen.lanes import Lanes, LaneSetup
from placewise.run.codegen.recorded_lanes import RecordingWriter, ReplayWriter
from placewise.run.codegen.recorded_segments import Segments, find_segments
from placewise.run.storage_copies import clone_storage, copy_storage_over

WARM_UP = 2  # plain steps: libraries make their plans and workspaces, and host scalars show whether they change

MOST_RECORDINGS = 10  # then a step whose tensors move, or whose scalars change, all the time stays plain

Layout = tuple[Any, ...]  # address, strides, offset and size of a tensor in memory


class Recording(NamedTuple):
    """Recorded segments, and what they rely on."""

    segments: Segments
    recorder: LaunchRecorder
    kept: dict[str, Any]  # what segments share with other launches, by its name in the lanes
    scalars: list[Any]  # the host's, as they were
    inputs: dict[int, Tensor]  # position among the residents -> what a batch is copied over
    layouts: dict[int, Layout]  # position among the residents -> the others, as they were


class Replay:
    """Chooses the lanes of each step: plain ones at first, then those that record, then those that replay.

    A step records again when a tensor of the model has moved, or a host scalar has changed that did not before; from then
    on the host launches the ops that read this scalar. After a recording that failed all steps are plain.
    """

    def __init__(self, make_recorder: Callable[[], LaunchRecorder], setup: LaneSetup) -> None:
        self._make_recorder, self._setup = make_recorder, setup
        self._warm_up_scalars: list[list[Any]] = []  # by step
        self._changing: frozenset[int] = frozenset()
        self._recording: Recording | None = None
        self._replay: Lanes | None = None
        self._recordings_left = MOST_RECORDINGS
        self.num_recorded_ops = 0  # ops in segments

    def lanes(self, plain: Lanes, residents: list[Any], scalars: list[Any]) -> Lanes:
        """Returns the lanes for a step with these values; copies the batch to where the segments read it."""
        if len(self._warm_up_scalars) < WARM_UP:
            self._warm_up_scalars.append(_snapshot(scalars))
            return plain
        if self._recording is None:
            for before in self._warm_up_scalars:
                self._changing |= _changed(before, scalars, range(len(scalars)))
        elif not self._holds(self._recording, residents, scalars):
            self.forget()
        if self._recording is None:
            return self._record(residents, scalars) if self._recordings_left else plain
        for position, kept in self._recording.inputs.items():
            residents[position] = copy_storage_over(residents[position], kept)
        if self._replay is None:
            self._replay = self._writer(ReplayWriter, self._recording).write()
        return self._replay

    def recover(self, failure: BaseException) -> None:
        """Forgets the recording after a step has failed; if that step was recording, all are plain from now on."""
        if self._recording is not None:
            self._recording.recorder.abandon()
            if self._replay is None and isinstance(failure, Exception):
                self._recordings_left = 0
                warnings.warn(f"launches are not recorded from now on: recording failed ({failure})", stacklevel=2)
        self.forget()

    def forget(self) -> None:
        """Gives back what the recording holds; the next step records again."""
        if self._recording is not None:
            self._recording.recorder.reset()
            self._recording.kept.clear()
        self._recording = self._replay = None

    def _holds(self, recording: Recording, residents: list[Any], scalars: list[Any]) -> bool:
        changed = _changed(recording.scalars, scalars, recording.segments.scalars)
        self._changing |= changed
        return not changed and recording.layouts == self._layouts(recording.segments, residents)

    def _record(self, residents: list[Any], scalars: list[Any]) -> Lanes:
        self._recordings_left -= 1
        segments = find_segments(self._setup.placed, self._setup.arithmetic, self._changing)
        inputs, resolved = dict[int, Tensor](), self._setup.placed.resolved
        for resident in resolved.program.residents:
            if resident.kind == "input" and resolved.storages[resident.slot] in segments.residents:
                position = self._setup.positions[resident.slot]
                residents[position] = inputs[position] = clone_storage(residents[position])
        layouts = self._layouts(segments, residents)
        recording = Recording(segments, self._make_recorder(), {}, _snapshot(scalars), inputs, layouts)
        lanes = self._writer(RecordingWriter, recording).write()
        self._recording, self.num_recorded_ops = recording, sum(map(len, segments.ops))
        return lanes

    def _layouts(self, segments: Segments, residents: list[Any]) -> dict[int, Layout]:
        """Returns where and how the model's tensors are in memory; those that are only copied may have any address."""
        found: dict[int, Layout] = {}
        resolved, positions = self._setup.placed.resolved, self._setup.positions
        for resident in resolved.program.residents:
            if resident.tensor >= 0 and resident.kind != "input":
                tensor = residents[position := positions[resident.slot]]
                is_read = resolved.storages[resident.slot] in segments.residents
                address = tensor.data_ptr() if is_read else 0
                found[position] = (address, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
        return found

    def _writer(self, kind: type[RecordingWriter], recording: Recording) -> RecordingWriter:
        return kind(self._setup, recording.segments, recording.recorder, recording.kept)


def _snapshot(scalars: list[Any]) -> list[Any]:
    """Returns the scalars as they are now; one that is a tensor may change in place later."""
    return [scalar.clone() if isinstance(scalar, Tensor) else scalar for scalar in scalars]


def _changed(before: list[Any], scalars: list[Any], positions: Iterable[int]) -> frozenset[int]:
    return frozenset(position for position in positions if not _same(before[position], scalars[position]))


def _same(first: Any, second: Any) -> bool:
    return first.equal(second) if isinstance(first, Tensor) else bool(first == second)
