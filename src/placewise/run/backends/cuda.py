"""A GPU's hardware queues: what is launched in more streams than it has queues waits for strangers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from placewise.run.backends.green_contexts import stream_of
from placewise.run.devices import RealDevice
from placewise.run.lower.waits import Queue
from placewise.run.step_notes import Notes
from placewise.run.whole_storages import copy_window_into, copy_window_over

Stream = torch.cuda.Stream

Event = torch.cuda.Event

_BareEvent = torch._C._CudaEventBase  # its methods, without the layer that torch.cuda.Event puts around them


class CudaStreams:
    """Streams and events of one compiled step."""

    def __init__(self, devices: tuple[RealDevice, ...], stream_of: Callable[[RealDevice], Stream] = stream_of) -> None:
        self._devices = devices
        self._gpus = sorted({device.torch_device for device in devices if device.is_gpu})
        self._streams: dict[Queue, tuple[Stream, Stream]] = {}  # where a queue waits, and where its work ends
        for number, device in enumerate(devices):
            if device.is_gpu:
                stream = stream_of(device)
                self._streams[number,] = (stream, stream)
        self._events: dict[int, Event] = {}
        self._marks: dict[tuple[int, bool], Event] = {}
        self._borders: dict[Any, Event] = {}
        self.pin = partial(copy_window_into, empty=partial(torch.empty_strided, device="cpu", pin_memory=True))
        self.is_pinned = Tensor.is_pinned

    # --- what the host's lane calls; meetings.Streams says what each is ---

    def enter(self, device: int) -> Callable[[], Any]:
        """Makes a device's stream the current one."""
        return _entering(self._streams[device,][0])

    def copy(self, source: int, target: int) -> Callable[..., Tensor]:
        """Copies a window's storage in the channel's stream, over an earlier copy's where that is given.

        One of a CPU device must be pinned.
        """
        leaves, arrives = self._channel((source, target))
        enter_source, enter_target = _entering(leaves), _entering(arrives)
        from_gpu, to_gpu = self._devices[source].is_gpu, self._devices[target].is_gpu
        reader = self._streams[target,][0] if to_gpu else None
        memory = {"device": self._devices[target].torch_device} if to_gpu else {"device": "cpu", "pin_memory": True}
        empty = partial(torch.empty_strided, **memory)

        def copy(window: Tensor, over: Tensor | None = None) -> Tensor:
            enter_source()
            if arrives is not leaves:
                enter_target()
            made = copy_window_into(window, empty) if over is None else copy_window_over(window, over)
            if from_gpu:
                window.record_stream(leaves)
            if reader is not None:
                made.record_stream(reader)
            return made

        return copy

    def record(self, instruction: int, queue: Queue) -> Callable[[], Any]:
        """Records the event of an instruction in its queue's stream."""
        return partial(_BareEvent.record, self._event(instruction), self._channel(queue)[1])

    def wait(self, instruction: int, queue: Queue) -> Callable[[], Any]:
        """Lets a queue's stream wait for the event of an instruction."""
        return partial(_BareEvent.wait, self._event(instruction), self._channel(queue)[0])

    def synchronize(self, instruction: int) -> Callable[[], Any]:
        """Lets a CPU device's thread wait for the event of an instruction."""
        return partial(_BareEvent.synchronize, self._event(instruction))

    def mark(self, instruction: int, is_end: bool, queue: Queue) -> Callable[[], Any]:
        """Notes in the queue's stream when an instruction starts or ends."""
        event = self._marks.setdefault((instruction, is_end), _new_event(True))
        return partial(_BareEvent.record, event, self._channel(queue)[0])

    # --- around a step ---

    @contextmanager
    def step(self, notes: Notes | None = None) -> Iterator[None]:
        """Puts a step between what the caller's streams did before and what they do next; fills in the notes."""
        device, callers = torch.cuda.current_device(), {gpu: torch.cuda.current_stream(gpu) for gpu in self._gpus}
        if notes is not None:
            for gpu in self._gpus:
                torch.cuda.synchronize(gpu)
        begin = perf_counter()
        self._follow(callers, is_timed=notes is not None)
        try:
            yield
        finally:
            self._lead(callers)
            for stream in callers.values():
                torch.cuda.set_stream(stream)
            torch.cuda.set_device(device)
        if notes is not None:
            self._fill(notes, begin)

    def synchronize_all(self) -> None:
        """Returns when all GPUs have done their work."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)

    def _follow(self, callers: dict[str, Stream], is_timed: bool) -> None:
        """Lets all streams wait for the caller's."""
        for gpu, caller in callers.items():
            event = self._borders.setdefault((gpu, is_timed), _new_event(is_timed))
            event.record(caller)
            for stream in self._all_streams():
                if stream.device == caller.device:
                    event.wait(stream)

    def _lead(self, callers: dict[str, Stream]) -> None:
        """Lets the caller's streams wait for all."""
        for stream in self._all_streams():
            event = self._borders.setdefault(stream, _new_event())
            event.record(stream)
            for caller in callers.values():
                if stream.device == caller.device:
                    event.wait(caller)

    def _fill(self, notes: Notes, begin: float) -> None:
        """Writes the times of what ran on GPUs, on the clock of the CPU devices."""
        self.synchronize_all()
        starts = {torch.device(gpu): self._borders[gpu, True] for gpu in self._gpus}
        for (number, is_end), event in self._marks.items():
            if is_end and number in notes.nbytes:
                first, last = self._marks[number, False], event
                base = starts[last.device]
                times = (base.elapsed_time(first) / 1e3, base.elapsed_time(last) / 1e3)
                notes.times[number] = (begin + times[0], begin + times[1])

    def _all_streams(self) -> list[Stream]:
        return list(dict.fromkeys(stream for pair in self._streams.values() for stream in pair))

    def _event(self, instruction: int) -> Event:
        return self._events.setdefault(instruction, _new_event())

    def _channel(self, queue: Queue) -> tuple[Stream, Stream]:
        """Returns the streams of a queue. A copy between two GPUs has one on each: PyTorch copies in the source's current
        stream, and lets the target's wait.
        """
        if queue not in self._streams:
            ends = [self._devices[device] for device in queue]
            gpus = dict.fromkeys(end.torch_device for end in ends if end.is_gpu)
            streams = [_channel_stream(gpu, *ends) for gpu in gpus]
            self._streams[queue] = (streams[0], streams[-1])
        return self._streams[queue]


def forget_workspaces() -> None:
    """Gives back the memory that cuBLAS keeps for each stream; graphs from before must not be replayed any more."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def _entering(stream: Stream) -> Callable[[], Any]:
    """Returns what makes a stream, and its GPU, the current one: torch.cuda.set_stream without its layers."""
    ids = {"stream_id": stream.stream_id, "device_index": stream.device_index, "device_type": stream.device_type}
    return partial(torch._C._cuda_setStream, **ids)


def _new_event(is_timed: bool = False) -> Event:
    return Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]


@cache
def _channel_stream(gpu: str, source: RealDevice, target: RealDevice) -> Stream:
    """Returns the stream of a channel on a GPU: the same one for all steps, since PyTorch has only 32 to give."""
    return Stream(gpu)  # type: ignore[no-untyped-call]
