"""Which piece of this machine each device of a cluster is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from placewise.core.cluster import Cluster, Device
from placewise.core.errors import ExecutionError
from placewise.machines.detect import processors
from placewise.machines.hardware_queues import want_queues
from placewise.run.backends.cpu_memory import keep_freed_memory

MANY_CORES = 8  # of so many and more, two or an eighth are left beside GPUs: to launching and to pinning; of fewer one


@dataclass(frozen=True)
class RealDevice:
    """One device of a cluster as a piece of this machine: a GPU, a slice of one, or a worker thread with its cores."""

    name: str  # the cluster's name of it
    torch_device: str  # "cuda:0", "cuda:1", ..., or "cpu"
    threads: int  # of a CPU device: how many cores are its own; 0 for a GPU
    slice: tuple[int, int] | None = None  # (index, count): one of `count` virtual devices that share that GPU
    cores: tuple[int, ...] = ()  # of a CPU device: the numbers of its processors
    left: tuple[int, ...] = ()  # of a CPU device beside GPUs: the processors that are left to the host

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, or a slice of one."""
        return self.torch_device != "cpu"

    @property
    def pinning(self) -> "RealDevice":
        """The piece of the machine that copies what a CPU device makes into pinned memory, on its way to GPUs."""
        return replace(self, name=f"{self.name} pinning", threads=max(len(self.left), 1), cores=self.left)


def real_devices(cluster: Cluster, virtual: Mapping[str, int] | None = None) -> tuple[RealDevice, ...]:
    """Returns the piece of this machine that each device of a cluster is, in the cluster's order.

    Devices of kind "gpu" are cuda:0, cuda:1, ... in that order; with `virtual` = {"cuda:0": 4} the first four are the
    four slices of cuda:0. Devices of kind "cpu" share this process's cores in equal parts, at least one each. Beside GPUs
    one core is left to the host, which launches for them; of eight and more two, or an eighth: tensors are pinned there too.
    """
    gpus = [device for device in cluster.devices if device.kind == "gpu"]
    cpus = [device for device in cluster.devices if device.kind == "cpu"]
    for device in cluster.devices:
        if device.kind not in ("gpu", "cpu"):
            raise ExecutionError(
                f"cluster {cluster.name!r}: device {device.name!r} is of kind {device.kind!r}, only gpu and cpu can be run"
            )
    found = {**_place_gpus(gpus, dict(virtual or {}), cluster.name), **_place_cpus(cpus, beside_gpus=bool(gpus))}
    return tuple(found[device.name] for device in cluster.devices)


def _place_gpus(gpus: list[Device], virtual: dict[str, int], cluster: str) -> dict[str, RealDevice]:
    count = _num_gpus() if gpus or virtual else 0
    known = [f"cuda:{i}" for i in range(count)]
    for name, pieces in virtual.items():
        if name not in known:
            raise ExecutionError(f"virtual devices: there is no {name!r}; this machine has {', '.join(known) or 'no GPU'}")
        if pieces < 1:
            raise ExecutionError(f"virtual devices: {name} must be cut into at least 1, it is {pieces}")
    places: list[tuple[str, tuple[int, int] | None]] = []
    for name in known:
        pieces = virtual.get(name, 0)
        places += [(name, (i, pieces)) for i in range(pieces)] if pieces else [(name, None)]
    if len(gpus) > len(places):
        raise ExecutionError(
            f"cluster {cluster!r}: has {len(gpus)} GPUs, this machine has {len(places)}: describe this machine with "
            "placewise detect, or cut a GPU into virtual devices (--virtual cuda:0=4)"
        )
    pairs = zip(gpus, places, strict=False)
    return {gpu.name: RealDevice(gpu.name, name, 0, piece) for gpu, (name, piece) in pairs}


def _num_gpus() -> int:
    import torch

    want_queues()
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _place_cpus(cpus: list[Device], beside_gpus: bool) -> dict[str, RealDevice]:
    if cpus:
        keep_freed_memory()
    cores = processors()
    num_left = 0
    if beside_gpus and len(cores) > len(cpus):  # ops on all cores would wait for one that is busy with other work
        num_left = min(max(2, len(cores) // 8) if len(cores) >= MANY_CORES else 1, len(cores) - len(cpus))
    cores, left = cores[: len(cores) - num_left], cores[len(cores) - num_left :]
    share = max(len(cores) // max(len(cpus), 1), 1)
    found = {}
    for i, device in enumerate(cpus):
        own = tuple(cores[(i * share + k) % len(cores)] for k in range(share))  # fewer cores than devices: they are shared
        found[device.name] = RealDevice(device.name, "cpu", share, None, own, tuple(left))
    return found
