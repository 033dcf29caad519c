"""placewise reproduce: the papers' tables and ours, claims, calibration and pictures."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from captured import GOLDEN
from command_line import refused

from placewise import zoo
from placewise.cli import main
from placewise.cli.reproduce_command import WHAT
from placewise.core.cluster import Cluster
from placewise.core.errors import InputError
from placewise.core.problem import Problem
from placewise.experiments.papers import reported_results, reproduction
from placewise.experiments.papers.calibration import Figures, StepWork, calibrate, calibrated, fit_device
from placewise.experiments.papers.claims import CLAIMS, found_ratio, judge, reported_ratio
from placewise.experiments.papers.function_split import FUNCTIONS, split_by_function, ways_to_share
from placewise.experiments.papers.reported_results import (
    BY_FUNCTION,
    HEFT_EXPECTS,
    OWN,
    PAPERS,
    Paper,
    PaperColumn,
    PaperRow,
)
from placewise.experiments.papers.reproduction import (
    Effort,
    Machines,
    ReproducedRow,
    Reproduction,
    quick,
    reproduce,
    reproduction_data,
    rows_of,
    slowed,
    write_reproduction_figures,
)
from placewise.experiments.papers.reproduction_tables import (
    claim_lines,
    payoff_table,
    ratio_table,
    reproduction_page,
    seconds_table,
)
from placewise.experiments.recorded_searches import Found
from placewise.machines.presets import PRESETS, preset
from placewise.models import load_graph
from placewise.simulate.simulator import Simulator
from placewise.strategies import STRATEGIES, make

CAPTURED = str(GOLDEN / "captured.json.gz")
EFFORT = Effort(evaluations=24, own_evaluations=8, seeds=2)
TINY = Paper(
    "post",
    "Tiny",
    "Post",
    (
        PaperColumn("single GPU", "gpu-only"),
        PaperColumn("Post", "post"),
        PaperColumn("random search", "random"),
        PaperColumn(OWN, "auto"),
    ),
    tuple(PaperRow(f"net-{n}", n, CAPTURED, f"{n}xK80", {"single GPU": 2.0, "Post": 1.0}, CAPTURED) for n in (2, 4)),
    ("single GPU",),
    quick_evaluations=24,
    fitted={"gpu": "single GPU"},
)


def times(done: Reproduction) -> list[list[tuple[float | None, ...]]]:
    return [[found.step_seconds for found in result.found.values()] for result in done.results]


# --- the papers ---


def test_the_tables_are_whole() -> None:
    assert {name: len(paper.rows) for name, paper in PAPERS.items()} == {
        "post": 14,
        "post-parts": 4,
        "post-appendix": 4,
        "spotlight": 4,
        "hdp": 6,
        "colocrl": 6,
    }
    for paper in PAPERS.values():
        names = [column.name for column in paper.columns]
        assert {paper.system, *paper.compared, *paper.fitted.values()} <= {*names}
        assert len({row.label for row in paper.rows}) == len(paper.rows)
        for column in paper.columns:
            assert column.strategy in STRATEGIES
            make(column.strategy, dict(column.settings))
        for row in paper.rows:
            assert {*row.reported} <= {*names}
            assert row.cluster in PRESETS
            assert row.num_gpus == sum(device.kind == "gpu" for device in preset(row.cluster).devices)
            assert all(zoo.parse_model(model) for model in (row.model, row.quick_model) if model)
    assert (*PAPERS, "changes", "calibrate") == WHAT


def test_the_papers_numbers_agree_with_what_they_say_in_words() -> None:
    """HDP's last column is 1 - HDP / expert; Post's expert has every CNN on one GPU."""
    reductions = [1 - (reported_ratio(row, "HDP", "expert") or math.nan) for row in PAPERS["hdp"].rows]
    assert math.isnan(reductions.pop(2))  # RNNLM's expert is in the column of one GPU
    assert reductions == pytest.approx([0.133, 0, 0.606, 0.536, -0.049], abs=1e-3)  # printed: 16.3% for the first one
    for row in PAPERS["post"].rows:
        if not row.family.startswith(("RNNLM", "NMT")):
            assert row.reported["expert"] == row.reported["single GPU"]


def test_every_claim_holds_for_the_papers_own_numbers() -> None:
    checked = 0
    for claim in CLAIMS:
        rows = [row for row in PAPERS[claim.paper].rows if not claim.families or row.family in claim.families]
        assert rows, claim
        known = {column.name for column in PAPERS[claim.paper].columns} | {BY_FUNCTION, HEFT_EXPECTS}
        assert {claim.of, claim.to} <= known, claim
        for row in rows:
            ratio = reported_ratio(row, claim.of, claim.to)
            checked += ratio is not None
            assert ratio is None or claim.least <= ratio < claim.below, (claim.text, row.label, ratio)
    assert checked > 80


# --- searching ---


def test_a_table_is_the_same_twice_and_is_answered_from_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = reproduce(TINY, EFFORT)
    assert first.is_complete
    assert [list(result.found) for result in first.results] == [
        ["single GPU", "Post", "random search", OWN, HEFT_EXPECTS]
    ] * 2
    assert [len(found.step_seconds) for found in first.results[0].found.values()] == [2, 2, 2, 2, 1]
    assert first.results[0].found["Post"].evaluations == 24
    assert first.results[0].found["Post"].settings == {"evaluations": "24"}
    for result in first.results:
        for found in result.found.values():
            assert result.bound_seconds is not None
            assert found.median is not None
            assert found.strategy == HEFT_EXPECTS or found.median >= result.bound_seconds
    assert times(reproduce(TINY, EFFORT, run_file=tmp_path / "runs.db")) == times(first)

    class Refusing(Simulator):
        def __call__(self, *_: Any) -> Any:
            raise AssertionError("is evaluated again")

    monkeypatch.setattr(reproduction, "Simulator", Refusing)
    again = reproduce(TINY, EFFORT, run_file=tmp_path / "runs.db")
    assert times(again) == times(first)
    assert again.results[0].found["Post"].histories[0][-1][2] == first.results[0].found["Post"].step_seconds[0]


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    done_so_far: list[tuple[str, str]] = []

    def stop(row: PaperRow, column: str, found: Found) -> None:
        done_so_far.append((row.label, column))
        if len(done_so_far) == 6:
            raise KeyboardInterrupt

    stopped = reproduce(TINY, EFFORT, run_file=tmp_path / "runs.db", on_found=stop)
    assert not stopped.is_complete
    assert [list(result.found) for result in stopped.results] == [
        ["single GPU", "Post", "random search", OWN, HEFT_EXPECTS],
        ["single GPU"],
    ]
    assert done_so_far[-1] == ("net-4, 4 GPUs", "Post")
    assert times(reproduce(TINY, EFFORT, run_file=tmp_path / "runs.db")) == times(reproduce(TINY, EFFORT))


def test_the_quick_version_and_single_models() -> None:
    effort = quick(PAPERS["post"])
    rows = rows_of(PAPERS["post"], effort)
    assert [row.label for row in rows if row.family.startswith("ResNet")] == ["ResNet-50, 2 GPUs", "ResNet-50, 4 GPUs"]
    assert {row.model for row in rows if row.family == "NMT-8"} == {"nmt:layers=8,length=5"}
    assert [row.label for row in rows_of(PAPERS["post"], Effort(), ("NMT-4",))] == ["NMT-4, 4 GPUs"]


def test_columns_of_single_models_and_in_micro_batches() -> None:
    row = PaperRow("net", 4, "cifar-cnn", "4xK80")
    towers = PaperColumn("towers", "towers", families=("net",), in_micro_batches=True)
    assert row.has(towers)
    assert not replace(row, family="other").has(towers)
    assert row.model_of(towers) == "cifar-cnn:micro_batches=4"
    assert replace(row, model="nmt:layers=2").model_of(towers) == "nmt:layers=2,micro_batches=4"
    assert row.model_of(replace(towers, in_micro_batches=False)) == "cifar-cnn"
    small = PaperRow("net", 2, "cifar-cnn:batch=4", "2xK80")
    done = reproduce(replace(TINY, columns=(*TINY.columns, towers), rows=(small,)), EFFORT)
    found = done.results[0].found
    assert found["towers"].evaluations == 1
    assert found["towers"].median != found["single GPU"].median
    other = reproduce(replace(TINY, columns=(*TINY.columns, towers), rows=(replace(small, family="other"),)), EFFORT)
    assert "towers" not in other.results[0].found


def test_steps_until_a_search_has_paid_off() -> None:
    """One GPU takes 3 s, the expert 4 s. A search that saves 1 s of 3 and judged placements for 20 s in all, each in ten
    steps, has paid off after 200 steps; by the 8 s that two seeds took here, after 4. What saves nothing never does."""
    found = {
        "single GPU": Found("gpu-only", (3.0,), evaluations=4),
        "expert": Found("expert", (4.0,), evaluations=1),
        "Post": Found("post", (2.0, 2.0), evaluations=24, search_seconds=8.0, trial_seconds=20.0),
        "random search": Found("random", (3.5, 3.5), evaluations=24, search_seconds=8.0, trial_seconds=90.0),
    }
    done = Reproduction(TINY, EFFORT, (ReproducedRow(TINY.rows[0], 1, 1, 1.0, found),))
    header, lines = payoff_table(done)
    assert header[1:] == ["without, s", "Post", "random search"]
    assert lines == [["net-2, 2 GPUs", "3.000", "200 / 4", "never"]]


# --- a translation model by function ---


def test_the_ways_to_share_functions() -> None:
    """Four functions on two GPUs: all on one, or one of 2^4 / 2 - 1 cuts; on four GPUs: Bell's number 15."""
    assert list(ways_to_share(2, 2)) == [(0, 0), (0, 1)]
    assert len(list(ways_to_share(4, 2))) == 8
    assert len({*ways_to_share(4, 4)}) == len(list(ways_to_share(4, 9))) == 15


