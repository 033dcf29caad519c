"""Clusters by a composed name, such as `3090+1080ti`, `4xA100-nvlink` or `2x(4090+3060)@10GbE`.

    NAME     = HOST | HOSTS @ NETWORK
    HOSTS    = [COUNT x] ( HOST ) [+ [COUNT x] ( HOST ) ...]
    HOST     = [COUNT x] GPU [-nvlink] [+ [COUNT x] GPU [-nvlink] ...] | cpu
    NETWORK  = a number and GbE: 1GbE, 2.5GbE, 10GbE, 100GbE

Every host has a CPU as well: a Ryzen 9 7950X, or an EPYC 7742 if it has a GPU for data centres. The GPUs of `-nvlink` reach
each other by NVLink, all others by PCIe; two GeForce cards or more in a host have eight lanes each. Hosts are called a, b,
c, and their devices `a/gpu:0`. A network card sends one copy at a time, and receives one at a time.
"""

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from placewise.core.cluster import MAX_DEVICES, NO_WORK, Cluster, CopyWork, Device, Link
from placewise.core.errors import ClusterError
from placewise.core.suggestions import did_you_mean
from placewise.machines.presets import (
    A100,
    EPYC_7742,
    GEFORCE_30,
    GIB,
    H100,
    H200,
    K40,
    K80,
    PCIE_3_X16,
    PCIE_4_X8,
    PCIE_4_X16,
    PCIE_LATENCY_SECONDS,
    RTX_3060,
    RTX_4090,
    RYZEN_7950X,
    V100,
    Gpu,
    Machine,
    Nvlink,
    assemble,
    multiples,
)

NETWORK_FRACTION = 0.9  # of a network's raw bandwidth: headers of Ethernet, IP and TCP take 5%

NETWORK_LATENCY_SECONDS = 5e-5  # of a message between two hosts over TCP and one switch; our choice

# NVIDIA Ampere GA102 white paper: 35.6 TFLOPS, 142 in float16 summed in float16, 24 GB, 936 GB/s, PCIe 4.0 x16, NVLink of
# four links with 14.0625 GB/s each way.
RTX_3090 = Gpu(
    "RTX 3090", 35.6e12, 24 * GIB, 936e9, PCIE_4_X16, Nvlink(56.25e9, False),
    peak_flops_by_type=multiples(35.6e12, GEFORCE_30),
)  # fmt: skip

# The same white paper: 29.8 TFLOPS, 10 GB, 760 GB/s, PCIe 4.0 x16, no NVLink.
RTX_3080 = Gpu("RTX 3080", 29.8e12, 10 * GIB, 760e9, PCIE_4_X16, peak_flops_by_type=multiples(29.8e12, GEFORCE_30))

# NVIDIA GeForce GTX 1080 Ti product page: 3,584 cores x 2 x 1.582 GHz, 11 GB, 484 GB/s, PCIe 3.0. In a cycle, a
# multiprocessor has 128 results in float32, 4 in float64, and 2 in float16 (CUDA C programming guide, table of
# arithmetic throughput, compute capability 6.1).
GTX_1080_TI = Gpu(
    "GTX 1080 Ti", 11.3e12, 11 * GIB, 484e9, PCIE_3_X16,
    peak_flops_by_type={"float16": 11.3e12 / 64, "float64": 11.3e12 / 32},
)  # fmt: skip

# NVIDIA T4 data sheet: 8.1 TFLOPS, 65 in float16, 16 GB, 320 GB/s, PCIe 3.0 x16.
T4 = Gpu("T4", 8.1e12, 16 * GIB, 320e9, PCIE_3_X16, peak_flops_by_type={"float16": 65e12, "float64": 8.1e12 / 32})

DATA_CENTRE = {"K40": K40, "K80": K80, "T4": T4, "V100": V100, "A100": A100, "H100": H100, "H200": H200}

GEFORCE = {
    "1080ti": GTX_1080_TI, "3060": RTX_3060, "3080": RTX_3080, "3090": RTX_3090, "4090": RTX_4090
}  # fmt: skip

CATALOGUE = {**GEFORCE, **DATA_CENTRE}

_PART = re.compile(r"(?:(\d+)x)?([^-+@()]+?)(-nvlink)?")

