"""Checks certificates in plain Python: every inequality is derived from the problem again, and nothing is optimised.

This package shares no code with the files that find the bounds. A certificate names the ops, prices, cuts or branchings to
look at; what follows from them is worked out here, so a wrong certificate can only prove less than it claims.
"""

from collections.abc import Mapping
from math import fsum, inf
from typing import Any

from placewise.bounds.check.plain_problem import PlainProblem
from placewise.bounds.check.segment_proofs import add_segments
from placewise.core.problem import Problem

TOLERANCE = 1e-9  # relative
ROUNDING = 1e-13  # relative error of a product
ENDLESS = 1e300  # seconds; no bound claims as much


def check(problem: Problem, name: str, seconds: float, certificate: Mapping[str, Any]) -> None:
    """Raises a ValueError unless the certificate proves that no placement of the problem has a step below `seconds`."""
    proved = _PROOFS[name](PlainProblem(problem), certificate)
    if not seconds <= proved * (1 + TOLERANCE):
        raise ValueError(f"the certificate of {name!r} proves {proved} s, not {seconds} s")


def _host(step: PlainProblem, certificate: Mapping[str, Any]) -> float:
    dispatch = step.problem.cluster.dispatch_seconds
    return step.share(len(step.groups)) * dispatch + min(map(min, step.seconds)) if dispatch and step.groups else 0.0


def _path(step: PlainProblem, certificate: Mapping[str, Any]) -> float:
    """The least time, over all devices of the group, of the longest path through one of its ops."""
    ops = sorted(set(certificate["ops"]))
    heads, tails = step.heads(ops), step.tails(ops)
    members = [op for op in ops if step.groups[op] == certificate["group"]]
    paths = [[heads[op][d] + step.seconds[op][d] + tails[op][d] for op in members] for d in step.devices]
    return min(max(row) for row in paths) if members else 0.0


def _work(step: PlainProblem, certificate: Mapping[str, Any]) -> float:
    return _priced(step, list(range(len(step.groups))), [0.0] * len(step.devices), certificate)


def _window(step: PlainProblem, certificate: Mapping[str, Any]) -> float:
    """The priced work of ops with late heads and long tails, within the time that each device has for them."""
    everything = list(range(len(step.groups)))
    heads, tails = step.heads(everything), step.tails(everything)
    seconds = step.seconds
    heads = {op: [h if seconds[op][d] < inf else inf for d, h in enumerate(row)] for op, row in heads.items()}
    tails = {op: [q if seconds[op][d] < inf else inf for d, q in enumerate(row)] for op, row in tails.items()}
    slack = 1 - TOLERANCE  # the thresholds are heads and tails that were summed in another order
    late = [
        op
        for op in everything
        if min(heads[op]) >= certificate["head"] * slack and min(tails[op]) >= certificate["tail"] * slack
    ]
    starts = [
        min((heads[op][d] for op in late), default=inf) + min((tails[op][d] for op in late), default=inf)
        for d in step.devices
    ]
    return _priced(step, late, starts, certificate)


def _priced(step: PlainProblem, ops: list[int], starts: list[float], certificate: Mapping[str, Any]) -> float:
    """Returns the least step time in which the devices' time and memory pay for the ops' work and the groups' bytes."""
    problem, graph = step.problem, step.problem.graph
    prices: list[float] = certificate["prices"]
    memory_prices: list[float] = certificate["memory_prices"]
    if min([*prices, *memory_prices], default=0.0) < 0.0:
        raise ValueError("a price must be at least 0")
    work = [[0.0] * len(step.devices) for _ in range(problem.num_groups)]
    for op in ops:
        for d in step.devices:
            work[step.groups[op]][d] += float(problem.op_seconds[op, d])
    nbytes = [0] * problem.num_groups
    for tensor in range(len(graph.tensors)):
        if graph.producer[tensor] < 0 and graph.tensors.alias_of[tensor] < 0:
            home, reader = int(graph.tensors.home[tensor]), int(graph.first_reader[tensor])
            if home >= 0 or reader >= 0:
                group = int(problem.merged[home]) if home >= 0 else step.groups[reader]
                nbytes[group] += int(graph.tensors.nbytes[tensor])
    memory = problem.cluster.memory_bytes.tolist()
    spent = [
        min(prices[d] * work[group][d] + memory_prices[d] * nbytes[group] for d in step.devices if problem.allowed[group, d])
        for group in range(problem.num_groups)
    ]
    room = fsum(m * price for m, price in zip(memory, memory_prices, strict=True))
    needed = fsum(spent) - room - ROUNDING * (fsum(spent) + room)

    def paid(seconds: float) -> float:
        return sum(price * max(0.0, seconds - start) for price, start in zip(prices, starts, strict=True) if start < inf)

    low, high = 0.0, 1.0
    while paid(high) < needed:
        low, high = high, 2 * high
        if high > ENDLESS:
            return 0.0  # no time is enough, as nothing fits: others report that
    for _ in range(200):  # halve the interval: `low` is always too short
        middle = (low + high) / 2
        low, high = (middle, high) if paid(middle) < needed else (low, middle)
    return high if needed > 0.0 else 0.0


def _segments(step: PlainProblem, certificate: Mapping[str, Any]) -> float:
    """The sum of the segments between the cuts, for the best choice of devices for the cuts."""
    return add_segments(step, certificate)


_PROOFS = {"host": _host, "path": _path, "work": _work, "window": _window, "segments": _segments}
