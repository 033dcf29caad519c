"""What a backend gives to the lanes that are generated for it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from placewise.run.lower.waits import Queue
from placewise.run.step_notes import Notes


class Streams(Protocol):
    """What the host's lane needs of CUDA; `run/backends/cuda.py` has the real one. Methods return what a step calls."""

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
