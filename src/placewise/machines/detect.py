"""Detects the machine that this process runs on, as a cluster.

Nothing is measured. Known GPUs get the figures of the presets. Other devices get a roofline from what the system reports,
with the presets' fractions, and the defaults below for what it does not report.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from placewise.core.cluster import Cluster
from placewise.core.quantities import format_count
from placewise.machines import presets
from placewise.machines.hardware_queues import request_hardware_queues
from placewise.machines.presets import (
    AMX,
    AVX2,
    AVX512,
    AVX512_HALF,
    FLOAT64,
    GEFORCE_30,
    GEFORCE_40,
    GIB,
    NO_HALF,
    Cpu,
    Gpu,
    Machine,
    assemble,
    multiples,
)

KNOWN_GPUS = {  # by the driver's name without the brand; GPUs with similar names have different figures
    **dict.fromkeys(("K40", "K40c", "K40m", "K40s", "K40t"), presets.K40),
    "K80": presets.K80,
    **dict.fromkeys(("V100-SXM2-16GB", "V100-SXM2-32GB"), presets.V100),
    "A100-SXM4-80GB": presets.A100,
    "H100 80GB HBM3": presets.H100,
    "H200": presets.H200,
    "RTX 4090": presets.RTX_4090,
    "RTX 3060": presets.RTX_3060,
    "RTX 4060 Laptop GPU": presets.RTX_4060_LAPTOP,
}

BRANDS = re.compile(r"\b(NVIDIA|Tesla|GeForce)\b")

SMI_ROW = re.compile(r"(.+), *(\d+) MiB")

DEFAULT_GPU_FLOPS = 10e12  # float32 peak of a GPU that reports no clocks: about an RTX 3060

DEFAULT_GPU_BYTES_PER_SECOND = 300e9

DEFAULT_CLOCK_HERTZ = 2.5e9

DEFAULT_MEMORY_BYTES = 8 * GIB

SSE = 16  # float32 flops per cycle of a core without 8-wide FMA (older x86, ARM NEON)

TENSOR_CORES: Mapping[tuple[int, int], Mapping[str, float]] = {
    # By compute capability: speed as a multiple of float32's. Where GeForce and professional cards share one, these are the
    # GeForce cards', whose tensor cores sum up in float32 at half the rate.
    (7, 0): {"float16": 8.0, "float64": 0.5},  # V100
    (7, 5): {"float16": 4.0, "float64": 1 / 32},  # RTX 20 (Turing white paper)
    (8, 0): {"tf32": 8.0, "bfloat16": 16.0, "float16": 16.0, "float64": 1.0},  # A100
    (8, 6): GEFORCE_30,
    (8, 9): GEFORCE_40,
    (9, 0): {"tf32": 7.4, "bfloat16": 14.8, "float16": 14.8, "float64": 1.0, "float8": 29.5},  # H100
    (10, 0): {"tf32": 14.0, "bfloat16": 28.0, "float16": 28.0, "float64": 0.5, "float8": 56.0},  # B200 data sheet
    (12, 0): GEFORCE_40,  # RTX 50 (Blackwell white paper)
}

CanReach = Callable[[int, int], bool]


def detect() -> Cluster:
    """Returns this machine: the GPUs that PyTorch can use, or else those that nvidia-smi lists, then the CPU."""
    gpus, can_reach = _torch_gpus() or _smi_gpus()
    cpu = _cpu()
    parts = [gpu.name for gpu in gpus] + [f"{cpu.name} ({format_count(cpu.num_cores, 'core')})"]
    machine = Machine(f"detected: {', '.join(parts)}", gpus, cpu)
    if not gpus:  # CPU devices launch their own ops
        machine = replace(machine, dispatch_seconds=0.0)
    return assemble("detected", machine, can_reach)


def _torch_gpus() -> tuple[tuple[Gpu, ...], CanReach] | None:
    """Returns the GPUs that PyTorch can use, None if it is not installed or finds none."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: one of its libraries is missing
        return None
    request_hardware_queues()
    if not torch.cuda.is_available():
        return None
    gpus = tuple(_torch_gpu(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))
    return gpus, torch.cuda.can_device_access_peer


