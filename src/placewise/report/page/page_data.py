"""What a page shows, as plain data: columns of numbers as base64 of their bytes, each text once in a list.

`template/data.js` reads it.
"""

import base64
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from placewise.core.arrays import Ints, Ragged
from placewise.core.graph import PHASES, TENSOR_KINDS, Graph, Tensors
from placewise.core.grouping import module_path
from placewise.core.problem import Problem
from placewise.report.chosen_options import options_in_words
from placewise.report.chrome_trace import MeasuredTrace
from placewise.report.comparisons import Comparisons
from placewise.report.explanation import explain
from placewise.report.page.option_marks import COPY_MARKS, OP_MARKS, bytes_without_options, mark_copies, mark_ops
from placewise.report.search_curves import Curve
from placewise.simulate.peak_memory import Allocations, allocated_at, allocations_of, bytes_before_step, peak_positions
from placewise.simulate.schedule import Schedule
from placewise.simulate.timeline import WAITS

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.core.plan import Plan

Word = TypeVar("Word", bound=Hashable)

LARGEST = 12  # rows of the table of a device's memory at its peak

PATH_KINDS = ("op", "copy", "host")  # what the critical path consists of

FEW = 3  # shapes that are listed; more are counted

NO_BREAK = "\u00a0"  # a space that keeps a shape on one line


@dataclass(frozen=True, eq=False)
class ShownPlan:
    """A plan as a page shows it."""

    label: str
    schedule: Schedule
    bound: "Bound | None"
    comparisons: Comparisons
    curve: Curve
    strategy: str | None = None
    seed: int | None = None
    evaluations: int | None = None
    measured: MeasuredTrace | None = None  # the trace of a step that was run
    measured_seconds: float | None = None  # the step's time if the search measured it
    trust: tuple[str, ...] = ()  # lines on what the plan gave for being simple
    advice: tuple[str, ...] = ()  # lines on what would help
    interval_seconds: tuple[float, float] | None = None  # between which eight of ten steps are if times are off by 10%
    is_other: bool = False  # another plan of the first one's step, which a click shows in its place


def measured_seconds(plan: "Plan") -> float | None:
    """Returns the measured step time of a plan; None if it was only simulated."""
    return None if plan.predicted_seconds is None else plan.step_seconds


def page_data(shown: Sequence[ShownPlan]) -> dict[str, Any]:
    """Returns all that a page shows; a problem that several plans share is there once."""
    first_plans = {plan.schedule.problem.digest: plan for plan in reversed(shown)}  # of each problem
    digests = list(dict.fromkeys(plan.schedule.problem.digest for plan in shown))
    return {
        "waits": WAITS,
        "phases": PHASES,
        "path_kinds": PATH_KINDS,
        "op_marks": OP_MARKS,
        "copy_marks": COPY_MARKS,
        "problems": [_problem_data(first_plans[digest]) for digest in digests],
        "plans": [_plan_data(plan, digests.index(plan.schedule.problem.digest)) for plan in shown],
    }


def pack(values: Any, kind: str) -> dict[str, str]:
    """Returns a column as its kind (f8, f4, i4, u2, u1) and its little-endian bytes in base64."""
    column: NDArray[Any] = np.ascontiguousarray(values, f"<{kind}")
    return {"kind": kind, "base64": base64.b64encode(column.tobytes()).decode()}


def _numbered(words: Sequence[Word]) -> tuple[list[Word], dict[str, str]]:
    """Returns each word once, and a column with the number of each."""
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return list(number), pack([number[word] for word in words], "u2" if len(number) <= 2**16 else "i4")


