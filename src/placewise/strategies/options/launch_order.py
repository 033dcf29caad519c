"""Where optional ops are launched: a launch order of the whole graph from one of the ops that always run."""

from heapq import heappop, heappush

import numpy as np

from placewise.core.arrays import Bools, Ints, Ragged
from placewise.core.problem import Problem


def needs(problem: Problem) -> tuple[Ints, Ints]:
    """Returns the pairs of ops, earlier and later, that hold in every order which suits each choice of optional ops.

    Besides what the graph says, a reader comes after the ops that write what it reads while an optional op is nowhere.
    """
    graph, after = problem.graph, problem.graph.ops.after
    earlier, later = [after.values], [after.rows]
    tensors, readers = graph.ops.reads.values, graph.ops.reads.rows
    while len(tensors):
        made = graph.producer[tensors] >= 0
        earlier.append(graph.producer[tensors[made]])
        later.append(readers[made])
        instead = graph.tensors.stands_for[tensors]
        tensors, readers = instead[instead >= 0], readers[instead >= 0]
    pairs = np.unique(np.stack([np.concatenate(earlier), np.concatenate(later)]), axis=1)
    return pairs[0], pairs[1]


def with_options(problem: Problem, order: Ints) -> Ints:
    """Returns an order of all ops, which suits each choice of the optional ones, from one of those that run.

    `order` has the numbers of the whole problem, at least of all ops that always run, and is kept as far as each choice
    allows. The other optional ops are launched before the op that follows them in the program; one that lets a tensor wait
    elsewhere is launched after the op before it, so that its copy leaves early.
    """
    num_ops = problem.num_ops
    if bool((np.diff(order) > 0).all()):
        return np.arange(num_ops)  # the program's
    optional = np.ones(num_ops, np.bool_)
    optional[order] = False
    key = np.full(num_ops, np.inf)
    key[order] = np.arange(len(order))
    following, last = np.full(num_ops, np.inf), np.inf
    for n in range(num_ops - 1, -1, -1):
        last = last if optional[n] else key[n]
        following[n] = last
    last, leaves = -1.0, waiting_ops(problem)
    for n in range(num_ops):
        if not optional[n]:
            last = key[n]
        else:
            key[n] = last + 0.5 if leaves[n] else following[n] - 0.5
    earlier, later = needs(problem)
    behind = Ragged.grouped(earlier, later, num_ops).lists()
    pending = np.bincount(later, minlength=num_ops).tolist()
    keys = key.tolist()
    ready: list[tuple[float, int]] = []
    for n in range(num_ops):
        if not pending[n]:
            heappush(ready, (keys[n], n))
    found = []
    while ready:
        _, n = heappop(ready)
        found.append(n)
        for m in behind[n]:
            pending[m] -= 1
            if not pending[m]:
                heappush(ready, (keys[m], m))
    return np.array(found, np.int64)


def waiting_ops(problem: Problem) -> Bools:
    """Returns whether each op lets a tensor that the step makes wait: it is optional and does no work: [ops]."""
    graph, ops = problem.graph, problem.graph.ops
    waits: Bools = ops.optional & ~(problem.op_seconds > 0).any(axis=1)
    back = np.unique(ops.reads.rows[graph.tensors.stands_for[ops.reads.values] >= 0])
    waits[back] = False
    waits[ops.reads.rows[graph.producer[ops.reads.values] < 0]] = False
    return waits
