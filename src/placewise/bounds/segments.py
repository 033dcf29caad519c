"""A chain of ops that cuts the step: what depends on one op of the chain and leads to the next runs between the two.

The least times of these segments add up. A segment's least time depends on the devices of its two ends; it is the longest
path through the segment, or a longer time that `refute` proves to be impossible.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from placewise.bounds.dag import Dag, interchangeable, restrict
from placewise.bounds.refute import Proof, refute
from placewise.core.arrays import Floats, Ints
from placewise.core.problem import Problem

SHARES = (0.04, 0.1, 1.0)  # of the chain's time: the longest spans that cuts keep whole, one try each
MAX_SEGMENT_OPS = 600  # a longer segment gets its longest path alone
HALVINGS = 7  # of the interval between a time that is refuted and one that is not
BRANCHING_SECONDS = 6.0  # of effort for each branching that a refutation may use


class Spans(NamedTuple):
    """Where each op is along a chain: after the member `low` and before the member `high`."""

    low: Ints  # [ops], the last member that an op depends on, -1 for none; for member i it is i - 1
    high: Ints  # [ops], the first member that depends on an op, len(chain) for none; for member i it is i


class Segmented(NamedTuple):
    """The bound, and what proves it."""

    seconds: float
    certificate: dict[str, Any]


class Refuted(NamedTuple):
    """A time that is too short for a segment, and the proof."""

    seconds: float
    proof: Proof


@dataclass(frozen=True, eq=False)
class Segment:
    """The ops that run between the ends of two ops which are on given devices."""

    dag: Dag  # one device for each set of devices that are alike here
    counts: Ints  # [devices], how many devices each one stands for


def best_segments(problem: Problem, dag: Dag, seconds: float) -> Segmented:
    """Returns the best bound of all cuts that are tried; more seconds of effort allow more branching."""
    times = problem.fastest_seconds
    chain = longest_chain(dag, times)
    best = Segmented(0.0, {"classes": [], "cuts": [], "segments": [], "proofs": []})
    if len(chain) < 2:
        return best
    search = _Search(Cutter(dag, interchangeable(problem)), int(seconds / BRANCHING_SECONDS))
    total, between = float(times[chain].sum()), find_spans(dag, chain)
    tried: list[list[int]] = []
    for share in SHARES:
        cuts = choose_cuts(chain, between, times, share * total)
        if len(cuts) < 2 or cuts.tolist() in tried:
            continue
        tried.append(cuts.tolist())
        found = search.total(chain, between, cuts)
        best = max(best, found, key=lambda one: one.seconds)
    return best


def longest_chain(dag: Dag, seconds: Floats) -> Ints:
    """Returns the ops of a longest chain that take time; ties go to the input with the lowest number."""
    total, before = [0.0] * dag.num_ops, [-1] * dag.num_ops  # the longest chain that leads to an op
    times = seconds.tolist()
    for source, target in zip(dag.sources.tolist(), dag.targets.tolist(), strict=True):  # sorted by target
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


def find_spans(dag: Dag, chain: Ints) -> Spans:
    """Returns where every op is along a chain."""
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


def choose_cuts(chain: Ints, between: Spans, seconds: Floats, longest: float) -> Ints:
    """Returns the members of a chain at which to cut it: those that no short span of a side branch contains.

    A span is short if the members inside it take at most `longest` seconds.
    """
    position = np.concatenate([[0.0], np.cumsum(seconds[chain])])  # [members + 1], position[i + 1]: end of member i
    branch = np.flatnonzero((between.high - between.low > 1) & (seconds > 0.0))
    low, high = between.low[branch], between.high[branch]
    inner = (low >= 0) & (high < len(chain))
    low, high = low[inner], high[inner]
    short = position[high + 1] - position[low + 1] <= longest
    covered = np.zeros(len(chain) + 1, np.int64)  # members low + 1 .. high - 1 are not cuts
    np.add.at(covered, low[short] + 1, 1)
    np.add.at(covered, high[short], -1)
    return np.flatnonzero(np.cumsum(covered)[:-1] == 0)


@dataclass(frozen=True, eq=False)
class Cutter:
    """Makes the segments of a problem, for devices that are alike only once."""

    dag: Dag
    classes: Ints  # [devices], see `interchangeable`

    def pairs(self) -> list[tuple[int, int]]:
        """Returns the ordered pairs of devices that stand for all others."""
        members = [np.flatnonzero(self.classes == c).tolist() for c in range(int(self.classes.max()) + 1)]
        same = [(m[0], m[0]) for m in members]
        apart = [(m[0], m[1]) for m in members if len(m) > 1]
        return same + apart + [(m[0], n[0]) for m in members for n in members if m is not n]

    def pair_of(self, source: int, target: int) -> tuple[int, int]:
        """Returns the pair that stands for this one."""
        firsts = {c: np.flatnonzero(self.classes == c).tolist() for c in self.classes[[source, target]].tolist()}
        a, b = firsts[int(self.classes[source])], firsts[int(self.classes[target])]
        if source == target:
            return a[0], a[0]
        return (a[0], a[1]) if self.classes[source] == self.classes[target] else (a[0], b[0])

    def devices(self, source: int, target: int) -> tuple[Ints, Ints]:
        """Returns the pair's devices and one other of each class, and how many devices each of them stands for."""
        kept, counts = [], []
        for c in range(int(self.classes.max()) + 1):
            members = [d for d in np.flatnonzero(self.classes == c).tolist() if d not in (source, target)]
            if members:
                kept.append(members[0])
                counts.append(len(members))
        named = list(dict.fromkeys([source, target]))
        return np.array(named + kept, np.int64), np.array([1] * len(named) + counts, np.int64)

    def segment(self, ops: Ints, source: int, target: int, pair: tuple[int, int]) -> Segment:
        """Returns the segment of `ops` between the ends of op `source` and op `target`; `target` is one of `ops`."""
        devices, counts = self.devices(*pair)
        part = self.dag.part(ops, devices)
        number = {op: i for i, op in enumerate(ops.tolist())}
        earliest, allowed = part.earliest, ~np.isinf(part.seconds)
        for edge in np.flatnonzero(self.dag.sources == source).tolist():
            if (i := number.get(int(self.dag.targets[edge]))) is not None:
                arrival = self.dag.copies.seconds(np.array([edge]))[0, pair[0], devices]
                earliest[i] = np.maximum(earliest[i], arrival)
        for op, device in ((source, pair[0]), (target, pair[1])):
            allowed[part.groups == self.dag.groups[op]] &= devices == device
        groups = np.unique(part.groups, return_inverse=True)[1]
        seconds = restrict(part.seconds, allowed & ~np.isinf(earliest))
        return Segment(
            Dag(seconds, np.where(np.isinf(earliest), 0.0, earliest), groups, part.sources, part.targets, part.copies),
            counts,
        )


