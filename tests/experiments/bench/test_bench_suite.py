"""bench suite: equal budgets, scores, resuming."""

import json
from pathlib import Path

import pytest
from captured import GOLDEN
from command_line import refused

from placewise import zoo
from placewise.cli import main
from placewise.experiments.bench.bench_suite import (
    CLUSTERS,
    MODELS,
    Suite,
    SuiteProblem,
    scores,
    search_suite,
    suite_page,
)
from placewise.experiments.recorded_searches import Found
from placewise.machines.presets import PRESETS

CAPTURED = str(GOLDEN / "captured.json.gz")
SUITE = Suite((CAPTURED,), ("2xK80", "4090+3060"), ("gpu-only", "random", "post"), evaluations=24, seeds=2)
COMMAND = ["bench", "suite", CAPTURED, "--clusters", "2xK80,4090+3060", "--strategies", "gpu-only,random,post"]


def times(done: list[SuiteProblem]) -> list[list[tuple[float | None, ...]]]:
    return [[found.step_seconds for found in judged.found.values()] for judged in done]


def test_everything_that_is_asked_for_by_name_is_there() -> None:
    assert {model.partition(":")[0] for model in MODELS} <= {*zoo.MODELS}
    assert {*CLUSTERS} < {*PRESETS}


def test_scores_by_hand() -> None:
    """Problem 1: a 2 s (found after 3 s), b 2 s, c nothing. Problem 2: a 4 s, b 1.04 s (after 5 s), c 1 s.

    a and b win the first one together, c the second; b is within 5% of both. The mean of a's ratios 1 and 4 is 2.
    """

    def found(seconds: float | None, after: float = 1.0) -> Found:
        return Found("s", (seconds,), 10, 0.5, histories=() if seconds is None else (((1, 0.0, 9.0), (2, after, seconds)),))

    first = SuiteProblem("m", "c", 3, {"a": found(2.0, 3.0), "b": found(2.0), "c": found(None)})
    second = SuiteProblem("n", "c", 3, {"a": found(4.0), "b": found(1.04, 5.0), "c": found(1.0)})
    suite = Suite(("m", "n"), ("c",), ("a", "b", "c"))
    rows = {row["strategy"]: row for row in scores(suite, [first, second])}
    assert list(rows) == ["c", "b", "a"]  # one win each: by the mean ratio
    assert [rows[name]["wins"] for name in "abc"] == [1, 1, 1]
    assert [rows[name]["near"] for name in "abc"] == [1, 2, 1]
    assert [rows[name]["fits"] for name in "abc"] == [2, 2, 1]
    assert rows["a"]["mean_ratio"] == pytest.approx(2.0)
    assert rows["b"]["mean_ratio"] == pytest.approx(1.04**0.5)
    assert [rows[name]["seconds_to_near"] for name in "abc"] == [3.0, 3.0, 1.0]
    page = list(suite_page(suite, [first, second]))
    assert "| c | 1 | 1 | 1/2 | 1.000 | 1.00 | 1.0 |" in page
    assert "| m on c | 3 | 2,000.0 | 2,000.0 | - |" in page
    assert scores(suite, [])[0]["mean_ratio"] is None
    del second.found["c"]  # stopped before
    problems = {row["strategy"]: row["problems"] for row in scores(suite, [first, second])}
    assert problems == {"a": 2, "b": 2, "c": 1}


def test_equal_budgets_the_same_on_processes_and_from_the_record(tmp_path: Path) -> None:
    done, is_complete = search_suite(SUITE, run_file=tmp_path / "runs.db")
    assert is_complete
    assert [(judged.model, judged.cluster) for judged in done] == [(CAPTURED, "2xK80"), (CAPTURED, "4090+3060")]
    assert [found.evaluations for found in done[0].found.values()][1:] == [24, 24]
    assert times(search_suite(SUITE, workers=1)[0]) == times(done)
    again, _ = search_suite(SUITE, run_file=tmp_path / "runs.db")
    assert again == done  # seconds too


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    done_so_far = []

    def stop(judged: SuiteProblem, name: str) -> None:
        done_so_far.append(name)
        if len(done_so_far) == 4:
            raise KeyboardInterrupt

    done, is_complete = search_suite(SUITE, run_file=tmp_path / "runs.db", on_found=stop)
    assert not is_complete
    assert [list(judged.found) for judged in done] == [["gpu-only", "random", "post"], ["gpu-only"]]
    assert {row["strategy"]: row["fits"] for row in scores(SUITE, done)} == {"gpu-only": 2, "random": 1, "post": 1}
    assert times(search_suite(SUITE, run_file=tmp_path / "runs.db")[0]) == times(search_suite(SUITE)[0])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "suite.json"
    rest = ["--budget", "24", "--seeds", "2", "--run-file", str(tmp_path / "runs.db"), "-o", str(output)]
    assert main([*COMMAND, *rest, "--plots", str(tmp_path / "plots")]) == 0
    names = ["suite-captured-json-gz-on-2xk80.svg", "suite-captured-json-gz-on-4090-3060.svg"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == names
    assert capsys.readouterr().out.split()[:2] == ["strategy", "wins"]
    kept = json.loads(output.read_text())
    assert [problem["cluster"] for problem in kept["problems"]] == ["2xK80", "4090+3060"]
    assert main([*COMMAND, *rest, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == kept
    assert main([*COMMAND, *rest, "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("| strategy | wins |")


def test_wrong_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--run-file", str(tmp_path / "runs.db")]
    assert "3xK81: is neither a file nor a preset" in refused(["bench", "suite", "--clusters", "3xK81", *rest], capsys)
    assert "lenet: is neither a file" in refused(["bench", "suite", CAPTURED, "lenet", *rest], capsys)
    assert "unknown strategy 'none'" in refused(["bench", "suite", "--strategies", "none", *rest], capsys)
    assert list(tmp_path.iterdir()) == []
