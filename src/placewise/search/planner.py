"""From a problem to a plan: the one place where bound, evaluator, strategy, search and record are put together."""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from placewise.core.carried_placements import carry_over, names_of_groups
from placewise.core.cluster import Cluster, as_cluster
from placewise.core.contracts import Evaluator, Strategy
from placewise.core.errors import InputError, NothingFits, StrategyError
from placewise.core.graph import Graph, as_graph
from placewise.core.grouping import COLOCATED
from placewise.core.plan import Plan, digest_of_graph
from placewise.core.problem import Problem
from placewise.core.quantities import format_bytes
from placewise.evaluate import open_evaluator
from placewise.evaluate.measured import Measure
from placewise.machines.presets import is_preset
from placewise.machines.variants import with_cuda_graphs
from placewise.search.budget import budget_of
from placewise.search.driver import Outcome, Progress, search
from placewise.search.request import DEFAULT_STRATEGY, Request, as_text, parameters_of, specify
from placewise.search.simplicity import SHARE, Front, Watched, interval, prepared, search_share, simplify, tolerance_of
from placewise.search.store import Run, RunFile, check_recorded
from placewise.search.tight_memory import with_options_if_tight
from placewise.simulate.cuts import Crossings
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.auto.candidates import Candidate
from placewise.strategies.auto.continued import Continued
from placewise.strategies.options.fitted import made_to_fit
from placewise.strategies.warm_start import with_start

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.graph_capture.capture import CapturedStep