_HOSTS = re.compile(r"(?:(\d+)x)?\(([^()]*)\)")

_NETWORK = re.compile(r"(\d+(?:\.\d+)?)GbE")


def is_composed(name: str) -> bool:
    """Returns whether a name is meant as a composed one: it has a sign of the grammar, or names a GPU of the catalogue."""
    if len(name) > 200 or "/" in name or name.endswith(".toml"):
        return False
    match = _PART.fullmatch(name)
    return any(sign in name for sign in "+@()") or (match is not None and (match[2] in CATALOGUE or name == "cpu"))


def compose(name: str) -> Cluster:
    """Returns the cluster of a composed name; a ClusterError says which part of the name is wrong."""
    rest, at, network = name.partition("@")
    if "(" not in rest and ")" not in rest:
        if at:
            raise _wrong(name, f"a network is between hosts, which stand in parentheses: 2x({rest})@{network or '10GbE'}")
        return _host(name, rest)
    hosts = [cluster for count, host in _hosts(name, rest) for cluster in [_host(name, host)] * count]
    if len(hosts) == 1 and not at:
        return replace(hosts[0], name=name)
    if len(hosts) > 1 and not at:
        raise _wrong(name, f"several hosts need a network: {rest}@10GbE")
    match = _NETWORK.fullmatch(network)
    if match is None or not float(match[1]) > 0:
        raise _wrong(name, f"the network must be like 10GbE, got {network!r}")
    return _join(name, hosts, float(match[1]))


def _hosts(name: str, text: str) -> list[tuple[int, str]]:
    """Returns each kind of host with its number: 2x(4090+3060)+(T4)."""
    found, position = [], 0
    while position < len(text):
        match = _HOSTS.match(text, position)
        if match is None:
            raise _wrong(name, f"expected hosts like 2x(4090+3060), got {text[position:]!r}")
        found.append((_count(name, match[1]), match[2]))
        position = match.end()
        if position < len(text):
            if text[position] != "+" or position + 1 == len(text):
                raise _wrong(name, f"expected '+' and another host, got {text[position:]!r}")
            position += 1
    _check_size(name, sum(count for count, _ in found))
    return found


def _host(name: str, text: str) -> Cluster:
    """Returns one host as a cluster."""
    gpus: list[Gpu] = []
    bridges: list[int] = []  # the part that each GPU has NVLink in, or -1
    is_large = False
    for number, part in enumerate([] if text == "cpu" else text.split("+")):
        match = _PART.fullmatch(part)
        if match is None:
            raise _wrong(name, f"expected a GPU like 4090, 2x3090 or 4xA100-nvlink, got {part!r}")
        count, key, has_nvlink = _count(name, match[1]), match[2], match[3] is not None
        if key not in CATALOGUE:
            raise _wrong(name, f"there is no GPU {key!r} in the catalogue: {did_you_mean(key, CATALOGUE)}")
        if has_nvlink and (CATALOGUE[key].nvlink is None or count < 2):
            need = "it links at least two GPUs" if CATALOGUE[key].nvlink else f"{key} has none"
            raise _wrong(name, f"{part!r} can't have NVLink: {need}")
        _check_size(name, len(gpus) + count)
        gpus += [CATALOGUE[key]] * count
        bridges += [number if has_nvlink else -1] * count
        is_large = is_large or key in DATA_CENTRE
    if len(gpus) > 1:  # a desktop's CPU has 16 lanes for cards
        gpus = [_on_eight_lanes(gpu) if gpu in GEFORCE.values() and not is_large else gpu for gpu in gpus]
    cpu = EPYC_7742 if is_large else RYZEN_7950X
    names = [gpu.name for gpu in gpus]
    words = ", ".join(f"{names.count(gpu)} x {gpu}" for gpu in dict.fromkeys(names))
    machine = Machine(f"composed: {words + ', ' if words else ''}{cpu.name}", tuple(gpus), cpu)
    return assemble(name, machine, lambda source, target: bridges[source] == bridges[target] >= 0)


def _on_eight_lanes(gpu: Gpu) -> Gpu:
    return replace(gpu, pcie_bytes_per_second=min(gpu.pcie_bytes_per_second / 2, PCIE_4_X8))


