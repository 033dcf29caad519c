"""How much slower devices are that share hardware, while their neighbours work too: slices of a GPU, shares of a CPU.

They share power and memory bandwidth, which separate devices do not. So products and additions are timed on one device while
none, one, two, ... of the others work, and copies between two of them while none, one, two, ... of all do.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Barrier, Event, Thread
from typing import Any

import numpy as np
import torch

from placewise.core.profile import Contention
from placewise.measure.clocks import StreamClock, own_thread
from placewise.run.devices import RealDevice

COMPUTE = {True: (4096, 8), False: (512, 4)}  # of GPUs, of CPUs: rows of square matrices, products in a stretch

MEMORY = {True: (1 << 26, 8), False: (1 << 23, 4)}  # float32 elements, additions in a stretch

COPIED_BYTES, COPIES = 1 << 24, 16  # between slices of a GPU, in a stretch

CACHED_ELEMENTS, CACHED_ADDITIONS = 1 << 20, 50  # 12 MiB in all, which every GPU with slices worth the name has in its cache

REPEATS = 7

Stretch = Callable[[], float | None]  # works for a while; returns when it has ended, with the seconds if it knows them

Make = Callable[[RealDevice], Stretch]


def measure_contention(devices: Sequence[RealDevice]) -> dict[str, Contention]:
    """Returns the factors by kind of device; a device that shares its hardware with none has none."""
    found = {}
    for kind in ("gpu", "cpu"):
        mates = [device for device in devices if device.kind == kind]
        mates = [device for device in mates if device.torch_device == mates[0].torch_device]
        if len(mates) > 1:
            first, others = mates[0], mates[1:]
            found[kind] = Contention(
                _factors(first, _products, others, _products),
                _factors(first, _additions, others, _additions),
                _factors(first, _additions, others, _products),
                *(_on_one_gpu(first, mates) if kind == "gpu" else ()),
            )
    return found


def _on_one_gpu(first: RealDevice, mates: Sequence[RealDevice]) -> tuple[Any, ...]:
    """Returns what only slices of a GPU have: factors of copies between them and of its cache, and how large that is."""
    others = mates[1:]
    return (
        _factors(first, _copies, mates, _products),
        _factors(first, _cached_additions, others, _additions),
        _factors(first, _cached_additions, others, _products),
        float(torch.cuda.get_device_properties(first.torch_device).L2_cache_size),
    )


def _factors(device: RealDevice, make: Make, others: Sequence[RealDevice], make_others: Make) -> tuple[float, ...]:
    """Returns the time of a device's stretch over that alone, by how many of the others work; it never falls.

    Alone it is timed before and after, and the shorter time counts: other work on the machine only makes it longer.
    """
    seconds = [_beside(device, make, others[:count], make_others) for count in (*range(len(others) + 1), 0)]
    seconds[0] = min(seconds[0], seconds.pop())
    factors = np.maximum.accumulate(np.array(seconds) / seconds[0])
    return tuple(round(factor, 4) for factor in factors.tolist())


def _beside(first: RealDevice, make: Make, others: Sequence[RealDevice], make_others: Make) -> float:
    """Returns the median time of a stretch on a device while all others work too."""
    stop, started = Event(), Barrier(len(others) + 1)

    def keep_busy(device: RealDevice) -> None:
        with _thread_of(device) as do:
            stretch = make_others(device)
            do(stretch)
            started.wait()
            while not stop.is_set():
                do(stretch)

    threads = [Thread(target=keep_busy, args=(device,), daemon=True) for device in others]
    for thread in threads:
        thread.start()
    try:
        with _thread_of(first) as do:
            stretch = make(first)
            do(stretch)
            started.wait()
            found = [do(stretch) for _ in range(REPEATS)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return float(np.median(found))


@contextmanager
def _thread_of(device: RealDevice) -> Iterator[Callable[[Stretch], float]]:
    """Gives a function that does a stretch where the device's ops would run, and returns its seconds."""

    def timed(stretch: Stretch) -> float:
        start = time.perf_counter()
        seconds = stretch()
        return time.perf_counter() - start if seconds is None else seconds

    with ExitStack() as stack:
        if device.launches_from_host:
            yield timed
        else:
            pool = stack.enter_context(own_thread(device))
            yield lambda stretch: pool.submit(timed, stretch).result()


def _products(device: RealDevice) -> Stretch:
    rows, times = COMPUTE[device.launches_from_host]
    a, b, out = (torch.rand(rows, rows, device=device.torch_device) for _ in range(3))
    return _repeated(device, lambda: torch.mm(a, b, out=out), times)


def _additions(device: RealDevice) -> Stretch:
    elements, times = MEMORY[device.launches_from_host]
    a, b, out = (torch.rand(elements, device=device.torch_device) for _ in range(3))
    return _repeated(device, lambda: torch.add(a, b, out=out), times)


def _cached_additions(device: RealDevice) -> Stretch:
    """Additions on what a GPU's cache can hold, launched before they start: each is shorter than its launch."""
    from placewise.run.backends.cuda import stream_of

    a, b, out = (torch.rand(CACHED_ELEMENTS, device=device.torch_device) for _ in range(3))
    clock = StreamClock(stream_of(device))
    torch.cuda.synchronize(device.torch_device)
    return lambda: clock.seconds(lambda: torch.add(a, b, out=out), CACHED_ADDITIONS)


def _copies(device: RealDevice) -> Stretch:
    """Copies as a channel between slices of a GPU does: in a stream that has no multiprocessors of its own."""
    given, taken = (torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device.torch_device) for _ in range(2))
    stream = torch.cuda.Stream(device.torch_device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device.torch_device)

    def on_stream() -> None:
        with torch.cuda.stream(stream):
            for _ in range(COPIES):
                taken.copy_(given, non_blocking=True)
        stream.synchronize()

    return on_stream


def _repeated(device: RealDevice, run: Callable[[], object], times: int) -> Stretch:
    def all_runs() -> None:
        for _ in range(times):
            run()

    if not device.launches_from_host:
        return all_runs
    from placewise.run.backends.cuda import stream_of

    stream = stream_of(device)
    torch.cuda.synchronize(device.torch_device)  # the operands are there

    def on_stream() -> None:
        with torch.cuda.stream(stream):
            all_runs()
        stream.synchronize()

    return on_stream
