"""How long a stretch of work takes on a device: by the processor's clock, or by events on a GPU's stream."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import numpy as np
import torch

from placewise.core.profile import Timing
from placewise.run.backends.cpu_threads import Cancelled, keep_num_threads, take_cores
from placewise.run.devices import RealDevice

Found = TypeVar("Found")

STRETCH_SECONDS = 0.002

STRETCHES, SLOW_STRETCHES, SLOW_SECONDS = 5, 3, 0.1

VERY_SLOW_SECONDS = 0.5  # one run behind the warm-up says enough

MOST_RUNS_IN_PLACE = 50  # of a stretch: values drift

CYCLES_PER_SECOND = 2e9  # of a GPU's clock, about: for keeping a stream busy


class Clock(Protocol):
    """Says how long a device works."""

    launch_seconds: float  # the host's time for one of the last runs, where the device does not run it itself; else 0
    most_runs: int  # of a stretch

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Returns how long the device takes to run this so many times, one after the other."""
        ...


class Repeatable(Protocol):
    """Work that can be done many times."""

    @property
    def changes_inputs(self) -> bool:
        """Whether what it works on drifts with every run."""
        ...

    def run(self) -> object:
        """Does it once."""
        ...

    def restore(self) -> None:
        """Undoes what has drifted."""
        ...


class CpuClock:
    """Times work on this thread, until another one stops it."""

    launch_seconds = 0.0
    most_runs = 1000
    is_stopped = False

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Returns the seconds of so many runs."""
        if self.is_stopped:
            raise Cancelled
        start = time.perf_counter()
        for _ in range(times):
            run()
        return time.perf_counter() - start


class StreamClock:
    """Times work on a stream, without the host's launches.

    A kernel that only waits goes first, so that all launches are in the queue before the first event passes.
    """

    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self.stream = stream
        self.launch_seconds = 50e-6
        self.most_runs = 100  # a queue holds about a thousand launches, and some ops have ten

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Returns the seconds of so many runs."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            wait_seconds = 1.5 * min(max(self.launch_seconds, 5e-6), 1e-3) * times + 1e-4
            torch.cuda._sleep(int(wait_seconds * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
            begun = time.perf_counter()
            start.record()
            for _ in range(times):
                run()
            end.record()
            self.launch_seconds = (time.perf_counter() - begun) / times
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def time_work(work: Repeatable, clock: Clock) -> Timing:
    """Returns how long one run takes: the median over stretches of several runs, after a warm-up."""
    clock.seconds(work.run, 1)
    work.restore()
    guess = max(clock.seconds(work.run, 1), 1e-7)
    if guess > VERY_SLOW_SECONDS:
        return Timing(guess, 1)
    most = min(clock.most_runs, MOST_RUNS_IN_PLACE) if work.changes_inputs else clock.most_runs
    times = int(np.clip(STRETCH_SECONDS / guess, 1, most))
    found = []
    for _ in range(SLOW_STRETCHES if guess > SLOW_SECONDS else STRETCHES):
        work.restore()
        found.append(clock.seconds(work.run, times) / times)
    return Timing.of(found)


def alike(device: RealDevice) -> tuple[str, int, int]:
    """Returns what devices have in common that need be measured only once: slices of a GPU, equal shares of cores."""
    return device.torch_device, device.slice[1] if device.slice else 1, device.threads


def run_on(device: RealDevice, measure: Callable[[Clock], Found]) -> Found:
    """Returns what is measured with a device's clock, where its ops would run: on its cores, or on its stream."""
    if not device.launches_from_host:
        clock = CpuClock()
        with own_thread(device) as thread:
            measured = thread.submit(measure, clock)
            try:
                return measured.result()
            finally:
                clock.is_stopped = True  # Ctrl-C comes here: the thread must not go on with the next ops
    from placewise.run.backends.cuda import stream_of

    stream = stream_of(device)
    with torch.cuda.stream(stream):
        return measure(StreamClock(stream))


@contextmanager
def own_thread(device: RealDevice) -> Iterator[ThreadPoolExecutor]:
    """Gives a thread as the executor has one for a CPU device: on its cores, with as many threads for an op."""
    with keep_num_threads(), ThreadPoolExecutor(1, initializer=take_cores, initargs=(device,)) as pool:
        yield pool
