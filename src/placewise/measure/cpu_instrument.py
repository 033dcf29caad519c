"""CPU devices, measured: on a thread with the device's cores, by the processor's clock."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TypeVar

import numpy as np
import torch

from placewise.core.quantities import format_count
from placewise.machines.detect import cpu_name
from placewise.measure.clocks import Clock
from placewise.measure.instruments import Repeat, WorkSizes
from placewise.run.backends.cpu_threads import Cancelled, keep_num_threads, take_cores
from placewise.run.devices import RealDevice

COPY_BYTES = tuple(4**n * 4096 for n in range(7))  # 4 KiB to 16 MiB

COPIES = 9  # of each size, after a warm-up

Found = TypeVar("Found")


class CpuClock:
    """Times work on the calling thread, until another thread stops it."""

    launch_seconds = 0.0
    max_runs = 1000
    is_stopped = False

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Returns the seconds of that many calls."""
        if self.is_stopped:
            raise Cancelled
        start = time.perf_counter()
        for _ in range(times):
            run()
        return time.perf_counter() - start


class CpuInstrument:
    """Measures devices of kind "cpu" (`Instrument` in instruments.py)."""

    sizes = WorkSizes(1024, 1 << 24, 512, 1 << 23, 4)
    compute_types = ("float32", "bfloat16", "float16", "float64")

    def hardware(self, device: RealDevice) -> str:
        """Returns the number of threads, and the processor's name."""
        return f"{format_count(device.threads, 'thread')} of {cpu_name()}"

    def run(self, device: RealDevice, measure: Callable[[Clock], Found]) -> Found:
        """Calls `measure` on a thread with the device's cores."""
        clock = CpuClock()
        with own_thread(device) as thread:
            measured = thread.submit(measure, clock)
            try:
                return measured.result()
            finally:
                clock.is_stopped = True  # Ctrl-C ends up here: the thread must not go on with the next ops

    def launch_seconds(self, device: RealDevice) -> float:
        """Returns 0: a CPU device's own thread runs its ops."""
        return 0.0

    def copy_launch_seconds(self, source: RealDevice, target: RealDevice) -> float:
        """Returns 0: the reader's own thread copies."""
        return 0.0

    def copy_seconds(self, source: RealDevice, target: RealDevice) -> dict[int, float]:
        """Returns the seconds from one thread's signal that a tensor is ready to the end of the other thread's copy."""
        with own_thread(source) as sender, own_thread(target) as receiver:
            return {nbytes: _handover_seconds(sender, receiver, nbytes) for nbytes in COPY_BYTES}

    @contextmanager
    def open_runs(self, device: RealDevice, run: Callable[[], object], times: int) -> Iterator[Repeat]:
        """Gives a function that runs this that many times on a thread with the device's cores."""
        clock = CpuClock()
        with own_thread(device) as thread:
            yield lambda: thread.submit(clock.seconds, run, times).result()

    def shared_parts(self, device: RealDevice) -> None:
        """Returns None: caches and copies of CPU devices are not measured apart."""


@contextmanager
def own_thread(device: RealDevice) -> Iterator[ThreadPoolExecutor]:
    """Gives a thread like the one that runs a CPU device's lane: on its cores, with as many threads for an op."""
    with keep_num_threads(), ThreadPoolExecutor(1, initializer=take_cores, initargs=(device,)) as pool:
        yield pool


def _handover_seconds(sender: ThreadPoolExecutor, receiver: ThreadPoolExecutor, nbytes: int) -> float:
    sent, received = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    ready, done = Event(), Event()

    def send() -> list[float]:
        started = []
        for _ in range(COPIES + 1):
            started.append(time.perf_counter())
            ready.set()
            done.wait()
            done.clear()
        return started

    def receive() -> list[float]:
        ended = []
        for _ in range(COPIES + 1):
            ready.wait()
            ready.clear()
            received.copy_(sent)
            ended.append(time.perf_counter())
            done.set()
        return ended

    ended, started = receiver.submit(receive), sender.submit(send)
    return float(np.median(np.subtract(ended.result(), started.result())[1:]))
