"""Stretches of one GPU as CUDA graphs: recorded once, then launched by one call.

All graphs of a GPU share one pool of memory. They are replayed in the order in which they were recorded, each in the stream
that it was recorded in, so what one has freed the next may use, as the plan says. What other streams read is not freed.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from placewise.execute.machine import RealDevice

_BareGraph = torch._C._CUDAGraph  # its methods, without the layer that torch.cuda.CUDAGraph puts around them


class CudaGraphs:
    """The graphs of one compiled step, by stretch."""

    def __init__(self, devices: Sequence[RealDevice]) -> None:
        self._devices = devices
        self._pools = {device.torch_device: torch.cuda.graph_pool_handle() for device in devices if device.is_gpu}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._recording: torch.cuda.CUDAGraph | None = None

    def begin(self, stretch: int, device: int) -> Callable[[], Any]:
        """Begins to record what is launched in a device's stream, which is the current one."""
        pool = self._pools[self._devices[device].torch_device]

        def begin() -> None:
            graph = self._graphs[stretch] = torch.cuda.CUDAGraph()
            graph.capture_begin(pool, capture_error_mode="thread_local")  # CPU devices' threads may pin memory meanwhile
            self._recording = graph

        return begin

    def end(self, stretch: int) -> Callable[[], Any]:
        """Ends the recording, and launches what was recorded."""

        def end() -> None:
            self._recording = None
            self._graphs[stretch].capture_end()
            self._graphs[stretch].replay()

        return end

    def replay(self, stretch: int) -> Callable[[], Any]:
        """Launches what was recorded, in the current stream."""
        return partial(_BareGraph.replay, self._graphs[stretch])

    def give_up(self) -> None:
        """Ends a recording that has failed, so that the stream can be used again."""
        if self._recording is not None:
            graph, self._recording = self._recording, None
            with suppress(RuntimeError):  # it says again that the recording has failed
                graph.capture_end()
