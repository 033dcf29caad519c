"""Times of ops, by hand and against a slow oracle."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import graph_of, graphs, mixed_cluster, op, tiny_cluster_data
from hypothesis import given

from placewise.core.costs import nominal_seconds, predict_op_seconds
from placewise.core.graph import COMPUTE_TYPES, Graph
from placewise.formats.cluster_file import parse_cluster


@pytest.mark.parametrize(
    ("fields", "gpu", "cpu"),
    [
        ({"flops": 200, "nbytes_moved": 10}, 2.5, 20),  # flops: 200/100 + 0.5, 200/10
        ({"flops": 10, "nbytes_moved": 20}, 2.5, 4),  # bytes: 20/10 + 0.5, 20/5
        ({"flops": 200}, 2.5, 20),
        ({"nbytes_moved": 20}, 2.5, 4),
        ({}, 0, 0),  # a view does no work, and pays no overhead
        ({"flops": 200, "seconds": {"gpu": 7}}, 7, 20),  # by kind
        ({"flops": 200, "seconds": {"gpu:0": 8}}, 8, 20),  # by name
        ({"flops": 200, "seconds": {"gpu": 7, "gpu:0": 8}}, 8, 20),  # the name goes before the kind
        ({"flops": 200, "seconds": {"gpu:1": 9, "tpu": 9}}, 2.5, 20),  # other devices
        ({"flops": 200, "seconds": {"gpu": 0, "cpu:0": 0}}, 0, 0),  # given as nothing
        ({"seconds": {"cpu": 3}}, 0, 3),
    ],
)
def test_op_seconds_by_hand(fields: dict[str, Any], gpu: float, cpu: float) -> None:
    """A GPU of 100 flop/s, 10 B/s and 0.5 s overhead, a CPU of 10 flop/s and 5 B/s without."""
    graph = graph_of([], [op(flops=1), op(**fields)])
    assert predict_op_seconds(graph, mixed_cluster())[1].tolist() == [gpu, cpu]


@pytest.mark.parametrize(
    ("fields", "first", "second"),
    [
        ({}, 40, 20),  # float32: 400/10, 400/20
        ({"compute": "float32"}, 40, 20),
        ({"compute": "bfloat16"}, 4, 20),  # 400/100; a device of one number has it for all types
        ({"compute": "tf32"}, 40, 20),  # the table lacks it: float32
        ({"compute": "float64"}, 400, 20),  # 400/1: a type may be slower
        ({"compute": "bfloat16", "nbytes_moved": 800}, 8, 20),  # now its memory binds: 800/100
        ({"compute": "bfloat16", "seconds": {"gpu:0": 3}}, 3, 20),  # a given time goes before the roofline
    ],
)
def test_op_seconds_in_other_types_by_hand(fields: dict[str, Any], first: float, second: float) -> None:
    """400 flops on a GPU of 10 flop/s in float32, 100 in bfloat16 and 1 in float64, and on one of 20; 100 B/s each."""
    data = tiny_cluster_data()
    data["devices"][0] |= {"flops": {"float32": 10, "bfloat16": 100, "float64": 1}, "bytes_per_second": 100}
    data["devices"][1] |= {"flops": 20, "bytes_per_second": 100}
    graph = graph_of([], [op(flops=400, **fields)])
    assert predict_op_seconds(graph, parse_cluster(data))[0].tolist() == [first, second]


def test_nominal_seconds_by_hand() -> None:
    """1e13 flops are a second, 5e11 bytes are too; of the given times the longest counts."""
    rows = [op(flops=2e13, nbytes_moved=5e11), op(nbytes_moved=5e11), op(), op(seconds={"gpu": 3, "cpu": 4})]
    assert nominal_seconds(graph_of([], rows)).tolist() == [2, 1, 0, 4]


@given(graphs())
def test_op_seconds_are_what_the_rule_says_one_by_one(graph: Graph) -> None:
    """The slow oracle: name, then kind, then the roofline, for one op on one device; the GPU has speeds for two types."""
    slow = mixed_cluster()
    gpu = replace(slow.devices[0], flops_by_type=(("float16", 300.0), ("tf32", 7.0)))
    cluster = replace(slow, devices=(gpu, slow.devices[1]))
    seconds = predict_op_seconds(graph, cluster)
    for n in range(len(graph.ops)):
        for d, device in enumerate(cluster.devices):
            given_times = {key: times[n] for key, times in graph.ops.seconds.items() if not np.isnan(times[n])}
            speed = {"float16": 300.0, "tf32": 7.0}.get(COMPUTE_TYPES[graph.ops.compute[n]], 100.0) if d == 0 else 10.0
            work = max(graph.ops.flops[n] / speed, graph.ops.bytes_moved[n] / device.bytes_per_second)
            expected = work + device.overhead_seconds if work else 0.0
            expected = given_times.get(device.name, given_times.get(device.kind, expected))
            assert seconds[n, d] == expected
