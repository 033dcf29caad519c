"""Advice: whether more devices are worth it, what limits the step, and what would help how much, all by simulation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from placewise.bounds.dag import alike
from placewise.core.cluster import Cluster
from placewise.core.errors import PlacewiseError
from placewise.core.graph import Graph
from placewise.core.problem import Problem
from placewise.core.quantities import format_seconds
from placewise.machines.variants import (
    gpus_of,
    with_cuda_graphs,
    with_faster_launches,
    with_faster_links,
    with_half_the_memory,
    with_one_less,
    with_one_more,
)
from placewise.search.budget import CLOSED, Budget
from placewise.search.driver import unless_stopped
from placewise.search.micro_batches import NUMBERS
from placewise.search.planner import Planner, find_bound
from placewise.search.request import Request
from placewise.search.tight_memory import with_options_if_tight
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.continued import Continued

if TYPE_CHECKING:
    from placewise.graph_capture.training_step import TrainingStep

NEAR = 0.03  # of the best plan: a device that comes as near is enough

WORTH_IT = 0.05  # of the step: what a change must save to be recommended

SAME = 0.01  # of the step: with a part of the machine taken out, it is not missed

BALANCED = 0.03  # of the step: if no part of the machine saves more, being twice as fast, all of them limit it

FASTER = 2.0  # how much faster links and launches are made

MOST_DEVICES = 8  # the busiest ones: of these is asked what twice as much speed saves

FIRST = 3.0  # times the seconds of other searches: what the search for the plan itself gets


class LimitingPart(NamedTuple):
    """Something of the machine, and how much shorter the step would be if it were twice as fast."""

    what: str
    saved: float  # share of the step


class Change(NamedTuple):
    """Something that could be changed, and what the step would take then."""

    what: str
    kind: str  # "free": nothing to buy and the same numbers; "software": other numbers or more memory; "machine"; "less"
    seconds: float  # for as many samples as before; infinite if nothing fits
    option: str = ""  # how to ask for it

    def saved(self, seconds: float) -> float:
        """Returns the share of a step of these seconds that it saves."""
        return 1 - self.seconds / seconds if seconds else 0.0


@dataclass(frozen=True, eq=False)
class Advice:
    """What was found for a step on a machine."""

    schedule: Schedule  # of the plan
    bound_seconds: float | None
    alone: tuple[str, float] | None  # the fastest single device and its seconds
    limits: tuple[LimitingPart, ...]  # the largest first
    changes: tuple[Change, ...]

    @property
    def seconds(self) -> float:
        """The plan's step."""
        return self.schedule.step_seconds

    @property
    def best_seconds(self) -> float:
        """The best step on this machine with the same numbers."""
        return min([self.seconds, *(change.seconds for change in self.changes if change.kind == "free")])

    @property
    def one_is_enough(self) -> bool:
        """Whether a single device is nearly as fast as the best plan."""
        return self.alone is not None and self.alone[1] <= self.best_seconds * (1 + NEAR)

    @property
    def recommendation(self) -> str:
        """What to do, in one sentence."""
        free, software = _best(self.changes, self.seconds, "free"), _best(self.changes, self.seconds, "software")
        others = _best(self.changes, self.seconds, "software", "machine")
        if self.one_is_enough and self.alone is not None:
            name, seconds = self.alone
            proven = self.bound_seconds is not None and seconds <= self.bound_seconds * (1 + NEAR)
            near = f"{name} alone is within {NEAR:.0%} of {'any plan' if proven else 'any plan found'}"
            more = _best(self.changes, self.seconds, "machine")
            return f"{'use one device' if more else 'buy nothing'}: {near}{self._also(software)}{self._also(more)}"
        if free:
            better = software if software and software.seconds < free.seconds else None
            return f"{free.option or free.what}: {_in_words(free, self.seconds)}{self._also(better)}"
        needless = [
            change
            for change in self.changes
            if change.what.startswith("without") and change.seconds <= self.seconds * (1 + SAME)
        ]
        less = "".join(f"; {change.what} it takes {format_seconds(change.seconds)}, hardly more" for change in needless[:1])
        if others or less:
            return f"use this plan{less}{self._also(others)}"
        return f"use this plan: nothing that was tried saves more than {WORTH_IT:.0%}"

    def _also(self, change: Change | None) -> str:
        return f"; {_in_words(change, self.seconds)}" if change else ""


