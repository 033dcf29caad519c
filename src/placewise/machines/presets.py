"""Clusters by name: machines that people have, and those of the papers.

A device's figures are the peaks of its data sheet times a fraction that real work achieves. The fractions, overheads and
latencies below are round numbers that we chose, not measurements: `placewise profile` measures your own machine, and a
calibration fits the K40 and K80 machines to the papers' tables.

Flops are given by type: float32 without TF32, and other types as tensor cores compute them, without sparsity and with sums
in float32, which is what PyTorch asks for. The papers' machines have one speed for all types: their models are in float32.

The links and their channels, such as `gpu:0 up`:

    GPU -> CPU              PCIe; every copy that leaves a GPU over PCIe uses its channel `up`
    CPU -> GPU              PCIe; uses the target's channel `down`
    GPU -> GPU, PCIe        through the host, up from the source and down to the target, pipelined in chunks: the
                            bandwidth of the slower hop, the latency of both; uses the source's channel `up`
    GPU -> GPU, NVLink      a channel for each pair, or one channel to a switch for all targets of a GPU

A copy uses one channel, so copies from two GPUs to a third over PCIe do not wait for each other on the way down: this
contention is not modelled.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ClusterError
from placewise.core.suggestions import did_you_mean

GIB = 2**30

GPU_FLOPS_FRACTION = 0.7  # of a type's peak, in large matrix products: an H200 reached 0.77 in float32, 0.80 in bfloat16

CPU_FLOPS_FRACTION = 0.5  # of cores x base clock x width: wide vectors lower the clock, and threads must synchronize

MEMORY_FRACTION = 0.8  # of the peak bandwidth of a device's memory

LINK_FRACTION = 0.8  # of a link's raw bandwidth, from pinned memory

DISPATCH_SECONDS = 1e-5  # host time per launch: between a bare kernel launch (5 us) and eager PyTorch (about 20 us)

TENSORFLOW_DISPATCH_SECONDS = 0.0  # on the papers' machines: TensorFlow launches ops from many threads

GPU_OVERHEAD_SECONDS = 5e-6  # from the end of a kernel to the start of the next, and the ramp-up of a small kernel

KEPLER_OVERHEAD_SECONDS = 1e-5  # the same on GPUs of 2013

CPU_OVERHEAD_SECONDS = 5e-6  # to wake the threads and wait for the last one

PCIE_LATENCY_SECONDS = 1e-5  # per hop, mostly to start the copy engine

NVLINK_LATENCY_SECONDS = 5e-6

PCIE_3_X16 = 15.75e9  # bytes per second each way: 16 lanes x 8 GT/s x 128/130 (PCI Express base specification 3.0)

PCIE_4_X16 = 2 * PCIE_3_X16  # 16 GT/s per lane (4.0)

PCIE_5_X16 = 4 * PCIE_3_X16  # 32 GT/s per lane (5.0); an H200 reached 55 GB/s, our fraction gives 50

PCIE_4_X8 = PCIE_4_X16 / 2


@dataclass(frozen=True)
class Nvlink:
    """Direct links from a GPU to others: a bandwidth for each pair, or one port that all targets share."""

    peak_bytes_per_second: float  # one way
    shared_port: bool


@dataclass(frozen=True)
class Gpu:
    """The data sheet of a GPU; we take "12 GB" as 12 GiB, which is within 2% of what the driver reports (without ECC)."""

    name: str
    peak_flops: float  # float32 without tensor cores, at boost clock
    memory_bytes: int
    peak_bytes_per_second: float
    pcie_bytes_per_second: float = PCIE_3_X16  # raw, one way
    nvlink: Nvlink | None = None
    overhead_seconds: float = GPU_OVERHEAD_SECONDS
    peak_flops_by_type: Mapping[str, float] = field(default_factory=dict)  # of other types


@dataclass(frozen=True)
class Cpu:
    """One CPU socket as a device, with the memory of the whole host."""

    name: str
    num_cores: int
    clock_hertz: float  # the base clock
    flops_per_cycle: int  # float32, per core
    peak_bytes_per_second: float
    memory_bytes: int
    speed_by_type: Mapping[str, float] = field(default_factory=dict)  # of other types, as multiples of float32's


AVX2 = 32  # flops per cycle: 2 FMA units x 8 floats x 2 (Intel 64 and AMD64 optimization manuals)

AVX512 = 64  # 2 FMA units x 16 floats x 2

AVX512_HALF = 2.0  # times float32's speed: VDPBF16PS (AVX512_BF16) and FMA of 32 numbers (AVX512_FP16)

AMX = 10.0  # times float32's speed, as Intel reports for whole models (launch of the 4th Xeon generation); the peak is 32

NO_HALF = 0.05  # times float32's speed, in a type without such instructions: PyTorch falls back to plain loops

FLOAT64 = 0.5  # times float32's speed: half as many numbers in a vector

# NVIDIA Tesla K40 board specification (BD-06902): 4.29 TFLOPS at 745 MHz, 288 GB/s, 12 GB, PCIe 3.0 x16.
K40 = Gpu("K40", 4.29e12, 12 * GIB, 288e9, overhead_seconds=KEPLER_OVERHEAD_SECONDS)

# NVIDIA Tesla K80 board specification (BD-07317): 8.74 TFLOPS with boost and 480 GB/s for a board of two GPUs; this is
# one of them. 12 GB per GPU, of which ECC leaves the 11 that Post states.
K80 = Gpu("K80", 4.37e12, 11 * GIB, 240e9, overhead_seconds=KEPLER_OVERHEAD_SECONDS)

# NVIDIA Tesla V100 data sheet (SXM2): 15.7 TFLOPS, 125 with tensor cores, 7.8 in float64, 16 GB, 900 GB/s, 6 NVLinks of 25
# GB/s each way: 2 to each other GPU. Its tensor cores know neither TF32 nor bfloat16.
V100_TYPES = {"float16": 125e12, "float64": 7.8e12}
V100 = Gpu("V100", 15.7e12, 16 * GIB, 900e9, nvlink=Nvlink(50e9, shared_port=False), peak_flops_by_type=V100_TYPES)

# NVIDIA A100 80GB data sheet (SXM4): 19.5 TFLOPS (tensor cores in float64 too), 156 in TF32, 312 in bfloat16 and float16,
# 2,039 GB/s, NVLink 600 GB/s both ways together, PCIe 4.0.
A100_TYPES = {"tf32": 156e12, "bfloat16": 312e12, "float16": 312e12, "float64": 19.5e12}
A100 = Gpu("A100", 19.5e12, 80 * GIB, 2039e9, PCIE_4_X16, Nvlink(300e9, shared_port=True), peak_flops_by_type=A100_TYPES)

# NVIDIA H100 data sheet (SXM5): 67 TFLOPS (tensor cores in float64 too), 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways
# together, PCIe 5.0. Its 989 in TF32, 1,979 in bfloat16 and float16 and 3,958 in float8 are with sparsity: twice as many.
H100_TYPES = {"tf32": 494.5e12, "bfloat16": 989.5e12, "float16": 989.5e12, "float64": 67e12, "float8": 1979e12}
H100 = Gpu("H100", 67e12, 80 * GIB, 3350e9, PCIE_5_X16, Nvlink(450e9, shared_port=True), peak_flops_by_type=H100_TYPES)

# NVIDIA H200 data sheet (SXM): 141 GB (the driver reports 139 GiB), 4.8 TB/s, all else as on the H100.
H200 = replace(H100, name="H200", memory_bytes=139 * GIB, peak_bytes_per_second=4800e9)


# Tables of NVIDIA's white papers on Ampere (GA102) and Ada: multiples of the float32 peak. GeForce cards sum up in float32
# at half the rate of sums in float16.
GEFORCE_30 = {"tf32": 1.0, "bfloat16": 2.0, "float16": 2.0, "float64": 1 / 64}
GEFORCE_40 = {**GEFORCE_30, "float8": 4.0}


def multiples(peak_flops: float, times: Mapping[str, float]) -> Mapping[str, float]:
    """Returns the peaks of other types, from the peak in float32 and how many times as fast they are."""
    return {name: factor * peak_flops for name, factor in times.items()}


# NVIDIA Ada GPU architecture white paper: 82.6 TFLOPS, 24 GB, 1,008 GB/s, PCIe 4.0 x16, no NVLink.
RTX_4090 = Gpu("RTX 4090", 82.6e12, 24 * GIB, 1008e9, PCIE_4_X16, peak_flops_by_type=multiples(82.6e12, GEFORCE_40))

# NVIDIA GeForce RTX 3060 (12 GB) product page: 3,584 cores x 2 x 1.78 GHz, 192 bit x 15 Gbit/s, PCIe 4.0 x16.
RTX_3060 = Gpu("RTX 3060", 12.7e12, 12 * GIB, 360e9, PCIE_4_X16, peak_flops_by_type=multiples(12.7e12, GEFORCE_30))

# NVIDIA GeForce RTX 40 laptop product page: 3,072 cores, 1,470 to 2,370 MHz depending on the power limit (1,890 here), 8 GB,
# 128 bit x 16 Gbit/s, PCIe 4.0 x8.
RTX_4060_LAPTOP = Gpu(
    "RTX 4060 Laptop", 11.6e12, 8 * GIB, 256e9, PCIE_4_X8, peak_flops_by_type=multiples(11.6e12, GEFORCE_40)
)

# HDP only says "Haswell". Intel Xeon E5-2699 v3 product page: 18 cores, 2.3 GHz, 68 GB/s. The memory is our choice.
HASWELL = Cpu("Haswell", 18, 2.3e9, AVX2, 68e9, 128 * GIB)

# Post says 8-core Broadwell and 26 GB. Intel Xeon E5-2699 v4 product page: 2.2 GHz, 76.8 GB/s.
BROADWELL = Cpu("Broadwell", 8, 2.2e9, AVX2, 76.8e9, 26 * GIB)

NO_HALF_TYPES = {"bfloat16": NO_HALF, "float16": NO_HALF, "float64": FLOAT64}

AVX512_BF16_TYPES = {"bfloat16": AVX512_HALF, "float16": NO_HALF, "float64": FLOAT64}

AMX_TYPES = {"bfloat16": AMX, "float16": AVX512_HALF, "float64": FLOAT64}

# Intel Xeon E5-2698 v4 product page: 20 cores, 2.2 GHz, 76.8 GB/s; NVIDIA DGX-1 data sheet: 512 GB.
XEON_2698 = Cpu("Xeon E5-2698 v4", 20, 2.2e9, AVX2, 76.8e9, 512 * GIB, NO_HALF_TYPES)

# AMD EPYC 7742 product page: 64 cores, 2.25 GHz, 204.8 GB/s; NVIDIA DGX A100 data sheet: 2 TB.
EPYC_7742 = Cpu("EPYC 7742", 64, 2.25e9, AVX2, 204.8e9, 2048 * GIB, NO_HALF_TYPES)

# NVIDIA DGX H100 data sheet: Xeon 8480C of 56 cores, 2.0 GHz, 2 TB; 8 channels of DDR5-4800. It has AMX (Sapphire Rapids).
XEON_8480 = Cpu("Xeon 8480C", 56, 2.0e9, AVX512, 307.2e9, 2048 * GIB, AMX_TYPES)

# AMD Ryzen 9 7950X product page: 16 cores, 4.5 GHz, 2 channels of DDR5-5200; its AVX-512 (also of bfloat16) runs in two
# halves. The memory is our choice.
RYZEN_7950X = Cpu("Ryzen 9 7950X", 16, 4.5e9, AVX2, 83.2e9, 64 * GIB, AVX512_BF16_TYPES)

# AMD Ryzen 7 7840HS product page: 8 cores, 3.8 GHz, 2 channels of DDR5-5600. The memory is our choice.
RYZEN_7840HS = Cpu("Ryzen 7 7840HS", 8, 3.8e9, AVX2, 89.6e9, 16 * GIB, AVX512_BF16_TYPES)


@dataclass(frozen=True)
class Machine:
    """The hardware of one machine."""

    description: str
    gpus: tuple[Gpu, ...]
    cpu: Cpu
    dispatch_seconds: float = DISPATCH_SECONDS


def _papers(num_gpus: int, gpu: Gpu, cpu: Cpu, paper: str) -> Machine:
    gigabytes = gpu.memory_bytes // GIB
    description = f"{paper} machine: {num_gpus} x {gpu.name} of {gigabytes} GB, {cpu.num_cores}-core {cpu.name}, PCIe 3"
    return Machine(description, (gpu,) * num_gpus, cpu, TENSORFLOW_DISPATCH_SECONDS)


PRESETS: dict[str, Machine] = {
    **{f"{n}xK40": _papers(n, K40, HASWELL, "HDP's") for n in range(1, 9)},
    **{f"{n}xK80": _papers(n, K80, BROADWELL, "Post's") for n in (2, 4, 8)},
    "4xV100-nvlink": Machine("4 V100 SXM2 of 16 GB, two NVLinks for every pair, PCIe 3", (V100,) * 4, XEON_2698),
    "8xA100-nvlink": Machine("8 A100 SXM4 of 80 GB on an NVSwitch, PCIe 4", (A100,) * 8, EPYC_7742),
    "8xH100-nvlink": Machine("8 H100 SXM5 of 80 GB on an NVSwitch, PCIe 5", (H100,) * 8, XEON_8480),
    "2xH200": Machine(
        "2 H200 SXM of 141 GB on an NVSwitch, a quarter of a board of 8, PCIe 5",
        (H200, H200),
        replace(XEON_8480, memory_bytes=512 * GIB),
    ),
    "4090+3060": Machine(
        "desktop: RTX 4090 of 24 GB and RTX 3060 of 12 GB, 8 lanes of PCIe 4 each, Ryzen 9 7950X",
        (replace(RTX_4090, pcie_bytes_per_second=PCIE_4_X8), replace(RTX_3060, pcie_bytes_per_second=PCIE_4_X8)),
        RYZEN_7950X,
    ),
    "laptop": Machine("laptop: RTX 4060 of 8 GB, Ryzen 7 7840HS, 8 lanes of PCIe 4", (RTX_4060_LAPTOP,), RYZEN_7840HS),
}


def preset(name: str) -> Cluster:
    """Returns the preset cluster with this name."""
    if name not in PRESETS:
        raise ClusterError(f"unknown preset {name!r}: {did_you_mean(name, PRESETS)}")
    machine = PRESETS[name]
    return assemble(name, machine, lambda source, target: machine.gpus[source].nvlink is not None)


def is_preset(cluster: Cluster) -> bool:
    """Returns whether a cluster is the preset of its name."""
    return cluster.name in PRESETS and preset(cluster.name).digest == cluster.digest


def assemble(name: str, machine: Machine, can_reach: Callable[[int, int], bool]) -> Cluster:
    """Returns the machine as a cluster: its GPUs, then its CPU.

    `can_reach(source, target)` returns whether one GPU can copy to another directly, not through the host.
    """
    gpus = [(f"gpu:{i}", gpu) for i, gpu in enumerate(machine.gpus)]
    links = []
    for i, (source, gpu) in enumerate(gpus):
        for j, (target, other) in enumerate(gpus):
            if i != j:
                links.append(_gpu_link(source, gpu, target, other, can_reach(i, j)))
        bytes_per_second = gpu.pcie_bytes_per_second * LINK_FRACTION
        links.append(Link(source, "cpu:0", bytes_per_second, PCIE_LATENCY_SECONDS, f"{source} up"))
        links.append(Link("cpu:0", source, bytes_per_second, PCIE_LATENCY_SECONDS, f"{source} down"))
    devices = [_gpu_device(device, gpu) for device, gpu in gpus] + [_cpu_device("cpu:0", machine.cpu)]
    return Cluster(name, tuple(devices), tuple(links), machine.dispatch_seconds, machine.description)


def _gpu_link(source: str, gpu: Gpu, target: str, other: Gpu, direct: bool) -> Link:
    if direct and gpu.nvlink and gpu.nvlink == other.nvlink:
        channel = f"{source} nvlink" if gpu.nvlink.shared_port else None
        return Link(source, target, gpu.nvlink.peak_bytes_per_second * LINK_FRACTION, NVLINK_LATENCY_SECONDS, channel)
    bytes_per_second = min(gpu.pcie_bytes_per_second, other.pcie_bytes_per_second) * LINK_FRACTION
    num_hops = 1 if direct else 2
    return Link(source, target, bytes_per_second, num_hops * PCIE_LATENCY_SECONDS, f"{source} up")


def _gpu_device(name: str, gpu: Gpu) -> Device:
    return Device(
        name=name,
        kind="gpu",
        memory_bytes=gpu.memory_bytes,
        flops=gpu.peak_flops * GPU_FLOPS_FRACTION,
        bytes_per_second=gpu.peak_bytes_per_second * MEMORY_FRACTION,
        overhead_seconds=gpu.overhead_seconds,
        flops_by_type=tuple((name, peak * GPU_FLOPS_FRACTION) for name, peak in gpu.peak_flops_by_type.items()),
    )


def _cpu_device(name: str, cpu: Cpu) -> Device:
    flops = cpu.num_cores * cpu.clock_hertz * cpu.flops_per_cycle * CPU_FLOPS_FRACTION
    return Device(
        name=name,
        kind="cpu",
        memory_bytes=cpu.memory_bytes,
        flops=flops,
        bytes_per_second=cpu.peak_bytes_per_second * MEMORY_FRACTION,
        overhead_seconds=CPU_OVERHEAD_SECONDS,
        flops_by_type=tuple((name, times * flops) for name, times in cpu.speed_by_type.items()),
    )