def test_every_function_is_whole() -> None:
    problem = Problem.of(load_graph("nmt:layers=1,hidden=4,length=2,batch=2,vocab=8"), Cluster.load("2xK80"))
    placements = split_by_function(problem)
    assert placements.shape == (8, problem.num_groups)
    names = problem.graph.ops.names
    for placement in placements:
        devices = placement[problem.op_groups]
        for function in FUNCTIONS:
            used = {int(devices[n]) for n, name in enumerate(names) if name.startswith(f"{function}.")}
            assert len(used) == 1, (function, used)
    assert len({tuple(row) for row in placements.tolist()}) == 8
    assert len(split_by_function(Problem.of(load_graph(CAPTURED), Cluster.load("2xK80")))) == 0


# --- calibration ---


def some_work(figures: Figures, factor: float = 1.0) -> list[StepWork]:
    """Returns steps that a device with these figures takes `factor` times the reported seconds for."""
    rng = np.random.default_rng(0)
    works = []
    for n in range(6):
        flops, moved = rng.lognormal(20, 2, 400), rng.lognormal(15 + n / 2, 1, 400)
        works.append(StepWork(str(n), flops, moved, 1.0))
    return [replace(work, reported_seconds=work.seconds(figures) / factor) for work in works]


def test_a_fit_finds_the_device_that_made_the_times() -> None:
    device = preset("2xK80").devices[0]
    truth = Figures(device.flops / 2, device.bytes_per_second / 3, device.overhead_seconds * 4)
    works = some_work(truth)
    found = fit_device(works, device)
    assert [work.seconds(found) for work in works] == pytest.approx([work.reported_seconds for work in works], rel=0.05)
    assert found == Figures(
        *(float(f"{value:.2e}") for value in (found.flops, found.bytes_per_second, found.overhead_seconds))
    )
    outlier = replace(works[0], reported_seconds=works[0].reported_seconds / 8)
    moved = fit_device([outlier, *works[1:]], device)
    assert [work.seconds(moved) for work in works[1:]] == pytest.approx(
        [work.reported_seconds for work in works[1:]], rel=0.25
    )


