"""Contention: how the factors follow from times with some neighbours busy."""

from collections.abc import Iterator
from contextlib import contextmanager

from placewise.measure.contention import REPEATS, slowdowns
from placewise.measure.instruments import Repeat
from placewise.run.devices import RealDevice

DEVICES = [RealDevice(f"cpu:{i}", "cpu", "cpu") for i in range(4)]


class Machine:
    """A machine on which some work takes these seconds, by how many other devices are busy.

    When it is timed alone for the second time, it takes `alone_again`.
    """

    def __init__(self, seconds: list[float], alone_again: float) -> None:
        self.seconds, self.alone_again = seconds, alone_again
        self.busy: set[str] = set()
        self.num_measured = 0

    @contextmanager
    def open_work(self, device: RealDevice) -> Iterator[Repeat]:
        def repeat() -> float:
            self.num_measured += 1
            is_last = self.num_measured > (REPEATS + 1) * len(self.seconds)
            return self.alone_again if is_last else self.seconds[len(self.busy)]

        yield repeat

    @contextmanager
    def open_others_work(self, device: RealDevice) -> Iterator[Repeat]:
        self.busy.add(device.name)
        yield lambda: 0.0
        self.busy.remove(device.name)


def measured(seconds: list[float], alone_again: float) -> tuple[float, ...]:
    machine = Machine(seconds, alone_again)
    return slowdowns(DEVICES[0], machine.open_work, DEVICES[1 : len(seconds)], machine.open_others_work)


def test_factors_are_by_the_number_of_busy_neighbours() -> None:
    assert measured([2.0, 3.0, 5.0], 2.0) == (1.0, 1.5, 2.5)


def test_the_shorter_time_alone_counts_and_factors_never_fall() -> None:
    """Alone it takes 4 s, and later 2 s, when other work on the machine has ended."""
    assert measured([4.0, 3.0, 2.5, 6.0], 2.0) == (1.0, 1.5, 1.5, 3.0)
