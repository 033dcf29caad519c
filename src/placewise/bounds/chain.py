"""A chain of ops that cuts the step: what lies between two of its ops has to be done between them."""

from typing import NamedTuple

import numpy as np

from placewise.bounds.dag import Dag
from placewise.core.arrays import Floats, Ints


class Spans(NamedTuple):
    """Where each op lies on a chain: behind its member `low` and before its member `high`."""

    low: Ints  # [ops], the last member that an op comes behind, -1: none; its own number less 1 for a member
    high: Ints  # [ops], the first member that comes behind an op, its own for a member; the number of members: none


def longest_chain(dag: Dag, seconds: Floats) -> Ints:
    """Returns the ops of a longest chain, each with a positive time; ties go to the input with the lowest number."""
    total, before = [0.0] * dag.num_ops, [-1] * dag.num_ops  # the longest chain up to an op, without it
    times = seconds.tolist()
    for source, target in zip(dag.sources.tolist(), dag.targets.tolist(), strict=True):  # edges stand by target
        if total[source] + times[source] > total[target]:
            total[target], before[target] = total[source] + times[source], source
    if not dag.num_ops:
        return np.zeros(0, np.int64)
    op, chain = int((np.array(total) + seconds).argmax()), []
    while op >= 0:
        chain.append(op)
        op = before[op]
    members = np.array(chain[::-1], np.int64)
    return members[seconds[members] > 0.0]


def spans(dag: Dag, chain: Ints) -> Spans:
    """Returns where every op lies on a chain."""
    low, high = [-1] * dag.num_ops, [len(chain)] * dag.num_ops
    member = {op: i for i, op in enumerate(chain.tolist())}
    sources, targets = dag.sources.tolist(), dag.targets.tolist()
    for source, target in zip(sources, targets, strict=True):
        low[target] = max(low[target], member.get(source, low[source]))
    by_source = np.lexsort((dag.targets, dag.sources))[::-1]
    for edge in by_source.tolist():
        source, target = sources[edge], targets[edge]
        high[source] = min(high[source], member.get(target, high[target]))
    for op, i in member.items():
        low[op], high[op] = i - 1, i
    return Spans(np.array(low, np.int64), np.array(high, np.int64))


def cuts_of(chain: Ints, between: Spans, seconds: Floats, longest: float) -> Ints:
    """Returns the members of a chain at which to cut it, such that no op with a short span is split from its surroundings.

    A span is short where the members inside take at most `longest` seconds; members inside such a span are left out.
    """
    position = np.concatenate([[0.0], np.cumsum(seconds[chain])])  # [members + 1], position[i + 1]: end of member i
    beside = np.flatnonzero((between.high - between.low > 1) & (seconds > 0.0))
    low, high = between.low[beside], between.high[beside]
    inner = (low >= 0) & (high < len(chain))
    low, high = low[inner], high[inner]
    short = position[high + 1] - position[low + 1] <= longest
    covered = np.zeros(len(chain) + 1, np.int64)  # members low + 1 .. high - 1 are no cuts
    np.add.at(covered, low[short] + 1, 1)
    np.add.at(covered, high[short], -1)
    return np.flatnonzero(np.cumsum(covered)[:-1] == 0)