def _problem_data(plan: ShownPlan) -> dict[str, Any]:
    problem, comparisons, bound = plan.schedule.problem, plan.comparisons, plan.bound
    alone = comparisons.alone
    ops, cluster = problem.graph.ops, problem.cluster
    kinds, kind = _numbered(ops.kinds)
    paths, path = _numbered([module_path(problem.graph, op) for op in range(len(ops))])
    shapes, shape = _numbered(_shapes_of_ops(problem.graph))
    return {
        "graph": problem.graph.name,
        "cluster": cluster.name,
        "devices": [
            {"name": d.name, "kind": d.kind, "memory_bytes": d.memory_bytes, "host": d.host} for d in cluster.devices
        ],
        "channels": cluster.channel_names,
        "channel": cluster.channels.tolist(),
        "second_channel": cluster.second_channels.tolist(),
        "bound_seconds": None if bound is None else bound.seconds,
        "alone": None if alone is None else {"name": alone[0], "seconds": alone[1]},
        "expert_seconds": comparisons.expert_seconds,
        "names": ops.names,
        "kinds": kinds,
        "kind": kind,
        "paths": paths,
        "path": path,
        "shapes": shapes,
        "shape": shape,
        "phase": pack(ops.phases, "u1"),
        "micro_batch": pack(ops.micro_batches, "i4"),
    }


def _shapes_of_ops(graph: Graph) -> list[tuple[str, str]]:
    """Returns the shapes that each op reads and writes, as `float32 [64, 1024], int64 [] and 3 more`: [ops].

    A text is empty if no shape is known. Spaces inside a shape don't break.
    """
    reads, writes = (_in_words(graph.tensors, rows) for rows in (graph.ops.reads, graph.ops.writes))
    return list(zip(reads, writes, strict=True))


def _in_words(tensors: Tensors, rows: Ragged) -> list[str]:
    words = [str(shape).replace(" ", NO_BREAK) for shape in tensors.shapes] + ["unknown"]  # has number -1

    @cache
    def listed(row: tuple[int, ...]) -> str:
        if max(row, default=-1) < 0:
            return ""
        more = f" and {len(row) - FEW} more" if len(row) > FEW else ""
        return ", ".join(words[number] for number in row[:FEW]) + more

    return [listed(tuple(row)) for row in Ragged(rows.offsets, tensors.shape[rows.values]).lists()]


def _plan_data(plan: ShownPlan, problem_index: int) -> dict[str, Any]:
    schedule = plan.schedule
    problem, t, allocations = schedule.problem, schedule.timeline, allocations_of(schedule)
    in_use = np.empty(problem.num_ops)  # [ops], bytes on the op's device at its launch
    in_use[schedule.order] = schedule.memory[np.arange(problem.num_ops), schedule.devices[schedule.order]]
    path, without = schedule.critical_path, bytes_without_options(schedule)
    where, *words = explain(problem, schedule, plan.bound)
    return {
        "problem": problem_index,
        "label": plan.label,
        "strategy": plan.strategy,
        "seed": plan.seed,
        "evaluations": plan.evaluations,
        "step_seconds": schedule.step_seconds,
        "fits": schedule.fits,
        "where": where,
        "words": [*plan.trust, *options_in_words(schedule), *words, *(line.replace("`", "") for line in plan.advice)],
        "interval_seconds": plan.interval_seconds,
        "is_other": plan.is_other,
        "device": pack(schedule.devices, "u2"),
        "start": pack(t.start, "f8"),
        "seconds": pack(t.end - t.start, "f4"),
        "wait": pack(t.wait, "u1"),
        "wait_for": pack(t.wait_for, "i4"),
        "bytes": pack(in_use, "f8"),
        "mark": pack(mark_ops(schedule), "u1"),
        "bytes_without": None if without is None else pack(without, "f8"),
        "copies": _copies(schedule),
        "critical": {
            "kind": pack([PATH_KINDS.index(link.kind) for link in path], "u1"),
            "number": pack([link.number for link in path], "i4"),
        },
        "peak_bytes": schedule.peak_bytes.tolist(),
        "resident_bytes": bytes_before_step(schedule, allocations).tolist(),
        "at_peak": _at_peak(schedule, allocations),
        "curve": _curve(plan.curve),
        "measured": None if plan.measured is None else _measured(plan.measured),
        "measured_seconds": plan.measured_seconds,
    }


