"""Stretches of one GPU as CUDA graphs: recorded once, then launched by one call.

All graphs of a GPU share one pool of memory. They are replayed in the order in which they were recorded, each in the stream
that it was recorded in, so what one has freed the next one of that stream may use, as the plan says: the allocator's free
blocks belong to a stream. What other streams read is not freed.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from placewise.run.devices import RealDevice

_BareGraph = torch._C._CUDAGraph  # its methods, without the layer that torch.cuda.CUDAGraph puts around them

_Pool = Any  # what torch calls a pool's handle


class CudaGraphs:
    """The graphs of one compiled step, by stretch."""

    def __init__(self, devices: Sequence[RealDevice]) -> None:
        self._devices = devices
        self._pools: dict[str, _Pool] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._recording: tuple[torch.cuda.CUDAGraph, str] | None = None  # the GPU, too
        for gpu in dict.fromkeys(device.torch_device for device in devices if device.is_gpu):
            torch.cuda.synchronize(gpu)
            self._pools[gpu] = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # while it records, the allocator can't take back what plain steps have left in its cache

    def begin(self, stretch: int, device: int) -> Callable[[], Any]:
        """Begins to record what is launched in a device's stream, which is the current one."""
        gpu = self._devices[device].torch_device

        def begin() -> None:
            graph = self._graphs[stretch] = torch.cuda.CUDAGraph()
            self._recording = (graph, gpu)
            graph.capture_begin(self._pools[gpu], capture_error_mode="thread_local")  # CPU devices may pin memory meanwhile

        return begin

    def end(self, stretch: int) -> Callable[[], Any]:
        """Ends the recording, and launches what was recorded."""

        def end() -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # its ops launch nothing
                self._graphs[stretch].capture_end()
            self._recording = None
            self._graphs[stretch].replay()

        return end

    def replay(self, stretch: int) -> Callable[[], Any]:
        """Launches what was recorded, in the current stream."""
        return partial(_BareGraph.replay, self._graphs[stretch])

    def give_up(self) -> None:
        """Ends a recording that has failed, so that the stream and the allocator can go on."""
        if self._recording is None:
            return
        (graph, gpu), self._recording = self._recording, None
        try:
            graph.capture_end()
        except RuntimeError:  # it says again that the recording has failed, and may leave the allocator in it
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(torch.device(gpu).index or 0, self._pools[gpu])

    def reset(self) -> None:
        """Gives back what the graphs hold; they can't be replayed any more."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
