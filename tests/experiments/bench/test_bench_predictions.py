"""Many models' predictions in one run: the rows, the summary, the page, and what is kept of a run that was stopped."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import refused

from placewise.cli import main
from placewise.core.errors import InputError, PlacewiseError
from placewise.experiments.bench import bench_predictions
from placewise.experiments.bench.bench_predictions import ZOO, Predictions, page_of, summary_of
from placewise.experiments.bench.prediction_rows import Asked, TableMachine, measure_all, read_tables
from placewise.experiments.outside_models import NAMES
from placewise.models import load_graph

TABLE = """
[machines.one]
title = "One"
cluster = "2xK80"
virtual = ["cuda:0=32+64"]

[machines.two]
cluster = "4xK80"

[[rows]]
model = "a"
machines = ["one", "two"]

[[rows]]
model = "b"
machines = ["two"]
"""

TINY = "rnnlm:layers=1,hidden=8,steps=2,batch=2,vocab=9"


def row(names: str, predicted: float, *measured: float) -> dict[str, Any]:
    """A row, in seconds; nothing measured: out of memory."""
    return {"placements": names.split(), "predicted": predicted, "alone": predicted, "measured": list(measured) or None}


def record(model: str, machine: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "machine": machine, "ops": 1000, "rows": list(rows), "torch": "2", "seconds": {"load": 1.0}}


def test_the_order_counts_where_placements_differ() -> None:
    """Of three pairs two differ by more than 3%; 1.00 before 1.50 was predicted, 1.00 before 1.49 was not."""
    found = summary_of([row("gpu-only", 1.1, 1.0), row("auto", 1.2, 1.5), row("m-etf", 1.05, 1.4, 1.6, 1.49)])
    assert found["order"] == 0.5
    assert found["median error %"] == pytest.approx(20.0)
    assert found["largest error %"] == pytest.approx(-100 * (1 - 1.05 / 1.49))
    assert found["auto / fastest"] == 1.5


def test_what_ran_out_of_memory_does_not_count() -> None:
    assert summary_of([row("auto", 1.0)]) == {
        "median error %": "-", "largest error %": "-", "order": "-", "auto / fastest": "-"
    }  # fmt: skip


def test_each_row_is_kept_and_a_stopped_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run ends by Ctrl-C after a on `one`, the second has a failure on `two`; the third measures the rest."""
    table, kept, page = tmp_path / "table.toml", tmp_path / "kept.jsonl", tmp_path / "page.md"
    table.write_text(TABLE, encoding="utf-8")
    asked: list[Any] = []

    def measure(jobs: Any, how: Any, processes: int) -> Any:
        assert processes == 1
        asked.append([(model, [machine.name for machine in machines]) for model, machines in jobs])
        if len(asked) == 1:
            yield record("a", "one", row("gpu-only expert", 0.11, 0.1, 0.101, 0.099), row("auto", 0.09))
            raise KeyboardInterrupt
        yield from ({"model": "a", "machine": "two", "failure": "no GPU"}, record("b", "two", row("auto", 0.002, 0.001)))

    monkeypatch.setattr(bench_predictions, "measure_all", measure)
    options = Predictions(table=str(table), kept=str(kept), page=str(page))
    assert not options.run().is_complete
    findings = options.run()
    assert findings.warnings == ("a: no GPU",)
    assert asked[1] == [("a", ["two"]), ("b", ["two"])]
    options.run()
    assert asked[2] == [("a", ["two"])]
    text = page.read_text("utf-8")
    assert "## One\n\n| model | ops | median error | largest error | order | auto / fastest |" in text
    assert "| `a` | gpu-only, expert | 110 ms | 100 ms | +10.0% | 2% |" in text
    assert "|  | auto | 90 ms | out of memory | - | - |" in text
    assert "| `b` | 1,000 | 100.0% | +100.0% | - | 1.00 |" in text
    assert "a on one: gpu-only, expert, 110 ms, 100 ms, +10.0%, 2%" in capsys.readouterr().err


def test_what_is_kept_of_one_machine_does_not_count_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measure(jobs: Any, how: Any, processes: int) -> Any:
        for model, machines in jobs:
            for machine in machines:
                asked.append(machine.name)
                yield record(model, machine.name, row("auto", 0.1, 0.1))

    monkeypatch.setattr(bench_predictions, "measure_all", measure)
    how: dict[str, Any] = {"only": (TINY,), "kept": str(tmp_path / "kept.jsonl")}
    for cluster, virtual in (("2xK80", ()), ("2xK80", ()), ("4xK80", ()), ("2xK80", (("cuda:0", (32, 64)),))):
        assert len(Predictions(cluster, virtual=virtual, **how).run().data["summary"]) == 1
    assert asked == ["2xK80", "4xK80", "2xK80 cuda:0=32+64"]