@dataclass(frozen=True, eq=False)
class Planner:
    """Makes a plan for a problem: opens the evaluator that the request asks for, searches with it, and predicts the best."""

    problem: Problem
    request: Request
    bound: "Bound | None" = None  # from `find_bound`; a search without it can't stop at its target gap
    step: "CapturedStep | None" = None  # what is measured; None: load `request.model`
    workers: int | None = None
    ray: str | None = None
    on_failure: Callable[[str], None] = lambda line: None  # gets a line for each measurement that fails
    strategy: Strategy | None = None  # in place of the one that the request names
    spent_seconds: float = 0.0  # of the budget, before the search: for the bound

    def evaluator(self) -> AbstractContextManager[Evaluator]:
        """Opens the evaluator that the request asks for: one that simulates, or one that measures."""
        return open_evaluator(
            self.problem,
            self.request.order,
            measure=self.request.measure,
            step=self.request.model if self.step is None else self.step.step,
            workers=self.workers,
            ray=self.ray,
            report=self.on_failure,
        )

    def search(
        self,
        on_batch: Callable[[Progress], None] | None = None,
        *,
        record: Run | str | Path | None = None,
        evaluator: Evaluator | None = None,
    ) -> Outcome:
        """Returns what the search finds.

        `record` is a run file, or an open run: the search is recorded there and continues where the record ends; a finished
        one is answered from the record. `evaluator` replaces the one that the request asks for.
        """
        with nullcontext(evaluator) if evaluator is not None else self.evaluator() as judge, self._open_run(record) as run:
            if run is not None and (found := run.outcome()) is not None and found.placement is not None:
                for plan in ((found.placement, found.order), found.fastest):
                    check_recorded(self.problem, plan, f"{run.file.path}: run {run.number}")
                return found
            strategy, front = self.strategy or make(self.request.strategy, dict(self.request.settings)), None
            budget = self.request.budget
            if self.request.simple:
                strategy, budget = prepared(strategy), search_share(budget)
                front = None if self.problem.graph.has_options else self._front(self.problem)
            if front is not None:
                strategy = Watched(made_to_fit(strategy, self.problem), front.watch)
            outcome = search(
                self.problem,
                strategy,
                judge,
                budget=budget.without(self.spent_seconds),
                seed=self.request.seed,
                bound_seconds=None if self.bound is None else self.bound.seconds,
                record=run,
                on_batch=on_batch,
                at_once=getattr(judge, "workers", 1) if self.request.measure else None,  # so that Ctrl-C loses little
            )
            outcome = self._simplified(outcome, front)
            if run is not None:
                run.finish(outcome)
            return outcome

    def _front(self, problem: Problem) -> Front:
        return Front(Simulator(problem, self.request.order), Crossings.of(problem), self.request.simple)

    def _simplified(self, outcome: Outcome, front: Front | None) -> Outcome:
        """Returns the outcome with a simpler plan, within the tolerance that the request has."""
        if not self.request.simple or outcome.placement is None or not self.problem.num_ops:
            return outcome
        placement, order, present = outcome.placement, outcome.order, None
        if self.problem.graph.has_options:  # what is nowhere stays nowhere
            present = self.problem.present(placement)
            placement = placement[present.groups]
            order = None if order is None else present.reduce_order(order)
        front = front or self._front(self.problem if present is None else present.problem)
        fastest = Candidate.of(front.model, placement, order)
        if fastest.overflow_bytes:
            return outcome
        seconds, rng = (
            self.request.budget.seconds,
            np.random.default_rng([self.request.seed, 1]),
        )  # other draws than the search's
        found = simplify(front, fastest, rng, None if seconds is None else SHARE * seconds)
        (placement, order), quickest = (
            (one.placement, np.asarray(one.order, np.int64))
            if present is None
            else (present.restore_placement(one.placement), present.restore_order(np.asarray(one.order, np.int64)))
            for one in (found.answer, found.fastest)
        )
        step_seconds = found.answer.seconds
        return replace(
            outcome, placement=placement, order=order, step_seconds=step_seconds, simplicity=found.gave, fastest=quickest
        )

    @contextmanager
    def _open_run(self, record: Run | str | Path | None) -> Iterator[Run | None]:
        if record is None or isinstance(record, Run):
            yield record
            return
        specification, is_new_file = specify(self.problem, self.request), not os.path.lexists(record)
        with RunFile(record) as file:
            number = file.find(specification)
            with file.create(specification, self.problem) if number is None else Run(file, number) as run:
                try:
                    yield run
                except StrategyError:  # it can't be used here: nothing is left of the attempt
                    if number is None:
                        run.forget()
                    if is_new_file:
                        file.discard()
                    raise

    def schedule(self, outcome: Outcome) -> Schedule:
        """Returns what the simulator predicts for the best placement; NothingFits if there is none."""
        simulator = Simulator(self.problem, self.request.order)
        if outcome.placement is None:
            raise NothingFits(_why_nothing_fits(simulator, outcome))
        return simulator.schedule(outcome.placement, outcome.order)

    def plan(self, outcome: Outcome, schedule: Schedule | None = None) -> Plan:
        """Returns the plan for the best placement; `schedule` is what `schedule` returned, if it was called already."""
        problem, request, bound = self.problem, self.request, self.bound
        schedule = schedule or self.schedule(outcome)
        is_measured = request.measure is not None
        step_seconds = outcome.step_seconds if is_measured else schedule.step_seconds
        placement, order = schedule.placement, schedule.order
        if schedule.present is not None:
            placement = schedule.present.restore_placement(placement)
            order = schedule.present.restore_order(order)
        is_program = bool((np.diff(schedule.order) > 0).all())
        known = list(outcome.history)
        if outcome.simplicity is not None:
            known.append((outcome.evaluations, outcome.simplicity.fastest_seconds))
        improvements = [pair for i, pair in enumerate(known) if i == 0 or pair[1] < known[i - 1][1]]
        return Plan(
            placement=problem.expand(placement),
            order=None if is_program else tuple(order.tolist()),
            graph_digest=digest_of_graph(problem.graph),
            cluster=problem.cluster.name,
            strategy=request.strategy,
            parameters=parameters_of(request),
            seed=request.seed,
            evaluations=outcome.evaluations,
            step_seconds=step_seconds,
            bound_seconds=None if bound is None else bound.seconds,
            gap=None if bound is None or is_measured else gap_of(step_seconds, bound.seconds),
            fits=schedule.fits,
            peak_bytes=dict(zip(problem.cluster.device_names, schedule.peak_bytes.tolist(), strict=True)),
            history=tuple(pair for pair in improvements if np.isfinite(pair[1])),
            predicted_seconds=schedule.step_seconds if is_measured else None,
            interval_seconds=None if is_measured else interval(schedule),
            simplicity=outcome.simplicity,
            groups=names_of_groups(problem.graph),
            rewrites=problem.graph.rewrites,
            cuda_graphs=problem.cluster.cuda_graphs,
            machine=None if is_preset(problem.cluster) else problem.cluster,
        )


