"""placewise bench rows: the tables, kept as they come."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders import graph_data, op, tensor
from captured import GOLDEN
from command_line import refused
from simulated import Step, gpus

from placewise import zoo
from placewise.cli import main
from placewise.experiments.bench import bench_rows, fast_strategies
from placewise.experiments.bench.bench_rows import (
    ROWS,
    TODAY_STRATEGIES,
    Row,
    RowBudget,
    pipelined_seconds,
    rows_page,
    search_rows,
    summarise_rows,
)
from placewise.machines.presets import PRESETS
from placewise.strategies import STRATEGIES

CAPTURED = str(GOLDEN / "captured.json.gz")
TINY = (Row("post", CAPTURED, "2xK80"), Row("today", CAPTURED, "4090+3060"))
BUDGET = RowBudget(evaluations=12, seconds=0.05)
QUICKLY = ["--budget", "12", "--seconds", "0.05"]


@pytest.fixture
def tiny_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_rows, "ROWS", TINY)


def test_the_tables_are_the_papers() -> None:
    assert [sum(row.table == table for row in ROWS) for table in ("post", "hdp", "today")] == [11, 6, 9]
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.model.partition(":")[0] in zoo.MODELS and row.cluster in PRESETS for row in ROWS)
    assert set(TODAY_STRATEGIES) < set(fast_strategies()) < set(STRATEGIES)
    assert set(STRATEGIES) - set(fast_strategies()) == {"exact", "colocrl", "spotlight", "hdp"}


def test_every_strategy_gets_its_budget_and_respects_the_bound() -> None:
    results = search_rows(TINY[:1], BUDGET, ("auto", "gpu-only", "annealing"))
    assert [(result["table"], result["model"], result["cluster"]) for result in results] == [("post", CAPTURED, "2xK80")]
    found = results[0]["strategies"]
    assert list(found) == ["auto", "gpu-only", "annealing"]
    assert all(entry["step_seconds"] >= results[0]["bound_seconds"] > 0 for entry in found.values())
    assert found["annealing"]["evaluations"] == 12
    assert found["auto"]["search_seconds"] >= 0.05
    assert results[0]["pipelined_seconds"] is None  # there are no micro-batches


def test_what_is_in_the_file_is_not_searched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the second search of the second row, it goes on with that one."""
    output = tmp_path / "rows.json"
    done: list[tuple[Row, str]] = []
    search = bench_rows._search

    def stopping(row: Row, problem: Any, name: str, budget: RowBudget) -> Any:
        if (row, name) == (TINY[1], "random") and len(done) == 3:
            raise KeyboardInterrupt
        return search(row, problem, name, budget)

    monkeypatch.setattr(bench_rows, "_search", stopping)
    arguments = (TINY, BUDGET, ("gpu-only", "random"), output, lambda row, name, found: done.append((row, name)))
    with pytest.raises(KeyboardInterrupt):
        search_rows(*arguments)
    kept = json.loads(output.read_text())["rows"]
    assert [list(row["strategies"]) for row in kept] == [["gpu-only", "random"], ["gpu-only"]]
    done.clear()
    results = search_rows(*arguments)
    assert done == [(TINY[1], "random")]
    assert results[0] == kept[0]
    assert json.loads(output.read_text())["rows"] == results
    search_rows(TINY, BUDGET, ("round-robin",), output, arguments[4])
    assert done[1:] == [(TINY[0], "round-robin"), (TINY[1], "round-robin")]


