"""`run`: what does not fit, other hardware, the progress on a terminal, and its trace on a page."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import refused
from compiled_steps import cpu_cluster, plan_by_op

import placewise as pw
from placewise.cli import main
from placewise.cli.progress import Line
from placewise.core.plan import Plan
from placewise.core.problem import Problem
from placewise.core.profile import Profile, ProfiledDevice
from placewise.core.quantities import format_bytes
from placewise.formats.cluster_file import write_cluster
from placewise.formats.profile_file import write_profile
from placewise.measure.instruments import instrument_of
from placewise.measure.random_batch import load_with_weights
from placewise.models import load_graph
from placewise.report.chrome_trace import read_measured
from placewise.run.devices import real_devices

MODEL = "rnnlm:layers=1,hidden=8,steps=3,batch=4,vocab=11"
RUN = ["run", MODEL, "--plan", "plan.json", "--steps", "2"]
ON_CPUS = ["--cluster", "cpus.toml"]

LOOKS_UP = """
import torch
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 4)

    def forward(self, words):
        return self.words(words + 100)


def step():
    model = Words()
    words = torch.zeros(4, dtype=torch.long)
    return model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), (words, words)
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with cpus.toml, and with plan.json and other.json at random."""
    monkeypatch.chdir(tmp_path)
    problem = Problem.of(load_graph(MODEL), cpu_cluster())
    rng = np.random.default_rng(0)
    for name in ("plan.json", "other.json"):
        Plan(problem.expand(rng.integers(0, 2, problem.num_groups))).save(name)
    write_cluster(problem.cluster, "cpus.toml")


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_plan_that_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """cpu:1 has 1 KiB less than the plan needs there; the step runs all the same, for the heap is larger."""
    assert main([*RUN, *ON_CPUS, "--json"]) == 0
    whole = said(capsys)
    assert (whole["fits"], whole["overflow_bytes"]) == (True, {"cpu:0": 0, "cpu:1": 0})
    first, second = cpu_cluster().devices
    small = replace(second, memory_bytes=whole["predicted_peak_bytes"]["cpu:1"] - 1024)
    write_cluster(replace(cpu_cluster(), devices=(first, small)), "small.toml")
    assert main([*RUN, "--cluster", "small.toml", "--json"]) == 0
    found = said(capsys)
    assert (found["fits"], found["overflow_bytes"]) == (False, {"cpu:0": 0, "cpu:1": 1024})
    assert main([*RUN, "--cluster", "small.toml"]) == 0
    line = f"the plan does not fit: cpu:1 needs 1 KiB more than its {format_bytes(small.memory_bytes)}"
    assert capsys.readouterr().out.splitlines()[1] == line


def test_a_profile_of_other_hardware_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    here = [instrument_of(device).hardware(device) for device in real_devices(cpu_cluster())]
    for name, hardware in (("here.json", here), ("z80.json", [here[0], "a Z80"])):
        devices = (ProfiledDevice(f"cpu:{i}", "cpu", hardware[i], "cpu:0") for i in range(2))
        write_profile(Profile(tuple(devices), {}), name)
    assert main([*RUN, *ON_CPUS, "--profile", "here.json"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*RUN, *ON_CPUS, "--profile", "z80.json", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == f"placewise: z80.json: was measured on other hardware: cpu:1 was 'a Z80', here it is {here[1]!r}\n"
    assert len(json.loads(out)["steps"]) == 2


def test_a_terminal_shows_which_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(Line, "is_due", True)
    monkeypatch.setattr(Line, "show", lambda self, entry: shown.append(entry.text))
    assert main([*RUN, *ON_CPUS]) == 0
    assert shown == ["warm-up", "warm-up", "step 1 of 2", "step 2 of 2"]


def test_its_trace_stands_beside_its_plan_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """With a plan that has other devices the page says so; with a model of another size it is refused."""
    assert main([*RUN, *ON_CPUS, "--trace", "trace.json"]) == 0
    capsys.readouterr()
    report = ["report", *ON_CPUS, "--measured", "trace.json", "-o", "page.html", "--graph"]
    assert main([*report, MODEL, "plan.json"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*report, MODEL, "other.json"]) == 0
    assert "trace.json: was measured with another placement than the plan" in capsys.readouterr().err
    wider = MODEL.replace("hidden=8", "hidden=9")
    assert "trace.json: is a trace of another graph" in refused([*report, wider, "plan.json"], capsys)


def test_measured_is_compared_with_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["run", MODEL, *ON_CPUS, "--plan", "plan.json", "--steps", "3", "--trace", "trace.json"]
    assert main([*given, "--json"]) == 0
    result = said(capsys)
    assert len(result["steps"]) == 3
    assert result["step_seconds"] > 0
    assert result["peak_bytes"] == result["predicted_peak_bytes"]
    measured = read_measured("trace.json", Problem.of(load_graph(MODEL), cpu_cluster()))
    assert len(measured.ops) == sum(result["ops"].values())
    assert (measured.end >= measured.start).all()
    assert main(given) == 0
    text = capsys.readouterr().out
    assert "a step, median of 3; predicted" in text
    assert "cpu:1" in text


def test_run_refuses_what_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert "placement has" in refused(["run", "cifar-cnn:batch=2", *ON_CPUS, "--plan", "plan.json"], capsys)
    assert "--together needs --profile" in refused([*RUN, *ON_CPUS, "--together"], capsys)
    with pytest.raises(SystemExit) as refusal:
        main([*RUN, *ON_CPUS, "--seed", "9" * 30])
    assert refusal.value.code == 2
    capsys.readouterr()
    if not torch.cuda.is_available():
        assert "has 2 GPUs, this machine has none" in refused([*RUN, "--cluster", "2xK80"], capsys)


def test_an_op_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It looks up the 100th of 5 words, which only a real step finds out."""
    (tmp_path / "looks_up.py").write_text(LOOKS_UP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    plan_by_op(load_with_weights("looks_up:step"), lambda name: "cpu:0").save("plan.json")
    given = ["looks_up:step", "--cluster", "cpus.toml"]
    message = refused(["run", *given, "--plan", "plan.json", "--trace", "trace.json"], capsys)
    assert "looks_up:step: an op of the step fails: IndexError: index out of range" in message
    assert "an op of the step fails: IndexError" in refused(["place", *given, "--measure", "-o", "found.json"], capsys)
    assert not any(map(Path.exists, map(Path, ("trace.json", "found.json"))))


def test_a_plan_that_was_saved_on_the_command_line_compiles_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step is called `branches:step` there, and by its class here."""
    (tmp_path / "branches.py").write_text(LOOKS_UP.replace(" + 100", ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["place", "branches:step", "--cluster", "cpus.toml", "--budget", "1", "-o", "plan.json"]) == 0
    parts = importlib.import_module("branches").step()
    assert Plan.load("plan.json").compile(pw.capture(*parts), "cpus.toml")(parts[3]).isfinite()
