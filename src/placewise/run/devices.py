"""Maps a cluster's devices to real ones: GPUs, slices of GPUs, CPU cores."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from placewise.core.cluster import Cluster
from placewise.core.errors import ExecutionError
from placewise.machines.slices import Cut
from placewise.run.backends import BACKENDS, backend_of

if TYPE_CHECKING:
    from placewise.run.backends.protocol import Backend

SLICED_KIND = "gpu"  # the devices that `virtual` can cut into slices


@dataclass(frozen=True)
class RealDevice:
    """The real device for one device of a cluster: an accelerator, a slice of one, or some cores of the host."""

    name: str  # in the cluster
    kind: str  # in the cluster, and of its backend
    torch_device: str  # where its tensors are
    launches_from_host: bool = False  # the calling thread launches its ops on a stream; else its own thread runs them
    threads: int = 0  # for each op that its own thread runs
    slice: tuple[int, Cut] | None = None  # (index, cut): one of the virtual devices that share an accelerator
    cores: tuple[int, ...] = ()  # the processors of its own thread
    rank: int | None = None  # of torch.distributed, if another process runs it; None: this one does
    host_cores: tuple[int, ...] = ()  # the processors that are left for launching and pinning, if other devices need it

    @property
    def pinning_thread(self) -> "RealDevice":
        """The thread that copies what this device makes into pinned memory, on its way to an accelerator."""
        num_threads = max(len(self.host_cores), 1)
        return replace(self, name=f"{self.name} pinning", threads=num_threads, cores=self.host_cores)


def real_devices(cluster: Cluster, virtual: Mapping[str, Cut] | None = None) -> tuple[RealDevice, ...]:
    """Returns the real device for each device of a cluster, in the cluster's order.

    Each backend decides for the devices of its kind (`Backend.claim`). `virtual` says how a GPU is cut into slices, by
    PyTorch's name for the GPU.
    """
    for device in cluster.devices:
        if device.kind not in BACKENDS:
            kinds = " and ".join(BACKENDS)
            raise ExecutionError(
                f"cluster {cluster.name!r}: device {device.name!r} is of kind {device.kind!r}, only {kinds} can be run"
            )
    claimed: dict[str, RealDevice] = {}
    for kind in BACKENDS:
        devices = [device for device in cluster.devices if device.kind == kind]
        slices = dict(virtual or {}) if kind == SLICED_KIND else {}
        if devices or slices:
            found = backend_of(kind).claim(devices, cluster.name, slices, tuple(claimed.values()))
            claimed |= {device.name: device for device in found}
    return tuple(claimed[device.name] for device in cluster.devices)


def group_by_backend(devices: Iterable[RealDevice]) -> list[tuple["Backend", list[RealDevice]]]:
    """Returns each backend that a step needs, with its devices, in the order of the first device of each."""
    found: dict[str, list[RealDevice]] = {}
    for device in devices:
        found.setdefault(device.kind, []).append(device)
    return [(backend_of(kind), mine) for kind, mine in found.items()]
