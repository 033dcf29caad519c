"""Checks certificates of segments: every time that a proof refutes, and their sum."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from placewise.bounds.check.plain_problem import PlainProblem

Row = list[float]


def add_segments(step: PlainProblem, certificate: Mapping[str, Any]) -> float:
    """Returns the least time of the segments between the cuts, of what comes before the first cut and after the last."""
    cuts: list[int] = certificate["cuts"]
    classes: list[int] = certificate["classes"]
    if not cuts:
        return 0.0
    _check_classes(step, classes)
    everything = list(range(len(step.groups)))
    first, last = step.heads(everything)[cuts[0]], step.tails(everything)[cuts[-1]]
    reached = [first[d] + step.seconds[cuts[0]][d] for d in step.devices]
    if len(certificate["segments"]) != len(cuts) - 1:
        raise ValueError(
            f"there must be a segment between each two cuts: {len(cuts)} cuts, {len(certificate['segments'])} segments"
        )
    for source, target, rows in zip(cuts[:-1], cuts[1:], certificate["segments"], strict=True):
        ops = _between(step, source, target)
        claims = {(a, b): (seconds, certificate["proofs"][number]) for a, b, seconds, number in rows}
        known: dict[tuple[int, int], float] = {}
        times = []
        for a in step.devices:
            pairs = [_representative(classes, a, b) for b in step.devices]
            for pair in pairs:
                if pair not in known:
                    known[pair] = _Part(step, ops, source, target, pair, classes).least(claims.get(pair))
            times.append([known[pair] for pair in pairs])
        reached = [min(reached[a] + times[a][b] for a in step.devices) for b in step.devices]
    return min(reached[d] + last[d] for d in step.devices)


def _check_classes(step: PlainProblem, classes: list[int]) -> None:
    """Raises a ValueError unless the devices of a class can be swapped without a change in time."""
    problem = step.problem
    matrices = (problem.cluster.latency_seconds, problem.cluster.bytes_per_second)
    for b in step.devices:
        a = classes.index(classes[b])
        swap = [b if d == a else a if d == b else d for d in step.devices]
        columns = (problem.op_seconds, problem.allowed)
        if not all(np.array_equal(c[:, a], c[:, b]) for c in columns) or not all(
            np.array_equal(matrix, matrix[swap][:, swap]) for matrix in matrices
        ):
            raise ValueError(f"devices {a} and {b} are not alike")


def _representative(classes: list[int], a: int, b: int) -> tuple[int, int]:
    """Returns the pair of devices that stands for this one: the first of each class, or the first two of one."""
    first, other = classes.index(classes[a]), classes.index(classes[b])
    if a == b:
        return first, first
    return (first, classes.index(classes[b], first + 1)) if classes[a] == classes[b] else (first, other)


def _between(step: PlainProblem, source: int, target: int) -> list[int]:
    """Returns the ops that depend on `source` and that `target` depends on, and `target`, in rising order."""
    after = {source}
    for op in range(source + 1, target + 1):
        if any(m in after for m in step.inputs[op]):
            after.add(op)
    before = {target}
    for op in range(target - 1, source, -1):
        if any(m in before for m in step.outputs[op]):
            before.add(op)
    if target not in after:
        raise ValueError(f"op {target} does not depend on op {source}")
    return sorted((after & before) - {source})


@dataclass(frozen=True)
class _Part:
    """The ops between the ends of two ops, which are on a pair of devices."""

    step: PlainProblem
    ops: list[int]
    source: int
    target: int
    pair: tuple[int, int]
    classes: list[int]

    def least(self, claim: tuple[float, Any] | None) -> float:
        """Returns the least time: the longest path, or the claimed time if its proof holds."""
        devices, counts = self._devices()
        seconds = self._seconds(devices)
        arrivals = self._arrivals(devices)
        if claim is None:
            heads = self.step.heads_from(self.ops, devices, seconds, arrivals)
            return max(min(h + t for h, t in zip(heads[op], seconds[op], strict=True)) for op in self.ops)
        claimed, proof = claim
        self._refute(devices, counts, seconds, arrivals, claimed, proof)
        return float(claimed)

    def _devices(self) -> tuple[list[int], list[int]]:
        """Returns the pair and the first other device of each class, with the number of devices that each stands for."""
        named = list(dict.fromkeys(self.pair))
        others = [d for d in self.step.devices if d not in named]
        kept = [d for i, d in enumerate(others) if self.classes[d] not in [self.classes[e] for e in others[:i]]]
        kept.sort(key=lambda d: self.classes[d])
        counts = [sum(self.classes[e] == self.classes[d] for e in others) for d in kept]
        return named + kept, [1] * len(named) + counts

    def _seconds(self, devices: list[int]) -> dict[int, Row]:
        """Returns the ops' times; the groups of the two ops are on the pair's devices."""
        seconds = {op: [self.step.seconds[op][d] for d in devices] for op in self.ops}
        for fixed, device in zip((self.source, self.target), self.pair, strict=True):
            for op in self.ops:
                if self.step.groups[op] == self.step.groups[fixed]:
                    seconds[op] = [t if d == device else inf for t, d in zip(seconds[op], devices, strict=True)]
        return seconds

    def _arrivals(self, devices: list[int]) -> dict[int, Row]:
        """Returns when the source's result can be on each op's device."""
        way, source, device = self.step.way, self.source, self.pair[0]
        rows = {}
        for op in self.ops:
            is_input = source in self.step.inputs[op]
            rows[op] = [way(source, op, device, d) if is_input else 0.0 for d in devices]
        return rows

    def _refute(
        self,
        devices: list[int],
        counts: list[int],
        seconds: dict[int, Row],
        arrivals: dict[int, Row],
        limit: float,
        proof: Any,
    ) -> None:
        """Raises a ValueError unless the proof holds: the ops can't run in less than `limit` seconds."""
        step = self.step
        while True:
            heads, tails = step.heads_from(self.ops, devices, seconds, arrivals), step.tails_from(self.ops, devices, seconds)
            fits: dict[int, list[bool]] = {}  # group -> [devices]
            for op in self.ops:
                whole = [h + t + q for h, t, q in zip(heads[op], seconds[op], tails[op], strict=True)]
                known = fits.get(step.groups[op], [True] * len(devices))
                fits[step.groups[op]] = [ok and w < limit for ok, w in zip(known, whole, strict=True)]
            left = {
                op: [t if ok else inf for t, ok in zip(seconds[op], fits[step.groups[op]], strict=True)] for op in self.ops
            }
            if any(min(row) == inf for row in left.values()):
                return
            if left == seconds:
                break
            seconds = left
        if "ops" in proof:
            chosen, subset = [self.ops[i] for i in sorted(set(proof["ops"]))], proof["devices"]
            outside = [i for i in range(len(devices)) if i not in subset]
            if not all(seconds[op][i] == inf for op in chosen for i in outside):
                raise ValueError("overload: one of its ops can run on another device")
            room = 0.0
            for i in sorted(set(subset)):
                here = [op for op in chosen if seconds[op][i] < inf]
                begin = min((heads[op][i] for op in here), default=inf) + min((tails[op][i] for op in here), default=inf)
                room += counts[i] * max(limit - begin, 0.0)
            if not sum(min(seconds[op]) for op in chosen) > room:
                raise ValueError("overload: its ops have no more work than their devices have time")
        elif "op" in proof:
            op, children = self.ops[proof["op"]], dict(proof["on"])
            for i, t in enumerate(seconds[op]):
                if t < inf:
                    if i not in children:
                        raise ValueError(f"branching over op {op}: device {devices[i]} is left out")
                    only = {**seconds, op: [s if j == i else inf for j, s in enumerate(seconds[op])]}
                    self._refute(devices, counts, only, arrivals, limit, children[i])
        else:
            raise ValueError(f"a time of {limit} s between ops {self.source} and {self.target} is not refuted")
