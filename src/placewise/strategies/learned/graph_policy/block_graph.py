"""What the graph policy reads of a problem: blocks, devices and what moves between them, all relative to the step."""

from typing import NamedTuple

import numpy as np

from placewise.bounds.dag import interchangeable
from placewise.core.arrays import Floats, Ints, Ragged
from placewise.core.graph import PHASES
from placewise.core.labels import sum_by_label
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import tensor_groups
from placewise.simulate.simulator import Simulator
from placewise.strategies.blocks import Blocks
from placewise.strategies.learned.graph_policy.placing import Between, BlockTasks
from placewise.strategies.list_scheduling.insertion import downward_ranks, upward_ranks
from placewise.strategies.list_scheduling.tasks import build_tasks, mean_copy_seconds, mean_op_seconds

BLOCK_FEATURES, DEVICE_FEATURES = 20, 12

LEAST = 1e-30  # seconds or bytes, in place of 0


class BlockGraph(NamedTuple):
    """A problem as the network reads it."""

    problem: Problem  # with blocks as groups
    placing: BlockTasks
    blocks: Floats  # [blocks, BLOCK_FEATURES]
    devices: Floats  # [devices, DEVICE_FEATURES]
    inputs: Floats  # [blocks, blocks], the shares of a block's inputs that come from others: rows add up to 1 or 0
    outputs: Floats  # [blocks, blocks], the same of its outputs
    residents: Floats  # [blocks, blocks], the same of parameters and their homes, both ways


def merge_blocks(problem: Problem, blocks: Blocks, grouping: str) -> Problem:
    """Returns the problem with blocks as groups."""
    merged = blocks.of_group[problem.merged]
    return Problem(problem.graph, problem.cluster, grouping, merged, problem.op_seconds, blocks.allowed)


