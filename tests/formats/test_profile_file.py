"""Profiles: what they make of a graph and a cluster, their file, and files that are broken."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import mixed_cluster, tiny_cluster, tiny_graph

from placewise.core.cluster import Cluster, Link
from placewise.core.costs import predict_op_seconds
from placewise.core.errors import ProfileError
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.core.profile import Contention, Profile, ProfiledDevice, Timing
from placewise.formats.profile_file import format_profile, parse_profile, read_profile, write_profile

SIGNATURES = ("relu", "mm", "mm", "add_")  # of the tiny graph's ops


def two_slices() -> Profile:
    """relu 1 s and mm 2 s on gpu:0, which gpu:1 is like; add_ was not measured."""
    return Profile(
        (ProfiledDevice("gpu:0", "gpu", "H1", "gpu:0", 2), ProfiledDevice("gpu:1", "gpu", "H1", "gpu:0", 2)),
        {"relu": {"gpu:0": Timing(1.0, 5)}, "mm": {"gpu:0": Timing(2.0, 5)}},
        (Link("gpu:0", "gpu:1", 5e9, 1e-5), Link("gpu:1", "gpu:0", 6e9, 2e-5)),
        3e-6,
        {"gpu": Contention((1.0, 1.5), (1.0, 3.0))},
    )


def test_measured_times_go_before_all_others() -> None:
    graph = two_slices().measured_graph(tiny_graph(), SIGNATURES, tiny_cluster())
    seconds = predict_op_seconds(graph, tiny_cluster())
    np.testing.assert_array_equal(seconds, [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [0.002, 0.002]])


def test_a_plan_holds_for_the_graph_before_and_after_it_was_measured() -> None:
    graph = tiny_graph()
    graph = replace(graph, ops=replace(graph.ops, seconds={}))
    measured = two_slices().measured_graph(graph, SIGNATURES, tiny_cluster())
    assert measured.digest != graph.digest
    assert measured.untimed_digest == graph.untimed_digest == graph.digest
    plan = Plan(("gpu:0",) * 3, graph_digest=graph.digest)
    assert plan.resolve(Problem.of(measured, tiny_cluster()))[0].tolist() == [0, 0, 0]


def test_busy_neighbours_slow_memory_bound_ops_more() -> None:
    """Half of the time beside one neighbour: compute (1 + 1.5) / 2.

    A fifth of the measured work is memory's, so memory work has company of its own kind for a tenth: 1 + (3 - 1) / 10.
    """
    graph = tiny_graph()
    flops = np.array([0.0, 1e12, 1e12, 0.0])
    graph = replace(graph, ops=replace(graph.ops, flops=flops, bytes_moved=np.ones(4)))
    found = two_slices().measured_graph(graph, SIGNATURES, tiny_cluster(), busy=0.5).ops.seconds["gpu:1"]
    np.testing.assert_allclose(found, [1.2, 2.5, 2.5, np.nan])


def test_work_in_the_cache_has_factors_of_its_own() -> None:
    """Two neighbours, one with products and one with additions: 2 for small work, 3 for large work."""
    graph = tiny_graph()
    moved = np.array([10.0, 10.0, 1e9, 1e9])
    graph = replace(graph, ops=replace(graph.ops, flops=np.zeros(4), bytes_moved=moved))
    contention = Contention(
        (1.0,), (1.0, 3.0, 5.0), cached=(1.0, 1.0, 1.0), cached_beside_compute=(1.0, 2.0, 4.0), cache_bytes=100.0
    )
    profile = replace(two_slices(), contention={"gpu": contention})
    np.testing.assert_allclose(profile.slowdown(graph, tiny_cluster().devices[0], 0.5, 0.5), [2.0, 2.0, 3.0, 3.0])


def test_busy_devices_slow_the_links_between_them() -> None:
    profile = replace(two_slices(), contention={"gpu": Contention(copies=(1.0, 2.0, 10.0))})
    links = profile.measured_cluster(tiny_cluster(), busy=0.75).links
    found = {(link.source, link.target): link.bytes_per_second for link in links}
    assert found["gpu:0", "gpu:1"] == pytest.approx(5e9 / 6)  # between one busy device, 2, and two, 10
    assert {link.channel for link in profile.measured_cluster(open_cluster()).links} == {"inside gpu:0"}
    assert {link.channel for link in two_slices().measured_cluster(open_cluster()).links} == {None}


def open_cluster() -> Cluster:
    """Returns the tiny cluster with a channel for each link."""
    return replace(tiny_cluster(), links=tuple(replace(link, channel=None) for link in tiny_cluster().links))


def test_links_and_launches_are_those_measured_and_keep_their_channels() -> None:
    cluster = tiny_cluster()
    cluster = replace(cluster, links=tuple(replace(link, channel="bus") for link in cluster.links))
    measured = two_slices().measured_cluster(cluster)
    assert measured.bytes_per_second[0, 1] == 5e9
    assert measured.latency_seconds[1, 0] == 2e-5
    assert measured.dispatch_seconds == 3e-6
    assert measured.channel_names == ("bus",)


def test_a_device_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"p.json: has no device 'cpu:0' of cluster 'mixed'; it has gpu:0, gpu:1"):
        two_slices().check_covers(mixed_cluster(), "p.json")
    other = replace(two_slices(), devices=tuple(replace(d, kind="cpu") for d in two_slices().devices))
    with pytest.raises(ProfileError, match="device 'gpu:0' is of kind 'cpu', in cluster 'tiny' it is of kind 'gpu'"):
        other.check_covers(tiny_cluster())


def test_a_file_says_what_the_profile_says(tmp_path: Path) -> None:
    write_profile(two_slices(), tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == two_slices()


def test_an_empty_profile_survives_its_file() -> None:
    assert parse_profile(json.loads(format_profile(Profile((), {})))) == Profile((), {})


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        (("format",), "placewise-plan", "format must be 'placewise-profile'"),
        (("version",), 2, "version must be 1"),
        (("devices",), {}, "devices must be a list"),
        (("devices", 0, "kind"), 3, r"devices\[0\]: kind must be text"),
        (("devices", 1, "times_of"), "gpu:7", r"devices\[1\]: times_of must be a device"),
        (("links", 0, "bytes_per_second"), 0, r"links\[0\]: bytes_per_second must be a finite number above 0"),
        (("links", 1, "to"), "gpu:7", "there is no device 'gpu:7'"),
        (("dispatch_seconds",), -1, "dispatch_seconds must be a finite number at least 0"),
        (("timings",), [], "timings must be a dict"),
        (("timings", "mm", "gpu:0", "seconds"), "fast", r"timings\['mm'\]: gpu:0: seconds must be a finite number"),
        (("timings", "mm", "gpu:9"), {}, r"timings\['mm'\]: unknown field 'gpu:9'"),
        (("contention", "gpu", "memory"), [0.5], "none below 1"),
        (("other",), 1, "unknown field 'other'"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_the_rule(tmp_path: Path, path: Any, value: Any, rule: str) -> None:
    data: Any = json.loads(format_profile(two_slices()))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ProfileError, match=rf"broken.json: .*{rule}") as caught:
        read_profile(file)
    assert "\n" not in str(caught.value)
