"""When a step's stretches are recorded as CUDA graphs, and whether they still hold."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor

from placewise.capture.program import Slot
from placewise.execute.copying import copy_window, copy_window_over
from placewise.execute.graph_lanes import Graphs, RecordingWriter, ReplayWriter
from placewise.execute.lanes import Lanes
from placewise.execute.numbers import Numbers
from placewise.execute.placed import Placed
from placewise.execute.stretches import Stretches, find_stretches

WARM_UP = 2  # plain steps: libraries make their plans and workspaces, and the host's numbers show whether they change


class Recording(NamedTuple):
    """Graphs, and what they take for granted."""

    stretches: Stretches
    graphs: Graphs
    kept: dict[str, Any]  # what graphs share with other launches, by its name in the lanes
    numbers: list[Any]  # of the host's, as they were
    inputs: dict[int, Tensor]  # by its place among the residents: what a batch is copied over
    addresses: dict[int, int]  # of the other residents that graphs read


class Graphed:
    """Chooses the lanes of each step: plain ones first, then some that record, then some that replay.

    A step records anew when a tensor of the model has moved, or a number of the host's has changed that did not before;
    launches that read such a number are left to the host from then on.
    """

    def __init__(
        self, plain: Lanes, make_graphs: Callable[[], Graphs], placed: Placed, numbers: Numbers, positions: dict[Slot, int],
        *others: Any,
    ) -> None:  # fmt: skip
        self._plain, self._make_graphs = plain, make_graphs
        self._placed, self._numbers, self._positions = placed, numbers, positions
        self._given = (placed, numbers, positions, *others)  # what a LaneWriter is made with
        self._seen: list[list[Any]] = []  # the host's numbers of the steps of the warm-up
        self._changing: frozenset[int] = frozenset()
        self._recording: Recording | None = None
        self._replay: Lanes | None = None

    @property
    def num_recorded(self) -> int:
        """How many ops are launched by graphs."""
        return 0 if self._recording is None else sum(map(len, self._recording.stretches.ops))

    def lanes(self, residents: list[Any], numbers: list[Any]) -> Lanes:
        """Returns the lanes for a step with these values; puts the batch where graphs read it."""
        if len(self._seen) < WARM_UP:
            self._seen.append(_snapshot(numbers))
            return self._plain
        recording = self._recording
        if recording is None:
            for before in self._seen:
                self._changing |= _changed(before, numbers, range(len(numbers)))
            return self._record(residents, numbers)
        changed = _changed(recording.numbers, numbers, recording.stretches.numbers)
        if changed or any(residents[place].data_ptr() != address for place, address in recording.addresses.items()):
            self._changing |= changed
            return self._record(residents, numbers)
        for place, kept in recording.inputs.items():
            residents[place] = copy_window_over(residents[place], kept)
        if self._replay is None:
            self._replay = self._writer(ReplayWriter, recording).write()
        return self._replay

    def give_up(self) -> None:
        """Forgets what was recorded; a step has failed."""
        if self._recording is not None:
            self._recording.graphs.give_up()
        self._recording = self._replay = None

    def _record(self, residents: list[Any], numbers: list[Any]) -> Lanes:
        self._recording = self._replay = None  # frees what graphs hold
        values = self._placed.values
        stretches = find_stretches(self._placed, self._numbers, self._changing)
        inputs, addresses = dict[int, Tensor](), dict[int, int]()
        for resident in values.program.residents:
            place = self._positions[resident.slot]
            if values.storages[resident.slot] not in stretches.residents:
                continue
            if resident.kind == "input":
                residents[place] = inputs[place] = copy_window(residents[place])
            else:
                addresses[place] = residents[place].data_ptr()
        self._recording = Recording(stretches, self._make_graphs(), {}, _snapshot(numbers), inputs, addresses)
        return self._writer(RecordingWriter, self._recording).write()

    def _writer(self, kind: type[RecordingWriter], recording: Recording) -> RecordingWriter:
        return kind(*self._given, stretches=recording.stretches, graphs=recording.graphs, kept=recording.kept)


def _snapshot(numbers: list[Any]) -> list[Any]:
    """Returns the numbers as they are now; a tensor of the host's may change in place."""
    return [number.clone() if isinstance(number, Tensor) else number for number in numbers]


def _changed(before: list[Any], numbers: list[Any], places: Iterable[int]) -> frozenset[int]:
    return frozenset(place for place in places if not _same(before[place], numbers[place]))


def _same(first: Any, second: Any) -> bool:
    return first.equal(second) if isinstance(first, Tensor) else bool(first == second)
