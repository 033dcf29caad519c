"""CPU devices are measured on threads of their own, which Ctrl-C ends."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event

import pytest
import torch

from placewise.measure.clocks import Clock
from placewise.measure.cpu_instrument import CpuInstrument, own_thread
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


def test_each_thread_has_its_own_number_of_threads() -> None:
    usual = torch.get_num_threads()
    with (
        own_thread(RealDevice("a", "cpu", "cpu", threads=3)) as one,
        own_thread(RealDevice("b", "cpu", "cpu", threads=5)) as other,
    ):
        for thread in (one, other):
            thread.submit(int).result()
        assert [thread.submit(torch.get_num_threads).result() for thread in (one, other)] == [3, 5]
    with ThreadPoolExecutor(1) as later:
        assert torch.get_num_threads() == later.submit(torch.get_num_threads).result() == usual
