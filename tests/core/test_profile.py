"""Profiles: the graph and the cluster that they make of measured times."""

from dataclasses import replace

import numpy as np
import pytest
from builders import mixed_cluster, profile_of_two_slices, tiny_cluster, tiny_graph

from placewise.core.cluster import Cluster
from placewise.core.costs import predict_op_seconds
from placewise.core.errors import ProfileError
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.core.profile import Contention

SIGNATURES = ("relu", "mm", "mm", "add_")  # of the tiny graph's ops


def test_measured_times_go_before_all_others() -> None:
    graph = profile_of_two_slices().measured_graph(tiny_graph(), SIGNATURES, tiny_cluster())
    seconds = predict_op_seconds(graph, tiny_cluster())
    np.testing.assert_array_equal(seconds, [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [0.002, 0.002]])


def test_a_plan_holds_for_the_graph_before_and_after_it_was_measured() -> None:
    graph = tiny_graph()
    graph = replace(graph, ops=replace(graph.ops, seconds={}))
    measured = profile_of_two_slices().measured_graph(graph, SIGNATURES, tiny_cluster())
    assert measured.digest != graph.digest
    assert measured.untimed_digest == graph.untimed_digest == graph.digest
    plan = Plan(("gpu:0",) * 3, graph_digest=graph.digest)
    assert plan.resolve(Problem.of(measured, tiny_cluster()))[0].tolist() == [0, 0, 0]


def test_busy_neighbours_slow_memory_bound_ops_more() -> None:
    """The neighbour is busy half of the time: compute (1 + 1.5) / 2.

    A fifth of the measured work is memory's, so memory work has company of its own kind for a tenth: 1 + (3 - 1) / 10.
    """
    graph = tiny_graph()
    flops = np.array([0.0, 1e12, 1e12, 0.0])
    graph = replace(graph, ops=replace(graph.ops, flops=flops, bytes_moved=np.ones(4)))
    found = profile_of_two_slices().measured_graph(graph, SIGNATURES, tiny_cluster(), busy=0.5).ops.seconds["gpu:1"]
    np.testing.assert_allclose(found, [1.2, 2.5, 2.5, np.nan])


def test_work_in_the_cache_has_factors_of_its_own() -> None:
    """Two neighbours, one with products and one with additions: 2 for small work, 3 for large work."""
    graph = tiny_graph()
    moved = np.array([10.0, 10.0, 1e9, 1e9])
    graph = replace(graph, ops=replace(graph.ops, flops=np.zeros(4), bytes_moved=moved))
    contention = Contention(
        (1.0,), (1.0, 3.0, 5.0), cached=(1.0, 1.0, 1.0), cached_beside_compute=(1.0, 2.0, 4.0), cache_bytes=100.0
    )
    profile = replace(profile_of_two_slices(), contention={"gpu": contention})
    np.testing.assert_allclose(profile.slowdown(graph, tiny_cluster().devices[0], 0.5, 0.5), [2.0, 2.0, 3.0, 3.0])


def test_busy_devices_slow_the_links_between_them() -> None:
    profile = replace(profile_of_two_slices(), contention={"gpu": Contention(copies=(1.0, 2.0, 10.0))})
    links = profile.measured_cluster(tiny_cluster(), busy=0.75).links
    found = {(link.source, link.target): link.bytes_per_second for link in links}
    assert found["gpu:0", "gpu:1"] == pytest.approx(5e9 / 6)  # between one busy device, 2, and two, 10
    assert {link.channel for link in profile.measured_cluster(open_cluster()).links} == {"inside gpu:0"}
    assert {link.channel for link in profile_of_two_slices().measured_cluster(open_cluster()).links} == {None}


def open_cluster() -> Cluster:
    """Returns the tiny cluster with a channel for each link."""
    return replace(tiny_cluster(), links=tuple(replace(link, channel=None) for link in tiny_cluster().links))


def test_links_and_launches_are_those_measured_and_keep_their_channels() -> None:
    cluster = tiny_cluster()
    cluster = replace(cluster, links=tuple(replace(link, channel="bus") for link in cluster.links))
    measured = profile_of_two_slices().measured_cluster(cluster)
    assert measured.bytes_per_second[0, 1] == 5e9
    assert measured.latency_seconds[1, 0] == 2e-5
    assert measured.dispatch_seconds == 3e-6
    assert measured.channel_names == ("bus",)


def test_a_device_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"p.json: has no device 'cpu:0' of cluster 'mixed'; it has gpu:0, gpu:1"):
        profile_of_two_slices().check_covers(mixed_cluster(), "p.json")
    other = replace(profile_of_two_slices(), devices=tuple(replace(d, kind="cpu") for d in profile_of_two_slices().devices))
    with pytest.raises(ProfileError, match="device 'gpu:0' is of kind 'cpu', in cluster 'tiny' it is of kind 'gpu'"):
        other.check_covers(tiny_cluster())
