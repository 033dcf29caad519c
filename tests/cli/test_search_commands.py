"""`placewise place`, `compare`, `runs`, `resume` and `strategies`."""

import json
import re
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_cluster
from command_line import refused, write_tiny_files

import placewise as pw
from placewise.cli import main
from placewise.cli.progress import Line
from placewise.cli.report_command import _shown_runs
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.evaluate.measured import Measure
from placewise.formats.cluster_file import write_cluster
from placewise.formats.graph_file import read_graph, write_graph
from placewise.search.budget import Budget
from placewise.search.planner import Planner
from placewise.search.request import Request, specify
from placewise.search.store import RunFile
from placewise.strategies import STRATEGIES

MODEL = "rnnlm:layers=2,hidden=8,steps=3,batch=4,vocab=11"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a small captured graph."""
    from placewise.models import load_graph

    path = tmp_path_factory.mktemp("graph") / "graph.json"
    write_graph(load_graph(MODEL), path)
    return path


def place(graph: Path, *others: str, strategy: str = "hill-climb") -> list[str]:
    return ["place", str(graph), "--cluster", "2xK80", "--strategy", strategy, "--budget", "60", *others]


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_place_writes_a_plan_that_simulates_to_what_it_says(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    assert main(place(graph, "-o", str(output), "--json")) == 0
    plan = said(capsys)
    assert Plan.load(output).step_seconds == plan["step_seconds"]
    assert (plan["strategy"], plan["evaluations"], plan["seed"], plan["fits"]) == ("hill-climb", 60, 0, True)
    assert plan["history"][-1][1] == plan["step_seconds"]
    assert main(["simulate", str(graph), "--cluster", "2xK80", "--plan", str(output), "--json"]) == 0
    simulated = said(capsys)
    assert simulated["step_seconds"] == plan["step_seconds"]
    assert simulated["peak_bytes"] == plan["peak_bytes"]


def test_place_prints_a_table(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(place(graph)) == 0
    out = capsys.readouterr()
    assert re.search(
        r"a step on 2xK80, at most \d+\.\d% above the best possible \(hill-climb, 60 evaluations, seed 0\)\n", out.out
    )
    assert out.err == ""  # no progress where there is no terminal


def test_the_same_command_is_answered_from_the_record(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = str(tmp_path / "runs.db")
    assert main(place(graph, "--run-file", runs, "--json")) == 0
    once = said(capsys)
    from placewise.simulate.simulator import Simulator

    monkeypatch.setattr(Simulator, "__call__", None)  # nothing is judged again
    monkeypatch.setattr("placewise.strategies.sampling.HillClimb.search", None)  # nor searched
    assert main(place(graph, "--run-file", runs, "--json")) == 0
    assert said(capsys) == once
    assert main(["resume", "1", "--run-file", runs, "--json"]) == 0
    assert said(capsys) == once
    assert main(["runs", runs, "--json"]) == 0
    rows = said(capsys)["runs"]
    assert [(row["run"], row["strategy"], row["status"], row["evaluations"]) for row in rows] == [
        (1, "hill-climb", "evaluations", 60)
    ]
    assert rows[0]["step_seconds"] == once["step_seconds"]
    assert main(["runs", runs]) == 0
    assert "hill-climb" in capsys.readouterr().out


def test_runs_say_whose_times_were_measured(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs.db"
    problem = Problem.of(read_graph(graph), pw.Cluster.load("2xK80"))
    simulated = Request("random", {}, Budget(2), model="m", cluster="c")
    with RunFile(runs) as file:
        for request in (simulated, replace(simulated, measure=Measure(steps=7))):
            file.create(specify(problem, request), problem).close()
    assert main(["runs", str(runs), "--json"]) == 0
    assert [row["measured"] and row["measured"]["steps"] for row in said(capsys)["runs"]] == [None, 7]
    assert main(["runs", str(runs)]) == 0
    header, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert [row[header.index("times")] for row in rows] == ["simulated", "measured"]


def test_compare_ranks_strategies(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = "random,gpu-only,hill-climb"
    command = ["compare", str(graph), "--cluster", "2xK80", "--strategies", names, "--budget", "40", "--seeds", "2"]
    assert main([*command, "--json"]) == 0
    data = said(capsys)
    rows = data["rows"]
    assert [row["gap"] for row in rows] == [row["best_seconds"] / data["bound_seconds"] - 1 for row in rows]
    assert rows[0]["gap"] > 0
    assert {row["strategy"] for row in rows} == set(names.split(","))
    assert [row["best_seconds"] for row in rows] == sorted(row["best_seconds"] for row in rows)
    assert rows[0]["relative"] == 1.0
    assert all(row["fits"] == "2/2" and row["evaluations"] <= 40 for row in rows)
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "to best" in out
    assert "\nno placement has a step below" in out
    assert f"{rows[0]['gap']:.1%}" in out


def test_strategies_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "--json"]) == 0
    assert list(said(capsys)) == list(STRATEGIES)
    assert main(["strategies"]) == 0
    assert "hill-climb" in capsys.readouterr().out


def test_memory_limits_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny step is fastest on one GPU, where it needs 13,000 bytes (x, w, h, y and g); with less it takes both."""
    write_tiny_files(tmp_path)
    problem = [str(tmp_path / "graph.json"), "--cluster", str(tmp_path / "cluster.toml")]
    plan = str(tmp_path / "plan.json")
    assert main(["place", *problem, "--strategy", "random", "--budget", "50", "--memory", "gpu:0=12kB",
                 "--memory", "gpu:1=12kB", "-o", plan, "--json"]) == 0  # fmt: skip
    placed = said(capsys)
    assert placed["fits"]
    assert max(placed["peak_bytes"].values()) <= 12_000
    assert set(placed["placement"]) - {None} == {"gpu:0", "gpu:1"}
    assert main(["simulate", *problem, "--memory", "gpu:0=1kB", "--plan", plan, "--json"]) == 0
    assert not said(capsys)["fits"]


