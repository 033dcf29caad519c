"""Ways to run a placement that end well, run out of memory, hang and crash, and a clock that follows a script.

A light module, because workers import it.
"""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation, Evaluator


@dataclass(frozen=True)
class Ending:
    """Makes evaluators: a placement takes 1 s, and 1 s more for each group on device 1, unless `ends` has another end.

    `ends` is by the number of groups on device 1. Every placement that is run adds a line to the file. One that hangs
    says so in the pipe.
    """

    file: Path
    ends: Mapping[int, str] = field(default_factory=dict)
    pipe: Path | None = None

    def __call__(self) -> Evaluator:
        return self.evaluate

    def evaluate(self, placements: Ints, orders: Ints | None = None) -> Evaluation:
        seconds, overflow = [], []
        for placement in placements:
            with self.file.open("a") as file:
                file.write("".join(map(str, placement.tolist())) + "\n")
            moved = int((placement == 1).sum())
            match self.ends.get(moved):
                case "crash":
                    os._exit(9)
                case "hang":
                    assert self.pipe is not None
                    self.pipe.write_text("hangs")
                    threading.Event().wait()
                case "memory":
                    seconds.append(np.inf)
                    overflow.append(5)
                case _:
                    seconds.append(1.0 + moved)
                    overflow.append(0)
        return Evaluation(np.array(seconds), np.array(seconds), np.array(overflow, np.int64))

    def lines(self) -> list[str]:
        """Returns the placements that were run, in order."""
        return self.file.read_text().split() if self.file.exists() else []


def no_memory(*_: Any) -> Any:
    """A `run_steps` that finds no memory."""
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")


def broken(*_: Any) -> Any:
    """A `run_steps` with a mistake in it."""
    raise RuntimeError("a mistake")


def three_steps(
    captured: Any, cluster: Any, placement: Any, order: Any, warm_up: int, steps: int, virtual: Any
) -> tuple[Any, dict[str, int]]:
    """A `run_steps` whose slowest step is an outlier, and whose peak is 10 bytes on each device."""
    return np.array([2.0, 1.0, 50.0]), dict.fromkeys(cluster.device_names, 10)


@dataclass
class ScriptedClock:
    """A clock for which a run takes these seconds; it notes how many runs it timed at a time."""

    run_seconds: list[float]  # in each repetition; the last one in all that follow
    launch_seconds: float = 0.0
    max_runs: int = 1000
    timed: list[int] = field(default_factory=list)

    def seconds(self, run: Callable[[], object], times: int) -> float:
        number = min(len(self.timed), len(self.run_seconds) - 1)
        self.timed.append(times)
        return times * self.run_seconds[number]
