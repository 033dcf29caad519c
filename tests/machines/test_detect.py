"""Detection: this machine, machines that fakes describe, and machines that say nothing of use."""

import os
import stat
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from placewise.core.cluster import Cluster
from placewise.formats.cluster_file import format_cluster, parse_cluster
from placewise.machines import detect as module
from placewise.machines.detect import detect
from placewise.machines.presets import preset

TWO_GPUS = "name, memory.total [MiB]\nTesla K80, 11441 MiB\nNVIDIA Imaginary 1, 6144 MiB\n"
CPUINFO = "\n\n".join(  # two cores of two threads each
    f"processor\t: {i}\nmodel name\t: Some CPU @ 3.00GHz\ncpu MHz\t\t: 800.0\nphysical id\t: 0\ncore id\t\t: {i % 2}"
    for i in range(4)
)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `import torch` fail, and shows every GPU."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def fake_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a shell script in place of nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(script, encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def printing(text: str) -> str:
    return f"#!/bin/sh\ncat <<'END'\n{text}END\n"


def gpus_of(cluster: Cluster) -> list[str]:
    return [device.name for device in cluster.devices if device.kind == "gpu"]


def test_this_machine_has_a_cpu_with_memory_and_survives_its_file() -> None:
    cluster = detect()
    cpu = cluster.devices[-1]
    assert (cpu.name, cpu.kind) == ("cpu:0", "cpu")
    assert 2**28 <= cpu.memory_bytes <= 2**46
    assert 1e9 <= cpu.flops <= 1e14
    assert "\n" not in cluster.description
    assert parse_cluster(tomllib.loads(format_cluster(cluster))).digest == cluster.digest


@pytest.mark.usefixtures("no_torch")
def test_without_gpus_there_is_only_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster = detect()
    assert cluster.device_names == ("cpu:0",)
    assert cluster.links == ()


@pytest.mark.usefixtures("no_torch")
def test_nvidia_smi_lists_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch, printing(TWO_GPUS))
    cluster = detect()
    known, unknown, _ = cluster.devices
    assert cluster.device_names == ("gpu:0", "gpu:1", "cpu:0")
    assert (known.flops, known.memory_bytes) == (preset("2xK80").devices[0].flops, 11441 * 2**20)
    assert unknown.memory_bytes == 6144 * 2**20
    assert cluster.channel_names[cluster.channels[0, 1]] == "gpu:0 up"
    assert "K80, Imaginary 1" in cluster.description
    assert parse_cluster(tomllib.loads(format_cluster(cluster))).digest == cluster.digest


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    ("visible", "count"), [("", 0), ("-1", 0), ("1", 1), ("1,0", 2), ("0,7,1", 1), ("²", 0), ("GPU-12ab", 2)]
)
def test_hidden_gpus_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    fake_smi(tmp_path, monkeypatch, printing(TWO_GPUS))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert len(gpus_of(detect())) == count


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(
    "script",
    [
        printing("No devices were found\n"),
        printing("name, memory.total [MiB]\nNVIDIA Unified, [N/A]\n, 12 MiB\n12 MiB\n"),
        "#!/bin/sh\nprintf '\\377\\376\\000, x MiB'\n",
        "#!/bin/sh\necho 'Tesla K80, 11441 MiB'\nexit 9\n",
        "#!/there/is/no/such/shell\n",
        "",
    ],
    ids=["none", "not-numbers", "not-text", "failed", "not-a-program", "empty"],
)
def test_unreadable_nvidia_smi_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake_smi(tmp_path, monkeypatch, script)
    assert gpus_of(detect()) == []


def fake_torch(monkeypatch: pytest.MonkeyPatch, *properties: SimpleNamespace, peers: bool) -> None:
    """Puts a PyTorch with these GPUs in place of the real one."""
    torch = ModuleType("torch")
    torch.__dict__["cuda"] = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: len(properties),
        get_device_properties=lambda i: properties[i],
        can_device_access_peer=lambda i, j: peers,
    )
    monkeypatch.setitem(sys.modules, "torch", torch)


def gpu_properties(name: str, **others: int) -> SimpleNamespace:
    fields = {"total_memory": 2**30, "multi_processor_count": 10, "major": 8, "minor": 9, **others}
    return SimpleNamespace(name=name, **fields)


def test_known_gpus_that_reach_each_other_use_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, gpu_properties("NVIDIA H200"), gpu_properties("NVIDIA H200"), peers=True)
    cluster, expected = detect(), preset("2xH200")
    assert cluster.devices[0].flops == expected.devices[0].flops
    assert cluster.devices[0].flops_by_type == expected.devices[0].flops_by_type
    assert cluster.devices[0].memory_bytes == 2**30
    assert (cluster.bytes_per_second == expected.bytes_per_second).all()
    assert cluster.channel_names == expected.channel_names


