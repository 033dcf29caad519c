"""From a step and a machine to a plan: the wiring of problem, bound, strategy, evaluator, search and record."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from placewise.core.cluster import Cluster, cluster_of
from placewise.core.contracts import Evaluator
from placewise.core.errors import InputError, NothingFits
from placewise.core.graph import Graph, graph_of
from placewise.core.grouping import COLOCATED
from placewise.core.plan import Plan, digest_of_graph
from placewise.core.problem import Problem
from placewise.core.quantities import nbytes
from placewise.evaluate.measured import Measure
from placewise.evaluate.simulated import open_evaluator
from placewise.search.budget import budget_of
from placewise.search.driver import Outcome, Progress, search
from placewise.search.request import DEFAULT_STRATEGY, Request, as_text, parameters_of, specify
from placewise.search.store import Run, RunFile
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator
from placewise.strategies import make

if TYPE_CHECKING:
    from placewise.bounds.best_bound import Bound
    from placewise.graph_capture.capture import CapturedStep


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
) -> Plan:
    """Returns the best plan that a strategy finds for a step on a cluster (or its name); NothingFits where none fits.

    Without a budget of evaluations or seconds it is 10 seconds for auto, and 2,400 evaluations for all others; the search
    ends before it where found / bound - 1 is at most `target_gap`. `settings` are the strategy's hyper-parameters. With
    `measure` (True is `Measure()`) placements are run on this machine and not simulated; without a budget it is 60 then.
    """
    graph, cluster, measure = graph_of(step), cluster_of(cluster), _measure_of(measure)
    _check("a word", str, strategy=strategy, grouping=grouping)
    _check("a table or None", (Mapping, NoneType), settings=settings)
    _check("a number", (Real, NoneType), seconds=seconds, target_gap=target_gap)
    _check("a whole number", (Integral, NoneType), evaluations=evaluations, seed=seed, workers=workers)
    _check("an address, or 'local'", (str, NoneType), ray=ray)
    problem = Problem.of(graph, cluster, grouping)
    budget = budget_of(strategy, evaluations, seconds, target_gap, is_measured=measure is not None)
    request = Request(strategy, as_text(settings or {}), budget, seed, order, graph.name, cluster.name, measure)
    make(strategy, dict(request.settings))  # wrong names are refused before any work
    limit = find_bound(problem)
    with open_judge(problem, request, None if isinstance(step, Graph) else step, workers=workers, ray=ray) as evaluator:
        outcome = run(problem, request, evaluator, limit=limit, run_file=run_file)
    return make_plan(problem, request, outcome, predict(problem, request, outcome), limit)


def _check(kind: str, types: Any, **given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, types):
            raise InputError(f"{name} must be {kind}, it is {value!r}")


def _measure_of(given: Measure | bool | None) -> Measure | None:
    if isinstance(given, bool):
        return Measure() if given else None
    _check("True, or a Measure of placewise.evaluate.measured", (Measure, NoneType), measure=given)
    return given


@contextmanager
def open_judge(
    problem: Problem,
    request: Request,
    step: "CapturedStep | None" = None,
    *,
    workers: int | None = None,
    ray: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[Evaluator]:
    """Gives the evaluator that a request asks for: one that simulates, or one that measures.

    What is measured is `step`, or what `request.model` names. `report` gets a line for each measurement that fails.
    """
    if request.measure is None:
        with open_evaluator(problem, request.order, workers=workers, ray=ray) as evaluator:
            yield evaluator
        return
    if workers is not None and ray is None:
        raise InputError("measure: one process measures, alone on the machine: workers can be given with ray only")
    from placewise.evaluate.cached import Cached
    from placewise.evaluate.measured import MeasuredEvaluator, MeasuredFactory
    from placewise.evaluate.measured_worker import RunnerFactory
    from placewise.measure.step_times import run_steps

    make = RunnerFactory(request.model if step is None else step.step, problem, request.measure, run_steps)
    timeout_seconds = request.measure.timeout_seconds
    if ray is None:
        with MeasuredEvaluator(problem, make, request.order, timeout_seconds, report) as measured:
            yield Cached(measured)  # what was measured is not measured again
        return
    from placewise.evaluate.on_ray import OnRay

    there = MeasuredFactory(problem, make, request.order, timeout_seconds)
    with OnRay(there, workers, None if ray == "local" else ray, one_per_machine=True) as machines:
        yield Cached(machines)


def find_bound(problem: Problem, seconds: float | None = None) -> "Bound | None":
    """Returns what no placement of the graph's own groups beats, whatever a search keeps together; None if that fails."""
    from placewise.bounds.best_bound import bound

    whole = problem if problem.grouping == COLOCATED else Problem.of(problem.graph, problem.cluster)
    try:
        return bound(whole, seconds=seconds)
    except Exception as trouble:  # a search is worth having without it
        warnings.warn(f"there is no bound for this step: {type(trouble).__name__}: {trouble}", stacklevel=2)
        return None


