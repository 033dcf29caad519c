"""The launch order of a pipeline: one forward, one backward."""

import heapq
import math

import numpy as np

from placewise.core.arrays import Ints, Ragged
from placewise.core.graph import PHASES
from placewise.core.problem import Problem


def one_forward_one_backward(problem: Problem, op_stages: Ints, num_stages: int) -> Ints:
    """Returns the launch order in which a stage turns to the backward pass of a micro-batch as soon as it can: [ops].

    Stage s of S starts with S - s micro-batches, then takes turns: the backward pass of one, the forward pass of another
    (PipeDream-flush: Narayanan et al., ICML 2021, §2.2), so that it never keeps the activations of more. Stages of ops are
    [ops]. Ops of one turn are in program order, and ops of no micro-batch come last; an op that others need comes before
    them, whatever its turn.
    """
    graph, phases = problem.graph, problem.graph.ops.phases
    numbers = np.unique(graph.ops.micro_batches[graph.ops.micro_batches >= 0])
    is_timed = (graph.ops.micro_batches >= 0) & (phases != PHASES.index("update"))
    keys = np.full(problem.num_ops, math.inf)
    which = np.searchsorted(numbers, graph.ops.micro_batches[is_timed])
    keys[is_timed] = turns_of(len(numbers), num_stages)[phases[is_timed], which, op_stages[is_timed]]
    return _launch_by(problem, keys.tolist())


def turns_of(num_micro_batches: int, num_stages: int) -> Ints:
    """Returns the turn of each pass, when every pass takes one turn: [forward and backward, micro-batches, stages]."""
    never = 2 * (num_micro_batches + num_stages) + 1
    turns = np.full((2, num_micro_batches, num_stages), never, np.int64)
    forward, backward = [0] * num_stages, [0] * num_stages  # how many each stage has done
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
    """Returns the order that launches, of all ops that may be, the one with the lowest key, the first of equals: [ops].

    An op whose followers have a lower key has theirs.
    """
    writers, readers, _ = problem.graph.edges
    after = problem.graph.ops.after
    before, behind = np.concatenate([writers, after.values]), np.concatenate([readers, after.rows])
    followers = Ragged.grouped(before, behind, problem.num_ops).lists()
    missing = np.bincount(behind, minlength=problem.num_ops).tolist()
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
