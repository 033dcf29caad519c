"""Where lanes and streams meet: the lines that wait for an instruction, and those that tell of one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from placewise.execute.gates import Alarm, Gate
from placewise.execute.notes import Notes
from placewise.execute.source import Source
from placewise.execute.waits import Queue, Waits

HOST_LANE = -1


def pinning_lane(device: int) -> int:
    """Returns the lane that pins what a CPU device makes for GPUs."""
    return -2 - device


def lane_name(lane: int) -> str:
    """Returns what a lane's function is called."""
    if lane == HOST_LANE:
        return "lane_host"
    return f"lane_{lane}" if lane >= 0 else f"lane_{-2 - lane}_pinning"


class Streams(Protocol):
    """What the host's lane needs of CUDA; `execute/cuda.py` has the real one. Methods return what a step calls."""

    def enter(self, device: int) -> Callable[[], Any]:
        """Makes a device's stream the current one."""

    def copy(self, source: int, target: int) -> Callable[..., Any]:
        """Copies a window's storage in the channel's stream, over an earlier copy's where that is given.

        One of a CPU device must be pinned.
        """

    def pin(self, window: Any) -> Any:
        """Returns the same window on a copy of its storage in pinned memory."""

    def is_pinned(self, window: Any) -> bool:
        """Whether a window is in pinned memory."""

    def record(self, instruction: int, queue: Queue) -> Callable[[], Any]:
        """Records the event of an instruction in its queue's stream."""

    def wait(self, instruction: int, queue: Queue) -> Callable[[], Any]:
        """Lets a queue's stream wait for the event of an instruction."""

    def synchronize(self, instruction: int) -> Callable[[], Any]:
        """Lets a CPU device's thread wait for the event of an instruction."""

    def step(self, notes: Notes | None = None) -> AbstractContextManager[None]:
        """Puts a step between what the caller's streams did before and what they do next; fills in the notes."""

    def synchronize_all(self) -> None:
        """Returns when all GPUs have done their work."""

    def mark(self, instruction: int, is_end: bool, queue: Queue) -> Callable[[], Any]:
        """Notes in the queue's stream when an instruction starts or ends."""


class Meetings:
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
