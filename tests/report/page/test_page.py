"""What a page is made of: memory at the peak, curves, shapes, measured timelines, the command; the picture in text."""

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import graph_data, op, tensor
from command_line import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Step, gpus, random_order, random_placements, steps

from placewise.cli import main
from placewise.core.cluster import Cluster
from placewise.core.contracts import Evaluation
from placewise.core.graph import Shape
from placewise.core.plan import Plan, digest_of_graph
from placewise.core.problem import Problem
from placewise.experiments.bench.generated_problems import generated_graph
from placewise.report.measured_trace import read_measured
from placewise.report.page.comparisons import Comparisons, comparisons_of
from placewise.report.page.html import in_script, page
from placewise.report.page.page_data import Shown, _table, pack, page_data
from placewise.report.page.peak_memory import live_at, lives, peak_positions, resident_bytes
from placewise.report.page.shapes import NO_BREAK
from placewise.report.search_curves import MOST_POINTS, Curve, Point, curve_of, curve_of_batches, curve_of_progress
from placewise.report.terminal_picture import axis, busy_shares, device_table, picture
from placewise.report.trace import write_trace
from placewise.search.driver import JudgedBatch
from placewise.simulate.schedule import Schedule
from placewise.simulate.simulator import Simulator


def chain(names: list[str], seconds: list[float], placement: list[int], **machine: Any) -> Schedule:
    """Returns the schedule of ops that each read the byte that the one before writes; a copy takes 1 + 1 s."""
    rows = [
        op(name, n, [n - 1] if n else [], [n], seconds={"gpu": time})
        for n, (name, time) in enumerate(zip(names, seconds, strict=True))
    ]
    data = graph_data([tensor(f"t{n}") for n in range(len(rows))], rows)
    problem = Step.of(data, gpus(max(placement) + 1, **machine)).problem
    return Simulator(problem, "program", 1).schedule(np.array(placement))


def two() -> Schedule:
    """3 s on gpu:0, a copy of 2 s, 5 s on gpu:1: 10 s in all."""
    return chain(["a.mm", "b.mm"], [3.0, 5.0], [0, 1])


def shown(schedule: Schedule, label: str = "plan") -> Shown:
    return Shown(label, schedule, None, Comparisons(None, None), curve_of(()))


def column(packed: dict[str, str]) -> Any:
    return np.frombuffer(base64.b64decode(packed["base64"]), f"<{packed['kind']}").tolist()


# --- memory ---


@given(steps(), st.booleans())
@settings(max_examples=60)
def test_what_is_live_adds_up_at_every_launch(drawn: tuple[Step, np.random.Generator], is_ordered: bool) -> None:
    """The simulator adds and takes away; here the pieces that are there are added up."""
    step, rng = drawn
    problem = step.problem
    placement = random_placements(problem, rng, 1)[0]
    schedule = Simulator(problem, "program", 1).schedule(placement, random_order(problem, rng) if is_ordered else None)
    pieces, sizes = lives(schedule), problem.graph.tensors.nbytes
    for position, n in enumerate(schedule.order.tolist()):
        device = int(schedule.devices[n])
        used = sizes[pieces.tensors[live_at(pieces, device, position)]].sum()
        assert used == schedule.memory[position, device]
    for device, position in enumerate(peak_positions(schedule).tolist()):
        used = sizes[pieces.tensors[live_at(pieces, device, position)]].sum()
        assert used == schedule.peak_bytes[device]
        if position < 0:
            assert used == resident_bytes(schedule, pieces)[device]


def test_the_peak_is_told_by_kind_and_by_module() -> None:
    """gpu:1 has the copy of t0 and t1, a byte each, when b.mm is launched."""
    found = page_data([shown(two())])["plans"][0]["at_peak"][1]
    assert found["op"] == 1
    assert found["kinds"] == [("activation", 1), ("copy", 1)]
    assert found["modules"] == [("b", "activation", 1, 1, "t1"), ("a", "copy", 1, 1, "t0")]


# --- curves ---


def judged(times: list[float], *, fits: bool = True, is_better: bool = False, seconds: float = 0.0) -> JudgedBatch:
    column = np.array(times)
    best = (np.zeros(1, np.int64), None) if is_better else None
    return JudgedBatch(Evaluation(column, column, np.full(len(times), 0 if fits else 1)), {}, b"", seconds, best)


