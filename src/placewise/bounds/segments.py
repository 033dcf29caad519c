"""A chain of ops that cuts the step: what lies between two of its ops has to be done between them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from placewise.bounds.dag import Dag, interchangeable, restrict
from placewise.bounds.refute import Proof, Trial
from placewise.core.arrays import Floats, Ints
from placewise.core.problem import Problem


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


SHARES = (0.04, 0.1, 1.0)  # of the chain's time that a span may take

MAX_SEGMENT_OPS = 600

HALVINGS = 7

NODE_SECONDS = 6.0  # of the budget for each branching that a refutation may use


class Segmented(NamedTuple):
    """The bound, and what it follows from."""

    seconds: float
    certificate: dict[str, Any]


class Refuted(NamedTuple):
    """A time that was refuted for a segment: it takes longer."""

    seconds: float
    proof: Proof


@dataclass(frozen=True, eq=False)
class Segment:
    """What is to be done between the ends of two ops, when these are on given devices."""

    dag: Dag  # of the devices that are told apart
    counts: Ints  # [devices]


@dataclass(frozen=True, eq=False)
class Cutter:
    """Makes the segments of a problem."""

    dag: Dag
    classes: Ints  # [devices]

    def pairs(self) -> list[tuple[int, int]]:
        """Returns pairs of devices that stand for all ordered pairs of devices."""
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
        """Returns the devices to tell apart, and how many each stands for: the pair itself, and one other of each class."""
        kept, counts = [], []
        for c in range(int(self.classes.max()) + 1):
            members = [d for d in np.flatnonzero(self.classes == c).tolist() if d not in (source, target)]
            if members:
                kept.append(members[0])
                counts.append(len(members))
        named = list(dict.fromkeys([source, target]))
        return np.array(named + kept, np.int64), np.array([1] * len(named) + counts, np.int64)

    def segment(self, ops: Ints, source: int, target: int, pair: tuple[int, int]) -> Segment:
        """Returns what is to be done, `ops`, from the end of op `source` to that of op `target`, which is one of them."""
        devices, counts = self.devices(*pair)
        part = self.dag.part(ops, devices)
        number = {op: i for i, op in enumerate(ops.tolist())}
        earliest, allowed = part.earliest, ~np.isinf(part.seconds)
        for edge in np.flatnonzero(self.dag.sources == source).tolist():
            if (i := number.get(int(self.dag.targets[edge]))) is not None:
                earliest[i] = np.maximum(earliest[i], self.dag.copy_seconds[edge][pair[0], devices])
        for op, device in ((source, pair[0]), (target, pair[1])):
            allowed[part.groups == self.dag.groups[op]] &= devices == device
        groups = np.unique(part.groups, return_inverse=True)[1]
        seconds = restrict(part.seconds, allowed & ~np.isinf(earliest))
        return Segment(
            Dag(seconds, np.where(np.isinf(earliest), 0.0, earliest), groups, part.sources, part.targets, part.copy_seconds),
            counts,
        )


def best_segments(problem: Problem, dag: Dag, seconds: float) -> Segmented:
    """Returns the best bound of the chains that are tried, with more branching for more seconds."""
    times = problem.fastest_seconds
    chain = longest_chain(dag, times)
    best = Segmented(0.0, {"classes": [], "cuts": [], "segments": [], "proofs": []})
    if len(chain) < 2:
        return best
    search = _Search(Cutter(dag, interchangeable(problem)), int(seconds / NODE_SECONDS))
    total, between = float(times[chain].sum()), spans(dag, chain)
    tried: list[list[int]] = []
    for share in SHARES:
        cuts = cuts_of(chain, between, times, share * total)
        if len(cuts) < 2 or cuts.tolist() in tried:
            continue
        tried.append(cuts.tolist())
        found = search.total(chain, between, cuts)
        best = max(best, found, key=lambda one: one.seconds)
    return best


@dataclass
class _Search:
    """Bounds segments; equal ones only once."""

    cutter: Cutter
    nodes: int  # branchings of one refutation
    known: dict[bytes, Refuted | None] = field(default_factory=dict)

    def total(self, chain: Ints, between: Spans, cuts: Ints) -> Segmented:
        """Returns the time from the start to the last cut."""
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
                number = numbers.setdefault(id(one), len(proofs))  # equal segments share one
                proofs += [one.proof] if number == len(proofs) else []
                rows[-1].append([*pair, one.seconds, number])
        classes = self.cutter.classes.tolist()
        certificate = {"classes": classes, "cuts": chain[cuts].tolist(), "segments": rows, "proofs": proofs}
        rest = dag.tails()[chain[cuts[-1]]]
        return Segmented(float((reached + rest).min()), certificate)

    def bound(self, ops: Ints, source: int, target: int) -> tuple[Floats, list[tuple[tuple[int, int], Refuted]]]:
        """Returns the least time for every pair of devices [devices, devices], and those that needed a proof."""
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
        """Returns the least time of a segment, at most about `goal`, and its proof where the longest path is shorter."""
        dag = segment.dag
        ends = dag.heads() + dag.seconds
        path = float(ends.min(axis=1).max())
        alone = float(dag.seconds.sum(axis=0).min())  # all on one device: it can't take longer
        limit = min(goal, alone) if np.isfinite(min(goal, alone)) else path
        if np.isinf(path) or limit <= path * (1 + 1e-6) or dag.num_ops > MAX_SEGMENT_OPS:
            return path, None
        key = _key(segment, limit)
        if key not in self.known:
            self.known[key] = _longest_refuted(Trial(dag, segment.counts), path, limit, self.nodes)
        one = self.known[key]
        return (path, None) if one is None else (one.seconds, one)


def _longest_refuted(trial: Trial, path: float, limit: float, nodes: int) -> Refuted | None:
    """Returns the longest time that is refuted between the longest path and a limit, found by halving."""
    best: Refuted | None = None
    low, high = path, limit
    trial_seconds = limit * (1 - 1e-7)  # often all on one device is the best
    for _ in range(HALVINGS + 1):
        proof = trial.refute(trial_seconds, nodes)
        if proof is None:
            high = trial_seconds
        else:
            best, low = Refuted(trial_seconds, proof), trial_seconds
            if high == limit and low >= limit * (1 - 1e-6):
                break
        trial_seconds = (low + high) / 2
    return best


def _key(segment: Segment, limit: float) -> bytes:
    dag = segment.dag
    columns = (dag.seconds, dag.earliest, dag.groups, dag.sources, dag.targets, dag.copy_seconds, segment.counts)
    return b"|".join([np.float64(limit).tobytes(), *(np.ascontiguousarray(column).tobytes() for column in columns)])
