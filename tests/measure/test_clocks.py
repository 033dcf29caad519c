"""Timing some work: how often it is run, and which time counts."""

import pytest
from measuring import ScriptedClock

from placewise.core.profile import Timing
from placewise.measure.clocks import PureWork, time_work


class Drifting:
    """Work in place, which counts how often its inputs are restored."""

    changes_inputs = True
    restored = 0

    def run(self) -> None: ...

    def restore(self) -> None:
        self.restored += 1


def test_the_median_of_five_repetitions_of_2_ms_counts() -> None:
    """A warm-up of 1 s and a first run of 10 µs, so a repetition has 200 runs: of 10, 30, 10, 90 and 20 µs each."""
    clock = ScriptedClock([1.0, 1e-5, 1e-5, 3e-5, 1e-5, 9e-5, 2e-5])
    timing = time_work(PureWork(int), clock)
    assert clock.timed == [1, 1, *[200] * 5]
    assert timing.seconds == pytest.approx(2e-5)
    assert timing.count == 5


def test_slow_work_is_run_less_often() -> None:
    for seconds, repetitions in ((0.05, 5), (0.2, 3), (0.6, 0)):
        clock = ScriptedClock([seconds])
        assert time_work(PureWork(int), clock) == Timing(seconds, max(repetitions, 1))
        assert clock.timed == [1] * (2 + repetitions)


def test_short_work_is_run_as_often_as_the_clock_allows_and_less_often_in_place() -> None:
    clock = ScriptedClock([1e-7])
    time_work(PureWork(int), clock)
    assert clock.timed[-1] == 1000
    clock, work = ScriptedClock([1e-7]), Drifting()
    time_work(work, clock)
    assert clock.timed[-1] == 50
    assert work.restored == 6, "after the warm-up, and before each repetition"