def test_the_pipeline_of_the_formula() -> None:
    """Two micro-batches of 4 and 2 s: 6 s on one device. Two equal ones: 6 x 3 / (2 x 2) = 4.5 s.

    With a second device of half the speed, which takes 12 s: 3 / 2 of the 4 s that both need together.
    """

    def problem(*speeds: float) -> Any:
        rows = [
            op(f"a_{n}", n, [], [n], seconds={f"gpu:{d}": t / speed for d, speed in enumerate(speeds)}, micro_batch=n)
            for n, t in enumerate((4.0, 2.0))
        ]
        return Step.of(graph_data([tensor(), tensor()], rows), gpus(len(speeds))).problem

    assert pipelined_seconds(problem(1.0)) == pytest.approx(6.0)
    assert pipelined_seconds(problem(1.0, 1.0)) == pytest.approx(4.5)
    assert pipelined_seconds(problem(1.0, 0.5)) == pytest.approx(6.0)


def result(auto: float | None, **others: float | None) -> dict[str, Any]:
    found = {"auto": auto, **{name.replace("_", "-"): seconds for name, seconds in others.items()}}
    strategies = {name: {"step_seconds": seconds} for name, seconds in found.items()}
    facts = {"table": "post", "model": "m", "cluster": "c", "ops": 1234, "pipelined_seconds": None}
    return {**facts, "bound_seconds": 0.2, "strategies": strategies}


def test_the_summary() -> None:
    header, lines = summarise_rows([result(0.25, gpu_only=None, genetic=0.5, expert=0.4), result(None)])
    assert header == ["row", "ops", "bound", "auto", "gap", "best other", "by", "auto / other", "one GPU"]
    assert lines[0] == ["m on c", "1,234", "200.0", "250.0", "25.0%", "400.0", "expert", "0.625", "-"]
    assert lines[1] == ["m on c", "1,234", "200.0", "-", "-", "-", "-", "-", "-"]
    header, lines = summarise_rows([{**result(0.25), "pipelined_seconds": 0.3}])
    assert (header[-1], lines[0][-1]) == ("GPipe", "300.0")


def test_the_page() -> None:
    page = list(rows_page([result(0.25, gpu_only=1.5)]))
    assert page == [
        "## post",
        "| row | ops | bound | auto | gap | best other | by | auto / other | one GPU |",
        "|---|---|---|---|---|---|---|---|---|",
        "| m on c | 1,234 | 200.0 | 250.0 | 25.0% | 1,500.0 | gpu-only | 0.167 | 1,500.0 |",
        "",
        "| strategy | m on c |",
        "|---|---|",
        "| auto | 250.0 |",
        "| gpu-only | 1,500.0 |",
        "",
    ]


@pytest.mark.usefixtures("tiny_rows")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "rows", "--strategies", "auto,gpu-only", "-o", str(tmp_path / "rows.json"), *QUICKLY]
    assert main([*command, "--json", "--rows", "today"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["cluster"] for row in rows] == ["4090+3060"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[4]] == ["post", "today"]
    assert main([*command, "--markdown"]) == 0
    page = capsys.readouterr().out
    assert "## post\n| row | ops |" in page
    assert f"{rows[0]['strategies']['gpu-only']['step_seconds'] * 1e3:,.1f}" in page


@pytest.mark.usefixtures("tiny_rows")
def test_wrong_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rows.json"
    command = ["bench", "rows", "--strategies", "gpu-only", "-o", str(output)]
    assert "no row has one of these models" in refused(["bench", "rows", "lenet"], capsys)
    assert "unknown strategy 'none'" in refused(["bench", "rows", "--strategies", "none"], capsys)
    assert main([*command, *QUICKLY]) == 0
    capsys.readouterr()
    assert "was made with another seconds than 10.0" in refused([*command, "--budget", "12"], capsys)
    for text, rule in (("{}", "format"), ("[", "is not JSON")):
        output.write_text(text)
        assert rule in refused([*command, *QUICKLY], capsys)
        assert output.read_text() == text
    head = {"format": "placewise-rows", "version": 1, "effort": {**BUDGET.__dict__}}
    output.write_text(json.dumps({**head, "rows": [{"table": "post"}]}))
    assert "rows[0]: needs the field 'model'" in refused([*command, *QUICKLY], capsys)
