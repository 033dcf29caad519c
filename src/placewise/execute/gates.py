"""Where one thread waits for another: each gate is opened once and passed once in every step."""

import contextlib
import threading
import weakref


class Stopped(Exception):
    """Another lane has failed, so this one ends too."""


class Gate:
    """A lock that one thread opens and one other passes; passing closes it again, so it needs no reset between steps."""

    __slots__ = ("__weakref__", "_alarm", "_lock", "open")

    def __init__(self, alarm: "Alarm") -> None:
        self._alarm = alarm
        self._lock = threading.Lock()
        self._lock.acquire()
        self.open = self._lock.release
        alarm.gates.add(self)

    def wait(self) -> None:
        """Returns when the gate is opened; raises Stopped when the step has failed."""
        self._lock.acquire()
        if self._alarm.failures:
            raise Stopped

    def force(self) -> None:
        """Opens the gate if it is closed."""
        with contextlib.suppress(RuntimeError):  # it was open
            self.open()

    def close(self) -> None:
        """Closes the gate if it is open."""
        self._lock.acquire(blocking=False)


class Alarm:
    """The failures of a step; the first one wakes everybody who waits."""

    def __init__(self) -> None:
        self.gates: weakref.WeakSet[Gate] = weakref.WeakSet()  # they go with the lanes that wait at them
        self.failures: list[BaseException] = []
        self._lock = threading.Lock()

    def ring(self, failure: BaseException) -> None:
        """Notes a failure and opens all gates."""
        with self._lock:
            self.failures.append(failure)
            for gate in self.gates:
                gate.force()

    def reset(self) -> None:
        """Forgets the failures; nobody may be running."""
        self.failures.clear()
        for gate in self.gates:
            gate.close()