def _best(changes: tuple[Change, ...], seconds: float, *kinds: str) -> Change | None:
    """Returns the change of these kinds that saves most, None if none is worth it; ties go to the first."""
    worth = [change for change in changes if change.kind in kinds and change.saved(seconds) >= WORTH_IT]
    return min(worth, key=lambda change: change.seconds, default=None)


def _in_words(change: Change, seconds: float) -> str:
    return f"{change.what} would save {change.saved(seconds):.0%} ({format_seconds(change.seconds)})"


# --- what limits a schedule ---


def find_limiting_parts(schedule: Schedule) -> tuple[LimitingPart, ...]:
    """Returns what limits a schedule, the largest first: each made twice as fast, with nothing else changed."""
    problem, step = schedule.problem, schedule.step_seconds
    cluster, limits = problem.cluster, list[LimitingPart]()
    if not step:
        return ()

    def add(what: str, other: Problem) -> None:
        found = Simulator(other, "program").simulate(schedule.placement[None], schedule.order[None])
        limits.append(LimitingPart(what, max(1 - float(found.step_seconds[0]) / step, 0.0)))

    busiest = np.argsort(-schedule.busy_seconds, kind="stable")[:MOST_DEVICES]
    for device, name in enumerate(cluster.device_names):
        if schedule.busy_seconds[device] > 0 and device in busiest:
            op_seconds = problem.op_seconds.copy()
            op_seconds[:, device] /= FASTER
            add(f"the work of {name}", replace(problem, op_seconds=op_seconds))
    if len(schedule.copy_tensors):
        add("the links", replace(problem, cluster=with_faster_links(cluster, FASTER)))
    if cluster.dispatch_seconds:
        add("launches", replace(problem, cluster=with_faster_launches(cluster, FASTER)))
    return tuple(sorted(limits, key=lambda limit: -limit.saved))


def path_share(schedule: Schedule) -> float:
    """Returns how much of the step the model's own critical path takes, each op on its fastest device and no copies."""
    problem = schedule.problem
    ends = np.zeros(problem.num_ops)
    writers, readers, _ = problem.graph.edges
    after = problem.graph.ops.after
    earlier = np.concatenate([writers, after.values])
    later = np.concatenate([readers, after.rows])
    by_reader = np.argsort(later, kind="stable")
    sources, targets = earlier[by_reader].tolist(), later[by_reader].tolist()
    start, seconds, entry = [0.0] * problem.num_ops, problem.fastest_seconds.tolist(), 0
    for n in range(problem.num_ops):
        while entry < len(targets) and targets[entry] == n:
            start[n] = max(start[n], ends[sources[entry]])
            entry += 1
        ends[n] = start[n] + seconds[n]
    return float(ends.max(initial=0.0)) / schedule.step_seconds if schedule.step_seconds else 0.0


def limits_in_words(schedule: Schedule, limits: tuple[LimitingPart, ...]) -> str:
    """Returns what limits the step, with numbers."""
    if not limits:
        return "nothing: no op takes any time"
    path = path_share(schedule)
    if path >= 0.9:
        return f"the model's own critical path: {path:.0%} of the step, however many devices there are"
    if limits[0].saved < BALANCED:
        busiest = int(schedule.busy_seconds.argmax())
        share = schedule.busy_seconds[busiest] / schedule.step_seconds
        name = schedule.problem.cluster.device_names[busiest]
        return f"no part alone: the work is balanced, {name} is busy {share:.0%} of the step"
    if limits[0].what == "launches":
        graphs = "".join(f"; {_in_words(change, schedule.step_seconds)}" for change in _graphs(schedule))
        launching = (
            schedule.problem.cluster.dispatch_seconds * schedule.problem.num_ops
            + schedule.problem.cluster.copy_launch_seconds * len(schedule.copy_tensors)
        )
        return f"launches: the host needs {format_seconds(launching)} of the step for them{graphs}"
    return f"{limits[0].what}: at twice the speed the step would be {limits[0].saved:.0%} shorter"