def place(
    step: "CapturedStep | Graph",
    cluster: Cluster | str | Path,
    *,
    strategy: str = DEFAULT_STRATEGY,
    evaluations: int | None = None,
    seconds: float | None = None,
    target_gap: float | None = None,
    seed: int = 0,
    order: str = "priority",
    grouping: str = COLOCATED,
    settings: Mapping[str, Any] | None = None,
    workers: int | None = None,
    ray: str | None = None,
    run_file: str | Path | None = None,
    measure: Measure | bool | None = None,
    start: "tuple[CapturedStep | Graph, Plan] | str | Path | None" = None,
    recompute: bool = True,
    park: bool = True,
    simple: float | None = None,
    cuda_graphs: bool = False,
) -> Plan:
    """Returns the best plan that a strategy finds for a step on a cluster (or its name); NothingFits if none fits.

    The default budget is 10 seconds for auto and 2,400 evaluations for all other strategies; the search ends earlier when
    found / bound - 1 is at most `target_gap`. `settings` are the strategy's hyper-parameters. With `measure` (True is
    `Measure()`) placements are run on this machine instead of simulated; the default budget is then 60 placements.
    With a `run_file` the search is recorded, and continues where an earlier call with the same arguments was stopped.
    `start` is the file of a plan for this step, a similar one (another batch size, one layer more, the forward pass alone)
    or another machine: strategies with a `start` begin there. `auto` also takes a pair, that step and its plan.
    Where memory is tight, tensors may be recomputed (`recompute`) or wait on other devices (`park`) if that is faster.
    The plan is the simplest that takes at most `simple` longer than the fastest one found: 0.02 for auto, 0 for others.
    With `cuda_graphs` it is predicted with their launches, and `plan.compile` uses them.
    """
    graph, cluster, measure = as_graph(step), as_cluster(cluster), _measure_of(measure)
    _check("a string", str, strategy=strategy, grouping=grouping)
    _check("a dict or None", (Mapping, NoneType), settings=settings)
    _check("a number", (Real, NoneType), seconds=seconds, target_gap=target_gap, simple=simple)
    _check("a whole number", (Integral, NoneType), evaluations=evaluations, workers=workers)
    _check("a whole number", (Integral,), seed=seed)
    _check("an address, or 'local'", (str, NoneType), ray=ray)
    if cuda_graphs:
        if measure is not None:
            raise InputError("cuda_graphs can't be used when placements are measured: they are measured without")
        cluster = with_cuda_graphs(cluster)
    problem = Problem.of(graph, cluster, grouping)
    if measure is None and not isinstance(start, tuple):
        problem = with_options_if_tight(problem, recompute=recompute, park=park)
    budget = budget_of(strategy, evaluations, seconds, target_gap, is_measured=measure is not None)
    tolerance = tolerance_of(strategy, simple, is_measured=measure is not None)
    texts = as_text(settings or {})
    if isinstance(start, (str, Path)):
        texts, start = with_start(strategy, texts, str(start)), None
    request = Request(strategy, texts, budget, seed, order, graph.name, cluster.name, measure, tolerance)
    make(strategy, dict(request.settings))  # refuses wrong names before any work
    captured = None if isinstance(step, Graph) else step
    continued = None
    if start is not None:
        if strategy != DEFAULT_STRATEGY or run_file is not None or measure is not None:
            raise InputError(
                "a step and its plan as start are for the strategy auto, without a run file and without measuring; "
                "for others, save the plan and name its file"
            )
        _check("the file of a plan, or a step and its plan", tuple, start=start)
        continued = continue_from(problem, as_graph(start[0]), start[1])
    begun = time.monotonic()
    bound = find_bound(problem)
    spent = time.monotonic() - begun
    planner = Planner(problem, request, bound, captured, workers, ray, strategy=continued, spent_seconds=spent)
    return planner.plan(planner.search(record=run_file))


def continue_from(problem: Problem, graph: Graph, plan: Plan) -> Continued:
    """Returns a search that begins at the plan of a similar graph, carried over by the names of ops and modules."""
    placement = problem.contract(carry_over(graph, [name or "" for name in plan.placement], problem.graph))
    is_same = plan.order is not None and graph.ops.names == problem.graph.ops.names
    return Continued(placement, np.array(plan.order, np.int64) if is_same else None)


def find_bound(problem: Problem, seconds: float | None = None) -> "Bound | None":
    """Returns the bound for the graph's own groups, however the search groups them further; None if it can't be found."""
    from placewise.bounds.best_bound import bound

    ungrouped = problem if problem.grouping == COLOCATED else Problem.of(problem.graph, problem.cluster)
    try:
        return bound(ungrouped, seconds=seconds)
    except Exception as reason:  # a search is useful without it
        warnings.warn(f"there is no bound for this step: {type(reason).__name__}: {reason}", stacklevel=2)
        return None


def gap_of(step_seconds: float, bound_seconds: float) -> float | None:
    """Returns found / bound - 1; None if the bound is 0 and the step is not."""
    if bound_seconds <= 0:
        return 0.0 if step_seconds == 0 else None
    return step_seconds / bound_seconds - 1


def _why_nothing_fits(simulator: Simulator, outcome: Outcome) -> str:
    """Returns on which devices the placement that overflows least does not fit, and by how much."""
    tried = f"nothing fits: of {outcome.evaluations:,} placements tried,"
    if outcome.closest is None:
        return f"{tried} none was judged"
    schedule = simulator.schedule(outcome.closest)
    over = [
        f"{device.name} needs {format_bytes(peak)}, {format_bytes(peak - device.memory_bytes)} more than it has"
        for device, peak in zip(simulator.problem.cluster.devices, schedule.peak_bytes.tolist(), strict=True)
        if peak > device.memory_bytes
    ]
    if not over:
        return f"{tried} none could be run, though the simulator predicts that they fit"
    return f"{tried} the one that overflows least: {', '.join(over)}"


def _check(kind: str, types: Any, **given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, types):
            raise InputError(f"{name} must be {kind}, got {value!r}")


def _measure_of(given: Measure | bool | None) -> Measure | None:
    if isinstance(given, bool):
        return Measure() if given else None
    _check("True, or a Measure of placewise.evaluate.measured", (Measure, NoneType), measure=given)
    return given
