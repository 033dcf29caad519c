"""Clusters: what they compute of themselves, their digest and their rules."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import tiny_cluster, tiny_cluster_data

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.errors import ClusterError
from placewise.formats.cluster_file import parse_cluster


def test_the_tiny_cluster_by_hand() -> None:
    """Two GPUs; a link each way with a channel of its own; from a device to itself nothing takes time."""
    cluster = tiny_cluster()
    assert cluster.num_devices == 2
    assert cluster.device_names == ("gpu:0", "gpu:1")
    assert cluster.memory_bytes.tolist() == [2**20, 2**20]
    assert cluster.latency_seconds.tolist() == [[0, 0.001], [0.001, 0]]
    assert cluster.bytes_per_second.tolist() == [[np.inf, 1e6], [1e6, np.inf]]
    assert cluster.channel_names == ("gpu:0->gpu:1", "gpu:1->gpu:0")
    assert cluster.channels.tolist() == [[-1, 0], [1, -1]]
    assert cluster.dispatch_seconds == 0


def test_a_link_goes_before_the_default_and_the_last_of_two_counts() -> None:
    data = tiny_cluster_data()
    data["links"] = [
        {"from": "gpu:0", "to": "gpu:1", "bytes_per_second": 5, "latency_seconds": 6, "both": True},
        {"from": "gpu:1", "to": "gpu:0", "bytes_per_second": 7, "latency_seconds": 8},
    ]
    cluster = parse_cluster(data)
    assert cluster.bytes_per_second.tolist() == [[np.inf, 5], [7, np.inf]]
    assert cluster.latency_seconds.tolist() == [[0, 6], [8, 0]]


def test_links_that_name_a_channel_share_it() -> None:
    data = tiny_cluster_data()
    data["default_link"]["channel"] = "bus"
    cluster = parse_cluster(data)
    assert cluster.channel_names == ("bus",)
    assert cluster.channels.tolist() == [[-1, 0], [0, -1]]


def test_one_device_needs_no_link() -> None:
    cluster = Cluster("one", (Device("cpu:0", "cpu", 0, 1.0, 1.0),), ())
    assert cluster.channels.tolist() == [[-1]]
    assert cluster.channel_names == ()


def test_no_column_can_be_written() -> None:
    cluster = tiny_cluster()
    for column in (cluster.memory_bytes, cluster.latency_seconds, cluster.bytes_per_second, cluster.channels):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


CHANGES: dict[str, tuple[list[Any], Any]] = {
    "device name": (["devices", 1, "name"], "gpu:2"),
    "device kind": (["devices", 1, "kind"], "cpu"),
    "memory": (["devices", 1, "memory"], 5),
    "flops": (["devices", 1, "flops"], 5),
    "flops by type": (["devices", 1, "flops"], {"float32": 1e12, "tf32": 5}),
    "flops of another type": (["devices", 1, "flops"], {"float32": 1e12, "float16": 5}),
    "flops of another device": (["devices", 0, "flops"], {"float32": 1e12, "tf32": 5}),
    "flops by types": (["devices", 1, "flops"], {"float32": 1e12, "tf32": 5, "float16": 5}),
    "bytes_per_second": (["devices", 1, "bytes_per_second"], 5),
    "overhead": (["devices", 1, "overhead_seconds"], 5),
    "latency": (["default_link", "latency_seconds"], 5),
    "bandwidth": (["default_link", "bytes_per_second"], 5),
    "channel": (["default_link", "channel"], "bus"),
    "dispatch": (["dispatch_seconds"], 5),
}


# It changes only with the meaning of a digest: recorded runs name it.
TINY_DIGEST = "b6b01fd2a934c59bb61ebd58a2c50c3e72a2675c744c40a3fcc895cec7115420"


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    data = copy.deepcopy(tiny_cluster_data())
    holder: Any = data
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return data


def test_the_digest_changes_with_every_number_and_not_with_the_description() -> None:
    digests = [parse_cluster(changed(path, value)).digest for path, value in CHANGES.values()]
    assert len({tiny_cluster().digest, *digests}) == 1 + len(CHANGES)
    for name in ("name", "description"):
        assert parse_cluster(changed([name], "other")).digest == tiny_cluster().digest
    assert parse_cluster(changed(["dispatch_seconds"], -0.0)).digest == tiny_cluster().digest


def test_the_digest_of_a_cluster_without_types_is_the_one_that_older_run_files_have() -> None:
    table = parse_cluster(changed(["devices", 1, "flops"], {"float32": 1e12}))
    assert {tiny_cluster().digest, table.digest} == {TINY_DIGEST}


def test_flops_by_type_by_hand() -> None:
    """A type that is not listed counts as float32, and the order in which they are listed does not matter."""
    device = Device("gpu:0", "gpu", 1, 10.0, 1.0, flops_by_type=(("float16", 80.0), ("tf32", 40.0)))
    assert [device.flops_in(name) for name in ("float32", "tf32", "float16", "bfloat16")] == [10, 40, 80, 10]
    assert device == Device("gpu:0", "gpu", 1, 10.0, 1.0, flops_by_type=(("tf32", 40.0), ("float16", 80.0)))
    assert hash(device) != hash(Device("gpu:0", "gpu", 1, 10.0, 1.0))


def typed(device: Device, *speeds: tuple[str, float]) -> Cluster:
    return Cluster("", (replace(device, flops_by_type=speeds),), ())


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (lambda gpu, link: Cluster("", (), ()), "devices: a cluster needs at least one device"),
        (lambda gpu, link: Cluster("", (gpu, gpu), ()), "device 'a': the name must not be empty, and no two"),
        (lambda gpu, link: Cluster("", (gpu,), (link,)), "link 'a' -> 'b': there is no device 'b'; the devices are a"),
        (lambda gpu, link: Cluster("", (gpu,), (), np.inf), "cluster: dispatch_seconds must be a finite number"),
        (lambda gpu, link: typed(gpu, ("float32", 1.0)), "device 'a': flops_by_type must have each of tf32, bfloat16, "),
        (lambda gpu, link: typed(gpu, ("bf16", 1.0)), "device 'a': flops_by_type must have each of tf32, bfloat16, "),
        (lambda gpu, link: typed(gpu, *[("tf32", 1.0)] * 2), "device 'a': flops_by_type must have each of tf32, bfloat16, "),
        (lambda gpu, link: typed(gpu, ("tf32", 0.0)), "device 'a': flops in tf32 must be a finite number above 0, got 0.0"),
    ],
)
def test_a_cluster_made_in_python_is_checked_too(cluster: Any, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        cluster(Device("a", "gpu", 1, 1.0, 1.0), Link("a", "b", 1.0, 0.0))
    assert str(caught.value).startswith(message)


def test_a_limit_lowers_a_devices_memory_and_nothing_else() -> None:
    cluster = tiny_cluster()
    limited = cluster.limited({"gpu:1": 1000})
    assert limited.memory_bytes.tolist() == [2**20, 1000]
    assert replace(limited, devices=cluster.devices).digest == cluster.digest
    assert cluster.limited({}) is cluster
    with pytest.raises(ClusterError, match="memory: 'gpu:1' has 1 MiB, a limit can only lower it, got 2 MiB"):
        cluster.limited({"gpu:1": 2**21})
