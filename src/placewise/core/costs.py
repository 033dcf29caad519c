"""How long an op takes on a device: given times first, then the roofline."""

import numpy as np

from placewise.core.arrays import Floats
from placewise.core.cluster import Cluster
from placewise.core.graph import Graph


def op_seconds(graph: Graph, cluster: Cluster) -> Floats:
    """Returns the time of every op on every device: [ops, devices].

    A time given for the device's name counts first, then one for its kind, then the roofline: the larger of arithmetic
    and traffic, and the device's overhead on top. An op that does no work (a view) takes none.
    """
    ops = graph.ops
    seconds = np.empty((len(ops), cluster.num_devices))
    for d, device in enumerate(cluster.devices):
        work = np.maximum(ops.flops / device.flops, ops.bytes_moved / device.bytes_per_second)
        seconds[:, d] = np.where(work > 0, work + device.overhead_seconds, 0.0)
        for key in (device.kind, device.name):  # the later one counts
            if key in ops.seconds:
                given = ops.seconds[key]
                seconds[:, d] = np.where(np.isnan(given), seconds[:, d], given)
    return seconds
