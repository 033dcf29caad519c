"""Predicts how long an op takes on a device: from given times, or else from the roofline."""

import numpy as np

from placewise.core.arrays import Floats
from placewise.core.cluster import Cluster, Device
from placewise.core.graph import COMPUTE_TYPES, Graph


def predict_op_seconds(graph: Graph, cluster: Cluster) -> Floats:
    """Returns the time of every op on every device: [ops, devices].

    A time given for the device's name comes first, then one for its kind, then the roofline: the larger of compute time (at
    the device's speed in the type that the op computes in) and memory time, plus the device's overhead. An op that does no
    work (a view) takes no time.
    """
    ops = graph.ops
    seconds = np.empty((len(ops), cluster.num_devices))
    for d, device in enumerate(cluster.devices):
        with np.errstate(over="ignore"):  # an infinite time is refused by Problem
            work = np.maximum(compute_seconds(graph, device), ops.bytes_moved / device.bytes_per_second)
        seconds[:, d] = np.where(work > 0, work + device.overhead_seconds, 0.0)
        for key in (device.kind, device.name):  # a time for the name overwrites one for the kind
            if key in ops.seconds:
                given = ops.seconds[key]
                seconds[:, d] = np.where(np.isnan(given), seconds[:, d], given)
    return seconds


def compute_seconds(graph: Graph, device: Device) -> Floats:
    """Returns how long each op's flops take on a device: [ops]."""
    speeds = np.array([device.flops_in(name) for name in COMPUTE_TYPES])  # [types]
    seconds: Floats = graph.ops.flops / speeds[graph.ops.compute]
    return seconds


def nominal_seconds(graph: Graph) -> Floats:
    """Returns a time for every op without a cluster: [ops].

    It is the longest of the given times, or else a roofline of 10 Tflop/s (in every type) and 500 GB/s.
    """
    seconds = np.maximum(graph.ops.flops / 1e13, graph.ops.bytes_moved / 5e11)
    for times in graph.ops.seconds.values():
        seconds = np.where(np.isnan(times), seconds, np.maximum(times, seconds))
    return seconds
