"""CPU devices are measured on threads of their own, which Ctrl-C ends."""

import time
from concurrent.futures import Future
from functools import partial
from threading import Event

import pytest

from placewise.measure.clocks import Clock
from placewise.measure.cpu_instrument import CpuInstrument
from placewise.run.backends.cpu_threads import Cancelled
from placewise.run.devices import RealDevice


def test_an_interrupted_measurement_ends_with_the_current_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the thread that waits; the one that measures has 100 s of work left."""
    begun, ends = Event(), []

    def interrupted(*_: object) -> None:
        begun.wait()
        raise KeyboardInterrupt

    def measure(clock: Clock) -> None:
        begun.set()
        for _ in range(10_000):
            try:
                clock.seconds(partial(time.sleep, 0.01), 1)
            except Cancelled:
                ends.append("stopped")
                return

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        CpuInstrument().run(RealDevice("cpu:0", "cpu", "cpu", threads=1), measure)
    assert ends == ["stopped"]
