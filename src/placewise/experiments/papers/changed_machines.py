"""What a plan loses when its machine changes, and how fast each system recovers from it: `placewise reproduce changes`.

A system searches on the machine as it was. Then a GPU is gone, or its links are slow, and the plan is carried over: what was
on the lost GPU goes to the GPU with the least work. From there the system searches again (`start=` its old plan; placewise
walks on from it), and for comparison afresh, both with the same budget.
"""

import hashlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.labels import sum_by_label
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.experiments.papers.reported_results import OWN
from placewise.experiments.papers.reproduction import Effort
from placewise.experiments.recorded_searches import recorded
from placewise.machines.variants import without
from placewise.models import load_graph
from placewise.search.budget import Budget
from placewise.search.driver import Outcome, unless_stopped
from placewise.search.planner import Planner
from placewise.search.request import Request
from placewise.simulate.simulator import Simulator
from placewise.strategies import parameters
from placewise.strategies.auto.continued import Continued

SLOWER = 4.0  # times that copies from and to a GPU take if its card runs with a quarter of its lanes

NEAR = 1.05  # a search has recovered at 5% above what it finds afresh

SYSTEMS: Mapping[str, str] = {"Post": "post", "ColocRL": "colocrl", "Spotlight": "spotlight", "HDP": "hdp", OWN: "auto"}


@dataclass(frozen=True)
class ChangedRow:
    """A model and the machine that it was placed on."""

    family: str
    model: str
    cluster: str
    quick_model: str = ""


ROWS = (
    ChangedRow("ResNet-50", "resnet", "4xK80", "resnet"),
    ChangedRow("Inception-V3", "inception-v3", "4xK80", "inception-v3"),
    ChangedRow("NMT-4", "nmt:layers=4", "4xK80", "nmt:layers=4,length=5"),
    ChangedRow("NMT-8", "nmt:layers=8", "8xK80"),
)


@dataclass(frozen=True)
class ChangedMachine:
    """What happens to a machine."""

    name: str
    cluster: Callable[[Cluster], Cluster]


@dataclass(frozen=True)
class Recovery:
    """What a change costs a system, in seconds per step; all are medians over the seeds, None where nothing fits."""

    row: ChangedRow
    change: str
    system: str
    before: float | None  # on the machine as it was
    carried: float | None  # the same plan afterwards
    afresh: float | None  # a search that knows nothing
    recovered: float | None  # a search that begins at the plan
    evaluations_afresh: float | None  # until it is near what it finds
    evaluations_recovered: float | None  # until it is as near to that


@dataclass(frozen=True)
class Recoveries:
    """All that was found."""

    effort: Effort
    results: tuple[Recovery, ...]
    is_complete: bool = True


def without_a_gpu(cluster: Cluster) -> Cluster:
    """Returns the cluster without its last GPU."""
    return without(cluster, _last_gpu(cluster))


def with_slow_links(cluster: Cluster) -> Cluster:
    """Returns the cluster with copies from and to its last GPU that take `SLOWER` times as long."""
    slow = _last_gpu(cluster)
    links = tuple(
        replace(link, bytes_per_second=link.bytes_per_second / SLOWER, latency_seconds=link.latency_seconds * SLOWER)
        if slow in (link.source, link.target)
        else link
        for link in cluster.links
    )
    return replace(cluster, name=f"{cluster.name}, slow links of {slow}", links=links)


CHANGES = (
    ChangedMachine("a GPU less", without_a_gpu),
    ChangedMachine(f"links of a GPU {SLOWER:g} times slower", with_slow_links),
)


def _last_gpu(cluster: Cluster) -> str:
    return [device.name for device in cluster.devices if device.kind != "cpu"][-1]


def carry_to(problem: Problem, placement: Ints, changed: Problem) -> Ints:
    """Returns the placement [groups] on a changed machine: what has lost its device goes to the GPU with the least work.

    Lost groups follow in their order, each with its own time on that GPU; ties go to the lowest.
    """
    names = changed.cluster.device_names
    of = np.array([names.index(name) if name in names else -1 for name in problem.cluster.device_names])
    carried: Ints = of[placement]
    seconds = np.zeros((changed.num_groups, changed.num_devices))
    np.add.at(seconds, changed.op_groups, changed.op_seconds)
    lost = np.flatnonzero(carried < 0)
    kept = np.flatnonzero(carried >= 0)
    work = sum_by_label(carried[kept], seconds[kept, carried[kept]], changed.num_devices)
    for group in lost.tolist():
        can = changed.allowed[group] & np.array([device.kind != "cpu" for device in changed.cluster.devices])
        can = can if can.any() else changed.allowed[group]
        carried[group] = int(np.where(can, work, np.inf).argmin())
        work[carried[group]] += seconds[group, carried[group]]
    return carried