def _torch_gpu(properties: Any) -> Gpu:
    """Returns a GPU from its properties; not all versions of PyTorch have the clocks (kHz) and the bus width (bits)."""
    gpu = _named_gpu(properties.name, properties.total_memory)
    if gpu is not None:
        return gpu
    cores = properties.multi_processor_count * _cores_per_multiprocessor(properties.major, properties.minor)
    clock_hertz = getattr(properties, "clock_rate", 0) * 1e3
    memory_hertz = getattr(properties, "memory_clock_rate", 0) * 1e3
    bus_bytes = getattr(properties, "memory_bus_width", 0) / 8
    peak_flops = cores * clock_hertz * 2 or DEFAULT_GPU_FLOPS  # a fused multiply-add counts as two
    speeds = TENSOR_CORES.get((properties.major, properties.minor), {})
    return Gpu(
        _model(properties.name),
        peak_flops,
        properties.total_memory,
        memory_hertz * 2 * bus_bytes or DEFAULT_GPU_BYTES_PER_SECOND,  # double data rate
        peak_flops_by_type=multiples(peak_flops, speeds),
    )


def _cores_per_multiprocessor(major: int, minor: int) -> int:
    """Returns the float32 cores of a multiprocessor (CUDA programming guide, throughput of arithmetic instructions)."""
    if major == 3:
        return 192
    return 64 if major == 7 or (major, minor) in ((6, 0), (8, 0)) else 128


def _smi_gpus() -> tuple[tuple[Gpu, ...], CanReach]:
    """Returns the GPUs that nvidia-smi lists and CUDA_VISIBLE_DEVICES allows; lines that can't be parsed are skipped.

    nvidia-smi does not list which GPUs reach each other directly, so all copies go through the host.
    """
    matches = (SMI_ROW.fullmatch(line.strip()) for line in _smi_output().splitlines())
    rows = [(match[1], int(match[2]) * 2**20) for match in matches if match]
    gpus = []
    for name, memory_bytes in _visible(rows):
        guess = Gpu(_model(name), DEFAULT_GPU_FLOPS, memory_bytes, DEFAULT_GPU_BYTES_PER_SECOND)
        gpus.append(_named_gpu(name, memory_bytes) or guess)
    return tuple(gpus), lambda source, target: False


