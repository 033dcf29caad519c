"""A placement and the small changes to it: what local search asks for."""

import numpy as np

from placewise.core.arrays import Ints
from placewise.core.contracts import Evaluation
from placewise.core.errors import ProblemError
from placewise.simulate import changes, kernels
from placewise.simulate.change_tables import build_uses, new_change_workspace, small
from placewise.simulate.simulator import Simulator
from placewise.simulate.tables import Small


class Neighbourhood:
    """Judges small changes to one placement in one order; exact, and faster than simulating each as a whole."""

    def __init__(self, simulator: Simulator, placement: Ints, order: Ints | None = None) -> None:
        """Starts from a placement [groups], in a given order [ops] or in the one that counts for it."""
        tables, problem = simulator.tables, simulator.problem
        self.simulator = simulator
        self.order: Small = simulator.order_of(placement) if order is None else small(problem.check_order(order))
        self._uses = build_uses(tables, self.order, problem.num_groups)
        count = problem.num_ops // changes.STRIDE + 1
        self._snapshots = kernels.Snapshots(
            changes.STRIDE, np.zeros(count), np.zeros((count, tables.num_devices)), np.zeros((count, tables.num_channels))
        )
        self._work = kernels.new_workspace(tables, problem.num_groups)
        self._memory = kernels.new_memory_workspace(tables)
        self._changes = new_change_workspace(tables, self._uses)
        self._stamp = 0
        self.move_to(placement)

    def move_to(self, placement: Ints) -> None:
        """Makes another placement the one that changes start from."""
        self.placement = np.array(self.simulator.problem.check_placements(np.asarray(placement)[None])[0])
        self._work.devices[:] = self.placement
        self._base = changes.make_base(self.simulator.tables, self.order, self._work, self._memory, self._snapshots)

    @property
    def step_seconds(self) -> float:
        """The step time of the placement itself."""
        return float(self._base.step_seconds)

    def moves(self, groups: Ints, devices: Ints, *, with_memory: bool = True) -> Evaluation:
        """Returns the evaluation of changes that each put one group on one device: [changes], [changes]."""
        return self(np.arange(len(groups) + 1), groups, devices, with_memory=with_memory)

    def __call__(self, ends: Ints, groups: Ints, devices: Ints, *, with_memory: bool = True) -> Evaluation:
        """Returns the evaluation of changes; change c puts `groups[ends[c]:ends[c + 1]]` on `devices[...]`.

        Without memory every change counts as one that fits.
        """
        problem, count = self.simulator.problem, len(ends) - 1
        if len(groups) and not (0 <= np.min(groups) <= np.max(groups) < problem.num_groups):
            raise ProblemError(
                f"Expected 0 <= group < {problem.num_groups}, a change has {np.min(groups)} to {np.max(groups)}."
            )
        if len(devices) and not (0 <= np.min(devices) <= np.max(devices) < problem.num_devices):
            raise ProblemError(f"Expected 0 <= device < {problem.num_devices}, a change has {np.max(devices)}.")
        if not problem.allowed[groups, devices].all():
            raise ProblemError("a change puts a group on a device that can't run all of its ops")
        seconds, peaks = np.zeros(count), np.zeros((count, self.simulator.problem.num_devices), np.int64)
        first = np.append(self._uses.first_positions[groups], self.simulator.problem.num_ops)
        earliest = np.minimum.reduceat(first, ends[:-1]) if count else first[:0]
        earliest = np.where(ends[:-1] < ends[1:], earliest, self.simulator.problem.num_ops)
        rows = np.argsort(-earliest, kind="stable")
        changes.run_changes(
            self.simulator.tables, self._uses, self.order, self._base, self._snapshots, self._work, self._changes,
            small(ends), small(groups), small(devices), small(rows), self._stamp, seconds, peaks if with_memory else None,
        )  # fmt: skip
        self._stamp += count
        return self.simulator.evaluation(seconds, peaks)