def test_no_device_is_faster_than_its_data_sheet() -> None:
    device = preset("2xK80").devices[0]
    found = fit_device(some_work(Figures(device.flops * 9, device.bytes_per_second * 9, 0.0)), device)
    assert found.flops == pytest.approx(4.37e12, rel=1e-2)
    assert found.bytes_per_second == pytest.approx(240e9, rel=1e-2)


def test_calibrated_machines_take_what_the_fit_says() -> None:
    """A step on one device takes the sum of its ops: the simulator's gpu-only is what was fitted."""
    calibration = calibrate(TINY)
    assert [(one.kind, one.model, one.reported_seconds) for one in calibration.fits] == [("gpu", CAPTURED, 2.0)]
    cluster = calibrated(Cluster.load("4xK80"), calibration)
    assert cluster.devices[-1] == Cluster.load("4xK80").devices[-1]  # there is no column of the CPU alone
    assert cluster.links == Cluster.load("4xK80").links
    found = reproduce(replace(TINY, columns=TINY.columns[:1]), EFFORT, machines=Machines(calibration))
    assert found.results[0].found["single GPU"].median == pytest.approx(calibration.fits[0].fitted_seconds)
    plain = reproduce(replace(TINY, columns=TINY.columns[:1]), EFFORT)
    assert plain.results[0].found["single GPU"].median == pytest.approx(calibration.fits[0].preset_seconds)
    with pytest.raises(InputError, match="spotlight: has no single-GPU or CPU-only column"):
        calibrate(PAPERS["spotlight"])


