"""A placement that needs as little of the fast devices' memory as options allow, and then takes back what has room.

`fit` looks for the cheapest changes one after the other; where most of a step does not fit it can end above the memory. This
starts at the other end: everything that can wait waits, every weight lives in the roomiest memory and visits for each pass,
updates run where their state is and as soon as their gradients are there. What a device then holds is what one op after the
other needs, so this fits if anything does that keeps the ops where they are. From there tensors and weights come back, those
that spare the most copies for each byte and launch first, as long as they fit and the step gets no slower.
"""

from dataclasses import dataclass

import numpy as np

from placewise.core.arrays import Bools, Ints, Ragged
from placewise.core.graph import PHASES, TENSOR_KINDS
from placewise.core.problem import NOWHERE, Problem
from placewise.strategies.options.changes import long_lived
from placewise.strategies.options.choice_walk import ChoiceModel
from placewise.strategies.options.fit import Chosen, fit
from placewise.strategies.options.launch_order import needs, waiting_ops
from placewise.strategies.single_device import accelerators

FORWARD, _, UPDATE = range(len(PHASES))

EFFORT = 200_000_000  # ops that are simulated to take things back
STARTS = 3  # kinds of things that are away: from each, things are taken back
CHUNK = 32  # things that come back at once, at first
WEIGHTS = (1.0, 8.0, 0.125)  # of residents' worth: what limits the step may be copies, the CPU or the GPU
ROUNDING = 1e-9  # relative, by which a step may get slower
MISSES = 256  # things in a row that can't come back alone, after which the others stay away


@dataclass(frozen=True, eq=False)
class _Away:
    """Something that is kept away from the devices that compute: groups, where they are then, and where they were."""

    groups: Ints
    away: Ints
    back: Ints
    worth: float  # seconds that coming back may spare, for each byte and for the share of the step that it takes it
    is_resident: bool = False
    with_others: Ints | None = None  # the groups that come back with it, if there are others


def streamed(model: ChoiceModel, placement: Ints, order: Ints | None = None, effort: int = EFFORT) -> Chosen:
    """Returns the placement [groups], whose optional ops don't count, with options so that it fits, or overflows less.

    `order` is a launch order of all ops that is tried besides the program's, with updates as early as they can run.
    """
    problem = model.problem
    placement = np.where(problem.optional, NOWHERE, placement)
    stores, lifetimes = _stores(problem), _Lifetimes(problem)
    waits, (homes, visits) = _waits(problem, placement, stores, lifetimes), _residents(problem, placement, stores)
    repeats, sums = _repeats(problem, placement, lifetimes), _sums(problem, placement, stores)
    orders = [updates_early(problem)] + ([] if order is None else [order])
    kinds = [[*waits, *visits, *homes], [*visits, *homes, *repeats], [*waits, *visits, *homes, *repeats], [*homes, *repeats]]
    kinds += [[*things, *sums] for things in kinds if sums]
    found: list[tuple[list[_Away], Chosen]] = []
    for things in kinds:
        away = _with(placement, things)
        found.append((things, min((_judged(model, away, launches) for launches in orders), key=lambda one: one.key)))
    found.sort(key=lambda pair: pair[1].key)
    things, best = found[0]
    if best.result.overflow_bytes:
        best = fit(model, best.placement, best.order, effort=effort)
        return _taken_back(model, best, things, WEIGHTS[0], effort)
    starts = [(things, best) for things, best in found[:STARTS] if not best.result.overflow_bytes]
    share = effort // (len(starts) * len(WEIGHTS))
    tried = [_taken_back(model, best, things, weight, share) for things, best in starts for weight in WEIGHTS]
    return min(tried, key=lambda one: one.key)


def updates_early(problem: Problem) -> Ints:
    """Returns the program's order with each op of the update as soon as what it needs has been launched: [ops]."""
    earlier, later = needs(problem)
    before = Ragged.grouped(later, earlier, problem.num_ops).lists()
    is_update = (problem.graph.ops.phases == UPDATE).tolist()
    keys: list[int] = []
    for n in range(problem.num_ops):
        keys.append(max((keys[m] for m in before[n]), default=n) if is_update[n] else n)
    return np.argsort(np.array(keys, np.int64), kind="stable")


def _stores(problem: Problem) -> Ints:
    """Returns where what leaves a device goes: the roomiest that does not compute, of its host if possible: [devices]."""
    cluster, fast = problem.cluster, accelerators(problem).tolist()
    found = []
    for device in range(problem.num_devices):
        others = [d for d in range(problem.num_devices) if d != device]
        found.append(
            max(
                others,
                key=lambda d: (d not in fast, cluster.hosts[d] == cluster.hosts[device], cluster.memory_bytes[d], -d),
                default=device,
            )
        )
    return np.array(found, np.int64)