def _graphs(schedule: Schedule) -> Iterator[Change]:
    """Yields CUDA graphs with the same placement and order; not if they save little, or there is no GPU."""
    problem = schedule.problem
    if problem.cluster.cuda_graphs or all(device.kind != "gpu" for device in problem.cluster.devices):
        return
    other = replace(problem, cluster=with_cuda_graphs(problem.cluster))
    found = Simulator(other, "program").simulate(schedule.placement[None], schedule.order[None])
    change = Change("CUDA graphs (--cuda-graphs)", "software", float(found.step_seconds[0]))
    if change.saved(schedule.step_seconds) >= SAME:
        yield change


def alone_in_words(alone: tuple[str, float] | None, seconds: float, num_devices: int) -> str:
    """Returns how a plan compares with the fastest single device."""
    if alone is None:
        return "no single device can hold the step"
    name, other = alone
    if num_devices == 1 and other >= seconds:
        return "this plan needs only one"
    if other <= seconds * (1 + NEAR):
        above = other / seconds - 1 if seconds else 0.0
        more = f"only {above:.1%} more than" if above >= 0.0005 else "no more than"
        return f"{name} alone takes {format_seconds(other)}, {more} this plan"
    more = f"this plan on {num_devices} devices saves {1 - seconds / other:.0%}"
    return f"{name} alone takes {format_seconds(other)}: {more}"


def advice_in_words(schedule: Schedule) -> tuple[str, ...]:
    """Returns three lines under a plan: one device against all, what limits the step, and what would help."""
    problem, step, limits = schedule.problem, schedule.step_seconds, find_limiting_parts(schedule)
    if not step:
        return ()
    used = len(np.unique(schedule.devices))
    helps = [f"{limit.what} twice as fast (saves {limit.saved:.0%})" for limit in limits if limit.saved >= 0.01][:3]
    return (
        f"one device: {alone_in_words(fastest_alone(problem), step, used)}",
        f"what limits: {limits_in_words(schedule, limits)}",
        f"what would help: {', '.join(helps) or 'no faster part of the machine'}; `placewise advise` also tries "
        "micro-batches, more and fewer GPUs, bfloat16, fused ops and a larger batch",
    )


# --- what would help ---


