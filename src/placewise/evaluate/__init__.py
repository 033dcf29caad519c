"""Evaluators around an evaluator: cached, on processes, on Ray. None of them changes a result."""

from collections.abc import Iterator
from contextlib import contextmanager

from placewise.core.contracts import Evaluator
from placewise.core.problem import Problem

__all__ = ["open_evaluator"]


@contextmanager
def open_evaluator(
    problem: Problem, order: str = "priority", *, workers: int | None = None, ray: str | None = None
) -> Iterator[Evaluator]:
    """Gives the evaluator of a problem: a Simulator here, on `workers` processes, or on the Ray cluster at `ray`.

    `ray` is a cluster's address, or "local" to start one on this machine for as long as the evaluator is open.
    """
    from placewise.simulate.simulator import Simulator

    if workers is None and ray is None:
        yield Simulator(problem, order)
        return
    from placewise.evaluate.factory import SimulatorFactory

    Simulator(problem, order, threads=1)  # refuses a wrong order here, before workers start
    make = SimulatorFactory(problem, order)
    if ray is None:
        from placewise.evaluate.pooled import Pooled

        assert workers is not None
        with Pooled(make, workers) as pooled:
            yield pooled
    else:
        from placewise.evaluate.on_ray import OnRay

        with OnRay(make, workers, None if ray == "local" else ray) as on_ray:
            yield on_ray
