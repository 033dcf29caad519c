"""The page's data: columns, texts, shapes, memory at the peak; nothing ends its script or loads from elsewhere."""

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from builders import graph_data, op, tensor
from chain_schedules import chain, two
from simulated import Step, gpus

from placewise.core.cluster import Cluster
from placewise.core.graph import Shape
from placewise.core.problem import NOWHERE, Problem
from placewise.experiments.bench.generated_problems import generated_graph
from placewise.report.comparisons import Comparisons
from placewise.report.page import html
from placewise.report.page.html import in_script, page
from placewise.report.page.option_marks import COPY_MARKS, OP_MARKS
from placewise.report.page.page_data import NO_BREAK, ShownPlan, _numbered, pack, page_data
from placewise.report.search_curves import curve_of
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator


def shown(schedule: Schedule, label: str = "plan") -> ShownPlan:
    return ShownPlan(label, schedule, None, Comparisons(None, None), curve_of(()))


def column(packed: dict[str, str]) -> Any:
    return np.frombuffer(base64.b64decode(packed["base64"]), f"<{packed['kind']}").tolist()


def test_the_peak_is_listed_by_kind_and_by_module() -> None:
    """gpu:1 has the copy of t0 and t1, a byte each, when b.mm is launched."""
    found = page_data([shown(two())])["plans"][0]["at_peak"][1]
    assert found["op"] == 1
    assert found["kinds"] == [("activation", 1), ("copy", 1)]
    assert found["modules"] == [("b", "activation", 1, 1, "t1"), ("a", "copy", 1, 1, "t0")]


def test_a_tensor_that_waits_has_marks_and_memory_is_compared_with_keeping_it() -> None:
    """a, b and c have 10 bytes. a waits on gpu:1 from op 2 on, while op 3 runs on gpu:0, and comes back for op 5.

    Launches of ops 0, 1, 3 and 5 on gpu:0 need 10, 20, 20 and 20 bytes; if a were kept, op 3 would need all three, 30.
    Op 4 makes b again for op 5, from a, which comes back for it; without it op 5 would keep b, a and c.
    """
    tensors = [tensor("a", 10), tensor("b", 10), tensor("a.wait", 10, stands_for=0), tensor("c", 10)]
    tensors += [tensor("b.again", 10, stands_for=1), tensor("d", 0)]
    ops = [
        op("a.mm", 0, [], [0], seconds={"gpu": 1}),
        op("b.mm", 0, [0], [1], seconds={"gpu": 1}),
        op("a.wait", 1, [0], [2], seconds={"gpu": 0}, optional=True),
        op("c.mm", 0, [1], [3], seconds={"gpu": 1}),
        op("b.again", 2, [2], [4], seconds={"gpu": 1}, optional=True),
        op("d.mm", 0, [2, 3, 4], [5], seconds={"gpu": 1}),
    ]
    problem = Step.of(graph_data(tensors, ops), gpus(2)).problem
    simulator = Simulator(problem, "program", threads=1)
    plan = page_data([shown(simulator.schedule(np.array([0, 1, 0])))])["plans"][0]
    assert [OP_MARKS[mark] for mark in column(plan["mark"])] == ["", "", "waits", "", "repeated", ""]
    assert [COPY_MARKS[mark] for mark in column(plan["copies"]["mark"])] == ["leaves", "returns"]
    assert column(plan["bytes"]) == [10, 20, 20, 20, 30, 30]
    without = column(plan["bytes_without"])
    assert [without[n] for n in (0, 1, 3, 5)] == [10, 20, 30, 30]
    assert np.isnan([without[2], without[4]]).all()
    plain = page_data([shown(simulator.schedule(np.array([0, NOWHERE, NOWHERE])))])["plans"][0]
    assert plain["bytes_without"] is None
    assert set(column(plain["mark"])) == {0}


def test_memory_in_use_and_copies_are_those_of_the_ops() -> None:
    """b.mm writes 2 bytes on gpu:1 and runs first: in program order a.mm, which writes 4 bytes on gpu:0, comes first.

    Then c.mm reads both on gpu:1: 2 bytes there, the copy of 4 and its own 8. The copy begins at 3 s and takes 1 + 4 s.
    """
    rows = [
        op("a.mm", 0, [], [0], seconds={"gpu": 3}),
        op("b.mm", 1, [], [1], seconds={"gpu": 1}),
        op("c.mm", 2, [0, 1], [2], seconds={"gpu": 1}),
    ]
    problem = Step.of(graph_data([tensor("a", 4), tensor("b", 2), tensor("c", 8)], rows), gpus(2)).problem
    schedule = Simulator(problem, threads=1).schedule(np.array([0, 1, 1]), np.array([1, 0, 2]))
    plan = page_data([shown(schedule)])["plans"][0]
    assert column(plan["bytes"]) == [4, 2, 14]
    assert column(plan["copies"]["start"]) == [3]
    assert column(plan["copies"]["seconds"]) == [5]


