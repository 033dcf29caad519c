"""Segments of a GPU's launches as CUDA graphs: recorded once, then replayed by one call each.

All graphs of a GPU share one memory pool. They are replayed in the order in which they were recorded, each in the stream
that it was recorded in. So a graph may use memory that an earlier one of its stream has freed, as the plan says: the
allocator's free blocks belong to a stream. What other streams read is not freed.
"""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from placewise.run.backends.protocol import Prepared
from placewise.run.devices import RealDevice

_BareGraph = torch._C._CUDAGraph  # its methods, without the layer that torch.cuda.CUDAGraph puts around them

_Pool = Any  # PyTorch's handle of a memory pool


class CudaGraphs:
    """The graphs of one recording of a step, by segment (`LaunchRecorder` in protocol.py)."""

    def __init__(self, devices: Sequence[RealDevice]) -> None:
        self._devices = devices
        self._pools: dict[str, _Pool] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._recording: tuple[torch.cuda.CUDAGraph, str] | None = None  # and its GPU
        for gpu in dict.fromkeys(device.torch_device for device in devices if device.launches_from_host):
            torch.cuda.synchronize(gpu)
            self._pools[gpu] = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # while it records, the allocator can't free blocks that plain steps have cached

    def begin(self, segment: int, device: int) -> Prepared:
        """Begins to record what is launched on a device's stream, which is the current one."""
        gpu = self._devices[device].torch_device

        def begin() -> None:
            graph = self._graphs[segment] = torch.cuda.CUDAGraph()
            self._recording = (graph, gpu)
            graph.capture_begin(self._pools[gpu], capture_error_mode="thread_local")  # other threads may pin memory

        return begin

    def end(self, segment: int) -> Prepared:
        """Ends the recording of a segment, and launches what was recorded."""

        def end() -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # its ops have no kernels
                self._graphs[segment].capture_end()
            self._recording = None
            self._graphs[segment].replay()

        return end

    def replay(self, segment: int) -> Prepared:
        """Launches what was recorded, in the current stream."""
        return partial(_BareGraph.replay, self._graphs[segment])

    def abandon(self) -> None:
        """Ends a recording that has failed, so that the stream and the allocator can be used again."""
        if self._recording is None:
            return
        (graph, gpu), self._recording = self._recording, None
        try:
            graph.capture_end()
        except RuntimeError:  # the recording has failed; the allocator may still use its pool
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(torch.device(gpu).index or 0, self._pools[gpu])

    def reset(self) -> None:
        """Gives back what the graphs hold; they can't be replayed any more."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
