"""GPUs: a stream for each device, one for each channel of copies, and events between them.

Memory. Each tensor is allocated in the stream that makes it: an op's in its device's, a copy's in its channel's. PyTorch's
allocator then takes memory back at the launch where the plan frees it, in that stream's order. Where another stream still
reads it (a channel reads its source, a device reads the copy), `record_stream` tells the allocator, which does not reuse the
memory before that stream has passed this point. We leave this to the allocator, and do not hold references until an event,
because the allocator looks at its events only when it needs memory, and our launch loop would have to look all the time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from placewise.core.cluster import Device
from placewise.core.errors import ExecutionError
from placewise.machines.hardware_queues import request_hardware_queues
from placewise.machines.slices import Cut, count_slices
from placewise.run.backends.cpu_memory import give_back_memory
from placewise.run.backends.cuda_graphs import CudaGraphs
from placewise.run.backends.green_contexts import slice_streams
from placewise.run.backends.protocol import LaunchRecorder, Prepared
from placewise.run.devices import RealDevice
from placewise.run.lower.waits import Queue
from placewise.run.step_trace import StepTrace
from placewise.run.storage_copies import copy_storage_over, copy_storage_to

Stream = torch.cuda.Stream

Event = torch.cuda.Event

_BareEvent = torch._C._CudaEventBase  # its methods, without the layer that torch.cuda.Event puts around them

CYCLES_PER_SECOND = 2e9  # of a GPU's clock, about

AHEAD, MIN_WAIT_SECONDS, MAX_WAIT_SECONDS = 3.0, 3e-3, 0.1  # a stream waits thrice as long as the last launches took

_OPENING = Lock()  # two threads must not open a GPU's stream twice


class Cuda:
    """The backend of kind "gpu"."""

    def claim(
        self, devices: Sequence[Device], cluster_name: str, slices: Mapping[str, Cut], claimed: Sequence[RealDevice]
    ) -> list[RealDevice]:
        """Takes cuda:0, cuda:1, ... in the cluster's order; a GPU that is cut gives all of its slices first."""
        known = [f"cuda:{i}" for i in range(_num_gpus())]
        for name, cut in slices.items():
            if name not in known:
                there = ", ".join(known) or "no GPU"
                raise ExecutionError(f"virtual devices: there is no {name!r}; this machine has {there}")
            if count_slices(cut) < 1:
                raise ExecutionError(f"virtual devices: {name} must be cut into at least 1 slice, got {cut}")
        found: list[tuple[str, tuple[int, Cut] | None]] = []  # a GPU, and which of its slices
        for name in known:
            cut = slices.get(name, 0)
            found += [(name, (i, cut)) for i in range(count_slices(cut))] if cut else [(name, None)]
        if len(devices) > len(found):
            wanted = f"cluster {cluster_name!r} has {len(devices)} GPU{'s' if len(devices) > 1 else ''}"
            if not found:
                raise ExecutionError(f"{wanted}, this machine has none: `placewise detect` describes this machine")
            raise ExecutionError(
                f"{wanted}, this machine has {len(found)}: describe it with `placewise detect`, or split a GPU into several "
                "devices (virtual, as in cuda:0=4)"
            )
        return [
            RealDevice(device.name, device.kind, name, launches_from_host=True, slice=part)
            for device, (name, part) in zip(devices, found, strict=False)
        ]

    def reset_peaks(self, devices: Sequence[RealDevice]) -> None:
        """Empties the allocators' caches and starts to count their peaks again."""
        torch.cuda.empty_cache()
        for gpu in set(_allocators(devices).values()):
            torch.cuda.reset_peak_memory_stats(gpu)

    def peak_bytes(self, devices: Sequence[RealDevice]) -> dict[str, int]:
        """Returns the allocators' peaks: by device, or "cuda:0" for all of its slices, which share one."""
        return {name: torch.cuda.max_memory_allocated(gpu) for name, gpu in _allocators(devices).items()}

    def release_memory(self) -> None:
        """Gives back what the host's heap has kept; the GPUs' allocators keep their caches for the next step."""
        give_back_memory()

    def open_streams(self, devices: Sequence[RealDevice]) -> "CudaStreams":
        """Returns the streams of one compiled step."""
        return CudaStreams(devices)

    def recorder_factory(self, devices: Sequence[RealDevice]) -> Callable[[], LaunchRecorder]:
        """Returns what makes the CUDA graphs of a recording."""
        return partial(CudaGraphs, devices)


