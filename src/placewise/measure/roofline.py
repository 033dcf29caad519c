"""The roofline of this machine's devices, and its links, from short measurements."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from placewise.core.cluster import Cluster, Device
from placewise.machines.slices import Cut
from placewise.measure.clocks import Clock, PureWork, time_work
from placewise.measure.instruments import instrument_of, speed_key
from placewise.measure.links import measure_links
from placewise.run.devices import RealDevice, real_devices

DTYPES = {  # of the inputs, by the type that their product computes in
    "float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Roofline:
    """What a device reaches; the fields are those of Device."""

    flops: float
    flops_by_type: tuple[tuple[str, float], ...]
    bytes_per_second: float
    overhead_seconds: float


def measure_machine(cluster: Cluster, virtual: Mapping[str, Cut] | None = None) -> Cluster:
    """Returns the cluster with measured flops, bandwidths, overheads, links and launches."""
    devices = real_devices(cluster, virtual)
    known: dict[object, Roofline] = {}
    measured: list[Device] = []
    for real, device in zip(devices, cluster.devices, strict=True):
        key = speed_key(real)
        if key not in known:
            known[key] = instrument_of(real).run(real, partial(measure_roofline, real))
        measured.append(replace(device, **asdict(known[key])))
    links = {(link.source, link.target): link for link in measure_links(devices)}
    launching = next((device for device in devices if device.launches_from_host), devices[0])
    return replace(
        cluster,
        devices=tuple(measured),
        links=tuple(replace(links[link.source, link.target], channel=link.channel) for link in cluster.links),
        dispatch_seconds=instrument_of(launching).launch_seconds(launching),
        description=f"{cluster.description}; measured",
    )


def measure_roofline(device: RealDevice, clock: Clock) -> Roofline:
    """Returns what large products in each type, a large addition and a tiny one reach."""
    instrument = instrument_of(device)
    flops = {name: _product_flops(device, clock, name, instrument.sizes.roofline_rows) for name in instrument.compute_types}
    elements = instrument.sizes.roofline_elements
    given, made = (torch.rand(elements, device=device.torch_device) for _ in range(2))
    addition = time_work(PureWork(partial(torch.add, given, 1.0, out=made)), clock).seconds
    small = torch.rand(1, device=device.torch_device)
    tiny = time_work(PureWork(partial(torch.add, small, 1.0)), clock).seconds
    return Roofline(flops.pop("float32"), tuple(flops.items()), 2 * 4 * elements / addition, tiny)


def _product_flops(device: RealDevice, clock: Clock, compute_type: str, rows: int) -> float:
    """Returns the flops per second of a large square product in a type."""
    matrix = torch.rand(rows, rows, device=device.torch_device).to(DTYPES[compute_type])
    with _tf32(compute_type == "tf32"):
        seconds = time_work(PureWork(partial(torch.mm, matrix, matrix)), clock).seconds
    return 2.0 * rows**3 / seconds


@contextmanager
def _tf32(is_allowed: bool) -> Iterator[None]:
    """Lets GPUs use TF32 for products of float32 inputs, or not."""
    settings: Any = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if is_allowed else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before