def test_slower_links_slow_copies_alone() -> None:
    """A copy of 1,000 bytes takes 20 us and 1,000 / 12.6 GB/s from GPU to GPU: five times that with the factor 5."""
    plain, slow = Cluster.load("2xK80"), Machines(slower_links=5.0).named("2xK80")

    def copy_seconds(cluster: Cluster) -> float:
        return float(cluster.latency_seconds[0, 1] + 1000 / cluster.bytes_per_second[0, 1])

    assert copy_seconds(slow) == pytest.approx(5 * copy_seconds(plain)) == pytest.approx(5 * (2e-5 + 1000 / 12.6e9))
    assert slow.devices == plain.devices
    assert slowed(plain, 1.0).digest == plain.digest


def test_nothing_but_single_device_columns_is_fitted() -> None:
    assert {column for paper in PAPERS.values() for column in paper.fitted.values()} == {"single GPU", "CPU only"}
    changed = replace(TINY, rows=tuple(replace(row, reported={**row.reported, "Post": 9.0}) for row in TINY.rows))
    assert calibrate(changed) == calibrate(TINY)


# --- what is printed ---


def result(label: int = 2, **medians: float | None) -> ReproducedRow:
    found = {
        name.replace("_", " "): Found("s", (value,), 2400, 1.0, histories=() if value is None else (((1, 0.0, value),),))
        for name, value in medians.items()
    }
    return ReproducedRow(
        PaperRow("NMT-2", label, "m", "2xK80", {"single GPU": None, "Post": 1.22, "expert": 2.05}), 7, 5, 0.25, found
    )


def test_the_tables_by_hand() -> None:
    paper = replace(
        TINY,
        columns=(PaperColumn("single GPU", "gpu-only"), PaperColumn("Post", "post")),
        compared=("single GPU", "expert"),
    )
    done = Reproduction(paper, EFFORT, (result(single_GPU=None, Post=0.5, expert=2.0),))
    assert seconds_table(done) == (
        ["paper / ours, s", "single GPU", "Post", "bound"],
        [["NMT-2, 2 GPUs", "OOM / OOM", "1.22 / 0.500", "0.250"]],
    )
    assert ratio_table(done) == (
        ["paper / ours", "Post / single GPU", "Post / expert"],
        [["NMT-2, 2 GPUs", "-", "0.60 / 0.25"]],
    )
    assert found_ratio(done.results[0], "Post", "Post") == 1.0
    page = list(reproduction_page(done))
    assert page[1] == '    placewise reproduce post --columns "single GPU,Post" --seeds 2 --budget 24 --own-budget 8'
    assert "| NMT-2, 2 GPUs | OOM / OOM | 1.22 / 0.500 | 0.250 |" in page