def test_a_recorded_run_has_best_and_average() -> None:
    """The second step fits nothing: it counts, and has no average."""
    curve = curve_of_batches(
        [judged([4.0, 2.0], is_better=True, seconds=1.0), judged([9.0], fits=False), judged([5.0, 1.0], is_better=True)]
    )
    assert curve.evaluations.tolist() == [2, 3, 5]
    assert curve.best.tolist() == [2.0, 2.0, 1.0]
    assert curve.seconds[0] == 1.0
    np.testing.assert_array_equal(curve.average, [3.0, np.nan, 3.0])


@given(st.lists(st.integers(1, 100), min_size=1, max_size=2000), st.integers(0, 2**30))
@settings(max_examples=30)
def test_a_long_curve_is_thinned_without_a_change_of_its_meaning(counts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    batches, best, bests = [], np.inf, []
    for n in counts[:1] * 600 + counts:
        times = rng.uniform(1, 2, n).tolist()
        batches.append(judged(times, is_better=min(times) < best))
        best = min(best, *times)
        bests.append(best)
    curve = curve_of_batches(batches)
    everything = np.concatenate([batch.evaluation.step_seconds for batch in batches])
    assert curve.evaluations[-1] == len(everything)
    assert curve.best[-1] == everything.min()
    np.testing.assert_array_equal(curve.best, np.minimum.accumulate(everything)[curve.evaluations - 1])
    assert np.isin(bests, curve.best).all()  # no better placement is left out
    lengths = np.diff(curve.evaluations, prepend=0)
    assert (curve.average * lengths).sum() == pytest.approx(everything.sum())
    assert len(curve.best) <= MOST_POINTS + len(np.unique(curve.best))


def test_curves_of_plans_and_of_progress() -> None:
    plan = curve_of([(1, 3.0), (7, 2.0)])
    assert (plan.evaluations.tolist(), plan.best.tolist()) == ([1, 7], [3.0, 2.0])
    assert np.isnan(plan.seconds).all()
    watched = curve_of_progress([Point(1, 0.5, np.inf), Point(4, 0.9, 2.0)])
    assert isinstance(watched, Curve)
    assert (watched.seconds.tolist(), watched.best.tolist()) == ([0.5, 0.9], [np.inf, 2.0])
    assert len(curve_of_progress([]).best) == len(curve_of_batches([]).best) == 0


# --- the page's data ---


def test_columns_are_little_endian_bytes() -> None:
    packed = pack([1.5, -2.0], "f8")
    assert np.frombuffer(base64.b64decode(packed["base64"]), "<f8").tolist() == [1.5, -2.0]


def test_problems_that_plans_share_stand_once() -> None:
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


def test_the_page_tells_the_shapes_of_what_ops_read_and_write() -> None:
    one = "float32 [2, 8]"
    data = page_data([shown(shaped())])
    problem, copies = data["problems"][0], data["plans"][0]["copies"]
    told = [tuple(text.replace(NO_BREAK, " ") for text in problem["shapes"][n]) for n in column(problem["shape"])]
    assert told == [
        *[("", one)] * 5,
        (f"{one}, {one}, {one} and 2 more", ""),
        (f"unknown, {one}", "bfloat16 []"),
    ]
    assert [copies["shapes"][n] for n in column(copies["shape"])] == [*[one] * 5, ""]


def test_a_long_table_has_numbers_that_are_large_enough() -> None:
    for count, kind in ((2**16, "u2"), (2**16 + 1, "i4")):
        words, numbers = _table(range(count))
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


def test_the_page_names_nothing_outside_of_it() -> None:
    text = page([shown(two())])
    assert "default-src 'none'" in text
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")


def test_rivals_are_one_device_and_the_expert() -> None:
    """Both ops on one device take 8 s; the expert has a module on each: 10 s. A byte of memory is too little for either."""
    assert comparisons_of(two().problem) == Comparisons(("gpu:0", 8.0), 10.0)
    assert comparisons_of(chain(["a.mm", "b.mm"], [3.0, 5.0], [0, 1], memory=1).problem) == Comparisons(None, None)


# --- measured ---


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
        ({"args": {"op": 2}}, "slice 'b.mm': args.op must be a whole number below 2, it is 2"),
        ({"args": {"op": "1"}}, "slice 'b.mm': args.op must be a whole number below 2, it is '1'"),
        ({"pid": 9}, "slice 'b.mm': pid must name a device, one of gpu:0, gpu:1, it is 9"),
        ({"ts": None}, "slice 'b.mm': ts must be microseconds, it is null"),
        ({"dur": -1}, "slice 'b.mm': dur must be at least 0, it is -1.0"),
    ],
)
def test_a_wrong_trace_is_refused(change: dict[str, Any], rule: str, tmp_path: Path) -> None:
    from placewise.core.errors import InputError

    problem = two().problem
    path, data = events(problem, tmp_path)
    next(event for event in data["traceEvents"] if event["name"] == "b.mm").update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as error:
        read_measured(path, problem)
    assert str(error.value) == f"{path}: {rule}"


