"""A time that no placement of a problem exceeds, in any order."""

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.cluster import copy_seconds
from placewise.core.graph import Graph
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import tensor_groups, unique_reads


def longest_step_seconds(problem: Problem) -> float:
    """Returns seconds that no step exceeds: all that can happen in it, one after the other, each as slow as it can be.

    Every op runs on the slowest device that its group can be on. Every tensor is copied to every device that a reading group
    can be on, over the slowest link for it, and takes what it can of the devices at both ends. The hosts launch all of that,
    and a copy between hosts is launched on both. A
    step takes no longer, because whatever ends in it has begun at its start, or when something else ended: its end is a sum
    of some of these times, each counted once. Where a tensor stands for others, the largest of them counts.
    """
    cluster, dispatch_seconds = problem.cluster, problem.cluster.dispatch_seconds
    slowest = np.where(problem.allowed[problem.op_groups], problem.op_seconds, 0.0).max(axis=1, initial=0.0)  # [ops]
    reading, read = unique_reads(problem.graph.ops.reads)
    elsewhere = tensor_groups(problem)[read] != problem.op_groups[reading]
    pairs = np.unique(np.stack([read[elsewhere], problem.op_groups[reading[elsewhere]]]), axis=1)  # tensor, reading group
    tensors, num_readers = np.unique(pairs[0], return_counts=True)
    num_copies = np.minimum(num_readers, problem.num_devices - 1)  # [tensors]
    links = np.unique(np.stack([cluster.latency_seconds.ravel(), cluster.bytes_per_second.ravel()]), axis=1)
    nbytes = _most_bytes(problem.graph)[tensors]
    slowest_copy = copy_seconds(nbytes[:, None], *links).max(axis=1, initial=0.0) + cluster.delay_seconds.max()
    fixed, per_byte, fixed_there, per_byte_there = cluster.copy_work.max(axis=(1, 2))
    slowest_copy += fixed + fixed_there + nbytes * (per_byte + per_byte_there)
    launches_per_copy = min(len(cluster.host_names), 2)
    launches = dispatch_seconds * problem.num_ops
    launches += cluster.copy_launch_seconds * launches_per_copy * int(num_copies.sum())
    return float(slowest.sum() + (num_copies * slowest_copy).sum() + launches)


def _most_bytes(graph: Graph) -> Ints:
    """Returns the size of each tensor, or of the largest that may be read in its place: [tensors]."""
    nbytes, stands_for = graph.tensors.nbytes, graph.tensors.stands_for
    while graph.has_options:
        larger = np.maximum(nbytes, np.where(stands_for >= 0, nbytes[stands_for], 0))
        if np.array_equal(larger, nbytes):
            break
        nbytes = larger
    return nbytes