def test_claims_are_judged_by_every_row() -> None:
    better, worse = result(2, Post=1.0, expert=2.0), result(4, Post=3.0, expert=2.0)
    paper = PAPERS["post"]

    def said(*results: ReproducedRow) -> list[str]:
        return [line for line in claim_lines(judge(Reproduction(paper, EFFORT, results))) if "Post beats the expert" in line]

    assert said(better) == ["yes: on NMT, Post beats the expert: 0.50 (paper 0.60)"]
    assert said(better, worse) == ["no, in 1 of 2 rows: on NMT, Post beats the expert: 0.50, 1.50 (paper 0.60, 0.60)"]
    assert said() == ["not measured: on NMT, Post beats the expert"]
    metis = result(2, Metis=3.0, expert=4.0)
    lines = [line for line in claim_lines(judge(Reproduction(paper, EFFORT, (metis,)))) if "on NMT, Metis" in line]
    assert lines[0].startswith("no: on NMT, Metis is slower than the expert: 0.75. Cause: ")


def test_a_picture_of_each_row_that_found_something(tmp_path: Path) -> None:
    write_reproduction_figures(Reproduction(TINY, EFFORT, (result(Post=0.5), result(4))), tmp_path / "new")
    assert [path.name for path in sorted((tmp_path / "new").iterdir())] == ["post-nmt-2-2-gpus.svg"]


# --- the command ---


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reported_results.PAPERS, "post", TINY)


@pytest.mark.usefixtures("tiny")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, runs = tmp_path / "results.json", tmp_path / "runs.db"
    command = ["reproduce", "post", "--quick", "--own-budget", "8", "--run-file", str(runs), "-o", str(output)]
    assert main([*command, "--plots", str(tmp_path / "plots")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Tiny\nquick version")
    assert "net-2, 2 GPUs" in text
    assert len(list((tmp_path / "plots").glob("*.svg"))) == 2
    kept = json.loads(output.read_text())
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == kept  # from the record: the search seconds too
    assert kept["effort"] == {"evaluations": 24, "own_evaluations": 8, "seeds": 2, "is_quick": True}
    again = reproduction_data(reproduce(TINY, Effort(24, 8, 2, True), run_file=runs), kept["claims"])
    assert kept == json.loads(json.dumps(again))
    assert main([*command, "--markdown", "--models", "net-4"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# Tiny, reproduced\n    placewise reproduce post --quick")
    assert "net-2" not in page


@pytest.mark.usefixtures("tiny")
def test_calibrated_from_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("post-appendix", "spotlight", "hdp", "colocrl"):
        monkeypatch.delitem(reported_results.PAPERS, name)
    assert main(["reproduce", "calibrate"]) == 0
    assert "Tflop/s" in capsys.readouterr().out
    assert main(["reproduce", "calibrate", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)["post"]
    assert main(["reproduce", "post", "--quick", "--own-budget", "8", "--calibrated", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machines"] == {"calibration": said, "slower_links": 1.0, "launch_seconds": None}
    assert found["rows"][0]["found"]["single GPU"]["median"] == pytest.approx(said["fits"][0]["fitted_seconds"])


@pytest.mark.usefixtures("tiny")
def test_wrong_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["reproduce", "post", "--quick", "--run-file", str(tmp_path / "runs.db")]
    assert "post has no model 'vgg' in its quick version; its models are net-2, net-4" in refused(
        [*command, "--models", "vgg"], capsys
    )
    assert "there is no folder" in refused([*command, "-o", str(tmp_path / "no" / "results.json")], capsys)
    assert list(tmp_path.iterdir()) == []