def read_block_graph(problem: Problem) -> BlockGraph:
    """Returns what the network reads of a problem whose groups are blocks."""
    graph, cluster = problem.graph, problem.cluster
    tasks, num_blocks = build_tasks(problem), problem.num_groups
    by_block = Ragged.grouped(problem.op_groups, np.arange(problem.num_ops), num_blocks)
    can = np.where(problem.allowed[problem.op_groups], problem.op_seconds, 0.0)
    block_seconds = np.stack([sum_by_label(problem.op_groups, column, num_blocks) for column in can.T], axis=1)
    fastest = sum_by_label(problem.op_groups, problem.fastest_seconds, num_blocks)
    total = max(float(fastest.sum()), LEAST)

    every = np.ones(problem.num_devices, np.bool_)
    op_seconds = mean_op_seconds(problem, problem.allowed)
    out_seconds = mean_copy_seconds(problem, tasks.output_bytes, every)
    up = upward_ranks(tasks, op_seconds, out_seconds)
    down = downward_ranks(tasks, op_seconds, mean_copy_seconds(problem, tasks.input_bytes, every), False)
    bare_up = upward_ranks(tasks, problem.fastest_seconds, np.zeros(len(out_seconds)))
    longest, longest_bare = max(float(up.max(initial=0.0)), LEAST), float(bare_up.max(initial=0.0))
    block_up = _max_by_label(problem.op_groups, up, num_blocks)
    sequence = np.argsort(-block_up, kind="stable")

    written = np.flatnonzero(graph.producer >= 0)
    made = graph.storage[written] == written
    own = written[made]
    other_bytes = sum_by_label(
        problem.op_groups[graph.producer[own]], graph.tensors.nbytes[own].astype(np.float64), num_blocks
    )
    resident_bytes, homes, readers, home_bytes = _residents(problem)
    other_bytes *= _share_at_peak(problem, float(resident_bytes.sum()), float(other_bytes.sum()))
    inputs = _edges(problem)
    memory = cluster.memory_bytes.astype(np.float64)
    placing = BlockTasks(
        tasks, sequence, by_block.values, by_block.offsets,
        _between(inputs[1], inputs[0], inputs[2], num_blocks), _between(inputs[0], inputs[1], inputs[2], num_blocks),
        _between(readers, homes, home_bytes, num_blocks), _between(homes, readers, home_bytes, num_blocks),
        block_seconds, fastest, resident_bytes, other_bytes, memory, interchangeable(problem), total,
    )  # fmt: skip

    pairs = ~np.eye(problem.num_devices, dtype=np.bool_)
    bandwidth = float(cluster.bytes_per_second[pairs].mean()) if pairs.any() else 1e30
    latency = float(cluster.latency_seconds[pairs].mean()) if pairs.any() else 0.0
    read, sent = (sum_by_label(labels, inputs[2], num_blocks) for labels in (inputs[1], inputs[0]))
    fan_in, fan_out = (np.bincount(labels, minlength=num_blocks) for labels in (inputs[1], inputs[0]))
    counts = np.maximum(np.diff(by_block.offsets), 1)
    phases = [
        sum_by_label(problem.op_groups, (graph.ops.phases == phase).astype(np.float64), num_blocks) / counts
        for phase in range(len(PHASES))
    ]
    flops = sum_by_label(problem.op_groups, graph.ops.flops.astype(np.float64), num_blocks)
    moved = sum_by_label(problem.op_groups, graph.ops.bytes_moved.astype(np.float64), num_blocks)
    position = sum_by_label(problem.op_groups, np.arange(problem.num_ops, dtype=np.float64), num_blocks) / counts
    seconds = np.maximum(fastest, 1e-6 * total)
    need = max(float(resident_bytes.sum()), 1.0)
    slack = (longest - block_up - _min_by_label(problem.op_groups, down, num_blocks)) / longest
    block_features = np.stack([
        num_blocks * fastest / total / (1 + num_blocks * fastest / total),
        np.log10(np.maximum(fastest / total, 1e-6)) / 3 + 1,
        block_up / longest,
        _max_by_label(problem.op_groups, down, num_blocks) / longest,
        np.clip(slack, -1, 1),
        position / max(problem.num_ops, 1),
        *phases[:3],
        _squashed(read / bandwidth / seconds), _squashed(sent / bandwidth / seconds),
        _squashed(latency * fan_in / seconds),
        _squashed(10 * read / bandwidth / total), _squashed(10 * sent / bandwidth / total),
        np.log1p(fan_in) / 4, np.log1p(fan_out) / 4,
        resident_bytes / need, _squashed(num_blocks * other_bytes / need),
        np.log10(np.clip(flops / np.maximum(moved, 1.0), 1e-3, 1e3)) / 3,
        np.log1p(counts) / 8,
    ], axis=1)  # fmt: skip

    whole = np.where(problem.allowed[problem.op_groups], problem.op_seconds, problem.fastest_seconds[:, None]).sum(axis=0)
    classes = placing.classes
    twins = np.bincount(classes, minlength=len(classes))[classes]
    all_bytes = float(resident_bytes.sum() + other_bytes.sum())
    alone = np.where(pairs, 1.0, 0.0)
    spread = np.maximum(alone.sum(axis=1), 1.0)
    device_bandwidth = np.where(pairs, cluster.bytes_per_second, 0.0).sum(axis=1) / spread
    device_latency = (cluster.latency_seconds * alone).sum(axis=1) / spread
    mean_op = total / max(problem.num_ops, 1)
    device_features = np.stack([
        np.log10(np.maximum(whole / total, 1.0)) / 2,
        np.log10(np.clip(memory / max(all_bytes, 1.0), 1e-3, 1e3)) / 3,
        np.log10(np.clip(memory / need, 1e-3, 1e3)) / 3,
        np.log1p(twins) / 2,
        np.full(len(memory), np.log1p(problem.num_devices) / 2),
        np.log10(np.clip(float(read.sum()) / np.maximum(device_bandwidth, LEAST) / total, 1e-4, 1e4)) / 4,
        np.log10(np.clip(float(resident_bytes.sum()) / np.maximum(device_bandwidth, LEAST) / total, 1e-4, 1e4)) / 4,
        np.log10(np.clip(device_latency / mean_op, 1e-4, 1e4)) / 4,
        np.full(len(memory), _squashed(cluster.dispatch_seconds / mean_op)),
        np.full(len(memory), longest_bare / total),
        np.full(len(memory), np.log1p(num_blocks) / 5),
        np.full(len(memory), np.log1p(len(problem.op_groups) / max(num_blocks, 1)) / 5),
    ], axis=1)  # fmt: skip
    into = _matrix(inputs[1], inputs[0], inputs[2], num_blocks)
    out = _matrix(inputs[0], inputs[1], inputs[2], num_blocks)
    home = _matrix(np.append(readers, homes), np.append(homes, readers), np.append(home_bytes, home_bytes), num_blocks)
    return BlockGraph(problem, placing, block_features, device_features, into, out, home)


