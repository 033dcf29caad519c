"""What makes an evaluator in another process."""

from dataclasses import dataclass

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