def _with(placement: Ints, things: list[_Away]) -> Ints:
    """Returns a placement with all of these things away."""
    placement = placement.copy()
    for thing in things:
        placement[thing.groups] = thing.away
    return placement


def _judged(model: ChoiceModel, placement: Ints, order: Ints) -> Chosen:
    return Chosen(placement, order, model.judge(placement, order))


def _groups_of_ops(problem: Problem, ops: Bools) -> dict[int, list[int]]:
    """Returns the ops of each group among some ops."""
    found: dict[int, list[int]] = {}
    for n in np.flatnonzero(ops).tolist():
        found.setdefault(int(problem.op_groups[n]), []).append(n)
    return found


class _Lifetimes:
    """When tensors are read, as shares of the launches."""

    def __init__(self, problem: Problem) -> None:
        ops, self.count = problem.graph.ops, max(problem.num_ops, 1)
        self.first = np.full(len(problem.graph.tensors), self.count, np.int64)  # [tensors], the first op that reads each
        np.minimum.at(self.first, ops.reads.values, ops.reads.rows)

    def share(self, begin: int, end: int) -> float:
        """Returns the share of the launches between two ops."""
        return max(end - begin, 1) / self.count


def _waits(problem: Problem, placement: Ints, stores: Ints, lifetimes: _Lifetimes) -> list[_Away]:
    """Returns the tensors that can wait elsewhere between the passes."""
    graph, ops = problem.graph, problem.graph.ops
    reads, writes, nbytes = ops.reads.lists(), ops.writes.lists(), graph.tensors.nbytes.tolist()
    found = []
    for group, mine in _groups_of_ops(problem, waiting_ops(problem)).items():
        if len(mine) > 1 or len(reads[mine[0]]) != 1:
            continue
        (read,), (made,) = reads[mine[0]], writes[mine[0]]
        here = int(placement[problem.op_groups[graph.producer[read]]])
        away = int(stores[here])
        if problem.allowed[group, away] and here != away:
            copies = _copy_seconds(problem, here, away, nbytes[read]) + _copy_seconds(problem, away, here, nbytes[read])
            worth = copies / max(nbytes[read], 1) / lifetimes.share(mine[0], int(lifetimes.first[made]))
            found.append(_Away(np.array([group]), np.array([away]), np.array([NOWHERE]), worth))
    return found


def _residents(problem: Problem, placement: Ints, stores: Ints) -> tuple[list[_Away], list[_Away]]:
    """Returns the weights, with their optimizer's states and updates, that can live elsewhere, and their visits.

    A visit is where the weight is: one where it is read would keep the copy of the pass before, as if there were none.
    """
    graph, ops, t = problem.graph, problem.graph.ops, problem.graph.tensors
    kinds = [TENSOR_KINDS.index(kind) for kind in ("parameter", "buffer", "constant", "state")]
    at_home = (graph.producer < 0) & (t.home >= 0) & (t.alias_of < 0) & (t.nbytes > 0) & np.isin(t.kinds, kinds)
    held = Ragged.grouped(problem.merged[t.home[at_home]], np.flatnonzero(at_home), problem.num_groups).lists()
    by_group = Ragged.grouped(problem.op_groups, np.arange(problem.num_ops), problem.num_groups).lists()
    readers, op_groups, reads = graph.readers.lists(), problem.op_groups.tolist(), ops.reads.lists()
    producer, nbytes, phases, optional = (
        graph.producer.tolist(),
        t.nbytes.tolist(),
        ops.phases.tolist(),
        ops.optional.tolist(),
    )
    no_work: list[bool] = [not any(row) for row in problem.op_seconds.tolist()]
    homes, all_visits = [], []
    for group, tensors in enumerate(held):
        if not tensors or any(phases[n] != UPDATE for n in by_group[group]):
            continue
        users = [n for tensor in tensors for n in readers[tensor] if op_groups[n] != group]
        places = [int(placement[op_groups[n]]) for n in users if not optional[n]]
        here = max(sorted(set(places)), key=places.count) if places else int(placement[group])
        away = int(stores[here])
        if not problem.allowed[group, away] or here == away:
            continue
        visits = sorted({op_groups[n] for n in users if optional[n] and no_work[n]})
        visits = [visit for visit in visits if problem.allowed[visit, away]]
        visiting = [tensor for tensor in tensors if any(op_groups[n] != group for n in readers[tensor])]
        there = sum(_copy_seconds(problem, away, here, nbytes[tensor]) for tensor in visiting)
        size = sum(nbytes[tensor] for tensor in visiting)
        nowhere = np.full(len(visits), NOWHERE)
        if visits and size:
            passes = {(int(ops.micro_batches[n]), phases[n]) for n in users if phases[n] != UPDATE}
            worth = (len(passes) - 1) * there / size
            all_visits.append(_Away(np.array(visits), np.full(len(visits), away), nowhere, worth, True))
        given = {r for n in by_group[group] for r in reads[n] if producer[r] >= 0 and op_groups[producer[r]] != group}
        spared = there + sum(_copy_seconds(problem, here, away, nbytes[tensor]) for tensor in given)
        spared += float(problem.op_seconds[by_group[group], away].sum())
        worth = spared / max(sum(nbytes[tensor] for tensor in tensors) - (size if visits else 0), 1)
        back = here if problem.allowed[group, here] else int(placement[group])
        groups = np.array([group, *visits])
        homes.append(_Away(np.array([group]), np.array([away]), np.append(back, nowhere), worth, True, groups))
    return homes, all_visits