def test_a_trace_of_another_graph_is_refused(tmp_path: Path) -> None:
    """Its ops have the same numbers and names, but there is a third op."""
    from placewise.core.errors import InputError

    path, _ = events(two().problem, tmp_path)
    other = chain(["a.mm", "b.mm", "c.mm"], [3.0, 5.0, 1.0], [0, 1, 1]).problem
    digests = [digest_of_graph(problem.graph)[:12] for problem in (two().problem, other)]
    with pytest.raises(InputError) as error:
        read_measured(path, other)
    rule = f"otherData.graph_digest is {digests[0]}..., that of 'test' is {digests[1]}..."
    assert str(error.value) == f"{path}: is a trace of another graph: {rule}"


def test_an_older_trace_is_known_by_the_names_of_its_ops(tmp_path: Path) -> None:
    from placewise.core.errors import InputError

    path, data = events(two().problem, tmp_path)
    del data["otherData"]["graph_digest"]
    path.write_text(json.dumps(data))
    longer = chain(["a.mm", "b.mm", "c.mm"], [3.0, 5.0, 1.0], [0, 1, 1]).problem
    assert read_measured(path, longer).ops.tolist() == [0, 1]
    with pytest.raises(InputError) as error:
        read_measured(path, chain(["a.mm", "b.relu"], [3.0, 5.0], [0, 1]).problem)
    assert str(error.value) == f"{path}: slice 'b.mm': is of another graph: in 'test' the name of op 1 is 'b.relu'"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "is not JSON"),
        ("{}", "traceEvents must be a list, it is null"),
        ('{"traceEvents": []}', "no slice of traceEvents has args.op"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(text: str, rule: str, tmp_path: Path) -> None:
    from placewise.core.errors import InputError

    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rule):
        read_measured(path, two().problem)


# --- the picture in text ---


def test_the_picture_of_two_ops() -> None:
    """10 s in 20 columns: gpu:0 is busy in the first 6, gpu:1 in the last 10."""
    lines = picture(two(), 27).splitlines()
    assert lines[:2] == ["gpu:0  " + "█" * 6, "gpu:1  " + " " * 10 + "█" * 10]
    assert picture(two(), 27, in_blocks=False).splitlines()[0] == "gpu:0  %%%%%%"


def test_a_column_shows_its_busy_share() -> None:
    """10 s in 10 columns of 1 s: 2.5 s on gpu:0 are two columns and a half one, 5.5 s on gpu:1 half a column and five."""
    schedule = chain(["a.mm", "b.mm"], [2.5, 5.5], [0, 1])
    assert picture(schedule, 17).splitlines()[:2] == ["gpu:0  ██▄", "gpu:1      ▄█████"]


def test_phases_have_colours() -> None:
    text = picture(two(), 27, in_colour=True)
    assert "gpu:0  \x1b[34m██████" in text
    assert text.splitlines()[-1].split() == [
        f"\x1b[{c}m{p}\x1b[0m" for c, p in ((34, "forward"), (33, "backward"), (32, "update"))
    ]


def test_the_axis_has_round_times_in_their_places() -> None:
    """0.35 s in 70 columns: a column is 5 ms, so 100 ms are 20 columns."""
    text = axis(0.35, 70)
    assert text == "0" + " " * 19 + "100 ms" + " " * 14 + "200 ms" + " " * 14 + "300 ms"
    assert all(len(axis(seconds, columns)) <= columns for seconds in (1e-7, 3e-3, 0.99, 7200.0) for columns in (10, 33, 200))


