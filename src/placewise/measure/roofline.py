"""The roofline of this machine's devices, and its links, by short measurements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from placewise.core.cluster import Cluster, Device
from placewise.measure.clocks import Clock, alike, run_on, time_work
from placewise.measure.links import measure_launch, measure_links
from placewise.run.devices import RealDevice, real_devices

MATRIX_ROWS = {True: 8192, False: 1024}  # of GPUs, of CPUs

MANY_ELEMENTS = {True: 1 << 27, False: 1 << 24}


@dataclass(frozen=True)
class Plain:
    """Work that changes nothing."""

    run: Callable[[], object]
    changes_inputs: bool = False

    def restore(self) -> None:
        """Does nothing."""


def measure_machine(cluster: Cluster, virtual: Mapping[str, int] | None = None) -> Cluster:
    """Returns the cluster with reachable flops, bandwidths, overheads, links and launches as they are here."""
    devices = real_devices(cluster, virtual)
    known: dict[object, tuple[float, float, float]] = {}
    measured: list[Device] = []
    for real, device in zip(devices, cluster.devices, strict=True):
        if alike(real) not in known:
            known[alike(real)] = run_on(real, partial(_roofline, real))
        flops, bytes_per_second, overhead_seconds = known[alike(real)]
        device = replace(device, flops=flops, bytes_per_second=bytes_per_second, overhead_seconds=overhead_seconds)
        measured.append(device)
    links = {(link.source, link.target): link for link in measure_links(devices)}
    return replace(
        cluster,
        devices=tuple(measured),
        links=tuple(replace(links[link.source, link.target], channel=link.channel) for link in cluster.links),
        dispatch_seconds=measure_launch(devices),
        description=f"{cluster.description}; measured",
    )


def _roofline(device: RealDevice, clock: Clock) -> tuple[float, float, float]:
    """Returns flops a second of a large float32 product, bytes a second of a large addition, seconds of a tiny one."""
    rows, elements = MATRIX_ROWS[device.launches_from_host], MANY_ELEMENTS[device.launches_from_host]
    matrix = torch.rand(rows, rows, device=device.torch_device)
    product = time_work(Plain(partial(torch.mm, matrix, matrix)), clock).seconds
    del matrix
    given, made = (torch.rand(elements, device=device.torch_device) for _ in range(2))
    addition = time_work(Plain(partial(torch.add, given, 1.0, out=made)), clock).seconds
    small = torch.rand(1, device=device.torch_device)
    tiny = time_work(Plain(partial(torch.add, small, 1.0)), clock).seconds
    return 2.0 * rows**3 / product, 2 * 4 * elements / addition, tiny
