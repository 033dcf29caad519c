"""How graphs are recorded, with a stand-in for CUDA that follows what it is asked for."""

import contextlib
from typing import Any

import pytest
import torch

from placewise.run.backends.cuda_graphs import CudaGraphs
from placewise.run.devices import RealDevice

GPUS = (
    RealDevice("a", "gpu", "cuda:0", True, slice=(0, 2)),
    RealDevice("b", "gpu", "cuda:0", True, slice=(1, 2)),
    RealDevice("c", "cpu", "cpu", threads=1),
)


class Cuda:
    """What was called, in order, and what fails."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, BaseException] = {}

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.failing.pop(name)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()

    class Graph:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: cuda.call(name)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda gpu: cuda.call("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cuda.call("empty_cache"))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: cuda.call("leave the pool"), raising=False)
    return cuda


def test_a_segment_is_recorded_and_run(cuda: Cuda) -> None:
    graphs = CudaGraphs(GPUS)
    graphs.begin(0, 1)()
    graphs.end(0)()
    graphs.abandon()  # nothing is being recorded
    graphs.reset()
    assert cuda.calls == ["synchronize", "empty_cache", "capture_begin", "capture_end", "replay", "reset"]


@pytest.mark.parametrize("moment", ["capture_begin", "capture_end"])
def test_an_interrupt_leaves_no_stream_recording(cuda: Cuda, moment: str) -> None:
    graphs = CudaGraphs(GPUS)
    cuda.failing = {moment: KeyboardInterrupt()}
    with contextlib.suppress(KeyboardInterrupt):
        graphs.begin(0, 0)()
        graphs.end(0)()
    graphs.abandon()
    assert cuda.calls[-1] == "capture_end"


def test_the_allocator_leaves_the_pool_of_a_recording_that_failed(cuda: Cuda) -> None:
    graphs = CudaGraphs(GPUS)
    graphs.begin(0, 0)()
    cuda.failing = {"capture_end": RuntimeError("operation failed due to a previous error during capture")}
    graphs.abandon()
    assert cuda.calls[-2:] == ["capture_end", "leave the pool"]
    graphs.abandon()
    assert cuda.calls[-1] == "leave the pool"