@given(steps(), st.integers(10, 60))
@settings(max_examples=40)
def test_the_picture_has_all_of_the_busy_time(drawn: tuple[Step, np.random.Generator], columns: int) -> None:
    step, rng = drawn
    schedule = Simulator(step.problem, "program", 1).schedule(random_placements(step.problem, rng, 1)[0])
    if not schedule.step_seconds:
        assert picture(schedule, 80) == ""
        return
    for device in range(step.problem.num_devices):
        shares = busy_shares(schedule, device, columns)
        assert ((shares >= -1e-9) & (shares <= 1 + 1e-9)).all()
        assert shares.sum() * schedule.step_seconds / columns == pytest.approx(schedule.busy_seconds[device])
    assert len(picture(schedule, 80).splitlines()) == step.problem.num_devices + 1


def test_the_table_says_what_does_not_fit() -> None:
    assert "does not fit" not in device_table(two())
    assert device_table(chain(["a.mm", "b.mm"], [3.0, 5.0], [0, 1], memory=1)).splitlines()[2].endswith("does not fit")


# --- the command ---


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with graph.json, a plan from each of two strategies, and their run file."""
    from placewise.formats.graph_file import write_graph

    monkeypatch.chdir(tmp_path)
    write_graph(chain(["a.mm", "b.mm", "c.mm"], [1e-3, 2e-3, 1e-3], [0, 0, 0]).problem.graph, "graph.json")
    Path("cluster.toml").write_text(
        'name = "two"\ndefault_link = { bytes_per_second = 1e9, latency_seconds = 1e-6 }\n'
        + "".join(
            f'[[devices]]\nname = "gpu:{n}"\nkind = "gpu"\nmemory = "1GiB"\nflops = 1e12\nbytes_per_second = 1e11\n'
            for n in range(2)
        )
    )
    for strategy in ("round-robin", "gpu-only"):
        command = ["place", "graph.json", "--cluster", "cluster.toml", "--strategy", strategy, "--quiet"]
        assert main([*command, "-o", f"{strategy}.json", "--run-file", "runs.db"]) == 0
    return tmp_path


PLANS = ("round-robin.json", "gpu-only.json")
PROBLEM = ("--graph", "graph.json", "--cluster", "cluster.toml")


def data_of(path: str) -> Any:
    text = Path(path).read_text(encoding="utf-8")
    return json.loads(text.partition('<script id="data" type="application/json">')[2].partition("</script>")[0])


def test_report_of_plans(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *PLANS, *PROBLEM, "-o", "page.html"]) == 0
    assert capsys.readouterr().out.startswith("page.html: 2 plans, 0.")
    data = data_of("page.html")
    assert [plan["label"] for plan in data["plans"]] == ["round-robin", "gpu-only"]
    assert [plan["strategy"] for plan in data["plans"]] == ["round-robin", "gpu-only"]
    assert data["plans"][1]["step_seconds"] == json.loads(Path(PLANS[1]).read_text())["step_seconds"]
    assert data["problems"][0]["alone"] == {"name": "gpu:0", "seconds": 4e-3}


def test_report_of_runs_has_the_fastest_first(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs.db", "-o", "page.html", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bytes"] == Path("page.html").stat().st_size
    assert [plan["label"] for plan in said["plans"]] == ["run 2", "run 1"]
    assert main(["report", "runs.db", "1", "-o", "one.html"]) == 0
    plan = data_of("one.html")["plans"][0]
    assert (plan["label"], plan["strategy"]) == ("run 1", "round-robin")
    assert np.frombuffer(base64.b64decode(plan["curve"]["evaluations"]["base64"])).tolist() == [1.0]


def test_runs_of_several_problems_stand_together(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run 3 is on another machine; of each problem the fastest is first."""
    assert main(["place", "graph.json", "--cluster", "2xK80", "--strategy", "gpu-only", "--run-file", "runs.db"]) == 0
    assert main(["report", "runs.db", "-o", "page.html"]) == 0
    data = data_of("page.html")
    assert [plan["label"] for plan in data["plans"]] == ["run 2", "run 1", "run 3"]
    assert [data["problems"][plan["problem"]]["cluster"] for plan in data["plans"]] == ["two", "two", "2xK80"]