def run(
    problem: Problem,
    request: Request,
    evaluator: Evaluator,
    *,
    limit: "Bound | None" = None,
    run_file: str | Path | None = None,
    on_step: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Returns what a search finds; with a run file it is recorded, and goes on where it was left."""
    if run_file is None:
        return _search(problem, request, evaluator, limit, None, on_step)
    with RunFile(run_file) as file:
        specification = specify(problem, request)
        number = file.find(specification)
        with file.create(specification, problem) if number is None else Run(file, number) as record:
            return go_on(problem, request, evaluator, record, limit=limit, on_step=on_step)


def go_on(
    problem: Problem,
    request: Request,
    evaluator: Evaluator,
    record: Run,
    *,
    limit: "Bound | None" = None,
    on_step: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Returns what a recorded run finds, going on where it was left; a finished one is answered from the record."""
    if (found := record.outcome()) is not None:
        return found
    outcome = _search(problem, request, evaluator, limit, record, on_step)
    record.finish(outcome)
    return outcome


def _search(
    problem: Problem,
    request: Request,
    evaluator: Evaluator,
    limit: "Bound | None",
    record: Run | None,
    on_step: Callable[[Progress], None] | None,
) -> Outcome:
    return search(
        problem,
        make(request.strategy, dict(request.settings)),
        evaluator,
        budget=request.budget,
        seed=request.seed,
        bound_seconds=None if limit is None else limit.seconds,
        record=record,
        on_step=on_step,
        at_once=getattr(evaluator, "workers", 1) if request.measure else None,  # measuring takes long: little is lost
    )


def predict(problem: Problem, request: Request, outcome: Outcome) -> Schedule:
    """Returns what the simulator predicts for an outcome; NothingFits where it has no placement."""
    simulator = Simulator(problem, request.order)
    if outcome.placement is None:
        raise NothingFits(_why_nothing_fits(simulator, outcome))
    return simulator.schedule(outcome.placement, outcome.order)


def make_plan(problem: Problem, request: Request, outcome: Outcome, schedule: Schedule, limit: "Bound | None") -> Plan:
    """Returns the plan of an outcome, with what is predicted for it and what no other beats."""
    is_measured = request.measure is not None
    step_seconds = outcome.step_seconds if is_measured else schedule.step_seconds
    is_program = bool((np.diff(schedule.order) > 0).all())
    improvements = [pair for i, pair in enumerate(outcome.history) if i == 0 or pair[1] < outcome.history[i - 1][1]]
    return Plan(
        placement=problem.expand(schedule.placement),
        order=None if is_program else tuple(schedule.order.tolist()),
        graph_digest=digest_of_graph(problem.graph),
        cluster=problem.cluster.name,
        strategy=request.strategy,
        parameters=parameters_of(request),
        seed=request.seed,
        evaluations=outcome.evaluations,
        step_seconds=step_seconds,
        bound_seconds=None if limit is None else limit.seconds,
        gap=None if limit is None or is_measured else gap_of(step_seconds, limit.seconds),
        fits=schedule.fits,
        peak_bytes=dict(zip(problem.cluster.device_names, schedule.peak_bytes.tolist(), strict=True)),
        history=tuple(pair for pair in improvements if np.isfinite(pair[1])),
        predicted_seconds=schedule.step_seconds if is_measured else None,
    )


def gap_of(step_seconds: float, bound_seconds: float) -> float | None:
    """Returns found / bound - 1; None where the bound says nothing."""
    if bound_seconds <= 0:
        return 0.0 if step_seconds == 0 else None
    return step_seconds / bound_seconds - 1


def _why_nothing_fits(simulator: Simulator, outcome: Outcome) -> str:
    """Returns by how much the placement that overflows least does not fit, and where."""
    tried = f"nothing fits: of {outcome.evaluations:,} placements that were tried"
    if outcome.closest is None:
        return f"{tried} none was judged"
    schedule = simulator.schedule(outcome.closest)
    over = [
        f"{device.name} needs {nbytes(peak)}, {nbytes(peak - device.memory_bytes)} more than it has"
        for device, peak in zip(simulator.problem.cluster.devices, schedule.peak_bytes.tolist(), strict=True)
        if peak > device.memory_bytes
    ]
    if not over:
        return f"{tried} none could be run; the simulator says that they fit"
    return f"{tried} the one that overflows least: {', '.join(over)}"
