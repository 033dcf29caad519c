"""What a kind of device must give so that it can be measured.

The rest of measure/ does not know which accelerator it has. A new one is one file here and one line in the table, as it is
in run/backends.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol, TypeVar

from placewise.machines.slices import slice_size
from placewise.measure.clocks import Clock
from placewise.run.devices import RealDevice

INSTRUMENTS = {  # kind of device -> instrument, loaded when one is measured
    "gpu": "placewise.measure.cuda_instrument:CudaInstrument",
    "cpu": "placewise.measure.cpu_instrument:CpuInstrument",
}

Found = TypeVar("Found")

Repeat = Callable[[], float]  # does some work again, and returns the seconds until it has ended

OpenWork = Callable[[RealDevice], AbstractContextManager[Repeat]]  # prepares some work on a device


@dataclass(frozen=True)
class WorkSizes:
    """How large the matrix products and additions are that devices are measured with: enough to keep one busy."""

    roofline_rows: int  # of square matrices
    roofline_elements: int  # of vectors
    contention_rows: int
    contention_elements: int
    contention_runs: int  # that are timed together


@dataclass(frozen=True)
class SharedParts:
    """What devices on the same hardware share besides power and memory bandwidth."""

    open_copies: OpenWork  # from one of them to another
    open_cached_additions: OpenWork  # of vectors that fit in the cache
    cache_bytes: float


class Instrument(Protocol):
    """Measures devices of one kind."""

    sizes: WorkSizes
    compute_types: tuple[str, ...]  # that products are measured in

    def hardware(self, device: RealDevice) -> str:
        """Returns the machine's name for a device."""
        ...

    def run(self, device: RealDevice, measure: Callable[[Clock], Found]) -> Found:
        """Calls `measure` with the device's clock where the device's ops run, and returns what it returns."""
        ...

    def launch_seconds(self, device: RealDevice) -> float:
        """Returns the host's time to launch a small op; 0 if it does not launch the device's ops."""
        ...

    def copy_launch_seconds(self, source: RealDevice, target: RealDevice) -> float:
        """Returns the host's time to launch a copy, with all that waits for it; 0 if it launches for neither device."""
        ...

    def copy_seconds(self, source: RealDevice, target: RealDevice) -> dict[int, float]:
        """Returns the time of a copy by its bytes; both devices are of this kind, or the other one is a CPU device."""
        ...

    def open_runs(self, device: RealDevice, run: Callable[[], object], times: int) -> AbstractContextManager[Repeat]:
        """Gives a function that runs this that many times where the device's ops run; its operands must be on the device."""
        ...

    def shared_parts(self, device: RealDevice) -> SharedParts | None:
        """Returns what a device shares with others on the same hardware; None if only power and memory bandwidth."""
        ...


def instrument_of(device: RealDevice) -> Instrument:
    """Returns the instrument for a device."""
    return _load(device.kind)


@cache
def _load(kind: str) -> Instrument:
    module, _, name = INSTRUMENTS[kind].partition(":")
    instrument: Instrument = getattr(import_module(module), name)()
    return instrument


def speed_key(device: RealDevice) -> tuple[str, int, int]:
    """Returns a key that is the same for equally fast devices: slices of a GPU, equal shares of the cores."""
    return device.torch_device, slice_size(*device.slice) if device.slice else 1, device.threads
