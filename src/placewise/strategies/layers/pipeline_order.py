"""The launch order of a pipeline: one forward, one backward."""

import heapq
import math

import numpy as np

from placewise.core.arrays import Ints, Ragged
from placewise.core.graph import PHASES
from placewise.core.problem import Problem


def one_forward_one_backward(problem: Problem, op_stages: Ints, num_stages: int) -> Ints:
    """Returns the launch order in which each stage begins a backward pass as soon as it can: [ops].

    Stage s of S starts with S - s forward passes, then alternates between the backward pass of one micro-batch and the
    forward pass of another (PipeDream-flush: Narayanan et al., ICML 2021, §2.2), so it never keeps the activations of more
    micro-batches. `op_stages` is [ops]. The ops of one turn are in program order, and ops of no micro-batch come last; an op
    that others need comes before them in any case.
    """
    graph, phases = problem.graph, problem.graph.ops.phases
    numbers = np.unique(graph.ops.micro_batches[graph.ops.micro_batches >= 0])
    is_timed = (graph.ops.micro_batches >= 0) & (phases != PHASES.index("update"))
    keys = np.full(problem.num_ops, math.inf)
    which = np.searchsorted(numbers, graph.ops.micro_batches[is_timed])
    keys[is_timed] = turns_of(len(numbers), num_stages)[phases[is_timed], which, op_stages[is_timed]]
    return _launch_by(problem, keys.tolist())


def turns_of(num_micro_batches: int, num_stages: int) -> Ints:
    """Returns the turn of each pass if every pass takes one turn: [forward and backward, micro-batches, stages]."""
    never = 2 * (num_micro_batches + num_stages) + 1
    turns = np.full((2, num_micro_batches, num_stages), never, np.int64)
    forward, backward = [0] * num_stages, [0] * num_stages  # passes that each stage has finished
    for turn in range(never):
        for stage in range(num_stages):
            f, b = forward[stage], backward[stage]
            if b < f and turn > (turns[1, b, stage + 1] if stage + 1 < num_stages else turns[0, b, stage]):
                turns[1, b, stage] = turn
                backward[stage] += 1
            elif f < num_micro_batches and f - b < num_stages - stage and (not stage or turn > turns[0, f, stage - 1]):
                turns[0, f, stage] = turn
                forward[stage] += 1
    return turns


def _launch_by(problem: Problem, keys: list[float]) -> Ints:
    """Returns the order that always launches, of the ops that can be launched, the one with the lowest key: [ops].

    An op takes over the lowest key of its followers. Ties go to the lowest op.
    """
    writers, readers, _ = problem.graph.edges
    after = problem.graph.ops.after
    source, target = np.concatenate([writers, after.values]), np.concatenate([readers, after.rows])
    followers = Ragged.grouped(source, target, problem.num_ops).lists()
    missing = np.bincount(target, minlength=problem.num_ops).tolist()
    for n in reversed(range(problem.num_ops)):
        keys[n] = min([keys[n], *(keys[m] for m in followers[n])])
    ready = [(keys[n], n) for n in range(problem.num_ops) if not missing[n]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, n = heapq.heappop(ready)
        order.append(n)
        for m in followers[n]:
            missing[m] -= 1
            if not missing[m]:
                heapq.heappush(ready, (keys[m], m))
    return np.array(order, np.int64)
