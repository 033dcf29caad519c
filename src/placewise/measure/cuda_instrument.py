"""GPUs and slices of them, measured: on their streams, by CUDA's events.

A slice has its own multiprocessors (run/backends/green_contexts.py), and shares the GPU's copies and cache with the others.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from placewise.measure.clocks import Clock
from placewise.measure.cpu_instrument import own_thread
from placewise.measure.instruments import Repeat, SharedParts, WorkSizes
from placewise.run.backends.cuda import CudaStreams, keep_busy, stream_of
from placewise.run.devices import RealDevice

COPY_BYTES = tuple(4**n * 4096 for n in range(8))  # 4 KiB to 64 MiB

REPEATS = 9  # of a copy, and of a series of launches

LAUNCHES = 500  # in a series

COPY_LAUNCHES = 50  # in a series: a queue holds about a thousand

SLICE_COPY_BYTES, SLICE_COPIES = 1 << 24, 16  # from slice to slice, timed together

CACHED_ELEMENTS, CACHED_ADDITIONS = 1 << 20, 50  # 12 MiB in all, which the cache of every GPU that is worth cutting holds

Found = TypeVar("Found")


class CudaClock:
    """Times work on a stream, without the host's launches.

    A kernel that only waits goes first, so that all launches are queued before the first event passes.
    """

    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self.stream = stream
        self.launch_seconds = 50e-6
        self.max_runs = 100  # a queue holds about a thousand launches, and some ops have ten

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Returns the seconds of that many calls."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            wait_seconds = 1.5 * min(max(self.launch_seconds, 5e-6), 1e-3) * times + 1e-4
            keep_busy(self.stream, wait_seconds)
            begun = time.perf_counter()
            start.record()
            for _ in range(times):
                run()
            end.record()
            self.launch_seconds = (time.perf_counter() - begun) / times
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


class CudaInstrument:
    """Measures devices of kind "gpu" (`Instrument` in instruments.py)."""

    sizes = WorkSizes(8192, 1 << 27, 4096, 1 << 26, 8)
    compute_types = ("float32", "tf32", "bfloat16", "float16", "float64")

    def hardware(self, device: RealDevice) -> str:
        """Returns the GPU's name, and how it is cut into slices."""
        name = torch.cuda.get_device_name(device.torch_device)
        if device.slice is None:
            return name
        index, cut = device.slice
        return f"{name}, one of {cut} slices" if isinstance(cut, int) else f"{name}, {cut[index]} multiprocessors"

    def run(self, device: RealDevice, measure: Callable[[Clock], Found]) -> Found:
        """Calls `measure` with the device's stream as the current one."""
        stream = stream_of(device)
        with torch.cuda.stream(stream):
            return measure(CudaClock(stream))

    def launch_seconds(self, device: RealDevice) -> float:
        """Returns the host's time to launch a small op."""
        add, small = torch.ops.aten.add_.Scalar._op, torch.zeros(1, device=device.torch_device)
        found = []
        with torch.cuda.stream(stream_of(device)):
            for _ in range(REPEATS):
                torch.cuda.synchronize(device.torch_device)
                start = time.perf_counter()
                for _ in range(LAUNCHES):
                    add(small, 1)
                found.append((time.perf_counter() - start) / LAUNCHES)
            torch.cuda.synchronize(device.torch_device)
        return float(np.median(found[1:]))

    def copy_launch_seconds(self, source: RealDevice, target: RealDevice) -> float:
        """Returns the host's time to launch a copy, with the events and streams around it, as a step's lane does it."""
        streams, small = CudaStreams((source, target)), _allocate(source, COPY_BYTES[0])
        copy, at = streams.copy(0, 1), 0 if source.launches_from_host else 1
        calls: list[Callable[..., object]] = [partial(copy, small), streams.record(1, (0, 1)), streams.enter(at)]
        if source.launches_from_host:
            calls = [streams.record(0, (0,)), streams.wait(0, (0, 1)), *calls]
        if target.launches_from_host:
            calls.append(streams.wait(1, (1,)))
        gpu = (source if source.launches_from_host else target).torch_device
        found = []
        for _ in range(REPEATS):
            torch.cuda.synchronize(gpu)
            start = time.perf_counter()
            for _ in range(COPY_LAUNCHES):
                for call in calls:
                    call()
            found.append((time.perf_counter() - start) / COPY_LAUNCHES)
        torch.cuda.synchronize(gpu)
        torch.cuda.set_stream(torch.cuda.default_stream(gpu))
        return float(np.median(found[1:]))

    def copy_seconds(self, source: RealDevice, target: RealDevice) -> dict[int, float]:
        """Returns the time of a copy by its bytes; the host's memory is pinned, as in a step."""
        copy = _between_gpus if source.launches_from_host and target.launches_from_host else _with_host
        return {nbytes: copy(source, target, nbytes) for nbytes in COPY_BYTES}

    @contextmanager
    def open_runs(self, device: RealDevice, run: Callable[[], object], times: int) -> Iterator[Repeat]:
        """Gives a function that runs this that many times on the device's stream, and waits for the end."""
        stream = stream_of(device)
        torch.cuda.synchronize(device.torch_device)  # the operands are there

        def all_runs() -> None:
            for _ in range(times):
                run()

        yield lambda: _seconds(lambda: _do_on(stream, all_runs))

    def shared_parts(self, device: RealDevice) -> SharedParts | None:
        """Returns the copies and the cache that slices of a GPU share."""
        cache_bytes = float(torch.cuda.get_device_properties(device.torch_device).L2_cache_size)
        return SharedParts(_open_slice_copies, _open_cached_additions, cache_bytes)


