"""What the simulator says of devices that share hardware: slices of a GPU slow each other down while they are busy.

The slowdown of an op depends on how many neighbours work beside it, which depends on the placement. So a placement is
simulated, every op slowed down by what lies beside it in that timeline, and simulated again.
"""

from dataclasses import replace

import numpy as np

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.problem import Problem
from placewise.core.profile import Profile, is_compute, slower_links
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator

TURNS = 6  # timelines; from the third on the step's time moves by little


def schedule_together(problem: Problem, profile: Profile, placement: Ints, order: Ints | None = None) -> Schedule:
    """Returns the timeline of a placement [groups] whose devices slow each other down; `problem` has their times alone.

    Without an order [ops] it is the one that counts for the placement where nothing is slowed down.
    """
    schedule = Simulator(problem).schedule(placement, order)
    compute, memory = np.zeros((2, problem.num_ops))
    links: dict[tuple[str, str], float] = {}
    for _ in range(TURNS if profile.contention else 0):
        beside = busy_beside(schedule, profile)
        compute, memory = (compute + beside[0]) / 2, (memory + beside[1]) / 2  # half way: a full step can swing
        links = {ends: (links.get(ends, 1.0) + slower) / 2 for ends, slower in slower_copies(schedule, profile).items()}
        factors = np.ones_like(problem.op_seconds)
        for number, device in enumerate(problem.cluster.devices):
            factors[:, number] = profile.slowdown(problem.graph, device, compute, memory)
        cluster = slower_links(problem.cluster, links)
        slowed = replace(problem, op_seconds=problem.op_seconds * factors, cluster=cluster)
        schedule = Simulator(slowed).schedule(placement, schedule.order)
    return schedule


def busy_beside(schedule: Schedule, profile: Profile) -> tuple[Floats, Floats]:
    """Returns which share of an op's neighbours works while it runs, on average, in compute and in memory: [ops] each."""
    problem, t = schedule.problem, schedule.timeline
    shares = np.zeros((2, len(t.start)))
    for device, mates in enumerate(_mates(schedule, profile)):
        ops = np.flatnonzero((schedule.devices == device) & (t.end > t.start))
        for mate in mates:
            in_compute = is_compute(problem.graph, problem.cluster.devices[mate])
            for kind, counts in enumerate((in_compute, ~in_compute)):
                shares[kind, ops] += _worked(_work_until(schedule, mate, counts), t.start[ops], t.end[ops])
        shares[:, ops] /= (t.end[ops] - t.start[ops]) * max(len(mates), 1)
    compute, memory = np.clip(shares, 0.0, 1.0)
    return compute, memory


def slower_copies(schedule: Schedule, profile: Profile) -> dict[tuple[str, str], float]:
    """Returns the factor of each link by the devices that work during its copies, on average over their bytes."""
    names, t = schedule.problem.cluster.device_names, schedule.timeline
    everything = np.ones(len(t.start), np.bool_)
    work = [_work_until(schedule, device, everything) for device in range(len(names))]
    nbytes = schedule.problem.graph.tensors.nbytes[schedule.copy_tensors]
    found = {}
    for source, mates in enumerate(_mates(schedule, profile)):
        for target in mates:
            copies = (t.copy_source == source) & (t.copy_target == target) & (t.copy_end > t.copy_start) & (nbytes > 0)
            start, end = t.copy_start[copies], t.copy_end[copies]
            if len(start):
                busy = sum((_worked(work[device], start, end) for device in (source, *mates)), np.zeros_like(start))
                shares = np.clip(busy / ((end - start) * (1 + len(mates))), 0.0, 1.0)
                factors = profile.copy_slowdown(names[source], names[target], shares)
                found[names[source], names[target]] = float(np.average(factors, weights=nbytes[copies]))
    return found


def _mates(schedule: Schedule, profile: Profile) -> list[list[int]]:
    """Returns for each device the others on the same hardware."""
    names = schedule.problem.cluster.device_names
    hardware = [next(entry.times_of for entry in profile.devices if entry.name == name) for name in names]
    return [[b for b in range(len(names)) if b != a and hardware[b] == hardware[a]] for a in range(len(names))]


Work = tuple[Floats, Floats]  # times, and seconds of work until then


def _work_until(schedule: Schedule, device: int, counts: Bools) -> Work:
    """Returns how long a device has worked by when, on the ops that count [ops]."""
    t = schedule.timeline
    ops = np.flatnonzero((schedule.devices == device) & counts)
    ops = ops[np.argsort(t.start[ops], kind="stable")]
    times = np.stack([t.start[ops], t.end[ops]], axis=1).ravel()
    steps = np.stack([np.zeros(len(ops)), t.end[ops] - t.start[ops]], axis=1).ravel()
    return np.concatenate([[0.0], times]), np.concatenate([[0.0], np.cumsum(steps)])


def _worked(work: Work, start: Floats, end: Floats) -> Floats:
    """Returns the seconds of work between two times: [times]."""
    found: Floats = np.interp(end, *work) - np.interp(start, *work)
    return found
