"""How long copies between devices take, and launches of the host: measured."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import torch
from torch import Tensor

from placewise.core.arrays import Floats
from placewise.core.cluster import Link
from placewise.measure.clocks import StreamClock, alike, own_thread
from placewise.run.devices import RealDevice

GPU_SIZES = tuple(4**n * 4096 for n in range(8))  # 4 KiB to 64 MiB

CPU_SIZES = tuple(4**n * 4096 for n in range(7))  # to 16 MiB

REPEATS = 9

NUM_LAUNCHES = 500


def measure_links(devices: Sequence[RealDevice]) -> tuple[Link, ...]:
    """Returns the link of every ordered pair of devices; pairs of like devices are measured once."""
    known: dict[tuple[object, object], tuple[float, float]] = {}
    links = []
    for source in devices:
        for target in devices:
            if source.name == target.name:
                continue
            pair = (alike(source), alike(target))
            if pair not in known:
                known[pair] = _measure(source, target)
            latency_seconds, bytes_per_second = known[pair]
            links.append(Link(source.name, target.name, bytes_per_second, latency_seconds))
    return tuple(links)


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Returns (latency seconds, bytes a second) of the line with the least squares of relative errors.

    Where the line would begin below zero, the latency is 0; where it does not rise, the largest copy says the bandwidth.
    """
    times: Floats = np.asarray(seconds, np.float64)
    design = np.stack([np.ones(len(sizes)), np.asarray(sizes, np.float64)], axis=1) / times[:, None]
    latency, slope = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0].tolist()
    if slope <= 0:
        return float(times.min()), max(sizes) / float(times[-1])
    return max(latency, 0.0), 1.0 / slope


def measure_launch(devices: Sequence[RealDevice]) -> float:
    """Returns the host's time for the launch of a small op on a GPU; 0 without one: workers on CPUs launch their own ops."""
    gpu = next((device for device in devices if device.kind == "gpu"), None)
    if gpu is None:
        return 0.0
    from placewise.run.backends.cuda import stream_of

    add, small = torch.ops.aten.add_.Scalar._op, torch.zeros(1, device=gpu.torch_device)
    found = []
    with torch.cuda.stream(stream_of(gpu)):
        for _ in range(REPEATS):
            torch.cuda.synchronize(gpu.torch_device)
            start = time.perf_counter()
            for _ in range(NUM_LAUNCHES):
                add(small, 1)
            found.append((time.perf_counter() - start) / NUM_LAUNCHES)
        torch.cuda.synchronize(gpu.torch_device)
    return float(np.median(found[1:]))


def _measure(source: RealDevice, target: RealDevice) -> tuple[float, float]:
    if not source.launches_from_host and not target.launches_from_host:
        with own_thread(source) as giver, own_thread(target) as taker:
            return fit(CPU_SIZES, [_handed_over(giver, taker, size) for size in CPU_SIZES])
    return fit(GPU_SIZES, [_copied(source, target, size) for size in GPU_SIZES])


def _copied(source: RealDevice, target: RealDevice, size: int) -> float:
    """Returns the seconds of a copy that a GPU takes part in; memory of the host is pinned.

    Between GPUs it goes there and back, from stream to stream, as in a step. What a GPU receives from the host is pinned
    while the tensor before it is on its way, so the slower of the two counts; the way is timed by events on the stream,
    for the GPU's next op waits there. What the host receives is timed by the host, which has to see the end of the copy
    before it goes on.
    """
    if source.launches_from_host and target.launches_from_host:
        return _there_and_back(source, target, size)
    given, taken = _memory(source, size), _memory(target, size)
    for device in (source, target):
        if device.launches_from_host:
            torch.cuda.synchronize(device.torch_device)
    stream = torch.cuda.Stream((target if target.launches_from_host else source).torch_device)  # type: ignore[no-untyped-call]

    def copy() -> None:
        taken.copy_(given, non_blocking=True)

    if target.launches_from_host:
        clock = StreamClock(stream)
        clock.seconds(copy, 2)
        copied = float(np.median([clock.seconds(copy, 4) / 4 for _ in range(REPEATS)]))
        return max(_pinned(source, given), copied)
    return _median(lambda: _on_stream(copy, stream))


def _pinned(source: RealDevice, pinned: Tensor) -> float:
    """Returns the seconds in which a tensor of a CPU device is copied into pinned memory."""
    made = torch.zeros_like(pinned, pin_memory=False)
    with own_thread(source.pinning_thread) as thread:
        return thread.submit(_median, lambda: pinned.copy_(made)).result()


def _there_and_back(source: RealDevice, target: RealDevice, size: int) -> float:
    """Returns the seconds from the end of a GPU's work to where another GPU, which waits for a copy of it, can begin."""
    from placewise.run.backends.cuda import stream_of

    memory = [_memory(device, size) for device in (source, target)]
    streams = [stream_of(device) for device in (source, target)]
    channels = [torch.cuda.Stream(device.torch_device) for device in (target, source)]  # type: ignore[no-untyped-call]
    for device in (source, target):
        torch.cuda.synchronize(device.torch_device)

    def round_trip() -> None:
        for leaves, arrives in ((0, 1), (1, 0)):
            channels[leaves].wait_stream(streams[leaves])
            with torch.cuda.stream(channels[leaves]):
                memory[arrives].copy_(memory[leaves], non_blocking=True)
            streams[arrives].wait_stream(channels[leaves])

    clock = StreamClock(streams[0])
    clock.seconds(round_trip, 2)
    return float(np.median([clock.seconds(round_trip, 4) / 8 for _ in range(REPEATS)]))


def _on_stream(copy: Callable[[], None], stream: "torch.cuda.Stream") -> None:
    with torch.cuda.stream(stream):
        copy()
    stream.synchronize()


def _memory(device: RealDevice, size: int) -> Tensor:
    if device.launches_from_host:
        return torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)


def _median(work: Callable[[], object]) -> float:
    work()
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return float(np.median(found))


def _handed_over(giver: ThreadPoolExecutor, taker: ThreadPoolExecutor, size: int) -> float:
    """Returns the seconds from one thread's word that a tensor is ready to another thread's having copied it."""
    given, taken = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    ready, done = Event(), Event()

    def give() -> list[float]:
        started = []
        for _ in range(REPEATS + 1):
            started.append(time.perf_counter())
            ready.set()
            done.wait()
            done.clear()
        return started

    def take() -> list[float]:
        ended = []
        for _ in range(REPEATS + 1):
            ready.wait()
            ready.clear()
            taken.copy_(given)
            ended.append(time.perf_counter())
            done.set()
        return ended

    ended, started = taker.submit(take), giver.submit(give)
    return float(np.median(np.subtract(ended.result(), started.result())[1:]))
