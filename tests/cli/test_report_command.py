"""placewise report: pages of plans and runs; pages that other commands write."""

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chain_schedules import chain
from command_line import refused

from placewise.cli import main
from placewise.core.plan import Plan


def column(packed: dict[str, str]) -> Any:
    return np.frombuffer(base64.b64decode(packed["base64"]), f"<{packed['kind']}").tolist()


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
        ([PLANS[0], *PROBLEM, "--busy", "0.5"], "--busy needs --profile"),
        ([*PLANS, *PROBLEM, "--measured", "t.json"], "--measured is the trace of one plan, got 2 plans"),
        ([PLANS[0], *PROBLEM, "--measured", "t.json"], "t.json: there is no such file"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], rule: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rule in refused(["report", *arguments, "-o", "page.html"], capsys)
    assert not Path("page.html").exists()
