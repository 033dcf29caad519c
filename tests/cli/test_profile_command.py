"""`placewise profile`, and the commands that use what it measures."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import refused
from small_steps import MLP, mlp_step

import placewise as pw
from placewise.bounds.best_bound import Bound, bound
from placewise.cli import main
from placewise.cli.progress import Line
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.core.profile import CheckedPrediction, Contention, Profile, ProfiledDevice
from placewise.formats.cluster_file import read_cluster
from placewise.formats.graph_file import read_graph, write_graph
from placewise.formats.profile_file import read_profile, write_profile
from placewise.measure import prediction_checks
from placewise.measure.cpu_instrument import CpuInstrument
from placewise.measure.profiler import measure_profile
from placewise.search import planner as placing


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with a cluster of two CPUs, where the tests' own MODEL can be found."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    assert main(["detect", "--cpus", "2", "-o", "two.toml"]) == 0
    capsys.readouterr()
    return tmp_path


def test_a_profile_serves_all_commands(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A measured graph file, and the model with --profile, are the same problem; a plan of one holds for the other."""
    where = ["--cluster", "two.toml"]
    made = ["-o", "p.json", "--graph", "g.json.gz", "--cluster-out", "m.toml"]
    assert main(["profile", MLP, *where, *made, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["failures"] == []
    assert facts["signatures"] < facts["ops"]
    profile = read_profile("p.json")
    assert {device.name for device in profile.devices} == {"cpu:0", "cpu:1"}
    from_file = Problem.of(read_graph("g.json.gz"), read_cluster("m.toml"))
    assert len(from_file.graph.ops.seconds) == 2
    searched = ["--strategy", "heft", "--profile", "p.json", "-o", "plan.json", "--json"]
    assert main(["place", MLP, *where, *searched]) == 0
    step_seconds = json.loads(capsys.readouterr().out)["step_seconds"]
    assert main(["simulate", MLP, *where, "--plan", "plan.json", "--profile", "p.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == step_seconds
    assert main(["simulate", "g.json.gz", "--cluster", "m.toml", "--plan", "plan.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] == step_seconds
    together = ["--plan", "plan.json", "--profile", "p.json", "--together", "--json"]
    assert main(["simulate", MLP, *where, *together]) == 0
    assert json.loads(capsys.readouterr().out)["step_seconds"] >= step_seconds * 0.999
    assert main(["bound", MLP, *where, "--profile", "p.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bound_seconds"] <= step_seconds
    shown = ["report", "plan.json", "--graph", MLP, *where, "-o", "page.html", "--json"]
    pages = []
    for times in ([], ["--profile", "p.json"]):
        assert main([*shown, *times]) == 0
        pages.append(json.loads(capsys.readouterr().out)["plans"][0]["step_seconds"])
    assert pages[0] != pages[1] == step_seconds


def test_the_bound_is_that_of_devices_alone(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It must hold for all placements, so the company that this one's devices keep has no part in it."""
    step = pw.capture(*mlp_step())
    slow = {"cpu": Contention((1.0, 3.0), (1.0, 3.0), (1.0, 3.0))}
    write_profile(replace(measure_profile(step, read_cluster("two.toml")).profile, contention=slow), "p.json")
    plan = ["--cluster", "two.toml", "--profile", "p.json"]
    assert main(["place", MLP, *plan, "--strategy", "round-robin", "-o", "plan.json"]) == 0
    found: list[Problem] = []

    def keep(problem: Problem) -> Bound:
        found.append(problem)
        return bound(problem)

    monkeypatch.setattr(placing, "find_bound", keep)
    for together in ([], ["--together"]):
        assert main(["simulate", MLP, *plan, "--plan", "plan.json", *together]) == 0
    capsys.readouterr()
    assert np.array_equal(found[0].op_seconds, found[1].op_seconds)


def test_what_was_not_measured_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", MLP, "--cluster", "two.toml", "-o", "p.json", "--ops-only"]) == 0
    assert "signatures of" in capsys.readouterr().out
    asked = ["--profile", "p.json", "--plan", "none.json"]
    assert "p.json: has no device 'gpu:0'" in refused(["bound", MLP, "--cluster", "2xK80", "--profile", "p.json"], capsys)
    assert "there is no such file" in refused(["simulate", MLP, "--cluster", "two.toml", *asked], capsys)
    together = ["simulate", MLP, "--cluster", "two.toml", "--plan", "x.json", "--together"]
    assert "--together needs --profile, which has the measured contention" in refused(together, capsys)
    assert "--together and --busy exclude each other" in refused([*together, "--profile", "p.json", "--busy", "1"], capsys)
    assert "need --measure" in refused(["place", MLP, "--cluster", "two.toml", "--steps", "3"], capsys)


def test_a_terminal_shows_what_is_measured(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(Line, "show", lambda self, shown: lines.append(shown.text))
    assert main(["profile", MLP, "--cluster", "two.toml", "-o", "p.json", "--ops-only"]) == 0
    count = len(read_profile("p.json").timings)
    expected = [f"{n} of {count} signatures on cpu:0" for n in range(count)]
    assert [line.partition(",")[0] for line in lines] == [*expected, "links", "contention"]
    assert re.fullmatch(f"0 of {count} signatures on cpu:0, [0-9]+ s", lines[0])


def test_whole_steps_are_run_and_predictions_checked(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check of everything on one device is made to be off by a factor of two, which the command says."""
    wrong = CheckedPrediction("cpu-only", 2e-3, 1e-3)
    monkeypatch.setattr(prediction_checks, "check_predictions", lambda *given: replace(given[2], checks=(wrong,)))
    assert main(["profile", MLP, "--cluster", "two.toml", "-o", "p.json"]) == 0
    printed = capsys.readouterr()
    assert "cpu-only       2 ms      1 ms  +100.0%" in printed.out
    assert (
        "p.json: its prediction for cpu-only was off by +100% when it was made (2 ms predicted, 1 ms measured)"
        in printed.err
    )
    assert read_profile("p.json").checks == (wrong,)
    assert main(["bound", MLP, "--cluster", "two.toml", "--profile", "p.json"]) == 0
    assert "p.json: its prediction for cpu-only was off by +100% when it was made" in capsys.readouterr().err
    asked = ["profile", MLP, "--cluster", "two.toml", "-o", "p.json", "--ops-only", "--run-step"]
    assert "--run-step and --ops-only exclude each other" in refused(asked, capsys)


def test_a_plan_or_a_profile_is_no_model(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, profile = ["--cluster", "two.toml"], ["--profile", "p.json"]
    devices = tuple(ProfiledDevice(name, "cpu", "", "cpu:0", 2) for name in ("cpu:0", "cpu:1"))
    write_profile(Profile(devices, {}), "p.json")
    Plan(("cpu:0",)).save("plan.json")
    models = "a zoo model with options (nmt:layers=4), package.module:function or path/to/file.py:function"
    for file, what in (("p.json", "a profile"), ("plan.json", "a plan")):
        for command in (
            ["profile", "-o", "x.json"],
            ["run", "--plan", "plan.json"],
            ["bound", *profile],
            ["place", "--measure"],
        ):
            assert (
                refused([command[0], file, *where, *command[1:]], capsys)
                == f"placewise: {file}: is {what}, but MODEL must be {models}\n"
            )
    write_graph(pw.capture(*mlp_step()).graph, "g.json")
    assert "g.json: is a graph file" in refused(["profile", "g.json", *where, "-o", "x.json"], capsys)


def test_nothing_is_written_for_a_machine_that_is_not_here(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    assert "has 2 GPUs, this machine has none" in refused(["profile", MLP, "--cluster", "2xK80", "-o", "p.json"], capsys)
    for command in (["place"], ["compare", "--strategies", "expert"]):  # before the model, which there is none of
        assert "this machine has none" in refused([*command, "no-such-model", "--cluster", "2xK80", "--measure"], capsys)
    assert not Path("p.json").exists()


def test_detect_measures_what_it_describes(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(CpuInstrument.sizes, roofline_rows=128)  # a product in float16 takes seconds on some processors
    monkeypatch.setattr(CpuInstrument, "sizes", small)
    assert main(["detect", "--cpus", "2", "--measure", "-o", "m.toml"]) == 0
    measured, guessed = read_cluster("m.toml"), read_cluster("two.toml")
    assert measured.device_names == guessed.device_names == ("cpu:0", "cpu:1")
    assert measured.devices[0].memory_bytes == guessed.devices[0].memory_bytes
    assert measured.devices[0].flops != guessed.devices[0].flops
    assert all(device.flops > 0 and device.bytes_per_second > 0 for device in measured.devices)
    assert [name for name, _ in measured.devices[1].flops_by_type] == ["bfloat16", "float16", "float64"]