def _smi_output() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=name,memory.total", "--format=csv"]
    try:
        result = subprocess.run(command, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.decode("utf-8", errors="replace")


def _visible(rows: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Returns the rows that CUDA_VISIBLE_DEVICES selects by number; as in CUDA, the first invalid number ends the list."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None or re.search("[A-Za-z]", text):  # GPU-... and MIG-... are not resolved: all are visible
        return rows
    visible = []
    for number in text.split(","):
        if not number.strip().isdecimal() or int(number) >= len(rows):
            break
        visible.append(rows[int(number)])
    return visible


def _named_gpu(name: str, memory_bytes: int) -> Gpu | None:
    gpu = KNOWN_GPUS.get(_model(name))
    return replace(gpu, memory_bytes=memory_bytes) if gpu else None


def _model(name: str) -> str:
    return " ".join(BRANDS.sub("", name).split())


def _cpu() -> Cpu:
    """Returns the cores that this process may use, and the host's memory.

    The memory bandwidth can't be read: we assume two channels of DDR4-3200 (51.2 GB/s) up to 16 cores, and 3.2 GB/s per
    core above.
    """
    info = _read("/proc/cpuinfo")
    max_kilohertz = _read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    num_cores = _num_cores(info, processors(), _read("/sys/fs/cgroup/cpu.max"))
    return Cpu(
        name=cpu_name(),
        num_cores=num_cores,
        clock_hertz=_clock_hertz(info, max_kilohertz),
        flops_per_cycle=_flops_per_cycle(info),
        peak_bytes_per_second=3.2e9 * max(num_cores, 16),
        memory_bytes=host_memory_bytes(),
        speed_by_type=_speed_by_type(info),
    )


def host_memory_bytes() -> int:
    """Returns the memory that processes of this machine can have."""
    return _memory_bytes(_read("/proc/meminfo"), _read("/sys/fs/cgroup/memory.max"))


def cpu_name() -> str:
    """Returns the name of this machine's processor."""
    return next(iter(_values(_read("/proc/cpuinfo"), "model name")), "CPU")


def processors() -> list[int]:
    """Returns the numbers of the logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _num_cores(info: str, processors: Iterable[int], quota: str) -> int:
    """Returns the number of physical cores of these logical processors, limited by the cgroup's quota.

    `info` is /proc/cpuinfo, `quota` is cpu.max ("200000 100000" is two cores, "max 100000" is no limit).
    """
    cores = {}
    for block in info.split("\n\n"):
        fields = [_values(block, name)[:1] for name in ("processor", "physical id", "core id")]
        if all(fields) and fields[0][0].isdecimal():
            cores[int(fields[0][0])] = (fields[1][0], fields[2][0])
    num_cores = len({cores.get(processor, processor) for processor in processors})
    if limit := re.match(r"(\d+) ([1-9]\d*)", quota):
        num_cores = min(num_cores, int(limit[1]) // int(limit[2]))
    return max(num_cores, 1)


def _flops_per_cycle(info: str) -> int:
    """Returns a core's float32 flops per cycle; AVX-512 counts only on Intel, because AMD's first chips halve it."""
    flags = _flags(info)
    if "avx512f" in flags and "GenuineIntel" in _values(info, "vendor_id"):
        return AVX512
    return AVX2 if "fma" in flags else SSE


def _speed_by_type(info: str) -> Mapping[str, float]:
    """Returns the speed in other types as multiples of float32's; nothing if the processor does not list what it can do."""
    flags = _flags(info)
    if not flags:
        return {}
    bfloat16 = AMX if "amx_bf16" in flags else AVX512_HALF if "avx512_bf16" in flags else NO_HALF
    return {"bfloat16": bfloat16, "float16": AVX512_HALF if "avx512_fp16" in flags else NO_HALF, "float64": FLOAT64}


def _flags(info: str) -> list[str]:
    return " ".join(_values(info, "flags")[:1]).split()


def _clock_hertz(info: str, max_kilohertz: str) -> float:
    """Returns the base clock in the model's name, or else the highest clock that is reported, or else a default."""
    if match := re.search(r"@ *(\d+(?:\.\d+)?) *GHz", info):
        return float(match[1]) * 1e9 or DEFAULT_CLOCK_HERTZ
    if max_kilohertz.strip().isdecimal():
        return int(max_kilohertz) * 1e3 or DEFAULT_CLOCK_HERTZ
    megahertz = [float(value) for value in _values(info, "cpu MHz") if re.fullmatch(r"\d+(\.\d+)?", value)]
    return max(megahertz, default=0) * 1e6 or DEFAULT_CLOCK_HERTZ


def _memory_bytes(meminfo: str, limit: str) -> int:
    """Returns the host's memory, or the cgroup's limit if that is lower."""
    if match := re.search(r"^MemTotal: *(\d+) kB", meminfo, re.MULTILINE):
        memory_bytes = int(match[1]) * 2**10
    else:
        memory_bytes = _sysconf_memory_bytes()
    return min(memory_bytes, int(limit)) if limit.strip().isdecimal() else memory_bytes


def _sysconf_memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, other systems may not have these names
        return DEFAULT_MEMORY_BYTES


def _values(info: str, name: str) -> list[str]:
    """Returns the values of a field, from the lines `name : value` in order."""
    return re.findall(rf"^{name}\s*: *(.*?) *$", info, re.MULTILINE)


def _read(path: str) -> str:
    """Returns the text of a system file, empty if it can't be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
