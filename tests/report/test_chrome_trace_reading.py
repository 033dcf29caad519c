"""A measured step is read from a Chrome trace."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chain_schedules import chain, two

from placewise.core.errors import InputError
from placewise.core.plan import digest_of_graph
from placewise.core.problem import Problem
from placewise.report.chrome_trace import read_measured, write_trace
from placewise.simulate.simulator import Simulator


def events(problem: Problem, tmp_path: Path) -> tuple[Path, Any]:
    path = tmp_path / "trace.json"
    schedule = Simulator(problem, "program", 1).schedule(np.array([0, 1]))
    write_trace(schedule, path)
    return path, json.loads(path.read_text())


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    """The trace of a schedule, begun at another moment: times are from the first start on."""
    problem = two().problem
    path, data = events(problem, tmp_path)
    for event in data["traceEvents"]:
        if "ts" in event:
            event["ts"] += 7e9
    path.write_text(json.dumps(data))
    measured = read_measured(path, problem)
    assert (measured.ops.tolist(), measured.devices.tolist()) == ([0, 1], [0, 1])
    np.testing.assert_allclose(measured.start, [0.0, 5.0], atol=1e-6)
    np.testing.assert_allclose(measured.end, [3.0, 10.0], atol=1e-6)
    assert (measured.copy_names, measured.copy_source.tolist(), measured.copy_target.tolist()) == (("t0",), [0], [1])
    np.testing.assert_allclose([measured.copy_start[0], measured.copy_end[0]], [3.0, 5.0], atol=1e-6)
    assert measured.step_seconds == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"args": {"op": 2}}, "slice 'b.mm': args.op must be a whole number below 2, got 2"),
        ({"args": {"op": "1"}}, "slice 'b.mm': args.op must be a whole number below 2, got '1'"),
        ({"pid": 9}, "slice 'b.mm': pid must name a device, one of gpu:0, gpu:1, got 9"),
        ({"pid": [1]}, "slice 'b.mm': pid must name a device, one of gpu:0, gpu:1, got a list"),
        ({"pid": {}}, "slice 'b.mm': pid must name a device, one of gpu:0, gpu:1, got a dict"),
        ({"pid": None}, "slice 'b.mm': pid must name a device, one of gpu:0, gpu:1, got null"),
        ({"ts": None}, "slice 'b.mm': ts must be microseconds, got null"),
        ({"dur": -1}, "slice 'b.mm': dur must be at least 0, got -1.0"),
    ],
)
def test_a_wrong_trace_is_refused(change: dict[str, Any], rule: str, tmp_path: Path) -> None:
    problem = two().problem
    path, data = events(problem, tmp_path)
    next(event for event in data["traceEvents"] if event["name"] == "b.mm").update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as error:
        read_measured(path, problem)
    assert str(error.value) == f"{path}: {rule}"


@pytest.mark.parametrize("pid", [[1], {}, None, 1e99, True])
def test_processes_with_odd_numbers_are_left_out(pid: Any, tmp_path: Path) -> None:
    problem = two().problem
    path, data = events(problem, tmp_path)
    data["traceEvents"].append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "odd"}})
    data["traceEvents"].append({"ph": "M", "name": "process_name", "pid": pid, "args": [pid]})
    if pid is True:  # which is 1 for Python, and so names the second device
        data["traceEvents"] = [*data["traceEvents"][-2:], *data["traceEvents"][:-2]]
    path.write_text(json.dumps(data))
    assert read_measured(path, problem).ops.tolist() == [0, 1]


def test_a_trace_of_another_graph_is_refused(tmp_path: Path) -> None:
    """Its ops have the same numbers and names, but there is a third op."""
    path, _ = events(two().problem, tmp_path)
    other = chain(["a.mm", "b.mm", "c.mm"], [3.0, 5.0, 1.0], [0, 1, 1]).problem
    digests = [digest_of_graph(problem.graph)[:12] for problem in (two().problem, other)]
    with pytest.raises(InputError) as error:
        read_measured(path, other)
    rule = f"its otherData.graph_digest is {digests[0]}..., the digest of 'test' is {digests[1]}..."
    assert str(error.value) == f"{path}: is a trace of another graph: {rule}"


def test_an_older_trace_is_known_by_the_names_of_its_ops(tmp_path: Path) -> None:
    path, data = events(two().problem, tmp_path)
    del data["otherData"]["graph_digest"]
    path.write_text(json.dumps(data))
    longer = chain(["a.mm", "b.mm", "c.mm"], [3.0, 5.0, 1.0], [0, 1, 1]).problem
    assert read_measured(path, longer).ops.tolist() == [0, 1]
    with pytest.raises(InputError) as error:
        read_measured(path, chain(["a.mm", "b.relu"], [3.0, 5.0], [0, 1]).problem)
    assert str(error.value) == f"{path}: slice 'b.mm': is of another graph: op 1 of 'test' is 'b.relu'"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "is not JSON"),
        ("{}", "traceEvents must be a list, got null"),
        ('{"traceEvents": []}', "no slice of traceEvents has args.op"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused(text: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rule):
        read_measured(path, two().problem)