def measure_recoveries(
    effort: Effort,
    *,
    rows: tuple[ChangedRow, ...] = ROWS,
    systems: Mapping[str, str] = SYSTEMS,
    run_file: str | Path | None = None,
    on_found: Callable[[Recovery], None] = lambda found: None,
) -> Recoveries:
    """Returns what changes cost each system; Ctrl-C ends it with what there is, and a run file lets it go on."""
    results: list[Recovery] = []
    try:
        with recorded(run_file) as file:
            for row in rows:
                for system, strategy in systems.items():
                    for found in _recoveries(row, system, strategy, effort, file):
                        results.append(found)
                        on_found(found)
    except KeyboardInterrupt:
        return Recoveries(effort, tuple(results), is_complete=False)
    return Recoveries(effort, tuple(results))


_graph = lru_cache(maxsize=2)(load_graph)


def _recoveries(row: ChangedRow, system: str, strategy: str, effort: Effort, file: Path) -> Iterator[Recovery]:
    budget = effort.own_evaluations if system == OWN else effort.evaluations
    whole = Cluster.load(row.cluster)
    problem = Problem.of(_graph(row.model), whole)
    simulator = Simulator(problem)
    seeds = range(effort.seeds)
    before = [_search(problem, simulator, row, strategy, budget, seed, file) for seed in seeds]
    for change in CHANGES:
        changed = Problem.of(problem.graph, change.cluster(whole))
        judge = Simulator(changed)
        carried: list[float | None] = []
        afresh, again = [], []
        for seed, old in zip(seeds, before, strict=True):
            afresh.append(_search(changed, judge, row, strategy, budget, seed, file))
            if old.placement is None:
                carried.append(None)
                again.append(afresh[-1])
                continue
            placement = carry_to(problem, old.placement, changed)
            judged = judge(placement[None])
            carried.append(float(judged.step_seconds[0]) if judged.overflow_bytes[0] == 0 else None)
            again.append(_search(changed, judge, row, strategy, budget, seed, file, placement))
        limits = [outcome.step_seconds * NEAR for outcome in afresh]
        yield Recovery(
            row, change.name, system,
            _median([_seconds(outcome) for outcome in before]),
            _median(carried),
            _median([_seconds(outcome) for outcome in afresh]),
            _median([_seconds(outcome) for outcome in again]),
            _median([_reached(outcome, limit) for outcome, limit in zip(afresh, limits, strict=True)]),
            _median([_reached(outcome, limit) for outcome, limit in zip(again, limits, strict=True)]),
        )  # fmt: skip


def _search(
    problem: Problem,
    simulator: Simulator,
    row: ChangedRow,
    strategy: str,
    budget: int,
    seed: int,
    file: Path,
    start: Ints | None = None,
) -> Outcome:
    """Returns what a strategy finds, from a placement on if it gets one."""
    settings = {"evaluations": str(budget)} if "evaluations" in parameters(strategy) else {}
    continued: Continued | None = None
    if start is not None and strategy == "auto":
        continued = Continued(start)
    elif start is not None:
        settings["start"] = str(_plan_file(problem, start, file))
    request = Request(strategy, settings, Budget(budget), seed, model=row.model, cluster=problem.cluster.name)
    record = None if continued else file  # a run file has no continued searches
    planner = Planner(problem, request, strategy=continued)
    return unless_stopped(planner.search(record=record, evaluator=simulator))


def _plan_file(problem: Problem, placement: Ints, file: Path) -> Path:
    """Returns the file of the plan that a search starts from, beside the run file and named after what it holds."""
    folder = Path(f"{file}.plans")
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.blake2b(placement.tobytes(), digest_size=8).hexdigest()}.json"
    Plan(placement=problem.expand(placement)).save(path)
    return path


def _seconds(outcome: Outcome) -> float | None:
    return None if outcome.placement is None else outcome.step_seconds


def _reached(outcome: Outcome, limit: float) -> float | None:
    """Returns the evaluations after which a search was at most at this limit, or None."""
    return next((float(spent) for spent, seconds in outcome.history if seconds <= limit), None)


def _median(values: list[float | None]) -> float | None:
    """Returns the median; None if there is a seed without a value."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def recovery_table(done: Recoveries) -> tuple[list[str], list[list[str]]]:
    """Returns a line for each row, change and system: seconds per step, and evaluations until the search is near."""
    header = [
        "model",
        "change",
        "system",
        "before, s",
        "old plan",
        "afresh",
        "from the plan",
        "evaluations afresh",
        "from the plan",
    ]
    lines = [
        [
            f"{found.row.family}, {found.row.cluster}",
            found.change,
            found.system,
            _text(found.before),
            _text(found.carried, found.before),
            _text(found.afresh, found.before),
            _text(found.recovered, found.before),
            "-" if found.evaluations_afresh is None else f"{found.evaluations_afresh:,.0f}",
            "-" if found.evaluations_recovered is None else f"{found.evaluations_recovered:,.0f}",
        ]
        for found in done.results
    ]
    return header, lines


def _text(seconds: float | None, before: float | None = None) -> str:
    """Returns seconds, and how many times those of before they are."""
    if seconds is None:
        return "-"
    return f"{seconds:.3f}" + (f" ({seconds / before:.2f})" if before else "")