def _copy_seconds(problem: Problem, source: int, target: int, nbytes: int) -> float:
    """Returns how long a copy takes, with its launch."""
    cluster = problem.cluster
    return float(
        cluster.dispatch_seconds
        + cluster.latency_seconds[source, target]
        + nbytes / cluster.bytes_per_second[source, target]
    )


def _repeats(problem: Problem, placement: Ints, lifetimes: _Lifetimes) -> list[_Away]:
    """Returns the ops that can be repeated, each where its original is."""
    graph, ops = problem.graph, problem.graph.ops
    works: list[bool] = [any(row) for row in problem.op_seconds.tolist()]
    source = np.arange(len(graph.tensors))  # [tensors], what each stands for in the end
    while (graph.tensors.stands_for[source] >= 0).any():
        source = np.where(graph.tensors.stands_for[source] >= 0, graph.tensors.stands_for[source], source)
    makers, writes = graph.producer[source], ops.writes.lists()
    found = []
    for group, mine in _groups_of_ops(problem, ops.optional).items():
        made = [tensor for n in mine for tensor in writes[n] if makers[tensor] >= 0]
        if not made or not any(works[n] for n in mine):
            continue
        here = int(placement[problem.op_groups[makers[made[-1]]]])
        if problem.allowed[group, here]:
            kept = sum(int(graph.tensors.nbytes[tensor]) for tensor in made if graph.storage[tensor] == tensor)
            share = lifetimes.share(int(makers[made[-1]]), mine[-1])
            worth = float(problem.op_seconds[mine, here].sum()) / max(kept, 1) / share
            found.append(_Away(np.array([group]), np.array([here]), np.array([NOWHERE]), worth))
    return found


def _sums(problem: Problem, placement: Ints, stores: Ints) -> list[_Away]:
    """Returns the ops that make what lives long, such as sums of gradients: they can run where that has room."""
    found = []
    for group in long_lived(problem):
        away = int(stores[placement[group]])
        if problem.allowed[group, away] and away != placement[group]:
            found.append(_Away(np.array([group]), np.array([away]), placement[[group]], np.inf))
    return found


def _taken_back(model: ChoiceModel, best: Chosen, things: list[_Away], weight: float, effort: int) -> Chosen:
    """Returns the choice with as many things back as fit, those of the most worth first; the step gets no slower."""
    waiting = [thing for thing in things if (best.placement[thing.groups] == thing.away).all()]
    waiting.sort(key=lambda thing: -thing.worth * (weight if thing.is_resident else 1.0))
    left = max(effort // max(model.problem.num_ops, 1), 100)
    begin, size, misses = 0, CHUNK, 0
    while begin < len(waiting) and left > 0 and misses < MISSES:
        some = waiting[begin : begin + size]
        placement = best.placement.copy()
        for thing in some:
            placement[thing.groups if thing.with_others is None else thing.with_others] = thing.back
        found, left = _judged(model, placement, best.order), left - 1
        is_slower = found.result.seconds > best.result.seconds * (1 + ROUNDING)
        if found.result.overflow_bytes <= best.result.overflow_bytes and not is_slower:
            best, begin, misses = found, begin + len(some), 0
            size *= 2
        elif len(some) == 1:
            begin, misses = begin + 1, misses + 1
        else:
            size = len(some) // 2
    return best
