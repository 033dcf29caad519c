"""Decides in the middle of a step whether its last ops run: with a GradScaler, the update is skipped after an overflow."""

from collections.abc import Callable, Sequence

from torch import Tensor

from placewise.run.backends.cpu_threads import Signal


class UpdateGate:
    """One lane decides whether the gate is open in this step; the others wait for that, and end if it is closed."""

    def __init__(self) -> None:
        self.is_open = True

    def decider(self, signals: Sequence[Signal]) -> Callable[[Tensor], bool]:
        """Returns the function that reads the value, which is on its device by then, and tells the other lanes."""

        def decide(value: Tensor) -> bool:
            self.is_open = not bool(value)
            for signal in signals:
                signal.set()
            return self.is_open

        return decide

    def waiter(self, signal: Signal) -> Callable[[], bool]:
        """Returns the function that waits for the decision, and returns it."""

        def wait() -> bool:
            signal.wait()
            return self.is_open

        return wait