def _copies(schedule: Schedule) -> dict[str, Any]:
    tensors, t = schedule.problem.graph.tensors, schedule.timeline
    names, name = _numbered([tensors.names[n] for n in schedule.copy_tensors.tolist()])
    shapes, shape = _numbered([str(tensors.shape_of(n) or "") for n in schedule.copy_tensors.tolist()])
    return {
        "names": names,
        "name": name,
        "shapes": shapes,
        "shape": shape,
        "bytes": pack(tensors.nbytes[schedule.copy_tensors], "f8"),
        "source": pack(t.copy_source, "u2"),
        "target": pack(t.copy_target, "u2"),
        "reader": pack(t.copy_reader, "i4"),
        "start": pack(t.copy_start, "f8"),
        "seconds": pack(t.copy_end - t.copy_start, "f4"),
        "mark": pack(mark_copies(schedule), "u1"),
        "wait": pack(t.copy_wait, "u1"),
        "wait_for": pack(t.copy_wait_for, "i4"),
    }


def _at_peak(schedule: Schedule, allocations: Allocations) -> list[dict[str, Any]]:
    """Returns for each device the op that is launched at its peak, the bytes by kind, and the largest modules."""
    return [
        {
            "op": int(schedule.order[position]) if position >= 0 else -1,
            "kinds": _by_kind(schedule.problem, allocations, found := allocated_at(allocations, device, position)),
            "modules": _by_module(schedule.problem, allocations, found),
            "count": len(found),
        }
        for device, position in enumerate(peak_positions(schedule).tolist())
    ]


def _by_kind(problem: Problem, allocations: Allocations, found: Ints) -> list[tuple[str, int]]:
    """Returns the bytes of each kind of tensor and of copies, most first, without those of 0 bytes."""
    tensors = problem.graph.tensors
    kind = np.where(allocations.is_copy[found], len(TENSOR_KINDS), tensors.kinds[allocations.tensors[found]])
    total = np.zeros(len(TENSOR_KINDS) + 1, np.int64)
    np.add.at(total, kind, tensors.nbytes[allocations.tensors[found]])
    sizes = [(name, size) for name, size in zip((*TENSOR_KINDS, "copy"), total.tolist(), strict=True) if size]
    return sorted(sizes, key=lambda pair: -pair[1])


def _by_module(problem: Problem, allocations: Allocations, found: Ints) -> list[tuple[str, str, int, int, str]]:
    """Returns the largest modules, most bytes first: module, kind, count, bytes and the name of the largest tensor."""
    tensors = problem.graph.tensors
    parts: dict[tuple[str, str], list[int]] = {}
    for i in found.tolist():
        tensor = int(allocations.tensors[i])
        kind = "copy" if allocations.is_copy[i] else TENSOR_KINDS[tensors.kinds[tensor]]
        parts.setdefault((_module_of(problem, tensor), kind), []).append(tensor)
    rows = []
    for (module, kind), inside in parts.items():
        sizes = tensors.nbytes[inside]
        rows.append((module, kind, len(inside), int(sizes.sum()), tensors.names[inside[int(sizes.argmax())]]))
    return sorted(rows, key=lambda row: -row[3])[:LARGEST]


def _module_of(problem: Problem, tensor: int) -> str:
    """Returns the module of the op that produces a tensor, or of the op that reads it first."""
    graph = problem.graph
    op = int(graph.producer[tensor]) if graph.producer[tensor] >= 0 else int(graph.first_reader[tensor])
    return module_path(graph, op) if op >= 0 else graph.tensors.names[tensor].rpartition(".")[0]


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "evaluations": pack(curve.evaluations, "f8"),
        **{name: pack(getattr(curve, name), "f8") for name in ("seconds", "best", "average")},
    }


def _measured(measured: MeasuredTrace) -> dict[str, Any]:
    return {
        "source": measured.source,
        "step_seconds": measured.step_seconds,
        "op": pack(measured.ops, "i4"),
        "device": pack(measured.devices, "u2"),
        "start": pack(measured.start, "f8"),
        "seconds": pack(measured.end - measured.start, "f4"),
        "copy_name": measured.copy_names,
        "copy_source": pack(measured.copy_source, "u2"),
        "copy_target": pack(measured.copy_target, "u2"),
        "copy_start": pack(measured.copy_start, "f8"),
        "copy_seconds": pack(measured.copy_end - measured.copy_start, "f4"),
    }
