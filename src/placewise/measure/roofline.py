"""The roofline of this machine's devices, and its links, from short measurements."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from placewise.core.cluster import Cluster, Device
from placewise.measure.clocks import Clock, PureWork, time_work
from placewise.measure.instruments import instrument_of, speed_key
from placewise.measure.links import measure_links
from placewise.run.devices import RealDevice, real_devices


def measure_machine(cluster: Cluster, virtual: Mapping[str, int] | None = None) -> Cluster:
    """Returns the cluster with measured flops, bandwidths, overheads, links and launches."""
    devices = real_devices(cluster, virtual)
    known: dict[object, tuple[float, float, float]] = {}
    measured: list[Device] = []
    for real, device in zip(devices, cluster.devices, strict=True):
        key = speed_key(real)
        if key not in known:
            known[key] = instrument_of(real).run(real, partial(measure_roofline, real))
        flops, bytes_per_second, overhead_seconds = known[key]
        device = replace(device, flops=flops, bytes_per_second=bytes_per_second, overhead_seconds=overhead_seconds)
        measured.append(device)
    links = {(link.source, link.target): link for link in measure_links(devices)}
    launching = next((device for device in devices if device.launches_from_host), devices[0])
    return replace(
        cluster,
        devices=tuple(measured),
        links=tuple(replace(links[link.source, link.target], channel=link.channel) for link in cluster.links),
        dispatch_seconds=instrument_of(launching).launch_seconds(launching),
        description=f"{cluster.description}; measured",
    )


def measure_roofline(device: RealDevice, clock: Clock) -> tuple[float, float, float]:
    """Returns flops per second of a large float32 product, bytes per second of a large addition, seconds of a tiny one."""
    sizes = instrument_of(device).sizes
    rows, elements = sizes.roofline_rows, sizes.roofline_elements
    matrix = torch.rand(rows, rows, device=device.torch_device)
    product = time_work(PureWork(partial(torch.mm, matrix, matrix)), clock).seconds
    del matrix
    given, made = (torch.rand(elements, device=device.torch_device) for _ in range(2))
    addition = time_work(PureWork(partial(torch.add, given, 1.0, out=made)), clock).seconds
    small = torch.rand(1, device=device.torch_device)
    tiny = time_work(PureWork(partial(torch.add, small, 1.0)), clock).seconds
    return 2.0 * rows**3 / product, 2 * 4 * elements / addition, tiny
