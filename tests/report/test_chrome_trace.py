"""The Perfetto trace of a schedule."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import graph_of, tiny_data
from command_line import TINY_CLUSTER_TOML

from placewise.core.plan import digest_of_graph
from placewise.core.problem import Problem
from placewise.formats.cluster_file import parse_cluster
from placewise.formats.graph_file import parse_graph
from placewise.report.chrome_trace import trace_data, write_trace
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator


@pytest.fixture
def schedule() -> Schedule:
    """The tiny graph with its middle group on the other device."""
    import tomllib

    problem = Problem.of(parse_graph(tiny_data()), parse_cluster(tomllib.loads(TINY_CLUSTER_TOML)))
    return Simulator(problem, "program", 1).schedule(np.array([0, 1, 0]))


def events(schedule: Schedule, phase: str) -> list[dict[str, Any]]:
    return [event for event in trace_data(schedule)["traceEvents"] if event["ph"] == phase]


def test_every_op_and_copy_is_a_slice_on_its_lane(schedule: Schedule) -> None:
    """Times are microseconds: relu runs on gpu:0 from 0 to 1,000, the copy of h on the channel from gpu:0 from 1,000 on."""
    slices = {event["name"]: event for event in events(schedule, "X")}
    assert list(slices) == ["relu", "mm", "mm.backward", "w.update", "h", "y", "g"]
    assert (slices["relu"]["pid"], slices["relu"]["tid"], slices["relu"]["dur"]) == (0, 0, pytest.approx(1000))
    assert (slices["h"]["pid"], slices["h"]["ts"], slices["h"]["dur"]) == (0, pytest.approx(1000), pytest.approx(3000))
    assert slices["y"]["pid"] == 1
    assert slices["mm"]["args"]["waited for"] == "copy of h"
    assert all(event["args"]["critical"] for name, event in slices.items() if event["cat"] != "copy")


def test_ops_and_copies_say_their_shape_where_it_is_known(schedule: Schedule) -> None:
    """relu makes h, which is copied; mm makes y, of which nothing is known, nor of what the file said nothing."""
    assert not [event for event in events(schedule, "X") if "shape" in event["args"]]
    data = tiny_data()
    data["tensors"][2] |= {"shape": [5, 100], "dtype": "float32"}
    known = Simulator(Problem.of(parse_graph(data), schedule.problem.cluster), "program", 1).schedule(np.array([0, 1, 0]))
    shapes = {event["name"]: event["args"]["shape"] for event in events(known, "X") if "shape" in event["args"]}
    assert shapes == {"relu": "float32 [5, 100]", "h": "float32 [5, 100]"}


def test_lanes_have_names(schedule: Schedule) -> None:
    names = [event["args"]["name"] for event in events(schedule, "M") if event["name"] != "process_sort_index"]
    assert names == ["gpu:0", "ops", "gpu:1", "ops", "copies: gpu:0->gpu:1", "copies: gpu:1->gpu:0"]


def test_arrows_lead_from_maker_to_copy_to_reader(schedule: Schedule) -> None:
    """The copy of h (number 0): made by relu at 1 ms, leaves at 1 ms, read by mm from 4 ms on."""
    first = [(e["ph"], e["pid"], e["tid"], e["ts"]) for phase in "stf" for e in events(schedule, phase) if e["id"] == 0]
    assert first == [("s", 0, 0, pytest.approx(1000)), ("t", 0, 1, pytest.approx(1000)), ("f", 1, 0, pytest.approx(4000))]


def test_the_arrow_of_a_resident_tensor_starts_with_its_copy() -> None:
    data = tiny_data()
    data["ops"][2]["reads"] = [3, 1]  # mm.backward reads the parameter, whose home is with mm
    import tomllib

    graph = graph_of(data["tensors"], data["ops"], data["outputs"])
    problem = Problem.of(graph, parse_cluster(tomllib.loads(TINY_CLUSTER_TOML)))
    schedule = Simulator(problem, "program", 1).schedule(np.array([0, 1, 0]))
    number = schedule.copy_tensors.tolist().index(1)
    arrow = [e["ph"] for phase in "stf" for e in events(schedule, phase) if e["id"] == number]
    assert arrow == ["s", "f"]


def test_counters_show_the_memory_at_launches(schedule: Schedule) -> None:
    used = {device: max(e["args"]["MiB"] for e in events(schedule, "C") if e["pid"] == device) for device in (0, 1)}
    assert used == {0: pytest.approx(9000 / 2**20, abs=1e-3), 1: pytest.approx(10000 / 2**20, abs=1e-3)}


def test_it_holds_the_digest_that_plans_know_the_graph_by(schedule: Schedule) -> None:
    """A model that was measured, or that has another name, is the same graph."""
    graph = schedule.problem.graph
    timed = replace(graph, name="other", ops=replace(graph.ops, seconds={"gpu": np.ones(4)}))
    other = Simulator(Problem.of(timed, schedule.problem.cluster), "program", 1).schedule(np.array([0, 1, 0]))
    digests = [trace_data(found)["otherData"]["graph_digest"] for found in (schedule, other)]
    assert digests == [digest_of_graph(graph)] * 2


def test_the_file_is_the_trace(schedule: Schedule, tmp_path: Path) -> None:
    write_trace(schedule, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace_data(schedule)
