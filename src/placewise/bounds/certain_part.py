"""What of a problem with optional ops is certain: the part whose bounds hold for every choice of them."""

from dataclasses import replace

import numpy as np

from placewise.core.arrays import Ragged
from placewise.core.problem import NOWHERE, Problem


def certain_part(problem: Problem) -> Problem:
    """Returns the ops that always run, with only the reads that are the same whatever runs besides.

    A read of what an optional op writes is left out: it may come from elsewhere, and need no copy. So is a resident tensor
    without a home that such an op reads or stands for: where it is depends on its first reader.
    """
    graph, o, t = problem.graph, problem.graph.ops, problem.graph.tensors
    if not graph.has_options:
        return problem
    of_optional = t.stands_for >= 0
    wavers = np.zeros(len(t), np.bool_)  # [tensors]
    wavers[t.stands_for[of_optional]] = True
    wavers[o.reads.values[o.optional[o.reads.rows]]] = True
    wavers &= (graph.producer < 0) & (t.home < 0)
    certain = ~(of_optional | wavers)[o.reads.values]
    reads = Ragged.grouped(o.reads.rows[certain], o.reads.values[certain], len(o))
    tensors = replace(t, nbytes=np.where(wavers, 0, t.nbytes))
    certain_graph = replace(graph, ops=replace(o, reads=reads), tensors=tensors)
    placement = np.where(problem.optional, NOWHERE, 0)
    return replace(problem, graph=certain_graph).present(placement).problem
