"""When a step's stretches are recorded as CUDA graphs, and whether they still hold."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from placewise.graph_capture.program import Slot
from placewise.run.codegen.cuda_graph_lanes import Graphs, RecordingWriter, ReplayWriter
from placewise.run.codegen.graph_segments import Segments, find_segments
from placewise.run.codegen.host_scalar_code import HostScalars
from placewise.run.codegen.lanes import Lanes
from placewise.run.lower.placed_step import PlacedStep
from placewise.run.whole_storages import copy_window, copy_window_over

WARM_UP = 2  # plain steps: libraries make their plans and workspaces, and the host's numbers show whether they change

MOST_RECORDINGS = 10  # of a step whose tensors move, or whose numbers change, all the time: then it stays plain


class Recording(NamedTuple):
    """Graphs, and what they take for granted."""

    stretches: Segments
    graphs: Graphs
    kept: dict[str, Any]  # what graphs share with other launches, by its name in the lanes
    numbers: list[Any]  # of the host's, as they were
    inputs: dict[int, Tensor]  # by its place among the residents: what a batch is copied over
    layouts: dict[int, "Layout"]  # of the other residents


Layout = tuple[Any, ...]  # address, strides, offset and size of a tensor in memory


class Graphed:
    """Chooses the lanes of each step: plain ones first, then some that record, then some that replay.

    A step records anew when a tensor of the model has moved, or a number of the host's has changed that did not before;
    launches that read such a number are left to the host from then on. When a recording fails, all later steps are plain.
    """

    def __init__(
        self,
        plain: Lanes,
        make_graphs: Callable[[], Graphs],
        placed: PlacedStep,
        numbers: HostScalars,
        positions: dict[Slot, int],
        *others: Any,
    ) -> None:
        self._plain, self._make_graphs = plain, make_graphs
        self._placed, self._numbers, self._positions = placed, numbers, positions
        self._given = (placed, numbers, positions, *others)  # what a LaneWriter is made with
        self._seen: list[list[Any]] = []  # the host's numbers of the steps of the warm-up
        self._changing: frozenset[int] = frozenset()
        self._recording: Recording | None = None
        self._replay: Lanes | None = None
        self._recordings_left = MOST_RECORDINGS
        self.num_recorded = 0  # ops that graphs launch

    def lanes(self, residents: list[Any], numbers: list[Any]) -> Lanes:
        """Returns the lanes for a step with these values; puts the batch where graphs read it."""
        if len(self._seen) < WARM_UP:
            self._seen.append(_snapshot(numbers))
            return self._plain
        if self._recording is None:
            for before in self._seen:
                self._changing |= _changed(before, numbers, range(len(numbers)))
        elif not self._holds(self._recording, residents, numbers):
            self.forget()
        if self._recording is None:
            return self._record(residents, numbers) if self._recordings_left else self._plain
        for place, kept in self._recording.inputs.items():
            residents[place] = copy_window_over(residents[place], kept)
        if self._replay is None:
            self._replay = self._writer(ReplayWriter, self._recording).write()
        return self._replay

    def give_up(self, failure: BaseException) -> None:
        """Forgets what was recorded, for a step has failed; all are plain from now on if that was while it recorded."""
        if self._recording is not None:
            self._recording.graphs.give_up()
            if self._replay is None and isinstance(failure, Exception):
                self._recordings_left = 0
                warnings.warn(f"no CUDA graphs from now on: recording them failed ({failure})", stacklevel=2)
        self.forget()

    def forget(self) -> None:
        """Gives back what graphs hold; the next step records anew."""
        if self._recording is not None:
            self._recording.graphs.reset()
            self._recording.kept.clear()
        self._recording = self._replay = None

    def _holds(self, recording: Recording, residents: list[Any], numbers: list[Any]) -> bool:
        changed = _changed(recording.numbers, numbers, recording.stretches.numbers)
        self._changing |= changed
        return not changed and recording.layouts == self._layouts(recording.stretches, residents)

    def _record(self, residents: list[Any], numbers: list[Any]) -> Lanes:
        self._recordings_left -= 1
        stretches = find_segments(self._placed, self._numbers, self._changing)
        inputs, values = dict[int, Tensor](), self._placed.values
        for resident in values.program.residents:
            if resident.kind == "input" and values.storages[resident.slot] in stretches.residents:
                place = self._positions[resident.slot]
                residents[place] = inputs[place] = copy_window(residents[place])
        layouts = self._layouts(stretches, residents)
        recording = Recording(stretches, self._make_graphs(), {}, _snapshot(numbers), inputs, layouts)
        lanes = self._writer(RecordingWriter, recording).write()
        self._recording, self.num_recorded = recording, sum(map(len, stretches.ops))
        return lanes

    def _layouts(self, stretches: Segments, residents: list[Any]) -> dict[int, Layout]:
        """Returns where and how the model's tensors are in memory; those that are only copied may be anywhere."""
        found: dict[int, Layout] = {}
        for resident in self._placed.values.program.residents:
            if resident.tensor >= 0 and resident.kind != "input":
                tensor = residents[place := self._positions[resident.slot]]
                is_read = self._placed.values.storages[resident.slot] in stretches.residents
                address = tensor.data_ptr() if is_read else 0
                found[place] = (address, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
        return found

    def _writer(self, kind: type[RecordingWriter], recording: Recording) -> RecordingWriter:
        return kind(*self._given, stretches=recording.stretches, graphs=recording.graphs, kept=recording.kept)


def _snapshot(numbers: list[Any]) -> list[Any]:
    """Returns the numbers as they are now; a tensor of the host's may change in place."""
    return [number.clone() if isinstance(number, Tensor) else number for number in numbers]


def _changed(before: list[Any], numbers: list[Any], places: Iterable[int]) -> frozenset[int]:
    return frozenset(place for place in places if not _same(before[place], numbers[place]))


def _same(first: Any, second: Any) -> bool:
    return first.equal(second) if isinstance(first, Tensor) else bool(first == second)