def _join(name: str, hosts: list[Cluster], gigabits: float) -> Cluster:
    """Returns the hosts with a network between them."""
    letters = string.ascii_lowercase
    names = [letters[i] if len(hosts) <= len(letters) else f"h{i}" for i in range(len(hosts))]
    _check_size(name, sum(host.num_devices for host in hosts))
    network = Connection(gigabits / 8 * 1e9 * NETWORK_FRACTION, NETWORK_LATENCY_SECONDS)
    kinds = dict.fromkeys(host.description.removeprefix("composed: ") for host in hosts)
    words = f"composed: {len(hosts)} hosts over {gigabits:g} Gbit/s Ethernet: {'; '.join(kinds)}"
    return join_hosts(name, names, hosts, lambda source, target: network, words)


class Connection(NamedTuple):
    """What a copy from one host to another takes: of the network, and of the CPUs that send and receive it."""

    bytes_per_second: float
    latency_seconds: float
    source_work: CopyWork = NO_WORK
    target_work: CopyWork = NO_WORK
    delay_seconds: float = 0.0


def join_hosts(
    name: str, names: Sequence[str], hosts: Sequence[Cluster], network: Callable[[int, int], Connection], words: str
) -> Cluster:
    """Returns hosts with a network between them, whose cards send one copy at a time and receive one.

    `network` gives what there is from one host to another.
    """
    devices = [
        replace(device, name=f"{letter}/{device.name}", host=letter)
        for letter, host in zip(names, hosts, strict=True)
        for device in host.devices
    ]
    links = []
    for letter, host in zip(names, hosts, strict=True):
        for link in host.links:
            channel = None if link.channel is None else f"{letter}/{link.channels[0]}"
            links.append(replace(link, source=f"{letter}/{link.source}", target=f"{letter}/{link.target}", channel=channel))
    card = {  # of each device, on its way to the network card
        f"{letter}/{device.name}": np.inf if device.kind == "cpu"
        else float(host.bytes_per_second[d, host.num_devices - 1])
        for letter, host in zip(names, hosts, strict=True)
        for d, device in enumerate(host.devices)
    }  # fmt: skip
    for a in devices:
        for b in devices:
            if a.host != b.host:
                links.append(link_of_hosts(a, b, network(names.index(a.host), names.index(b.host)), card))
    return Cluster(name, tuple(devices), tuple(links), max(host.dispatch_seconds for host in hosts), words)


def link_of_hosts(source: Device, target: Device, network: Connection, to_card: Mapping[str, float]) -> Link:
    """Returns the link between devices of two hosts, whose cards send one copy at a time and receive one.

    A GPU's copies pass its host, at the speed `to_card` (by the device's name), and take none of the GPU's own time.
    """
    hops = sum(device.kind == "gpu" for device in (source, target))
    return Link(
        source.name,
        target.name,
        min(network.bytes_per_second, to_card[source.name], to_card[target.name]),
        network.latency_seconds + hops * PCIE_LATENCY_SECONDS,
        (f"{source.host} sends", f"{target.host} receives"),
        source_work=network.source_work if source.kind == "cpu" else NO_WORK,
        target_work=network.target_work if target.kind == "cpu" else NO_WORK,
        delay_seconds=network.delay_seconds,
    )


def _count(name: str, digits: str | None) -> int:
    if digits is None:
        return 1
    if not 1 <= len(digits) <= 4 or not int(digits):
        raise _wrong(name, f"a number of GPUs or hosts must be from 1 to {MAX_DEVICES}, got {digits[:20]}")
    return int(digits)


def _check_size(name: str, num_devices: int) -> None:
    if num_devices > MAX_DEVICES:
        raise _wrong(name, f"a cluster has at most {MAX_DEVICES} devices")


def _wrong(name: str, rule: str) -> ClusterError:
    return ClusterError(f"cluster {name[:80]!r}: {rule}")


def catalogue_lines() -> list[tuple[str, str, str]]:
    """Returns a row for each GPU of the catalogue: its name, its float32 Tflop/s peak and memory, and its full name."""
    return [
        (key, f"{gpu.peak_flops / 1e12:.3g} Tflop/s, {gpu.memory_bytes // GIB} GiB", gpu.name)
        for key, gpu in CATALOGUE.items()
    ]
