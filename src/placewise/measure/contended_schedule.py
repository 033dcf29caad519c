"""The simulator's schedule with contention: devices on the same hardware slow each other down while they are busy.

How much an op slows down depends on which neighbours are busy while it runs, and so on the placement. So a placement is
simulated, every op slowed down by what overlaps it in that timeline, and simulated again.
"""

from dataclasses import replace

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.problem import Problem
from placewise.core.profile import Profile, is_compute, slower_links
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator

ROUNDS = 6  # after the third, the step's time hardly changes

Busy = tuple[Floats, Floats]  # times, and how many seconds a device has been busy until each


def schedule_together(problem: Problem, profile: Profile, placement: Ints, order: Ints | None = None) -> Schedule:
    """Returns the schedule of a placement [groups] with contention; `problem` has the times of devices alone.

    Without an order [ops] it is the simulator's for the placement without contention.
    """
    schedule = Simulator(problem).schedule(placement, order)
    compute, memory = np.zeros((2, problem.num_ops))
    links: dict[tuple[str, str], float] = {}
    for _ in range(ROUNDS if profile.contention else 0):
        shares = busy_neighbours(schedule, profile)
        compute, memory = (compute + shares[0]) / 2, (memory + shares[1]) / 2  # half way: full steps can oscillate
        links = {ends: (links.get(ends, 1.0) + factor) / 2 for ends, factor in _link_slowdowns(schedule, profile).items()}
        factors = np.ones_like(problem.op_seconds)
        for number, device in enumerate(problem.cluster.devices):
            factors[:, number] = profile.slowdown(problem.graph, device, compute, memory)
        cluster = slower_links(problem.cluster, links)
        slowed = replace(problem, op_seconds=problem.op_seconds * factors, cluster=cluster)
        schedule = Simulator(slowed).schedule(placement, schedule.order)
    return schedule


def busy_neighbours(schedule: Schedule, profile: Profile) -> tuple[Floats, Floats]:
    """Returns the mean share of an op's neighbours that do compute, and memory work, while it runs: [ops] each."""
    problem, t = schedule.problem, schedule.timeline
    shares = np.zeros((2, len(t.start)))
    for device, neighbours in enumerate(_neighbours(schedule, profile)):
        ops = np.flatnonzero((schedule.devices == device) & (t.end > t.start))
        for neighbour in neighbours:
            in_compute = is_compute(problem.graph, problem.cluster.devices[neighbour])
            for kind, counts in enumerate((in_compute, ~in_compute)):
                shares[kind, ops] += _busy_between(_busy_until(schedule, neighbour, counts), t.start[ops], t.end[ops])
        shares[:, ops] /= (t.end[ops] - t.start[ops]) * max(len(neighbours), 1)
    compute, memory = np.clip(shares, 0.0, 1.0)
    return compute, memory


def _link_slowdowns(schedule: Schedule, profile: Profile) -> dict[tuple[str, str], float]:
    """Returns the factor of each link, by its ends: the mean over its copies, weighted by bytes."""
    names, t = schedule.problem.cluster.device_names, schedule.timeline
    every_op = np.ones(len(t.start), np.bool_)
    busy = [_busy_until(schedule, device, every_op) for device in range(len(names))]
    nbytes = schedule.problem.graph.tensors.nbytes[schedule.copy_tensors]
    found = {}
    for source, neighbours in enumerate(_neighbours(schedule, profile)):
        for target in neighbours:
            copies = (t.copy_source == source) & (t.copy_target == target) & (t.copy_end > t.copy_start) & (nbytes > 0)
            start, end = t.copy_start[copies], t.copy_end[copies]
            if len(start):
                devices = (source, *neighbours)
                seconds = sum((_busy_between(busy[device], start, end) for device in devices), np.zeros_like(start))
                shares = np.clip(seconds / ((end - start) * len(devices)), 0.0, 1.0)
                factors = profile.copy_slowdown(names[source], names[target], shares)
                found[names[source], names[target]] = float(np.average(factors, weights=nbytes[copies]))
    return found


def _neighbours(schedule: Schedule, profile: Profile) -> list[list[int]]:
    """Returns for each device the others on the same hardware."""
    names = schedule.problem.cluster.device_names
    hardware = [next(entry.shared_hardware for entry in profile.devices if entry.name == name) for name in names]
    return [[b for b in range(len(names)) if b != a and hardware[b] == hardware[a]] for a in range(len(names))]


def _busy_until(schedule: Schedule, device: int, counts: Bools) -> Busy:
    """Returns how long a device has been busy, by time, with the ops that count [ops]."""
    t = schedule.timeline
    ops = np.flatnonzero((schedule.devices == device) & counts)
    ops = ops[np.argsort(t.start[ops], kind="stable")]
    times = np.stack([t.start[ops], t.end[ops]], axis=1).ravel()
    steps = np.stack([np.zeros(len(ops)), t.end[ops] - t.start[ops]], axis=1).ravel()
    return np.concatenate([[0.0], times]), np.concatenate([[0.0], np.cumsum(steps)])


def _busy_between(busy: Busy, start: Floats, end: Floats) -> Floats:
    """Returns the busy seconds between each start and end."""
    found: Floats = np.interp(end, *busy) - np.interp(start, *busy)
    return found
