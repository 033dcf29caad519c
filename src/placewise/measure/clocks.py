"""How long a device takes for some work: the median over repetitions, by the device's own clock.

`instruments.py` gives a device's clock; each kind of device has its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from placewise.core.profile import Timing

REPETITION_SECONDS = 0.002  # about; it has as many calls as that takes

REPETITIONS, SLOW_REPETITIONS, SLOW_SECONDS = 5, 3, 0.1

VERY_SLOW_SECONDS = 0.5  # a single call after the warm-up is enough

MAX_RUNS_IN_PLACE = 50  # in a repetition: values drift


class Clock(Protocol):
    """Times work on a device."""

    launch_seconds: float  # the host's time to launch one of the last calls; 0 if the host does not launch the device's ops
    max_runs: int  # in a repetition

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Returns how long the device takes to run this that many times, one after the other."""
        ...


class Repeatable(Protocol):
    """Work that can be done many times."""

    @property
    def changes_inputs(self) -> bool:
        """Whether its inputs drift with every call."""
        ...

    def run(self) -> object:
        """Does it once."""
        ...

    def restore(self) -> None:
        """Gives its inputs their first values again."""
        ...


@dataclass(frozen=True)
class PureWork:
    """Work that does not change its inputs."""

    run: Callable[[], object]
    changes_inputs: bool = False

    def restore(self) -> None:
        """Does nothing."""


def time_work(work: Repeatable, clock: Clock) -> Timing:
    """Returns how long one call takes: the median over repetitions of several calls, after a warm-up."""
    clock.seconds(work.run, 1)
    work.restore()
    guess = max(clock.seconds(work.run, 1), 1e-7)
    if guess > VERY_SLOW_SECONDS:
        return Timing(guess, 1)
    most = min(clock.max_runs, MAX_RUNS_IN_PLACE) if work.changes_inputs else clock.max_runs
    times = int(np.clip(REPETITION_SECONDS / guess, 1, most))
    found = []
    for _ in range(SLOW_REPETITIONS if guess > SLOW_SECONDS else REPETITIONS):
        work.restore()
        found.append(clock.seconds(work.run, times) / times)
    return Timing.of(found)
