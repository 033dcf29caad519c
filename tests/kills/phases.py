"""The phases of a command, and the file in which a command notes the one that it is in."""

import mmap
import struct
from pathlib import Path

PHASES = ("import", "rest", "capture", "bound", "search", "recording", "report", "step")

SIZE = 8 * (1 + len(PHASES))


class Note:
    """Notes a phase, and how many calls and returns each had; what is noted survives the process, however it ends."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(SIZE))
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)

    @property
    def phase(self) -> str:
        """The phase that the command is in, or was in when it ended."""
        return PHASES[struct.unpack_from("q", self._memory)[0]]

    @phase.setter
    def phase(self, name: str) -> None:
        struct.pack_into("q", self._memory, 0, PHASES.index(name))

    def events(self, phase: str) -> int:
        """Returns how many calls and returns were counted in a phase."""
        return int(struct.unpack_from("q", self._memory, 8 * (1 + PHASES.index(phase)))[0])

    def count(self, phase: str) -> int:
        """Counts one more call or return; returns how many the phase had."""
        events = self.events(phase) + 1
        struct.pack_into("q", self._memory, 8 * (1 + PHASES.index(phase)), events)
        return events
