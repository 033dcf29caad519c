"""How much devices on the same hardware slow each other down: slices of a GPU, shares of a CPU's cores.

They share power and memory bandwidth, which separate devices do not. So matrix products and additions are timed on one
device while none, one, two, ... of its neighbours are busy. Slices of a GPU share more, which is timed in the same way.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Barrier, Event, Thread

import numpy as np
import torch

from placewise.core.profile import Contention
from placewise.measure.instruments import INSTRUMENTS, OpenWork, Repeat, instrument_of, speed_key
from placewise.run.devices import RealDevice

REPEATS = 7


def measure_contention(devices: Sequence[RealDevice]) -> dict[str, Contention]:
    """Returns the factors by kind of device; none for a kind whose first device shares its hardware with no other.

    Where unlike devices share hardware, as slices of different sizes do, each has its own factors, by its name.
    """
    found = {}
    for kind in INSTRUMENTS:
        of_kind = [device for device in devices if device.kind == kind]
        together = [device for device in of_kind if device.torch_device == of_kind[0].torch_device]
        unlike = {speed_key(device): device for device in reversed(together)}  # the first device of each
        for device in reversed(unlike.values()) if len(together) > 1 else ():
            others = [other for other in together if other is not device]
            found[kind if len(unlike) == 1 else device.name] = _measure(device, others)
    return found


def _measure(first: RealDevice, others: Sequence[RealDevice]) -> Contention:
    products = slowdowns(first, _open_products, others, _open_products)
    additions = slowdowns(first, _open_additions, others, _open_additions)
    with_products = slowdowns(first, _open_additions, others, _open_products)
    shared = instrument_of(first).shared_parts(first)
    if shared is None:
        return Contention(products, additions, with_products)
    return Contention(
        products,
        additions,
        with_products,
        slowdowns(first, shared.open_copies, (first, *others), _open_products),
        slowdowns(first, shared.open_cached_additions, others, _open_additions),
        slowdowns(first, shared.open_cached_additions, others, _open_products),
        shared.cache_bytes,
    )


def slowdowns(
    device: RealDevice, open_work: OpenWork, others: Sequence[RealDevice], open_others_work: OpenWork
) -> tuple[float, ...]:
    """Returns the time of some work over its time alone, by the number of other devices that are busy; it never falls.

    Alone it is timed first and last, and the shorter time counts: other work on the machine can only make it longer.
    """
    counts = (*range(len(others) + 1), 0)
    seconds = [_seconds_while_busy(device, open_work, others[:count], open_others_work) for count in counts]
    seconds[0] = min(seconds[0], seconds.pop())
    factors = np.maximum.accumulate(np.array(seconds) / seconds[0])
    return tuple(round(factor, 4) for factor in factors.tolist())


def _seconds_while_busy(
    device: RealDevice, open_work: OpenWork, others: Sequence[RealDevice], open_others_work: OpenWork
) -> float:
    """Returns the median time of some work on a device while all others are busy."""
    stop, started = Event(), Barrier(len(others) + 1)

    def keep_busy(other: RealDevice) -> None:
        with open_others_work(other) as repeat:
            repeat()
            started.wait()
            while not stop.is_set():
                repeat()

    threads = [Thread(target=keep_busy, args=(other,), daemon=True) for other in others]
    for thread in threads:
        thread.start()
    try:
        with open_work(device) as repeat:
            repeat()
            started.wait()
            found = [repeat() for _ in range(REPEATS)]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return float(np.median(found))


@contextmanager
def _open_products(device: RealDevice) -> Iterator[Repeat]:
    instrument = instrument_of(device)
    rows = instrument.sizes.contention_rows
    a, b, out = (torch.rand(rows, rows, device=device.torch_device) for _ in range(3))
    with instrument.open_runs(device, lambda: torch.mm(a, b, out=out), instrument.sizes.contention_runs) as repeat:
        yield repeat


@contextmanager
def _open_additions(device: RealDevice) -> Iterator[Repeat]:
    instrument = instrument_of(device)
    a, b, out = (torch.rand(instrument.sizes.contention_elements, device=device.torch_device) for _ in range(3))
    with instrument.open_runs(device, lambda: torch.add(a, b, out=out), instrument.sizes.contention_runs) as repeat:
        yield repeat