# --- copies ---


def _between_gpus(source: RealDevice, target: RealDevice, nbytes: int) -> float:
    """Returns the seconds from the end of a GPU's work to the start of another's that waits for a copy of the result.

    The copy goes back and forth, from stream to stream, as in a step.
    """
    tensors = [_allocate(device, nbytes) for device in (source, target)]
    streams = [stream_of(device) for device in (source, target)]
    channels = [torch.cuda.Stream(device.torch_device) for device in (target, source)]  # type: ignore[no-untyped-call]
    for device in (source, target):
        torch.cuda.synchronize(device.torch_device)

    def round_trip() -> None:
        for leaves, arrives in ((0, 1), (1, 0)):
            channels[leaves].wait_stream(streams[leaves])
            with torch.cuda.stream(channels[leaves]):
                tensors[arrives].copy_(tensors[leaves], non_blocking=True)
            streams[arrives].wait_stream(channels[leaves])

    clock = CudaClock(streams[0])
    clock.seconds(round_trip, 2)
    return float(np.median([clock.seconds(round_trip, 4) / 8 for _ in range(REPEATS)]))


def _with_host(source: RealDevice, target: RealDevice, nbytes: int) -> float:
    """Returns the seconds of a copy between a GPU and the host.

    A tensor for a GPU is pinned while the one before it is copied, so the slower of the two counts; the copy is timed by
    events, because the GPU's next op waits on a stream. A copy to the host is timed by the host, which has to see its end.
    """
    sent, received = _allocate(source, nbytes), _allocate(target, nbytes)
    gpu = (target if target.launches_from_host else source).torch_device
    torch.cuda.synchronize(gpu)
    stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]

    def copy() -> None:
        received.copy_(sent, non_blocking=True)

    if target.launches_from_host:
        clock = CudaClock(stream)
        clock.seconds(copy, 2)
        copied = float(np.median([clock.seconds(copy, 4) / 4 for _ in range(REPEATS)]))
        return max(_pinning_seconds(source, sent), copied)
    return _median_seconds(lambda: _do_on(stream, copy))


def _pinning_seconds(source: RealDevice, pinned: Tensor) -> float:
    """Returns the seconds to copy a CPU device's tensor into pinned memory."""
    made = torch.zeros_like(pinned, pin_memory=False)
    with own_thread(source.pinning_thread) as thread:
        return thread.submit(_median_seconds, lambda: pinned.copy_(made)).result()


def _allocate(device: RealDevice, nbytes: int) -> Tensor:
    """Returns memory of a GPU, or pinned memory of the host."""
    if device.launches_from_host:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
    return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)


# --- what slices share ---


@contextmanager
def _open_slice_copies(device: RealDevice) -> Iterator[Repeat]:
    """Gives copies like those between slices of a GPU: in a stream that has no multiprocessors of its own."""
    sent, received = (torch.zeros(SLICE_COPY_BYTES, dtype=torch.uint8, device=device.torch_device) for _ in range(2))
    stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device.torch_device)

    def copies() -> None:
        for _ in range(SLICE_COPIES):
            received.copy_(sent, non_blocking=True)

    yield lambda: _seconds(lambda: _do_on(stream, copies))


@contextmanager
def _open_cached_additions(device: RealDevice) -> Iterator[Repeat]:
    """Gives additions of vectors that fit in the cache, all launched before the first starts: launches take longer."""
    a, b, out = (torch.rand(CACHED_ELEMENTS, device=device.torch_device) for _ in range(3))
    clock = CudaClock(stream_of(device))
    torch.cuda.synchronize(device.torch_device)
    yield lambda: clock.seconds(lambda: torch.add(a, b, out=out), CACHED_ADDITIONS)


# --- by the host's clock ---


def _do_on(stream: "torch.cuda.Stream", work: Callable[[], object]) -> None:
    """Does some work on a stream, and waits for its end."""
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _median_seconds(work: Callable[[], object]) -> float:
    work()  # a warm-up
    return float(np.median([_seconds(work) for _ in range(REPEATS)]))