def test_gpus_without_peer_access_copy_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, gpu_properties("NVIDIA H200"), gpu_properties("NVIDIA H200"), peers=False)
    cluster = detect()
    assert cluster.channel_names[cluster.channels[0, 1]] == "gpu:0 up"
    assert cluster.latency_seconds[0, 1] == 2 * cluster.latency_seconds[0, 2]


def test_an_unknown_gpu_gets_a_roofline_from_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 multiprocessors x 128 lanes x 1 GHz x 2 = 2.56 TFLOPS, of which 0.7; 5 GHz x 2 x 16 bytes = 160 GB/s, 0.8."""
    clocks = {"clock_rate": 1_000_000, "memory_clock_rate": 5_000_000, "memory_bus_width": 128}
    fake_torch(monkeypatch, gpu_properties("NVIDIA GeForce RTX 4090 Laptop GPU", **clocks), peers=False)
    gpu = detect().devices[0]
    assert gpu.flops == pytest.approx(0.7 * 2.56e12)
    assert gpu.bytes_per_second == pytest.approx(0.8 * 160e9)


@pytest.mark.parametrize(
    ("major", "minor", "expected"),
    [
        (6, 1, [1, 1, 1]),  # no tensor cores: all types count as float32
        (7, 5, [1, 1, 4]),  # they have neither TF32 nor bfloat16
        (8, 6, [1, 2, 2]),
        (8, 0, [8, 16, 16]),
        (9, 0, [7.4, 14.8, 14.8]),
        (99, 0, [1, 1, 1]),  # not known yet
    ],
)
def test_the_capability_of_an_unknown_gpu_tells_its_tensor_cores(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int, expected: list[float]
) -> None:
    fake_torch(monkeypatch, gpu_properties("Mystery", major=major, minor=minor), peers=False)
    gpu = detect().devices[0]
    assert [gpu.flops_in(name) / gpu.flops for name in ("tf32", "bfloat16", "float16")] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fma avx512f avx512_bf16 avx512_fp16 amx_bf16", {"bfloat16": 10, "float16": 2, "float64": 0.5}),
        ("fma avx512f avx512_bf16", {"bfloat16": 2, "float16": 0.05, "float64": 0.5}),
        ("fma avx512f", {"bfloat16": 0.05, "float16": 0.05, "float64": 0.5}),
    ],
)
def test_speeds_in_other_types_follow_from_the_flags(flags: str, expected: dict[str, float]) -> None:
    assert module._speed_by_type(f"flags\t\t: {flags}\n") == expected
    assert module._speed_by_type("") == {}


def test_an_unknown_gpu_without_clocks_gets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(monkeypatch, gpu_properties("Mystery"), peers=False)
    assert detect().devices[0].flops == pytest.approx(0.7 * module.DEFAULT_GPU_FLOPS)


@pytest.mark.parametrize(
    ("processors", "quota", "expected"),
    [
        ([0, 1, 2, 3], "max 100000", 2),
        ([0, 2], "", 1),  # two threads of one core
        ([0, 1, 2, 3], "100000 100000", 1),
        ([0, 1], "50000 100000", 1),  # half a core is still one
        ([0, 1], "nonsense", 2),
    ],
)
def test_cores_are_physical_and_allowed(processors: list[int], quota: str, expected: int) -> None:
    assert module._num_cores(CPUINFO, processors, quota) == expected


def test_processors_that_nothing_is_known_of_count_as_cores() -> None:
    assert module._num_cores("", [0, 1, 5], "") == 3


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("GenuineIntel", "sse avx2 fma avx512f", 64),
        ("AuthenticAMD", "sse avx2 fma avx512f", 32),
        ("GenuineIntel", "sse avx2 fma", 32),
        ("GenuineIntel", "sse fma4", 16),
    ],
)
def test_flops_a_cycle_follow_from_the_flags(vendor: str, flags: str, expected: int) -> None:
    assert module._flops_per_cycle(f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n") == expected
    assert module._flops_per_cycle("") == 16


def test_the_clock_is_the_names_then_the_highest_known_then_a_default() -> None:
    nameless = CPUINFO.replace(" @ 3.00GHz", "")
    assert module._clock_hertz(CPUINFO, "5000000\n") == pytest.approx(3e9)
    assert module._clock_hertz(nameless, "5000000\n") == pytest.approx(5e9)
    assert module._clock_hertz(nameless, "") == pytest.approx(800e6)
    assert module._clock_hertz("", "") == module.DEFAULT_CLOCK_HERTZ


def test_memory_is_the_least_of_host_and_limit() -> None:
    meminfo = "MemTotal:       1024 kB\nMemFree: 5 kB\n"
    assert module._memory_bytes(meminfo, "max\n") == 2**20
    assert module._memory_bytes(meminfo, "4096\n") == 4096
    assert module._memory_bytes("", "") > 2**28  # this machine's, by sysconf
