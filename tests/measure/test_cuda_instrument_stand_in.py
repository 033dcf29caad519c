"""The instrument for GPUs on a stand-in for CUDA, whose work is finished when it is launched: it needs no GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from placewise.measure import cuda_instrument
from placewise.measure.contention import measure_contention
from placewise.measure.cuda_instrument import COPY_BYTES, CudaInstrument
from placewise.measure.instruments import WorkSizes, instrument_of
from placewise.measure.roofline import measure_roofline
from placewise.run.devices import RealDevice

SLICES = [RealDevice(f"gpu:{i}", "gpu", "cpu", launches_from_host=True, slice=(i, 3)) for i in range(3)]
CPU = RealDevice("cpu:0", "cpu", "cpu", threads=1)


class StandIn:
    """Streams that note which of them waits for which, and events that take the time when they are recorded."""

    def __init__(self) -> None:
        self.current = "none"
        self.waits: list[tuple[str, str]] = []
        self.num_streams = 0

    def new_stream(self, *_: object) -> Any:
        self.num_streams += 1
        return self.stream_named(f"stream {self.num_streams}")

    def stream_named(self, name: str) -> Any:
        def wait_stream(other: Any) -> None:
            self.waits.append((name, other.name))

        return SimpleNamespace(name=name, wait_stream=wait_stream, synchronize=lambda: None)

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Event:
    """An event that has passed when it is recorded."""

    def __init__(self, enable_timing: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.time - self.time)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """CUDA's part of PyTorch, as far as the instrument uses it."""
    stand_in = StandIn()
    properties = SimpleNamespace(L2_cache_size=50_000_000)
    fakes = {
        "Stream": stand_in.new_stream,
        "stream": stand_in.use,
        "Event": Event,
        "_sleep": lambda cycles: None,
        "synchronize": lambda device: None,
        "get_device_name": lambda device: "Stand-in",
        "get_device_properties": lambda device: properties,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("zeros", "zeros_like"):  # without a GPU there is no pinned memory
        plain = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, plain=plain, pin_memory=False, **others: plain(*args, **others))
    monkeypatch.setattr(cuda_instrument, "stream_of", lambda device: stand_in.stream_named(device.name))
    monkeypatch.setattr(CudaInstrument, "sizes", WorkSizes(8, 8, 8, 8, 2))
    monkeypatch.setattr(cuda_instrument, "SLICE_COPY_BYTES", 8)  # one processor needs seconds for what a GPU does in none
    monkeypatch.setattr(cuda_instrument, "CACHED_ELEMENTS", 8)
    return stand_in


def test_a_copy_between_gpus_waits_for_one_and_lets_the_other_wait(cuda: StandIn) -> None:
    """There it goes in a stream of its own, which waits for gpu:0 and which gpu:1 waits for; and back in another one."""
    seconds = CudaInstrument().copy_seconds(SLICES[0], SLICES[1])
    assert tuple(seconds) == COPY_BYTES
    assert all(value > 0 for value in seconds.values())
    there, back = "stream 1", "stream 2"
    assert cuda.waits[:4] == [(there, "gpu:0"), ("gpu:1", there), (back, "gpu:1"), ("gpu:0", back)]


def test_copies_to_and_from_the_host(cuda: StandIn) -> None:
    for ends in ((SLICES[0], CPU), (CPU, SLICES[0])):
        assert all(value > 0 for value in CudaInstrument().copy_seconds(*ends).values())
    assert cuda.waits == []


def test_slices_share_copies_and_a_cache(cuda: StandIn) -> None:
    found = measure_contention(SLICES)["gpu"]
    lengths = [len(factors) for factors in (found.compute, found.memory, found.copies, found.cached)]
    assert lengths == [3, 3, 4, 3], "copies are timed while up to three slices are busy"
    assert found.cache_bytes == 50_000_000


def test_unequal_slices_are_measured_each(cuda: StandIn) -> None:
    """Two slices of 8 multiprocessors are alike, one of 16 is not."""
    slices = [replace(device, slice=(i, (8, 8, 16))) for i, device in enumerate(SLICES)]
    assert list(measure_contention(slices)) == ["gpu:0", "gpu:2"]
    assert CudaInstrument().hardware(slices[2]) == "Stand-in, 16 multiprocessors"


def test_products_are_measured_in_each_type_and_only_those_in_tf32_may_use_it(
    cuda: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[tuple[torch.dtype, str], None] = {}
    multiply, settings = torch.mm, torch.backends.cuda.matmul

    def mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen[a.dtype, settings.fp32_precision] = None
        return multiply(a, b)

    monkeypatch.setattr(torch, "mm", mm)
    before = settings.fp32_precision
    found = instrument_of(SLICES[0]).run(SLICES[0], partial(measure_roofline, SLICES[0]))
    assert list(seen) == [
        *((torch.float32, "ieee"), (torch.float32, "tf32"), (torch.bfloat16, "ieee")),
        *((torch.float16, "ieee"), (torch.float64, "ieee")),
    ]
    assert settings.fp32_precision == before
    assert [name for name, _ in found.flops_by_type] == ["tf32", "bfloat16", "float16", "float64"]
    assert min(found.flops, *dict(found.flops_by_type).values()) > 0


def test_names_launches_and_where_ops_run(cuda: StandIn) -> None:
    instrument = instrument_of(SLICES[0])
    assert isinstance(instrument, CudaInstrument)
    assert instrument.hardware(SLICES[0]) == "Stand-in, one of 3 slices"
    assert instrument.launch_seconds(SLICES[0]) > 0
    assert instrument.run(SLICES[1], lambda clock: cuda.current) == "gpu:1"