def test_of_many_runs_the_fastest_are_shown(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placewise.cli.report_command.MOST_PLANS", 1)
    assert main(["report", "runs.db", "-o", "page.html"]) == 0
    assert [plan["strategy"] for plan in data_of("page.html")["plans"]] == ["gpu-only"]


def test_resume_writes_the_page_too(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", "1", "--run-file", "runs.db", "--report", "page.html", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert data_of("page.html")["plans"][0]["strategy"] == "round-robin"


def test_place_writes_the_page_too(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["place", "graph.json", "--cluster", "cluster.toml", "--strategy", "gpu-only", "--report", "page.html"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "page.html shows it: open it in a browser"
    assert "gpu:0  ████" in out
    assert data_of("page.html")["plans"][0]["step_seconds"] == 4e-3
    Path("page.html").unlink()
    assert main([*command, "--run-file", "runs.db", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == 4e-3
    assert np.frombuffer(base64.b64decode(data_of("page.html")["plans"][0]["curve"]["best"]["base64"])).tolist() == [4e-3]
    assert main([*command, "--quiet", "-o", "plan.json"]) == 0
    assert capsys.readouterr() == ("", "")
    assert Path("plan.json").exists()


def test_a_terminal_that_can_not_show_blocks_gets_letters(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    import io
    import sys

    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["place", "graph.json", "--cluster", "cluster.toml", "--strategy", "gpu-only"]) == 0
    assert b"gpu:0  %%%%" in raw.getvalue()


def test_a_measured_trace_stands_beside_the_plan(files: Path) -> None:
    command = ["simulate", "graph.json", "--cluster", "cluster.toml", "--plan", PLANS[0], "--trace", "trace.json"]
    assert main(command) == 0
    assert main(["report", PLANS[0], *PROBLEM, "--measured", "trace.json", "-o", "page.html"]) == 0
    plan = data_of("page.html")["plans"][0]
    assert plan["measured"]["step_seconds"] == pytest.approx(plan["step_seconds"])


def test_a_trace_of_another_placement_is_shown_and_said(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace has the second of three ops on gpu:1, where the other plan has none."""
    assert main(["simulate", *PROBLEM[1:], "--plan", PLANS[0], "--trace", "trace.json"]) == 0
    measured = ["--measured", "trace.json", "-o", "page.html"]
    capsys.readouterr()
    assert main(["report", PLANS[0], *PROBLEM, *measured]) == 0
    assert capsys.readouterr().err == ""
    assert main(["report", PLANS[1], *PROBLEM, *measured]) == 0
    rule = "1 of 3 ops ran on other devices; 'b.mm' ran on gpu:1, the plan has it on gpu:0"
    assert capsys.readouterr().err == f"placewise: trace.json: was measured with another placement than the plan: {rule}\n"
    assert column(data_of("page.html")["plans"][0]["measured"]["device"]) == [0, 1, 0]


def test_a_plan_whose_step_was_measured_says_so(files: Path) -> None:
    """The timeline is the simulator's; a plan that was found by simulating has no such time."""
    plan = dataclasses.replace(Plan.load(PLANS[0]), step_seconds=99.0, predicted_seconds=1.0)
    plan.save("measured.json")
    assert main(["report", "measured.json", PLANS[0], *PROBLEM, "-o", "page.html"]) == 0
    assert [plan["measured_seconds"] for plan in data_of("page.html")["plans"]] == [99.0, None]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ([PLANS[0]], "round-robin.json: is a plan, so --graph is needed"),
        ([PLANS[0], "--graph", "graph.json"], "round-robin.json: is a plan, so --cluster is needed"),
        (["nothing.json", *PROBLEM], "nothing.json: there is no such file"),
        (["graph.json", *PROBLEM], "graph.json: format must be 'placewise-plan'"),
        (["runs.db", "x"], "runs.db: expected run numbers after the run file, got 'x'"),
        (["runs.db", "7"], "runs.db: there is no run 7; the runs are: 1, 2"),
        (["runs.db", "--graph", "graph.json"], "--graph is for plans, runs.db is a run file"),
        (["runs.db", "--profile", "p.json"], "--profile is for plans, runs.db is a run file"),
        ([PLANS[0], *PROBLEM, "--profile", "p.json"], "p.json: there is no such file"),
        ([PLANS[0], *PROBLEM, "--busy", "0.5"], "--busy needs a --profile"),
        ([*PLANS, *PROBLEM, "--measured", "t.json"], "--measured is the trace of one plan, got 2 plans"),
        ([PLANS[0], *PROBLEM, "--measured", "t.json"], "t.json: there is no such file"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], rule: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rule in refused(["report", *arguments, "-o", "page.html"], capsys)
    assert not Path("page.html").exists()
