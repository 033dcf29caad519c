"""What the simulator says of devices that share hardware: slices of a GPU slow each other down while they are busy.

The slowdown of an op depends on how many neighbours work beside it, which depends on the placement. So a placement is
simulated, every op slowed down by what lies beside it in that timeline, and simulated again.
"""

from dataclasses import replace

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.problem import Problem
from placewise.core.profile import Profile
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator

TURNS = 6  # timelines; from the third on the step's time moves by little


def schedule_together(problem: Problem, profile: Profile, placement: Ints, order: Ints | None = None) -> Schedule:
    """Returns the timeline of a placement [groups] whose devices slow each other down; `problem` has their times alone.

    Without an order [ops] it is the one that counts for the placement where nothing is slowed down.
    """
    schedule = Simulator(problem).schedule(placement, order)
    share = np.zeros(problem.num_ops)
    for _ in range(TURNS if profile.contention else 0):
        share = (share + busy_beside(schedule, profile)) / 2  # half way: a full step can swing
        factors = np.ones_like(problem.op_seconds)
        for device, name in enumerate(problem.cluster.device_names):
            factors[:, device] = profile.slowdown(problem.graph, problem.cluster, name, share)
        slowed = replace(problem, op_seconds=problem.op_seconds * factors)
        schedule = Simulator(slowed).schedule(placement, schedule.order)
    return schedule


def busy_beside(schedule: Schedule, profile: Profile) -> Floats:
    """Returns which share of an op's neighbours on the same hardware works while it runs, on average: [ops]."""
    names, t = schedule.problem.cluster.device_names, schedule.timeline
    hardware = [next(entry.times_of for entry in profile.devices if entry.name == name) for name in names]
    work = [_work_until(schedule, device) for device in range(len(names))]
    share = np.zeros(len(t.start))
    for device in range(len(names)):
        mates = [mate for mate in range(len(names)) if mate != device and hardware[mate] == hardware[device]]
        ops = np.flatnonzero((schedule.devices == device) & (t.end > t.start))
        for mate in mates:
            times, done = work[mate]
            share[ops] += np.interp(t.end[ops], times, done) - np.interp(t.start[ops], times, done)
        share[ops] /= (t.end[ops] - t.start[ops]) * max(len(mates), 1)
    return np.clip(share, 0.0, 1.0)


def _work_until(schedule: Schedule, device: int) -> tuple[Floats, Floats]:
    """Returns how long a device has worked by when: times, and seconds of work until then."""
    t = schedule.timeline
    ops = np.flatnonzero(schedule.devices == device)
    ops = ops[np.argsort(t.start[ops], kind="stable")]
    times = np.stack([t.start[ops], t.end[ops]], axis=1).ravel()
    steps = np.stack([np.zeros(len(ops)), t.end[ops] - t.start[ops]], axis=1).ravel()
    return np.concatenate([[0.0], times]), np.concatenate([[0.0], np.cumsum(steps)])
