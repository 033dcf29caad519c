"""Which real devices a cluster's devices are mapped to."""

import pytest

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ExecutionError
from placewise.run.backends import cpu_threads, cuda
from placewise.run.devices import RealDevice, real_devices


def cluster(**kinds: str) -> Cluster:
    devices = tuple(Device(name.replace("_", ":"), kind, 2**30, 1e9, 1e9) for name, kind in kinds.items())
    names = [device.name for device in devices]
    return Cluster("test", devices, tuple(Link(a, b, 1e9, 0.0) for a in names for b in names if a != b))


@pytest.fixture(autouse=True)
def four_cores_and_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "processors", lambda: [1, 3, 5, 7])
    monkeypatch.setattr(cuda, "_num_gpus", lambda: 2)


def test_cpu_devices_share_the_cores_equally() -> None:
    one, other = real_devices(cluster(cpu_0="cpu", cpu_1="cpu"))
    assert one == RealDevice("cpu:0", "cpu", "cpu", threads=2, cores=(1, 3))
    assert other == RealDevice("cpu:1", "cpu", "cpu", threads=2, cores=(5, 7))
    assert [d.threads for d in real_devices(cluster(cpu_0="cpu", cpu_1="cpu", cpu_2="cpu"))] == [1, 1, 1]


def test_more_cpu_devices_than_cores_share_them() -> None:
    devices = real_devices(cluster(**{f"cpu_{i}": "cpu" for i in range(5)}))
    assert [device.cores for device in devices] == [(1,), (3,), (5,), (7,), (1,)]


def test_one_core_is_left_for_launching_on_gpus() -> None:
    assert [device.cores for device in real_devices(cluster(gpu="gpu", cpu="cpu"))] == [(), (1, 3, 5)]
    _, *cpus = real_devices(cluster(gpu="gpu", **{f"cpu_{i}": "cpu" for i in range(4)}))
    assert [device.threads for device in cpus] == [1, 1, 1, 1]


@pytest.mark.parametrize(("count", "num_host_cores"), [(7, 1), (8, 2), (16, 2), (64, 8)])
def test_some_of_many_cores_are_left_for_launching_and_pinning(
    monkeypatch: pytest.MonkeyPatch, count: int, num_host_cores: int
) -> None:
    monkeypatch.setattr(cpu_threads, "processors", lambda: list(range(count)))
    _, cpu = real_devices(cluster(gpu="gpu", cpu="cpu"))
    assert (cpu.cores, cpu.host_cores) == (tuple(range(count - num_host_cores)), tuple(range(count - num_host_cores, count)))
    assert (cpu.pinning_thread.cores, cpu.pinning_thread.threads) == (cpu.host_cores, num_host_cores)
    assert real_devices(cluster(cpu="cpu"))[0].host_cores == ()


def test_gpus_are_taken_in_the_clusters_order() -> None:
    devices = real_devices(cluster(gpu_0="gpu", cpu="cpu", gpu_1="gpu"))
    assert [device.torch_device for device in devices] == ["cuda:0", "cpu", "cuda:1"]


def test_slices_come_before_the_next_gpu() -> None:
    """cuda:0 in three slices, then cuda:1 whole."""
    devices = real_devices(cluster(**{f"gpu_{i}": "gpu" for i in range(4)}), {"cuda:0": 3})
    assert [(device.torch_device, device.slice) for device in devices] == [
        ("cuda:0", (0, 3)), ("cuda:0", (1, 3)), ("cuda:0", (2, 3)), ("cuda:1", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "virtual", "rule"),
    [
        (
            {"a": "gpu", "b": "gpu", "c": "gpu"},
            {},
            "^cluster 'test' has 3 GPUs, this machine has 2: .*placewise detect.*virtual",
        ),
        ({"a": "gpu"}, {"cuda:2": 2}, "there is no 'cuda:2'; this machine has cuda:0, cuda:1"),
        ({"a": "gpu"}, {"cuda:0": 0}, "cuda:0 must be cut into at least 1 slice, got 0"),
        ({"a": "tpu"}, {}, "device 'a' is of kind 'tpu', only gpu and cpu can be run"),
    ],
)
def test_a_cluster_that_this_machine_is_not_is_refused(kinds: dict[str, str], virtual: dict[str, int], rule: str) -> None:
    with pytest.raises(ExecutionError, match=rule):
        real_devices(cluster(**kinds), virtual)