@dataclass(frozen=True, eq=False)
class Adviser:
    """Places a step, and what is a little different from it, each with a short search."""

    seconds: float = 3.0  # of each search; the plan's own gets more
    seed: int = 0
    on_step: Callable[[str], None] = lambda what: None  # is told what is being tried

    def advise(self, graph: Graph, cluster: Cluster, step: "Callable[[], TrainingStep | None]") -> Advice | None:
        """Returns advice for a graph on a cluster, also for what needs another capture of the model; None if nothing fits.

        `step` returns the step that the graph was captured from, a new one in every call, or None if there is none.
        """
        self.on_step("this plan")
        problem = Problem.of(graph, cluster)
        bound = find_bound(problem)
        schedule = self._place(problem, FIRST * self.seconds, None if bound is None else bound.seconds)
        alone = fastest_alone(problem)
        if schedule is None:
            return None
        changes = [*self._captures(graph, cluster, step), *_graphs(schedule), *self._machines(graph, cluster, schedule)]
        changes = [
            change._replace(seconds=max(change.seconds, schedule.step_seconds)) if change.kind == "less" else change
            for change in changes
        ]  # what a smaller machine can do, this one can do, too: a shorter step there is the search's luck
        bound_seconds = None if bound is None else bound.seconds
        return Advice(schedule, bound_seconds, alone, find_limiting_parts(schedule), tuple(changes))

    def _captures(self, graph: Graph, cluster: Cluster, step: "Callable[[], TrainingStep | None]") -> Iterator[Change]:
        """Yields what would take another capture: micro-batches, bfloat16, fused ops, a larger batch."""
        from placewise.graph_capture.capture import capture_step
        from placewise.models import in_bfloat16, with_twice_the_batch

        given = step()
        if given is None or given.optimizer is None:
            return
        own = any("batch_norm" in kind for kind in graph.ops.kinds)  # then each micro-batch is normalised by itself
        variants: list[tuple[str, str, str, float, Callable[[TrainingStep], TrainingStep | None]]] = [
            (f"{number} micro-batch{'es' if number > 1 else ''}{', batch norms of their own' if own and number > 1 else ''}",
             "software" if own else "free", f"use micro_batches={number}", 1.0,
             lambda one, number=number: replace(one, micro_batches=number))  # type: ignore[misc]
            for number in NUMBERS if number != given.micro_batches
        ]  # fmt: skip
        if given.autocast is None:
            variants.append(("bfloat16 (autocast)", "software", "", 1.0, in_bfloat16))
        if not given.fuse:
            variants.append(("fused ops", "software", "", 1.0, lambda one: replace(one, fuse=True)))
        variants.append(("twice the batch, per sample", "software", "", 0.5, with_twice_the_batch))
        for what, kind, option, share, change in variants:
            self.on_step(what)
            try:
                built = step()
                changed = None if built is None else change(built)
                if changed is None:
                    continue
                other = capture_step(changed, what).graph
            except PlacewiseError:
                continue  # such as a batch that can't be split into that many parts
            found = self._place(Problem.of(other, cluster), self.seconds)
            yield Change(what, kind, np.inf if found is None else found.step_seconds * share, option)

    def _machines(self, graph: Graph, cluster: Cluster, schedule: Schedule) -> Iterator[Change]:
        """Yields what other machines would do; each search begins at the plan, if that is possible."""
        less = with_one_less(cluster)
        machines = [
            ("links twice as fast", with_faster_links(cluster, FASTER) if len(cluster.devices) > 1 else None),
            (f"one more {gpus[0].name}" if (gpus := gpus_of(cluster)) else "", with_one_more(cluster)),
            (f"without {less[1]}" if less else "", less[0] if less else None),
            ("half the GPUs' memory", with_half_the_memory(cluster) if gpus else None),
        ]
        smaller = [what for what, _ in machines[2:]]
        for what, machine in machines:
            if machine is None:
                continue
            self.on_step(what)
            problem = Problem.of(graph, machine)
            found = self._place(problem, self.seconds)
            seconds = np.inf if found is None else found.step_seconds
            if schedule.present is None and set(machine.device_names) >= set(cluster.device_names):
                placement = problem.contract(schedule.problem.expand(schedule.placement))
                carried = self._place(problem, self.seconds, start=Continued(placement, schedule.order))
                seconds = min(seconds, np.inf if carried is None else carried.step_seconds)
            yield Change(what, "less" if what in smaller else "machine", seconds)

    def _place(
        self, problem: Problem, seconds: float, bound_seconds: float | None = None, start: Continued | None = None
    ) -> Schedule | None:
        """Returns the fastest schedule that a search of some seconds finds, None if nothing fits."""
        problem = problem if start else with_options_if_tight(problem)
        budget = Budget(seconds=seconds, target_gap=CLOSED)
        planner = Planner(problem, Request(budget=budget, seed=self.seed), strategy=start)
        outcome = unless_stopped(planner.search())
        return None if outcome.placement is None else planner.schedule(outcome)


def fastest_alone(problem: Problem) -> tuple[str, float] | None:
    """Returns the device that runs everything fastest, and the step's time there; None if everything fits on no device."""
    whole = np.flatnonzero(problem.allowed.all(axis=0))
    if not len(whole):
        return None
    whole = np.sort(whole[np.unique(alike(problem)[whole], return_index=True)[1]])  # those that are alike take equally long
    evaluation = Simulator(problem)(np.tile(whole[:, None], (1, problem.num_groups)))
    times = np.where(evaluation.overflow_bytes > 0, np.inf, evaluation.step_seconds)
    best = int(times.argmin())
    return (problem.cluster.device_names[whole[best]], float(times[best])) if np.isfinite(times[best]) else None