def _share_at_peak(problem: Problem, resident_bytes: float, other_bytes: float) -> float:
    """Returns how much of all that ops make is there at the peak of a step on one device, in program order."""
    if not problem.num_ops or other_bytes <= 0:
        return 1.0
    first = problem.allowed.argmax(axis=1)  # [groups]
    peak = float(Simulator(problem, "program", threads=1).simulate(first[None]).peak_bytes.sum())
    return min(max((peak - resident_bytes) / other_bytes, 0.0), 1.0)


def _squashed(values: Floats | float) -> Floats:
    return np.asarray(values / (1.0 + np.abs(values)), np.float64)


def _edges(problem: Problem) -> tuple[Ints, Ints, Floats]:
    """Returns the source and target blocks with tensors between them, each pair once, and their bytes: [edges] each."""
    writers, readers, tensors = problem.graph.edges
    return _joined(problem.op_groups[writers], problem.op_groups[readers], tensors, problem)


def _residents(problem: Problem) -> tuple[Floats, Ints, Ints, Floats]:
    """Returns the resident bytes of each block [blocks]; and the homes, the readers and the bytes between them [edges]."""
    graph = problem.graph
    groups = tensor_groups(problem)
    own = np.flatnonzero((graph.producer < 0) & (graph.storage == np.arange(len(graph.tensors))) & (groups >= 0))
    nbytes = sum_by_label(groups[own], graph.tensors.nbytes[own].astype(np.float64), problem.num_groups)
    tensors, readers = graph.ops.reads.values, graph.ops.reads.rows
    resident = (graph.producer[tensors] < 0) & (groups[tensors] >= 0)
    found = _joined(groups[tensors[resident]], problem.op_groups[readers[resident]], tensors[resident], problem)
    return nbytes, *found


def _joined(source: Ints, target: Ints, tensors: Ints, problem: Problem) -> tuple[Ints, Ints, Floats]:
    """Returns pairs of different blocks with the bytes of the tensors between them, each tensor once for a pair."""
    pairs = np.unique(np.stack([source, target, tensors]), axis=1)
    pairs = pairs[:, pairs[0] != pairs[1]]
    keys, inverse = np.unique(pairs[:2], axis=1, return_inverse=True)
    nbytes = sum_by_label(inverse.ravel(), problem.graph.tensors.nbytes[pairs[2]].astype(np.float64), keys.shape[1])
    return keys[0], keys[1], nbytes


def _between(blocks: Ints, others: Ints, nbytes: Floats, num_blocks: int) -> Between:
    rows = Ragged.grouped(blocks, np.arange(len(blocks)), num_blocks)
    return Between(rows.offsets, others[rows.values], nbytes[rows.values])


def _matrix(rows: Ints, columns: Ints, nbytes: Floats, num_blocks: int) -> Floats:
    """Returns the shares of bytes, so that each row adds up to 1, or to 0 if it has none: [blocks, blocks]."""
    matrix = np.zeros((num_blocks, num_blocks))
    np.add.at(matrix, (rows, columns), np.maximum(nbytes, 1.0))
    return np.asarray(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1.0), np.float64)


def _max_by_label(labels: Ints, values: Floats, count: int) -> Floats:
    found = np.zeros(count)
    np.maximum.at(found, labels, values)
    return found


def _min_by_label(labels: Ints, values: Floats, count: int) -> Floats:
    found = np.full(count, np.inf)
    np.minimum.at(found, labels, values)
    return np.where(np.isfinite(found), found, 0.0)