def test_names_from_a_table_do_not_reach_the_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    bench_predictions._tell(record("a\x1b[2J", "one\x07", row("auto", 0.09, 0.1)))
    machine = TableMachine("one\x07", "2xK80", (), "\x1b[31mone")
    printed = capsys.readouterr().err + page_of([machine], [record("a", "one\x07", row("auto", 0.09, 0.1))])
    assert "a\\x1b[2J on one\\x07" in printed
    assert all(character.isprintable() or character == "\n" for character in printed)


def test_wrong_inputs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no/such.toml" in refused(["bench", "predictions", "no/such.toml"], capsys)
    assert "needs CLUSTER or --table FILE" in refused(["bench", "predictions"], capsys)
    table, kept = tmp_path / "table.toml", tmp_path / "kept.jsonl"
    table.write_text(TABLE.replace('["two"]', '["three"]'), encoding="utf-8")
    command = ["bench", "predictions", "--table", str(table)]
    assert "rows[1]: there is no machine 'three'; the machines are one, two" in refused(command, capsys)
    assert "need CLUSTER" in refused([*command, "--outside"], capsys)
    table.write_text(TABLE.replace("32+64", "32+"), encoding="utf-8")
    assert "machines.one: virtual: cuda:0 must be a number of slices or" in refused(command, capsys)
    good = record("a", "one", row("auto", 0.09, 0.1))
    for wrong, rule in (
        ({}, "line 2: needs the field 'model'"),
        ({**good, "rows": [row("auto", 0.09, 0.0)]}, r"line 2: rows\[0\]: measured must be times from 1e-12 to 1e\+09 s"),
        ({**good, "seconds": {"search": "long"}}, r"line 2: seconds: search must be a finite number"),
    ):
        kept.write_text(f"{json.dumps(good)}\n{json.dumps(wrong)}\n", encoding="utf-8")
        with pytest.raises(InputError, match=rule):
            Predictions("2xK80", kept=str(kept)).run()


@pytest.mark.parametrize("model", ["os:abort", "fused:os:abort", "hostile.py:step"])
def test_a_table_can_not_name_code(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.toml"
    table.write_text(TABLE.replace('model = "a"', f'model = "{model}"'), encoding="utf-8")
    line = refused(["bench", "predictions", "--table", str(table)], capsys)
    assert f"rows[0]: model '{model}' is code that would be imported" in line


def test_a_table_names_machines_beside_it(tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text(TABLE, encoding="utf-8")
    (tmp_path / "4xK80").write_text("", encoding="utf-8")
    machines, rows = read_tables(str(table))
    assert machines == [
        TableMachine("one", "2xK80", (("cuda:0", (32, 64)),), "One"),
        TableMachine("two", str(tmp_path / "4xK80"), (), "two"),
    ]
    assert rows == [("a", ("one", "two")), ("b", ("two",))]


@pytest.mark.parametrize("processes", [1, 2])
def test_models_are_measured_on_cpu_devices(tmp_path: Path, processes: int) -> None:
    """One of the models does not exist. With CPU devices the second process has nothing to do."""
    assert main(["detect", "--cpus", "2", "-o", str(tmp_path / "two.toml")]) == 0
    machine = TableMachine("../two", str(tmp_path / "two.toml"))  # its name is not a file's
    jobs = [(model, (machine,)) for model in (TINY, "nosuch")]
    found = list(measure_all(jobs, Asked(("cpu-only", "auto"), 0.2, 10, 2), processes))
    assert found[0]["rows"][0]["placements"][0] == "cpu-only"
    assert all(len(entry["measured"]) == 2 for entry in found[0]["rows"])
    assert set(found[0]["seconds"]) == {"load", "wait", "profile", "search", "measure"}
    assert "nosuch" in found[1]["failure"]


def test_processes_work_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPUs each model fails in its own process."""
    monkeypatch.setattr(TableMachine, "has_cpu", False)
    jobs = [(model, (TableMachine("gpus", "2xK80"),)) for model in (TINY, "nosuch")]
    found = {entry["model"]: entry["failure"] for entry in measure_all(jobs, Asked(("gpu-only",), 0.2, 10, 2), 2)}
    assert "this machine has none" in found[TINY] or "2 GPUs" in found[TINY]
    assert "nosuch" in found["nosuch"]


def test_models_outside_of_the_zoo_are_captured() -> None:
    assert Predictions("2xK80", outside=True)._models()[:2] == tuple(
        f"placewise.experiments.outside_models:{name}" for name in NAMES[:2]
    )
    assert Predictions("2xK80")._models() == ZOO
    plain, autocast = (load_graph(f"placewise.experiments.outside_models:unet{end}") for end in ("", "_bf16"))
    assert len(set(autocast.ops.compute.tolist()) - set(plain.ops.compute.tolist())) == 1
    with pytest.raises(PlacewiseError):
        Predictions("2xK80", only=("placewise.experiments.outside_models:unett",)).run()
