"""What makes an evaluator in another process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from placewise.core.contracts import Evaluator
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator


@dataclass(frozen=True, eq=False)
class SimulatorFactory:
    """Makes a Simulator that uses one thread: the workers are the parallelism.

    It travels by pickle protocol 5, which keeps the problem's arrays exact and not writable.
    """

    problem: Problem
    order: str = "priority"

    def __call__(self) -> Simulator:
        """Returns the simulator."""
        return Simulator(self.problem, self.order, threads=1)


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

    Simulator(problem, order, threads=1)  # refuses a wrong order here, before workers start
    make = SimulatorFactory(problem, order)
    if ray is None:
        from placewise.evaluate.processes import Pooled

        assert workers is not None
        with Pooled(make, workers) as pooled:
            yield pooled
    else:
        from placewise.evaluate.on_ray import OnRay

        with OnRay(make, workers, None if ray == "local" else ray) as on_ray:
            yield on_ray
