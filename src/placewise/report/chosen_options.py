"""In words: which optional ops a placement uses, what they cost and what they spare."""

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.problem import NOWHERE, Problem
from placewise.core.quantities import format_bytes, format_count, format_seconds
from placewise.simulate.schedule import Schedule


def describe_options(problem: Problem, placement: Ints) -> str:
    """Returns "recomputes 34 tensors in 2.8 ms; 12 tensors (1.2 GiB) wait in cpu:0", or "" if no optional op runs.

    `placement` [groups] is of the whole problem. A tensor of another's memory does not count.
    """
    graph, names = problem.graph, problem.cluster.device_names
    device = placement[problem.op_groups]
    runs = graph.ops.optional & (device != NOWHERE)
    works = (problem.op_seconds > 0).any(axis=1)
    parts = []
    if again := np.flatnonzero(runs & works).tolist():
        seconds = sum(float(problem.op_seconds[n, device[n]]) for n in again)
        parts.append(f"recomputes {format_count(_storages(problem, again)[0], 'tensor')} in {format_seconds(seconds)}")
    idle = np.flatnonzero(runs & ~works)
    visits = np.isin(idle, graph.ops.reads.rows[graph.producer[graph.ops.reads.values] < 0])
    for chosen, verbs in ((idle[~visits], ("waits in", "wait in")), (idle[visits], ("visits", "visit"))):
        for d, name in enumerate(names):
            if there := chosen[device[chosen] == d].tolist():
                count, nbytes = _storages(problem, there)
                parts.append(f"{format_count(count, 'tensor')} ({format_bytes(nbytes)}) {verbs[count != 1]} {name}")
    return "; ".join(parts)


def describe_schedule(schedule: Schedule | None) -> str:
    """Returns what `describe_options` says about a schedule."""
    if schedule is None or schedule.present is None:
        return ""
    return describe_options(schedule.present.whole, schedule.present.restore_placement(schedule.placement))


def options_in_words(schedule: Schedule) -> list[str]:
    """Returns what `describe_options` says about a schedule as a sentence; nothing if no optional op runs."""
    words = describe_schedule(schedule)
    return [f"to fit in memory: {words}"] if words else []


def _storages(problem: Problem, ops: list[int]) -> tuple[int, int]:
    """Returns the number and the bytes of the tensors that some ops write, without those of another's memory."""
    graph = problem.graph
    written = [t for n in ops for t in graph.ops.writes[n].tolist() if graph.storage[t] == t]
    return len(written), int(graph.tensors.nbytes[written].sum()) if written else 0
