"""Evaluators: each judges a batch of placements, and all are called alike.

`open_evaluator` gives the one that a search needs. `Simulator` (of `placewise.simulate`) is the one that all others can be
compared with; `pool` and `ray` evaluate on other processes and machines, `measured` runs placements for real, and `cached`
remembers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from placewise.core.contracts import Evaluator
from placewise.core.errors import InputError
from placewise.core.problem import Problem

if TYPE_CHECKING:
    from placewise.evaluate.measured import Measure
    from placewise.graph_capture.training_step import TrainingStep


@contextmanager
def open_evaluator(
    problem: Problem,
    order: str = "priority",
    *,
    measure: "Measure | None" = None,
    step: "str | TrainingStep" = "",
    workers: int | None = None,
    ray: str | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[Evaluator]:
    """Gives an evaluator of a problem's placements, for as long as the block lasts.

    It simulates them: in this process, on `workers` processes, or on the Ray cluster at `ray` ("local" starts a cluster on
    this machine). With `measure` it runs them instead, in one process of this machine or of each machine of the Ray
    cluster, and measures none twice. `step` is what they are placements of: what the command line calls MODEL, or the step
    itself. `report` gets a line for each measurement that fails on this machine.
    """
    if measure is None:
        with _open_simulated(problem, order, workers, ray) as evaluator:
            yield evaluator
        return
    if workers is not None and ray is None:
        raise InputError("several workers can measure only on a Ray cluster: on one machine, one process measures alone")
    from placewise.evaluate.cached import Cached

    with _open_measured(problem, order, measure, step, workers, ray, report) as evaluator:
        yield Cached(evaluator)


@contextmanager
def _open_simulated(problem: Problem, order: str, workers: int | None, ray: str | None) -> Iterator[Evaluator]:
    from placewise.simulate.simulator import Simulator

    if workers is None and ray is None:
        yield Simulator(problem, order)
        return
    make = partial(Simulator, problem, order, threads=1)  # the workers are the parallelism
    make()  # refuses a wrong order here, before workers start
    if ray is None:
        from placewise.evaluate.pool import ProcessPool

        assert workers is not None
        with ProcessPool(make, workers) as processes:
            yield processes
    else:
        from placewise.evaluate.ray import RayPool

        with RayPool(make, workers, _address(ray)) as actors:
            yield actors


@contextmanager
def _open_measured(
    problem: Problem,
    order: str,
    measure: "Measure",
    step: "str | TrainingStep",
    workers: int | None,
    ray: str | None,
    report: Callable[[str], None],
) -> Iterator[Evaluator]:
    from placewise.evaluate.measured import Measurer, make_runner
    from placewise.measure.steps import run_steps

    runner = partial(make_runner, step, problem, measure, run_steps)
    if ray is None:
        with Measurer(problem, runner, order, measure.timeout_seconds, report) as here:
            yield here
    else:
        from placewise.evaluate.ray import RayPool

        make = partial(Measurer, problem, runner, order, measure.timeout_seconds)
        with RayPool(make, workers, _address(ray), one_per_machine=True) as machines:
            yield machines


def _address(ray: str) -> str | None:
    return None if ray == "local" else ray
