"""A graph in a few numbers: sizes, work, critical path, parallelism."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.graph import COMPUTE_TYPES, PHASES, TENSOR_KINDS, Graph


@dataclass(frozen=True)
class Statistics:
    """A graph in numbers. Times count each op on its fastest device, without copies."""

    num_ops: int
    num_groups: int
    num_tensors: int
    ops_by_phase: dict[str, int]
    ops_by_kind: dict[str, int]  # most frequent first
    flops_by_phase: dict[str, float]
    flops_by_type: dict[str, float]  # that ops compute in, without those that have none
    flops: float
    nbytes_moved: float
    resident_bytes: dict[str, int]  # by kind of tensor
    work_seconds: float
    critical_path_seconds: float
    parallelism: float  # work / critical path: more devices can't speed the step up by more than this factor
    widest_level: int  # the most ops at one depth of the graph
    depth: int

    @classmethod
    def of(cls, graph: Graph, op_seconds: Floats) -> "Statistics":
        """Returns a graph's statistics; `op_seconds` [ops] is how long each op takes."""
        ops, tensors = graph.ops, graph.tensors
        own = (graph.producer < 0) & (tensors.alias_of < 0)
        resident = np.bincount(tensors.kinds[own], weights=tensors.nbytes[own], minlength=len(TENSOR_KINDS))
        per_phase = np.bincount(ops.phases, minlength=len(PHASES))
        type_flops = np.bincount(ops.compute, weights=ops.flops, minlength=len(COMPUTE_TYPES))
        phase_flops = np.bincount(ops.phases, weights=ops.flops, minlength=len(PHASES))
        work, path = float(op_seconds.sum()), float(path_seconds(graph, op_seconds).max(initial=0.0))
        levels = depths(graph)
        return cls(
            num_ops=len(ops),
            num_groups=graph.num_groups,
            num_tensors=len(tensors),
            ops_by_phase={phase: int(n) for phase, n in zip(PHASES, per_phase, strict=True)},
            ops_by_kind=dict(sorted(Counter(ops.kinds).items(), key=lambda item: (-item[1], item[0]))),
            flops_by_phase={phase: float(n) for phase, n in zip(PHASES, phase_flops, strict=True)},
            flops_by_type={name: float(n) for name, n in zip(COMPUTE_TYPES, type_flops, strict=True) if n},
            flops=float(ops.flops.sum()),
            nbytes_moved=float(ops.bytes_moved.sum()),
            resident_bytes={kind: int(n) for kind, n in zip(TENSOR_KINDS, resident, strict=True) if n},
            work_seconds=work,
            critical_path_seconds=path,
            parallelism=work / path if path else 0.0,
            widest_level=int(np.bincount(levels).max(initial=0)) if len(levels) else 0,
            depth=int(levels.max(initial=-1)) + 1,
        )


def path_seconds(graph: Graph, op_seconds: Floats) -> Floats:
    """Returns the length of the longest path that ends with each op, its own time included: [ops]."""
    end = [0.0] * len(graph.ops)
    for n, (before, time) in enumerate(zip(_predecessors(graph), op_seconds.tolist(), strict=True)):
        end[n] = time + max([end[m] for m in before], default=0.0)
    return np.array(end)


def depths(graph: Graph) -> Ints:
    """Returns the number of ops before each op on the longest path to it: [ops]."""
    depth = [0] * len(graph.ops)
    for n, before in enumerate(_predecessors(graph)):
        depth[n] = max([depth[m] + 1 for m in before], default=0)
    return np.array(depth, np.int64)


def _predecessors(graph: Graph) -> list[list[int]]:
    """Returns the ops that each op waits for."""
    before = graph.ops.after.lists()
    writers, readers, _ = graph.edges
    for m, n in zip(writers.tolist(), readers.tolist(), strict=True):
        before[n].append(m)
    return before
