"""Simulated schedules of devices that slow each other down."""

from dataclasses import replace

import numpy as np
import pytest
from builders import wired
from small_steps import two_cpus

from placewise.core.problem import Problem
from placewise.core.profile import Contention, Profile, ProfiledDevice
from placewise.measure.contended_schedule import busy_neighbours, schedule_together
from placewise.simulate.simulator import Simulator


def shared(*factors: float) -> Profile:
    devices = tuple(ProfiledDevice(name, "cpu", "", "cpu:0", 2) for name in ("cpu:0", "cpu:1"))
    return Profile(devices, {}, contention={"cpu": Contention(factors, factors)})


def test_ops_side_by_side_slow_each_other_down() -> None:
    """Two independent ops of 2 s, one on each device: each takes twice as long while the other runs."""
    graph = wired([], 2, seconds=[{"cpu": 2.0}, {"cpu": 2.0}])
    problem = Problem.of(graph, two_cpus())
    together, alone = np.array([0, 1]), np.array([0, 0])
    assert schedule_together(problem, shared(1.0, 2.0), together).step_seconds == pytest.approx(4.0, rel=0.05)
    assert schedule_together(problem, shared(1.0, 2.0), alone).step_seconds == pytest.approx(4.0)
    assert schedule_together(problem, shared(1.0), together).step_seconds == pytest.approx(2.0)


def test_unlike_devices_on_one_gpu_slow_each_other_down() -> None:
    """cpu:0 takes thrice as long beside cpu:1, which is busy for half of its 4 s; cpu:1 takes as long as alone."""
    problem = Problem.of(wired([], 2, seconds=[{"cpu": 2.0}, {"cpu": 2.0}]), two_cpus())
    devices = tuple(ProfiledDevice(name, "cpu", "", name, 2, "here") for name in ("cpu:0", "cpu:1"))
    factors = Contention((1.0, 3.0), (1.0, 3.0))
    profile = Profile(devices, {}, contention={"cpu:0": factors, "cpu:1": Contention()})
    schedule = schedule_together(problem, profile, np.array([0, 1]))
    np.testing.assert_allclose(schedule.timeline.end, [4.0, 2.0], rtol=0.05)
    apart = replace(profile, devices=tuple(replace(device, part_of=device.name) for device in devices))
    np.testing.assert_allclose(schedule_together(problem, apart, np.array([0, 1])).timeline.end, [2.0, 2.0])


def test_only_the_time_side_by_side_counts() -> None:
    """An op of 3 s and one of 1 s start together: the neighbour is busy for a third of the one, and for all of the other."""
    problem = Problem.of(wired([], 2, seconds=[{"cpu": 3.0}, {"cpu": 1.0}]), two_cpus())
    schedule = Simulator(problem).schedule(np.array([0, 1]))
    np.testing.assert_allclose(np.sum(busy_neighbours(schedule, shared(1.0, 2.0)), axis=0), [1 / 3, 1.0])


def test_copies_between_busy_devices_take_longer() -> None:
    """cpu:0 makes a tensor and goes on with other work while it is copied to cpu:1, which waits: one of the two is busy."""
    graph = wired([(0, 1)], 3, seconds=[{"cpu": 1.0}, {"cpu": 1.0}, {"cpu": 30.0}])
    cluster = two_cpus()
    links = tuple(replace(link, bytes_per_second=0.5, latency_seconds=0.0) for link in cluster.links)
    problem = Problem.of(graph, replace(cluster, links=links))
    placement = np.array([0, 1, 0])
    profile = replace(shared(1.0, 1.0), contention={"cpu": Contention(copies=(1.0, 3.0, 9.0))})
    for schedule, seconds in (
        (Simulator(problem).schedule(placement), 2.0),
        (schedule_together(problem, profile, placement), 6.0),
    ):
        assert schedule.timeline.copy_end[0] - schedule.timeline.copy_start[0] == pytest.approx(seconds, rel=0.02)