def test_nothing_fits_says_where_and_by_how_much(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "small.toml"
    write_cluster(tiny_cluster(memory=1000), cluster)
    plan = tmp_path / "plan.json"
    command = ["place", str(graph), "--cluster", str(cluster), "--strategy", "random", "--budget", "5", "-o", str(plan)]
    assert main(command) == 3
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "nothing fits: of 5 placements tried, the one that overflows least: gpu:" in error
    assert "more than it has" in error
    assert not plan.exists()


def test_a_strategy_that_cannot_be_used_here_leaves_nothing(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, runs = tmp_path / "gpus.toml", tmp_path / "runs.db"
    write_cluster(tiny_cluster(), cluster)
    command = ["place", str(graph), "--cluster", str(cluster), "--run-file", str(runs)]
    assert "cpu-only needs a CPU, and tiny has none" in refused([*command, "--strategy", "cpu-only"], capsys)
    assert list(tmp_path.iterdir()) == [cluster]
    assert main([*command, "--strategy", "gpu-only", "--quiet"]) == 0
    assert "cpu-only needs a CPU" in refused([*command, "--strategy", "cpu-only"], capsys)
    assert main(["runs", str(runs), "--json"]) == 0
    assert [run["strategy"] for run in said(capsys)["runs"]] == ["gpu-only"]


@pytest.mark.parametrize(
    ("others", "rule"),
    [
        (["--strategy", "simulated"], "unknown strategy 'simulated'"),
        (["--set", f"neighbours={10**400}"], "neighbours must be a whole number of at most 1,000,000,000, it is '1000"),
        (["--set", "neighbours=many"], "neighbours must be a whole number of at most 1,000,000,000, it is 'many'"),
        (["--set", "neighbors=3"], "unknown parameter 'neighbors': did you mean 'neighbours'?"),
        (["--set", "neighbours"], "--set must be NAME=VALUE"),
        (
            ["--grouping", "coarse"],
            "unknown grouping 'coarse': did you mean 'coarse:N'?",
        ),
        (["--cluster", "9xK81"], "9xK81"),
        (["-o", "/nowhere/plan.json"], "/nowhere"),
    ],
)
def test_wrong_input_is_refused(graph: Path, others: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rule in refused([*place(graph), *others], capsys)


@pytest.mark.parametrize(
    "others",
    [
        ["--memory", "gpu:0"],
        ["--memory", "gpu:0=lots"],
        ["--memory", "gpu:0=-1"],
        ["--budget", "0"],
        ["--budget", "x"],
        ["--seconds", "-1"],
        ["--seed", "-1"],
        ["--order", "x"],
        ["--target-gap", "-1"],
    ],
)
def test_wrong_options_are_refused_in_one_line(graph: Path, others: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*place(graph), *others])
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(("batch", "spent"), [(1, "1 evaluation"), (2, "2 evaluations")])
def test_one_evaluation_is_no_evaluations(
    graph: Path, batch: int, spent: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(line: Line) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Line, "is_due", property(stop))
    for options in ([], ["--json"], ["--quiet"]):  # standard error says it, whatever standard output has
        assert main(place(graph, "--set", f"batch={batch}", *options, strategy="random")) == 0
        assert f"stopped after {spent}: this is the best so far; with --run-file" in capsys.readouterr().err


def test_a_plan_has_the_bound_and_its_gap(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(place(graph, "--json")) == 0
    plan = said(capsys)
    assert main(["bound", str(graph), "--cluster", "2xK80", "--json"]) == 0
    assert plan["bound_seconds"] == said(capsys)["bound_seconds"]
    assert plan["gap"] == plan["step_seconds"] / plan["bound_seconds"] - 1 > 0


def test_the_bound_holds_for_the_graphs_own_groups_whatever_is_kept_together(
    graph: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan does not say what its search kept together, so its gap is to the best of all placements."""
    assert main(place(graph, "--json")) == 0
    fine = said(capsys)
    assert main(place(graph, "--json", "--grouping", "coarse:2")) == 0
    assert said(capsys)["bound_seconds"] == fine["bound_seconds"]
    assert main(["bound", str(graph), "--cluster", "2xK80", "--grouping", "coarse:2", "--json"]) == 0
    assert said(capsys)["bound_seconds"] > fine["bound_seconds"]


def test_a_search_ends_at_its_target_gap_and_so_does_one_that_goes_on(
    graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The gap of a whole search is reached with its last improvement; a run that was cut back to one step ends there too."""
    one_by_one = place(graph, "--json", "--set", "batch=1", strategy="random")
    assert main(one_by_one) == 0
    whole = said(capsys)
    runs = str(tmp_path / "runs.db")
    command = [*one_by_one, "--run-file", runs, "--target-gap", f"{whole['gap'] * (1 + 1e-9)!r}"]
    assert main(command) == 0
    plan = said(capsys)
    assert plan["history"] == whole["history"]
    assert 1 < plan["evaluations"] == whole["history"][-1][0] < 60
    assert main(command) == 0
    assert said(capsys) == plan
    connection = sqlite3.connect(runs)
    with connection:
        connection.execute("delete from steps where number > 0")
        connection.execute("update runs set status = 'running', outcome = null")
    connection.close()
    assert main(["resume", "1", "--run-file", runs, "--json"]) == 0
    assert said(capsys) == plan
    assert main(["runs", runs, "--json"]) == 0
    assert [row["status"] for row in said(capsys)["runs"]] == ["gap"]


def test_a_comparison_that_was_stopped_says_who_had_less(
    graph: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Planner.search

    def stop_genetic(planner: Planner, *others: Any, **options: Any) -> Any:
        outcome = whole(planner, *others, **options)
        return replace(outcome, status="stopped") if planner.request.strategy == "genetic" else outcome

    monkeypatch.setattr(Planner, "search", stop_genetic)
    for names, said_so in (("heft,genetic", "genetic had less"), ("heft,genetic,random", "not started: random")):
        assert main(["compare", str(graph), "--cluster", "2xK80", "--strategies", names, "--budget", "4"]) == 0
        assert said_so in capsys.readouterr().err


@pytest.mark.parametrize("model", ["os:abort", "evil:step", "evil.py:step", "nmt.evil:step"])
def test_a_function_that_a_run_file_names_is_never_called(
    model: str, graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring would import and call it, from the current folder first: `resume` asks for the user's own word."""
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("from pathlib import Path\nPath('called').touch()\ndef step(): Path('called').touch()\n")
    problem = Problem.of(read_graph(graph), pw.Cluster.load("2xK80"))
    request = Request("random", {}, Budget(2), model=model, cluster="c", measure=Measure())
    with RunFile("runs.db") as file:
        file.create(specify(problem, request), problem).close()
    rule = f"run 1 measures '{model}', and to resume it is to import and call that: if you trust it, add --model {model}\n"
    assert refused(["resume", "1", "--run-file", "runs.db"], capsys).endswith(rule)
    for command in (["runs", "runs.db"], ["report", "runs.db", "1", "-o", "page.html"]):
        main(command)
    assert not Path("called").exists()
    capsys.readouterr()
    if model == "evil.py:step":
        assert main(["resume", "1", "--run-file", "runs.db", "--model", model]) == 2  # it is called, and returns nothing
        assert Path("called").exists()


def test_a_model_is_named_for_measured_runs_only(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = str(tmp_path / "runs.db")
    assert main(place(graph, "--run-file", runs, "--json")) == 0
    capsys.readouterr()
    rule = "--model: run 1 is simulated, so it needs no model"
    assert rule in refused(["resume", "1", "--run-file", runs, "--model", "os:abort"], capsys)


# --- simple plans and advice ---


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (("--simple", "60%"), "argument --simple: must be a share of at least 0 and below 50%, as in 10% or 0.1, got '60%'"),
        (("--simple", "1%", "--measure"), "simple can't be used when placements are measured: it judges plans by simulated"),
        (("--keep", "layer:3"), "unknown grouping 'layer:3'"),
        (("--keep", "layers", "--grouping", "module"), "--keep and --grouping exclude each other"),
    ],
)
def test_wrong_simplicity_is_refused(
    graph: Path, options: tuple[str, ...], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "argument" in rule:
        with pytest.raises(SystemExit, match="2"):
            main(place(graph, *options))
        assert rule in capsys.readouterr().err
        return
    assert rule in refused(place(graph, *options), capsys)


def test_layers_are_kept_whole(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(place(graph, "--keep", "layers", "-o", str(tmp_path / "plan.json"), "--quiet")) == 0
    problem = Problem.of(read_graph(graph), pw.Cluster.load("2xK80"), "layer")
    Plan.load(tmp_path / "plan.json").resolve(problem)  # refuses a plan that splits a layer


def test_auto_says_what_it_gave(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(place(graph, "--simple", "20%", strategy="auto")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"\d+ cuts? instead of \d+ .* time \(\d+ cop(y|ies) instead of \d+\)", lines[2])
    assert lines[3].endswith(" if times are off by 10%")
    starts = ("one device: ", "what limits: ", "what would help: ")
    assert [start for start in starts if any(line.startswith(start) for line in lines)] == list(starts)


def test_a_page_of_a_run_shows_its_simple_plan(graph: Path, tmp_path: Path) -> None:
    runs, file = tmp_path / "runs.db", str(tmp_path / "plan.json")
    command = place(graph, "--simple", "20%", "--run-file", str(runs), "-o", file, "--quiet", strategy="auto")
    assert main(command) == 0
    plan = Plan.load(file)
    assert plan.simplicity is not None
    assert plan.simplicity.cuts < plan.simplicity.fastest_cuts
    with RunFile(runs, read_only=True) as opened:
        (shown,) = _shown_runs(opened, [1])
    assert shown.schedule.problem.expand(shown.schedule.placement) == plan.placement
    assert shown.schedule.step_seconds == plan.step_seconds
    assert shown.trust == tuple(plan.trust()[:1])


def test_advice_for_a_graph_file_is_about_the_machine(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(graph), "--cluster", "2xK80", "--seconds", "0.05", "--json"]) == 0
    advice = said(capsys)
    assert [change["what"] for change in advice["changes"]] == [
        "links twice as fast", "one more gpu:0", "without gpu:1", "half the GPUs' memory",
    ]  # fmt: skip
    assert [change["kind"] for change in advice["changes"]] == ["machine", "machine", "less", "less"]
    assert advice["recommendation"]


def test_advice_tries_other_captures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", MODEL, "--cluster", "2xK80", "--seconds", "0.05"]) == 0
    text = capsys.readouterr().out
    for what in ("2 micro-batches", "4 micro-batches", "bfloat16 (autocast)", "fused ops", "twice the batch, per sample"):
        assert f"\n{what} " in text
    assert "8 micro-batches" not in text  # 4 rows can't be split into 8


def test_micro_batches_are_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "place",
        f"{MODEL},micro_batches=auto",
        "--cluster",
        "2xK80",
        "--seconds",
        "0.2",
        "-o",
        str(tmp_path / "p.json"),
    ]
    assert main(command) == 0
    chosen = re.match(r"placewise: micro_batches=(\d+) \(a step with 1: .*, 2: .*, 4: .*\)", capsys.readouterr().err)
    assert chosen is not None
    auto = f"{MODEL},micro_batches=auto"
    with monkeypatch.context() as patched:
        patched.setattr("placewise.search.micro_batches.Planner", None)  # wrong options are refused before any search
        assert "unknown strategy 'autoo'" in refused(["place", auto, *command[2:], "--strategy", "autoo"], capsys)
        assert "can't be used with --profile" in refused(["place", auto, *command[2:], "--profile", "p.json"], capsys)
    model = f"{MODEL},micro_batches={chosen[1]}"
    assert main(["simulate", model, "--cluster", "2xK80", "--plan", str(tmp_path / "p.json")]) == 0


def test_simple_plans_are_compared(graph: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simple", str(graph), "--clusters", "2xK80", "--seconds", "0.3", "--json"]) == 0
    (row,) = said(capsys)["simple"]
    assert row["simple"]["step_seconds"] > 0
    assert row["fastest"]["cuts"] >= 0


def test_a_search_begins_at_an_old_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_files(tmp_path)
    model, cluster, old = (str(tmp_path / name) for name in ("graph.json", "cluster.toml", "old.json"))
    assert main(["place", model, "--cluster", cluster, "--strategy", "heft", "-o", old]) == 0
    capsys.readouterr()
    assert main(["place", model, "--cluster", cluster, "--start", old, "--budget", "2"]) == 0
    assert "old.json covers 100% of the graph: 4 of 4 ops by name\n" in capsys.readouterr().err
    new = str(tmp_path / "new.json")
    place = ["place", model, "--cluster", cluster, "-o", new]
    assert "strategy 'heft' can't begin at a plan" in refused([*place, "--strategy", "heft", "--start", old], capsys)
    assert "start: no-such.json: there is no such file" in refused([*place, "--start", "no-such.json"], capsys)
    assert "cluster.toml: is not JSON" in refused([*place, "--start", cluster], capsys)
    assert "refusing to overwrite an input file" in refused([*place[:-1], old, "--start", old], capsys)
    assert not Path(new).exists()