def _num_gpus() -> int:
    request_hardware_queues()
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _allocators(devices: Sequence[RealDevice]) -> dict[str, str]:
    """Returns the GPU of each allocator, by the name that its peak has."""
    return {device.name if device.slice is None else device.torch_device: device.torch_device for device in devices}


def stream_of(device: RealDevice) -> Stream:
    """Returns the stream that the ops of a GPU, or of a slice of one, are launched on; the same one in every call."""
    if device.slice is None:
        with _OPENING:
            return _gpu_stream(device.torch_device)
    index, cut = device.slice
    return slice_streams(device.torch_device, cut)[index]


@cache
def _gpu_stream(gpu: str) -> Stream:
    return Stream(gpu)  # type: ignore[no-untyped-call]


class CudaStreams:
    """The streams and events of one compiled step (`Streams` in protocol.py)."""

    def __init__(self, devices: Sequence[RealDevice], stream_of: Callable[[RealDevice], Stream] = stream_of) -> None:
        self._devices = devices
        self._gpus = sorted({device.torch_device for device in devices if device.launches_from_host})
        self._streams: dict[Queue, tuple[Stream, Stream]] = {}  # where a queue waits, and where its work ends
        for number, device in enumerate(devices):
            if device.launches_from_host:
                stream = stream_of(device)
                self._streams[number,] = (stream, stream)
        self._events: dict[int, Event] = {}
        self._marks: dict[tuple[int, bool], Event] = {}  # (instruction, is its end)
        self._boundaries: dict[Any, Event] = {}  # between a step and the caller's streams
        self.empty = partial(torch.empty_strided, device="cpu", pin_memory=True)
        self.pin = partial(copy_storage_to, empty=self.empty)
        self.is_pinned = Tensor.is_pinned

    # --- what the lanes call ---

    def enter(self, device: int) -> Prepared:
        """Makes a device's stream the current one."""
        return _entering(self._streams[device,][0])

    def copy(self, source: int, target: int) -> Callable[..., Tensor]:
        """Copies a tensor's storage in the channel's stream; memory of the host must be pinned."""
        leaves, arrives = self._channel((source, target))
        enter_source, enter_target = _entering(leaves), _entering(arrives)
        from_gpu, to_gpu = self._devices[source].launches_from_host, self._devices[target].launches_from_host
        reader = self._streams[target,][0] if to_gpu else None
        memory = {"device": self._devices[target].torch_device} if to_gpu else {"device": "cpu", "pin_memory": True}
        empty = partial(torch.empty_strided, **memory)

        def copy(tensor: Tensor, over: Tensor | None = None) -> Tensor:
            enter_source()
            if arrives is not leaves:
                enter_target()
            made = copy_storage_to(tensor, empty) if over is None else copy_storage_over(tensor, over)
            if from_gpu:
                tensor.record_stream(leaves)
            if reader is not None:
                made.record_stream(reader)
            return made

        return copy

    def record(self, instruction: int, queue: Queue) -> Prepared:
        """Records the event of an instruction in its queue's stream."""
        return partial(_BareEvent.record, self._event(instruction), self._channel(queue)[1])

    def wait(self, instruction: int, queue: Queue) -> Prepared:
        """Makes a queue's stream wait for the event of an instruction."""
        return partial(_BareEvent.wait, self._event(instruction), self._channel(queue)[0])

    def synchronize(self, instruction: int) -> Prepared:
        """Makes the calling thread wait for the event of an instruction."""
        return partial(_BareEvent.synchronize, self._event(instruction))

    def mark(self, instruction: int, is_end: bool, queue: Queue) -> Prepared:
        """Records in the queue's stream when an instruction starts or ends."""
        event = self._marks.setdefault((instruction, is_end), _new_event(True))
        return partial(_BareEvent.record, event, self._channel(queue)[0])

    def stay_ahead(self) -> Prepared:
        """Lets a device's stream wait if it has passed the point of the call before; meanwhile the host launches more."""
        passed = {queue: _new_event() for queue in self._streams if len(queue) == 1}
        before = perf_counter()

        def wait_for_host() -> None:
            nonlocal before
            seconds = min(max(AHEAD * (perf_counter() - before), MIN_WAIT_SECONDS), MAX_WAIT_SECONDS)
            for queue, event in passed.items():
                stream = self._streams[queue][0]
                if event.query():  # type: ignore[no-untyped-call]  # also before it is recorded for the first time
                    keep_busy(stream, seconds)
                event.record(stream)
            before = perf_counter()

        return wait_for_host

    # --- around a step ---

    @contextmanager
    def step(self, trace: StepTrace | None = None) -> Iterator[None]:
        """Orders a step between what the caller's streams have before and what they get next; fills in the trace."""
        device, callers = torch.cuda.current_device(), {gpu: torch.cuda.current_stream(gpu) for gpu in self._gpus}
        if trace is not None:
            self.synchronize_all()
        begin = perf_counter()
        self._wait_for_callers(callers, is_timed=trace is not None)
        try:
            yield
        finally:
            self._make_callers_wait(callers)
            for stream in callers.values():
                torch.cuda.set_stream(stream)
            torch.cuda.set_device(device)
        if trace is not None:
            self._fill_in(trace, begin)

    def synchronize_all(self) -> None:
        """Returns when all GPUs have finished their work."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def _wait_for_callers(self, callers: dict[str, Stream], is_timed: bool) -> None:
        """Makes all streams wait for the caller's streams."""
        for gpu, caller in callers.items():
            event = self._boundaries.setdefault((gpu, is_timed), _new_event(is_timed))
            event.record(caller)
            for stream in self._all_streams():
                if stream.device == caller.device:
                    event.wait(stream)

    def _make_callers_wait(self, callers: dict[str, Stream]) -> None:
        """Makes the caller's streams wait for all streams."""
        for stream in self._all_streams():
            event = self._boundaries.setdefault(stream, _new_event())
            event.record(stream)
            for caller in callers.values():
                if stream.device == caller.device:
                    event.wait(caller)

    def _fill_in(self, trace: StepTrace, begin: float) -> None:
        """Adds the times of what ran on GPUs to a trace, on the clock of the CPU threads."""
        self.synchronize_all()
        starts = {torch.device(gpu): self._boundaries[gpu, True] for gpu in self._gpus}
        for (number, is_end), event in self._marks.items():
            if is_end and number in trace.nbytes:
                first, last = self._marks[number, False], event
                base = starts[last.device]
                times = (base.elapsed_time(first) / 1e3, base.elapsed_time(last) / 1e3)
                trace.times[number] = (begin + times[0], begin + times[1])

    def _all_streams(self) -> list[Stream]:
        return list(dict.fromkeys(stream for pair in self._streams.values() for stream in pair))

    def _event(self, instruction: int) -> Event:
        return self._events.setdefault(instruction, _new_event())

    def _channel(self, queue: Queue) -> tuple[Stream, Stream]:
        """Returns the streams of a queue; a new one for a channel that has none yet.

        A copy between two GPUs has a stream on each: PyTorch copies in the source's current stream, and makes the target's
        current stream wait.
        """
        if queue not in self._streams:
            ends = [self._devices[device] for device in queue]
            gpus = dict.fromkeys(end.torch_device for end in ends if end.launches_from_host)
            streams = [_channel_stream(gpu, *ends) for gpu in gpus]
            self._streams[queue] = (streams[0], streams[-1])
        return self._streams[queue]


def keep_busy(stream: Stream, seconds: float) -> None:
    """Launches a kernel that only waits."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]


def forget_workspaces() -> None:
    """Gives back the memory that cuBLAS keeps for each stream; graphs that were recorded before must not be replayed."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def _entering(stream: Stream) -> Prepared:
    """Returns a call that makes a stream, and its GPU, the current one: torch.cuda.set_stream without its layers."""
    ids = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
    return partial(torch._C._cuda_setStream, **ids)


def _new_event(is_timed: bool = False) -> Event:
    return Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]


@cache
def _channel_stream(gpu: str, source: RealDevice, target: RealDevice) -> Stream:
    """Returns the stream of a channel on a GPU: the same one for all steps, because PyTorch has only 32 to give."""
    return Stream(gpu)  # type: ignore[no-untyped-call]
