"""Schedules of ops in a chain, whose times can be worked out in one's head."""

from typing import Any

import numpy as np
from builders import graph_data, op, tensor
from simulated import Step, gpus

from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator


def chain(names: list[str], seconds: list[float], placement: list[int], **machine: Any) -> Schedule:
    """Returns the schedule of ops that each read the byte that the one before writes; a copy takes 1 + 1 s."""
    rows = [
        op(name, n, [n - 1] if n else [], [n], seconds={"gpu": time})
        for n, (name, time) in enumerate(zip(names, seconds, strict=True))
    ]
    data = graph_data([tensor(f"t{n}") for n in range(len(rows))], rows)
    problem = Step.of(data, gpus(max(placement) + 1, **machine)).problem
    return Simulator(problem, "program", 1).schedule(np.array(placement))


def two() -> Schedule:
    """3 s on gpu:0, a copy of 2 s, 5 s on gpu:1: 10 s in all."""
    return chain(["a.mm", "b.mm"], [3.0, 5.0], [0, 1])
