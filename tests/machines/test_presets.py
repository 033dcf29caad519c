"""The presets: all of them build, survive their file, and have the links that the docs describe."""

import re
import tomllib
from pathlib import Path

import pytest

from placewise.core.cluster import Cluster
from placewise.core.errors import ClusterError
from placewise.formats.cluster_file import format_cluster, parse_cluster
from placewise.machines.presets import PRESETS, preset

NAMES = (
    *(f"{n}xK40" for n in range(1, 9)),
    *("2xK80", "4xK80", "8xK80", "4xV100-nvlink", "8xA100-nvlink", "8xH100-nvlink", "2xH200", "4090+3060", "laptop"),
)
PCIE_NAMES = tuple(name for name in NAMES if "K40" in name or "K80" in name or name in ("4090+3060", "laptop"))
DOCS = Path(__file__).parents[2] / "docs" / "machines.md"


def num_gpus(cluster: Cluster) -> int:
    return cluster.num_devices - 1


def channel(cluster: Cluster, source: int, target: int) -> str:
    return cluster.channel_names[int(cluster.channels[source, target])]


def test_the_names_are_these() -> None:
    assert tuple(PRESETS) == NAMES


def test_an_unknown_name_is_refused_with_the_closest_name_or_all_names() -> None:
    with pytest.raises(ClusterError) as caught:
        preset("9xK40")
    assert str(caught.value) == "unknown preset '9xK40': did you mean '8xK40'?"
    with pytest.raises(ClusterError) as caught:
        preset("mainframe")
    assert str(caught.value).startswith("unknown preset 'mainframe': expected one of ")
    assert str(caught.value).endswith(", ".join(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_has_gpus_then_one_cpu_and_one_line_about_it(name: str) -> None:
    cluster = preset(name)
    count = num_gpus(cluster)
    assert cluster.name == name
    assert cluster.device_names == (*(f"gpu:{i}" for i in range(count)), "cpu:0")
    assert [device.kind for device in cluster.devices] == ["gpu"] * count + ["cpu"]
    assert cluster.description
    assert "\n" not in cluster.description
    if match := re.match(r"(\d)x", name):
        assert count == int(match[1])


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_survives_its_file(name: str) -> None:
    cluster = preset(name)
    again = parse_cluster(tomllib.loads(format_cluster(cluster)))
    assert again.digest == cluster.digest
    assert (again.name, again.description) == (cluster.name, cluster.description)


@pytest.mark.parametrize("name", NAMES)
def test_the_way_to_the_host_and_back_are_channels_of_each_gpu(name: str) -> None:
    cluster = preset(name)
    cpu = num_gpus(cluster)
    for gpu in range(cpu):
        assert channel(cluster, gpu, cpu) == f"gpu:{gpu} up"
        assert channel(cluster, cpu, gpu) == f"gpu:{gpu} down"


@pytest.mark.parametrize("name", PCIE_NAMES)
def test_all_pcie_copies_that_leave_a_gpu_share_its_way_up(name: str) -> None:
    cluster = preset(name)
    cpu = num_gpus(cluster)
    for source in range(cpu):
        targets = [target for target in range(cluster.num_devices) if target != source]
        assert {channel(cluster, source, target) for target in targets} == {f"gpu:{source} up"}


def test_a_copy_through_the_host_has_both_hops_latency_and_one_hops_bandwidth() -> None:
    """PCIe 3 x16 moves 15.75 GB/s raw, of which 0.8 is 12.6; a hop has a latency of 10 us, two of 20."""
    cluster = preset("2xK40")
    assert cluster.bytes_per_second[0, 1] == cluster.bytes_per_second[0, 2] == pytest.approx(12.6e9)
    assert cluster.latency_seconds[0, 2] == pytest.approx(10e-6)
    assert cluster.latency_seconds[0, 1] == pytest.approx(20e-6)


def test_v100_pairs_have_a_wire_each() -> None:
    cluster = preset("4xV100-nvlink")
    names = {channel(cluster, i, j) for i in range(4) for j in range(4) if i != j}
    assert len(names) == 12
    assert cluster.bytes_per_second[0, 1] == pytest.approx(0.8 * 50e9)


@pytest.mark.parametrize(("name", "peak"), [("8xA100-nvlink", 300e9), ("8xH100-nvlink", 450e9), ("2xH200", 450e9)])
def test_a_switch_gives_each_gpu_one_port_for_all_targets(name: str, peak: float) -> None:
    cluster = preset(name)
    for source in range(num_gpus(cluster)):
        targets = [target for target in range(num_gpus(cluster)) if target != source]
        assert {channel(cluster, source, target) for target in targets} == {f"gpu:{source} nvlink"}
        assert cluster.bytes_per_second[source, targets] == pytest.approx(0.8 * peak)


def test_newer_gpus_are_faster_and_every_gpu_beats_its_host() -> None:
    names = ("2xK40", "4xV100-nvlink", "8xA100-nvlink", "8xH100-nvlink")
    gpus = [preset(name).devices[0] for name in names]
    assert [gpu.flops for gpu in gpus] == sorted(gpu.flops for gpu in gpus)
    assert [gpu.bytes_per_second for gpu in gpus] == sorted(gpu.bytes_per_second for gpu in gpus)
    for name in NAMES:
        *others, cpu = preset(name).devices
        assert all(gpu.flops_in(kind) > cpu.flops_in(kind) for gpu in others for kind in ("float32", "bfloat16", "float16"))
        assert all(gpu.bytes_per_second > cpu.bytes_per_second for gpu in others)
        assert all(gpu.flops < 1e14 and gpu.bytes_per_second < 1e13 for gpu in others)


@pytest.mark.parametrize("name", [name for name in NAMES if "K40" in name or "K80" in name])
def test_the_papers_machines_have_one_speed_for_all_types(name: str) -> None:
    """So steps, run files and tables from before there were types stay as they are."""
    assert {device.flops_by_type for device in preset(name).devices} == {()}


def test_peaks_of_tensor_cores_by_hand() -> None:
    """0.7 of the dense peak with sums in float32: 125 TFLOPS of a V100 are 87.5, 165.2 of an RTX 4090 are 115.64."""
    v100, a100, h200 = (preset(name).devices[0] for name in ("4xV100-nvlink", "8xA100-nvlink", "2xH200"))
    big, small = preset("4090+3060").devices[:2]
    assert v100.flops_in("float16") == pytest.approx(87.5e12)
    assert v100.flops_in("tf32") == v100.flops_in("bfloat16") == v100.flops
    assert [a100.flops_in(name) for name in ("tf32", "bfloat16")] == pytest.approx([109.2e12, 218.4e12])
    assert [h200.flops_in(name) for name in ("tf32", "float16")] == pytest.approx([0.7 * 494.5e12, 0.7 * 989.5e12])
    assert [big.flops_in("bfloat16"), small.flops_in("bfloat16")] == pytest.approx([115.64e12, 17.78e12])
    assert (big.flops_in("tf32"), small.flops_in("tf32")) == (big.flops, small.flops), "TF32 is no faster on GeForce cards"


def test_a_cpu_is_faster_in_types_that_it_has_instructions_for_and_slow_in_others() -> None:
    """AMX in a Xeon 8480C: 10 times float32 in bfloat16; AVX512_BF16 in a Ryzen: twice; neither in an EPYC 7742."""
    speeds = {
        name: [preset(name).devices[-1].flops_in(kind) / preset(name).devices[-1].flops for kind in ("bfloat16", "float16")]
        for name in ("2xH200", "laptop", "8xA100-nvlink")
    }
    assert speeds == {
        "2xH200": pytest.approx([10, 2]),
        "laptop": pytest.approx([2, 0.05]),
        "8xA100-nvlink": pytest.approx([0.05, 0.05]),
    }


def test_the_papers_memory_is_what_they_state() -> None:
    """HDP: GPUs of 12 GB. Post: GPUs of 11 GB, a host of 26 GB."""
    assert preset("8xK40").devices[0].memory_bytes == 12 * 2**30
    assert [preset("2xK80").devices[i].memory_bytes for i in (0, 2)] == [11 * 2**30, 26 * 2**30]


def test_the_docs_list_every_preset_and_their_example_is_a_cluster() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)`(?: \.\. `([^`]+)`)? \| \d", text, re.MULTILINE)
    listed = [name for first, last in rows for name in NAMES[NAMES.index(first) : NAMES.index(last or first) + 1]]
    assert tuple(listed) == NAMES
    for example in re.findall(r"```toml\n(.*?)```", text, re.DOTALL):
        assert parse_cluster(tomllib.loads(example)).num_devices > 1
