"""What a search may change so that less memory is used: a tensor waits elsewhere, or is made again, or lives elsewhere."""

from typing import NamedTuple

import numpy as np

from placewise.core.arrays import Bools, Ints, Ragged
from placewise.core.problem import NOWHERE, Problem

DEPTHS = (1, 2, 4, 8, 16)  # ops before a repeated one that are repeated with it
LONG = 0.2  # share of the ops between a tensor's maker and its last reader that makes it one that lives long
LARGE = 1e-4  # share of all bytes of such tensors that makes one large


class Changes(NamedTuple):
    """Changes to a placement: change c puts the groups `groups[ends[c] : ends[c + 1]]` on the devices `targets`."""

    ends: Ints  # [changes + 1]
    groups: Ints
    targets: Ints
    origins: Ints  # where they were: NOWHERE for those of optional ops
    are_simple: Bools  # [changes], whether each is not made of others


def find_changes(problem: Problem, placement: Ints) -> Changes:
    """Returns the changes that make sense where the ops that always run are placed like this: [groups].

    A tensor can wait on every device but its own, and comes back to where it is read. An op is repeated where the original
    is or where its result is read; alone, or with repeated ops that it reads from, up to several depths. A group with
    resident tensors (an update with its optimizer's state, a frozen weight), or one that makes what lives long (a sum of
    gradients), can be on another device.
    """
    graph, ops = problem.graph, problem.graph.ops
    works = [any(row) for row in problem.op_seconds.tolist()]
    made_by_option: list[bool] = (graph.tensors.stands_for >= 0).tolist()
    source = np.arange(len(graph.tensors))  # [tensors], what each stands for in the end
    while (graph.tensors.stands_for[source] >= 0).any():
        source = np.where(graph.tensors.stands_for[source] >= 0, graph.tensors.stands_for[source], source)
    op_groups, producer = problem.op_groups.tolist(), graph.producer.tolist()
    reads, writes, readers = ops.reads.lists(), ops.writes.lists(), graph.readers.lists()
    optional, homes = ops.optional.tolist(), graph.tensors.home.tolist()
    allowed: Bools = problem.allowed

    def place_of(t: int) -> int:
        t = int(source[t])
        if producer[t] >= 0:
            return int(placement[op_groups[producer[t]]])
        return int(placement[problem.merged[homes[t]]]) if homes[t] >= 0 else -1

    def read_at(t: int, depth: int = 0) -> list[int]:
        """Returns the devices where a tensor is read by ops that always run, through optional ones that only pass it on."""
        found: list[int] = []
        for n in readers[t]:
            if not optional[n]:
                found.append(int(placement[op_groups[n]]))
            elif depth < 4:
                found += [place for w in writes[n] for place in read_at(w, depth + 1)]
        return found

    by_group = Ragged.grouped(problem.op_groups, np.arange(problem.num_ops), problem.num_groups).lists()
    rows: dict[tuple[tuple[int, int], ...], None] = {}
    chosen_place: dict[int, int] = {}  # where the group of a repeated op goes first
    repeated = []
    for group in np.flatnonzero(problem.optional).tolist():
        mine = by_group[group]
        if not mine:
            continue
        written = [t for n in mine for t in writes[n]]
        at = sorted({place for t in written for place in read_at(t)} - {-1})
        if any(works[n] for n in mine):
            at = sorted({*at, *(place_of(t) for t in written)} - {-1})
            at = [d for d in at if allowed[group, d]] or np.flatnonzero(allowed[group]).tolist()
            repeated.append(group)
            chosen_place[group] = at[0]
            rows.update(dict.fromkeys(((group, d),) for d in at))
            continue
        here = {place_of(t) for n in mine for t in reads[n]}
        back = sorted({op_groups[n] for t in written for n in readers[t] if optional[n] and not works[n]} - {group})
        for d in np.flatnonzero(allowed[group]).tolist():
            if d in here and not any(made_by_option[t] for n in mine for t in reads[n]):
                continue
            rows[((group, d),)] = None
            for e in at:
                returning = tuple((g, e) for g in back if allowed[g, e])
                if returning and e != d:
                    rows[((group, d), *returning)] = None
    t = graph.tensors
    resident = np.flatnonzero((graph.producer < 0) & (t.home >= 0) & (t.alias_of < 0) & (t.nbytes > 0))
    held_by = Ragged.grouped(problem.merged[t.home[resident]], resident, problem.num_groups).lists()
    for group, held in enumerate(held_by):
        if not held:
            continue
        own = int(placement[group])
        visits = sorted({op_groups[n] for t in held for n in readers[t] if optional[n] and not works[n]})
        for d in np.flatnonzero(allowed[group]).tolist():
            if d != own:
                rows[((group, d),)] = None
                # At a reader, visits would keep the copy of the pass before.
                visiting = tuple((g, d) for g in visits if allowed[g, d])
                if visiting:
                    rows[((group, d), *visiting)] = None
    for group in long_lived(problem):
        rows.update(dict.fromkeys(((group, d),) for d in np.flatnonzero(allowed[group]).tolist() if d != placement[group]))
    num_simple = len(rows)
    for group in repeated:
        d = chosen_place[group]
        closure, front, depth = [group], [group], 0
        while front and depth < max(DEPTHS):
            inputs = {
                op_groups[producer[t]]
                for g in front
                for n in by_group[g]
                for t in reads[n]
                if made_by_option[t] and works[producer[t]]
            }
            front = sorted(inputs - set(closure))
            closure += front
            depth += 1
            if front and depth in DEPTHS:
                rows[tuple((g, d if allowed[g, d] else chosen_place[g]) for g in closure)] = None
    ends = np.cumsum([0, *map(len, rows)])
    flat = [pair for row in rows for pair in row]
    groups = np.array([g for g, _ in flat], np.int64)
    origins = np.where(problem.optional[groups], NOWHERE, placement[groups])
    return Changes(ends, groups, np.array([d for _, d in flat], np.int64), origins, np.arange(len(rows)) < num_simple)


def long_lived(problem: Problem) -> list[int]:
    """Returns the groups, not optional, that write something large that is used much later, such as a sum of gradients."""
    graph, count = problem.graph, max(problem.num_ops, 1)
    made = np.flatnonzero(graph.producer >= 0)
    last = np.array(graph.producer)
    np.maximum.at(last, graph.ops.reads.values, graph.ops.reads.rows)
    lasts = np.zeros(len(last), np.int64)
    np.maximum.at(lasts, graph.storage, last)
    own = made[graph.storage[made] == made]
    long = own[(lasts[own] - graph.producer[own]) > LONG * count]
    large = long[graph.tensors.nbytes[long] > LARGE * max(int(graph.tensors.nbytes[long].sum()), 1)]
    groups = np.unique(problem.op_groups[graph.producer[large]])
    return [int(group) for group in groups if not problem.optional[group]]