@dataclass
class _Search:
    """Bounds segments; equal segments are bounded only once."""

    cutter: Cutter
    num_branchings: int  # of one refutation
    known: dict[bytes, Refuted | None] = field(default_factory=dict)

    def total(self, chain: Ints, between: Spans, cuts: Ints) -> Segmented:
        """Returns the bound that cutting a chain at some of its members gives."""
        dag = self.cutter.dag
        first = chain[cuts[0]]
        reached = dag.heads()[first] + dag.seconds[first]  # [devices]
        rows: list[list[list[Any]]] = []
        proofs: list[Proof] = []
        numbers: dict[int, int] = {}
        by_low = np.argsort(between.low, kind="stable")
        for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            inside = by_low[np.searchsorted(between.low[by_low], low) : np.searchsorted(between.low[by_low], high)]
            ops = np.sort(inside[between.high[inside] <= high])
            times, shown = self.bound(ops, int(chain[low]), int(chain[high]))
            reached = (reached[:, None] + times).min(axis=0)
            rows.append([])
            for pair, one in shown:
                number = numbers.setdefault(id(one), len(proofs))  # equal segments share a proof
                proofs += [one.proof] if number == len(proofs) else []
                rows[-1].append([*pair, one.seconds, number])
        classes = self.cutter.classes.tolist()
        certificate = {"classes": classes, "cuts": chain[cuts].tolist(), "segments": rows, "proofs": proofs}
        rest = dag.tails()[chain[cuts[-1]]]
        return Segmented(float((reached + rest).min()), certificate)

    def bound(self, ops: Ints, source: int, target: int) -> tuple[Floats, list[tuple[tuple[int, int], Refuted]]]:
        """Returns the least time for every pair of devices [devices, devices], and the proofs of the pairs that need one."""
        by_pair: dict[tuple[int, int], float] = {}
        shown = []
        same: dict[int, float] = {}
        for pair in self.cutter.pairs():
            segment = self.cutter.segment(ops, source, target, pair)
            goal = np.inf if pair[0] == pair[1] else max(same.values())
            by_pair[pair], one = self._show(segment, goal)
            if one is not None:
                shown.append((pair, one))
            if pair[0] == pair[1]:
                same[pair[0]] = by_pair[pair]
        num_devices = len(self.cutter.classes)
        devices = range(num_devices)
        return np.array([[by_pair[self.cutter.pair_of(a, b)] for b in devices] for a in devices]), shown

    def _show(self, segment: Segment, goal: float) -> tuple[float, Refuted | None]:
        """Returns the least time of a segment, at most about `goal`, and its proof if that is more than the longest path."""
        dag = segment.dag
        ends = dag.heads() + dag.seconds
        path = float(ends.min(axis=1).max())
        alone = float(dag.seconds.sum(axis=0).min())  # all on one device; the least time is not longer
        limit = min(goal, alone) if np.isfinite(min(goal, alone)) else path
        if np.isinf(path) or limit <= path * (1 + 1e-6) or dag.num_ops > MAX_SEGMENT_OPS:
            return path, None
        key = _key(segment, limit)
        if key not in self.known:
            self.known[key] = _longest_refuted(segment, path, limit, self.num_branchings)
        one = self.known[key]
        return (path, None) if one is None else (one.seconds, one)


def _longest_refuted(segment: Segment, path: float, limit: float, num_branchings: int) -> Refuted | None:
    """Returns the longest refuted time between the longest path and a limit, found by halving; None if there is none."""
    best: Refuted | None = None
    low, high = path, limit
    tried = limit * (1 - 1e-7)  # often everything on one device is best
    for _ in range(HALVINGS + 1):
        proof = refute(segment.dag, segment.counts, tried, num_branchings)
        if proof is None:
            high = tried
        else:
            best, low = Refuted(tried, proof), tried
            if high == limit and low >= limit * (1 - 1e-6):
                break
        tried = (low + high) / 2
    return best


def _key(segment: Segment, limit: float) -> bytes:
    dag = segment.dag
    columns = (dag.seconds, dag.earliest, dag.groups, dag.sources, dag.targets, *dag.copies, segment.counts)
    return b"|".join([np.float64(limit).tobytes(), *(np.ascontiguousarray(column).tobytes() for column in columns)])