def test_columns_are_little_endian_bytes() -> None:
    packed = pack([1.5, -2.0], "f8")
    assert np.frombuffer(base64.b64decode(packed["base64"]), "<f8").tolist() == [1.5, -2.0]


def test_what_a_plan_says_of_itself_goes_around_the_explanation() -> None:
    """The paragraph of what runs where is for the picture; other plans of the step come after the first one."""
    plan = dataclasses.replace(shown(two()), trust=("9 cuts",), advice=("buy nothing",), interval_seconds=(1.0, 2.0))
    first, other = page_data([plan, dataclasses.replace(shown(two()), is_other=True)])["plans"]
    assert (first["words"][0], first["words"][-1]) == ("9 cuts", "buy nothing")
    assert first["where"].endswith("1 copy, 1 B")
    assert first["where"] not in first["words"]
    assert (first["interval_seconds"], first["is_other"], other["is_other"]) == ((1.0, 2.0), False, True)


def test_problems_that_plans_share_are_there_once() -> None:
    first, same, other = two(), two(), chain(["c.mm"], [1.0], [0])
    data = page_data([shown(first), shown(other), shown(same)])
    assert [plan["problem"] for plan in data["plans"]] == [0, 1, 0]
    assert [problem["names"] for problem in data["problems"]] == [("a.mm", "b.mm"), ("c.mm",)]


def shaped() -> Schedule:
    """Five tensors of 2 x 8 floats, one of which nothing is known; `cat` on gpu:1 reads all, `sum` on gpu:0 its result."""
    tensors = [tensor(f"t{n}", shape=[2, 8], dtype="float32") for n in range(5)]
    tensors += [tensor("all"), tensor("loss", shape=[], dtype="bfloat16")]
    rows = [op(f"make{n}", n, [], [n], seconds={"gpu": 1.0}) for n in range(5)]
    rows += [op("cat", 5, [0, 1, 2, 3, 4], [5], seconds={"gpu": 1.0}), op("sum", 6, [5, 0], [6], seconds={"gpu": 1.0})]
    problem = Step.of(graph_data(tensors, rows), gpus(2)).problem
    return Simulator(problem, "program", 1).schedule(np.array([0, 0, 0, 0, 0, 1, 0]))


def test_ops_have_the_shapes_that_they_read_and_write() -> None:
    one = "float32 [2, 8]"
    data = page_data([shown(shaped())])
    problem, copies = data["problems"][0], data["plans"][0]["copies"]
    words = [tuple(text.replace(NO_BREAK, " ") for text in problem["shapes"][n]) for n in column(problem["shape"])]
    assert words == [
        *[("", one)] * 5,
        (f"{one}, {one}, {one} and 2 more", ""),
        (f"unknown, {one}", "bfloat16 []"),
    ]
    assert [copies["shapes"][n] for n in column(copies["shape"])] == [*[one] * 5, ""]


def test_a_long_table_has_numbers_that_are_large_enough() -> None:
    for count, kind in ((2**16, "u2"), (2**16 + 1, "i4")):
        words, numbers = _numbered(range(count))
        assert numbers["kind"] == kind
        assert column(numbers) == list(words) == list(range(count))


def test_shapes_cost_a_page_little() -> None:
    """20,000 ops that read one to four tensors of five shapes in any mixture, against the same ones without."""
    graph = generated_graph(20_000)
    shapes = tuple(Shape("float32", (64, 1024 * n)) for n in range(5))
    numbers = np.random.default_rng(0).integers(len(shapes), size=len(graph.tensors))
    known = dataclasses.replace(graph, tensors=dataclasses.replace(graph.tensors, shapes=shapes, shape=numbers))
    sizes = []
    for one in (graph, known):
        problem = Problem.of(one, Cluster.load("2xK80"))
        schedule = Simulator(problem, "program", 1).schedule(np.zeros(problem.num_groups, np.int64))
        sizes.append(len(page([shown(schedule)])))
    assert sizes[0] < sizes[1] < 1.1 * sizes[0]


def test_no_name_ends_the_script_element() -> None:
    name = "</script><script>alert(1)</script>"
    text = page([shown(chain([name, "/*SCRIPT*/"], [1.0, 1.0], [0, 0]))])
    assert text.count("<script") == text.count("</script>") == 2
    assert json.loads(in_script({"name": name})) == {"name": name}


def test_a_panel_is_a_file_that_is_found_by_being_there() -> None:
    text = page([shown(two())])
    panels = sorted((Path(html.__file__).parent / "template" / "panels").iterdir())
    assert len(panels) >= 7
    places = []
    for path in panels:
        match = html.PANEL.fullmatch(path.read_text("utf-8"))
        assert match is not None, f"{path.name} needs markup, a style and a script"
        assert "addPanel({" in match[3]
        assert match[2] in text
        assert match[3] in text
        places.append(text.index(match[1]))
    assert places == sorted(places)


def test_the_page_loads_nothing() -> None:
    text = page([shown(two())])
    assert "default-src 'none'" in text
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
