"""What a page says about optional ops: which ops and copies they are, and the memory that the step takes without."""

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.problem import NOWHERE
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator

OP_MARKS = ("", "repeated", "waits")

COPY_MARKS = ("", "leaves", "returns", "visits")


def _optional(schedule: Schedule) -> Bools:
    """Returns whether each op that runs is optional: [ops]."""
    present, num_ops = schedule.present, schedule.problem.num_ops
    return np.zeros(num_ops, np.bool_) if present is None else present.whole.graph.ops.optional[present.ops]


def mark_ops(schedule: Schedule) -> Ints:
    """Returns the number of each op's mark: [ops]. An optional op without work lets a tensor wait."""
    works = (schedule.problem.op_seconds > 0).any(axis=1)
    return np.where(_optional(schedule), np.where(works, 1, 2), 0)


def mark_copies(schedule: Schedule) -> Ints:
    """Returns the number of each copy's mark: [copies]. A tensor leaves or comes back, or a parameter visits."""
    waits: Bools = np.append(mark_ops(schedule) == 2, False)
    makers = schedule.problem.graph.producer[schedule.copy_tensors]
    to_wait = waits[schedule.timeline.copy_reader]
    return np.where(to_wait & (makers < 0), 3, np.where(to_wait & ~waits[makers], 1, np.where(waits[makers], 2, 0)))


def bytes_without_options(schedule: Schedule) -> Floats | None:
    """Returns the bytes on each op's device at its launch if no optional op ran: [ops], NaN for these; None without any."""
    present = schedule.present
    if present is None or not _optional(schedule).any():
        return None
    problem, placement, order = schedule.whole
    plain = Simulator(problem, "program").schedule(np.where(problem.optional, NOWHERE, placement), order)
    assert plain.present is not None
    in_use = np.full(problem.num_ops, np.nan)
    in_use[plain.present.ops[plain.order]] = plain.memory[np.arange(len(plain.order)), plain.devices[plain.order]]
    return in_use[present.ops]
