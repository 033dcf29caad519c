"""The profiler on this machine's CPUs: every op has a time, every pair of devices a link."""

import numpy as np
from small_steps import signatures_of, two_cpus, words_step

from placewise.core.problem import Problem
from placewise.measure.profiler import apply_profile, measure_profile


def test_every_op_gets_a_time_and_every_pair_a_link() -> None:
    step, cluster = words_step(), two_cpus()
    found = measure_profile(step, cluster)
    assert found.failures == ()
    assert found.num_signatures == len(set(signatures_of(step)))
    graph, measured = apply_profile(step, cluster, found.profile)
    problem = Problem.of(graph, measured)
    assert (problem.op_seconds > 0).all()
    np.testing.assert_array_equal(problem.op_seconds[:, 0], problem.op_seconds[:, 1])
    assert {(link.source, link.target) for link in found.profile.links} == {("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")}
    assert all(link.bytes_per_second > 0 and link.latency_seconds >= 0 for link in found.profile.links)
    factors = vars(found.profile.contention["cpu"])
    assert [len(factors[name]) for name in ("compute", "memory", "memory_beside_compute", "copies")] == [2, 2, 2, 1]
    assert factors["cache_bytes"] == 0
    assert graph.untimed_digest == step.graph.digest
