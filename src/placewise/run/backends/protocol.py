"""What a kind of device must give so that a placed step can run on it: the executor's contract on one page.

A step runs in *lanes*, straight-line functions that codegen/lanes.py writes. A device is run in one of two ways:

- **By a thread of its own.** The thread runs the device's lane, op by op, in the host's memory, and waits for other threads
  by `cpu_threads.Signal`. Such a backend is a `Backend`.
- **From the host** (`RealDevice.launches_from_host`). The calling thread runs one lane that launches the ops of all such
  devices, in launch order, and does not wait for them: every device has a stream, every channel of copies has one, and
  streams wait for each other's events. Such a backend is a `StreamBackend`.

The lanes call what `Streams` and `LaunchRecorder` prepare for them, so the rest of run/ does not know which accelerator it
has. A new backend is one file here and one line in `BACKENDS`. One step can have devices with threads and those of one
StreamBackend.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from placewise.core.cluster import Device
from placewise.machines.slices import Cut
from placewise.run.devices import RealDevice
from placewise.run.lower.instructions import CopyTensor
from placewise.run.lower.waits import Queue
from placewise.run.step_trace import StepTrace
from placewise.run.storage_copies import Empty

Prepared = Callable[[], Any]  # made once, when lanes are written; called in every step


class Backend(Protocol):
    """A kind of device of this machine."""

    def claim(
        self, devices: Sequence[Device], cluster_name: str, slices: Mapping[str, Cut], claimed: Sequence[RealDevice]
    ) -> list[RealDevice]:
        """Returns the real device for each of these devices of a cluster, in the cluster's order.

        `slices` says how real devices are cut into virtual ones, by PyTorch's name for each. `claimed` are the
        real devices that other backends have claimed already. An ExecutionError says what this machine lacks.
        """
        ...

    def reset_peaks(self, devices: Sequence[RealDevice]) -> None:
        """Starts to count the peaks of memory again, without cached blocks whose sizes suited other steps."""
        ...

    def peak_bytes(self, devices: Sequence[RealDevice]) -> dict[str, int]:
        """Returns the peak of each allocator since the last reset: by device, or by the PyTorch device that slices share."""
        ...

    def release_memory(self) -> None:
        """Gives back memory that is kept from one step to the next; called when a step is closed."""
        ...


class StreamBackend(Backend, Protocol):
    """A kind of device that the host launches on."""

    def open_streams(self, devices: Sequence[RealDevice]) -> "Streams":
        """Returns the streams of one compiled step; `devices` are all of the step's, also those that have threads."""
        ...

    def recorder_factory(self, devices: Sequence[RealDevice]) -> "Callable[[], LaunchRecorder] | None":
        """Returns what makes the recorder of each recording; None if launches can't be recorded."""
        ...


class Streams(Protocol):
    """The streams and events of one compiled step, for the host's lane.

    A device is its number among the step's devices; a queue is a device, or the source and target of a channel.
    """

    def enter(self, device: int) -> Prepared:
        """Makes a device's stream the current one."""
        ...

    def copy(self, source: int, target: int) -> Callable[..., Tensor]:
        """Copies a tensor's storage in the channel's stream; over an earlier copy, if that is the second argument.

        Memory of the host must be pinned.
        """
        ...

    def pin(self, tensor: Tensor) -> Tensor:
        """Returns the same view of a copy of its storage in pinned memory; the tensor itself if copies need none."""
        ...

    @property
    def empty(self) -> Empty:
        """Makes pinned memory, as torch.empty_strided does; any memory of the host if copies need no pinned one."""
        ...

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in pinned memory, or copies need none."""
        ...

    def record(self, instruction: int, queue: Queue) -> Prepared:
        """Records the event of an instruction in its queue's stream."""
        ...

    def wait(self, instruction: int, queue: Queue) -> Prepared:
        """Makes a queue's stream wait for the event of an instruction."""
        ...

    def synchronize(self, instruction: int) -> Prepared:
        """Makes the calling thread wait for the event of an instruction."""
        ...

    def mark(self, instruction: int, is_end: bool, queue: Queue) -> Prepared:
        """Records in the queue's stream when an instruction starts or ends, for the trace."""
        ...

    def stay_ahead(self) -> Prepared:
        """Lets the devices wait if they may have caught up with the host since the call before."""
        ...

    def step(self, trace: StepTrace | None = None) -> AbstractContextManager[None]:
        """Orders a step after what the caller has launched before, and before what it launches next.

        Fills in the times of a trace.
        """
        ...

    def synchronize_all(self) -> None:
        """Returns when all devices have finished their work."""
        ...


class Network(Protocol):
    """What moves tensors between the processes that run one step together."""

    def sender(self, copy: CopyTensor) -> Callable[..., None]:
        """Returns what begins to send a tensor's storage, given views of it; it does not wait."""
        ...

    def finisher(self, copy: CopyTensor) -> Prepared:
        """Returns what waits until it has been sent, so that its memory may be written."""
        ...

    def receiver(self, copy: CopyTensor, empty: Empty) -> Callable[[], tuple[Tensor, ...]]:
        """Returns what waits for it and returns these views, in memory that `empty` makes."""
        ...

    def step(self) -> AbstractContextManager[None]:
        """Tells the other processes that this one is in a step and, if it fails, why."""
        ...

    def share(self, values: list[Any], devices: Sequence[int], drawing: int | None) -> list[Any]:
        """Returns values with each taken from the process of its device; ends when all processes are here.

        `drawing` is the device whose process's random generator all others take over.
        """
        ...

    def collect(self, tensor: Tensor, device: int) -> None:
        """Writes the value that a device's process has over this process's tensor."""
        ...


class LaunchRecorder(Protocol):
    """Records a step's segments of launches once, and replays each by one call."""

    def begin(self, segment: int, device: int) -> Prepared:
        """Begins to record what is launched on a device's stream, which is the current one."""
        ...

    def end(self, segment: int) -> Prepared:
        """Ends the recording of a segment, and launches what was recorded."""
        ...

    def replay(self, segment: int) -> Prepared:
        """Launches what was recorded, in the current stream."""
        ...

    def abandon(self) -> None:
        """Ends a recording that has failed, so that its stream can be used again."""
        ...

    def reset(self) -> None:
        """Gives back what the recording holds; it can't be replayed any more."""
        ...
