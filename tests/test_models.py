"""MODEL as path/to/file.py:function and as package.module:function: what they return, and what can be wrong."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from placewise.cli import main
from placewise.core.errors import CaptureError, ModelError
from placewise.graph_capture.training_step import TrainingStep
from placewise.models import load_graph, load_step

STEP = """
import torch

from {neighbour} import WIDTH


def step():
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    batch = (torch.zeros(4, WIDTH), torch.zeros(4, dtype=torch.int64))
    return model, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), batch


def nothing():
    raise RuntimeError("there is nothing")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with my-model.py, json.py and a neighbour of both; the tests run in another one."""
    (tmp_path / "models").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    neighbour = f"neighbour_{tmp_path.name.replace('-', '_')}"  # modules of other tests stay loaded
    (tmp_path / "models" / f"{neighbour}.py").write_text("WIDTH = 5\n")
    for name in ("my-model.py", "json.py"):
        (tmp_path / "models" / name).write_text(STEP.format(neighbour=neighbour))
    before = set(sys.modules)
    yield tmp_path / "models"
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.mark.parametrize("form", ["relative", "absolute"])
def test_a_function_of_a_file_in_another_folder(folder: Path, form: str) -> None:
    path = "../models/my-model.py" if form == "relative" else str(folder / "my-model.py")
    graph = load_graph(f"{path}:step")
    assert graph.name == f"{path}:step"
    assert sum(kind == "aten.addmm" for kind in graph.ops.kinds) == 2
    assert load_step(f"{path}:step").graph.digest == graph.digest


def test_a_file_may_be_named_like_a_module_that_is_loaded() -> None:
    """../models/json.py is not Python's json, which stays what it is."""
    assert len(load_graph("../models/json.py:step").ops) > 0
    assert sys.modules["json"] is json


def test_a_file_is_loaded_once(folder: Path) -> None:
    (folder / "counted.py").write_text("import sys\nsys.counted = getattr(sys, 'counted', 0) + 1\ndef step(): return 1\n")
    for _ in range(2):
        with pytest.raises(ModelError, match="it returned a int"):
            load_graph("../models/counted.py:step")
    assert sys.counted == 1  # type: ignore[attr-defined]
    del sys.counted  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        ("../models/none.py:step", "../models/none.py: there is no such file"),
        ("../models/my-model.py:setp", "there is no function 'setp' in ../models/my-model.py: did you mean 'step'?"),
        ("../models/my-model.py:nothing", "RuntimeError: there is nothing (my-model.py:14)"),
        ("../models/my-model.py", "../models/my-model.py: name the function that returns the step, as in"),
        ("../models/wrong.py:step", "SyntaxError: '(' was never closed (wrong.py, line 1)"),
        ("../models/empty.py:step", "there is no function 'step' in ../models/empty.py: it has no functions"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    folder: Path, model: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "wrong.py").write_text("def step(\n")
    (folder / "empty.py").write_text("")
    for command in (["info", model], ["capture", model, "-o", "graph.json"]):
        assert main(command) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
        assert rule in err
    assert os.listdir() == []
    with pytest.raises(ModelError, match=re.escape(rule)):
        load_step(model)


def test_a_process_that_measures_loads_the_file_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect", "--cpus", "2", "-o", "two.toml"]) == 0
    capsys.readouterr()
    search = ["--strategy", "random", "--budget", "2", "--measure", "--steps", "1", "--json"]
    assert main(["place", "../models/my-model.py:step", "--cluster", "two.toml", *search]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["evaluations"], found["fits"]) == (2, True)
    assert 0 < found["step_seconds"] < float("inf")


# --- package.module:function ---

USER_MODULE = """
import torch
import placewise as pw
from placewise.graph_capture.training_step import TrainingStep

def parts():
    model = torch.nn.Linear(2, 2)
    assert model.weight.is_meta
    return model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), (torch.ones(4, 2), torch.ones(4, 2))

def step():
    return TrainingStep(*parts(), micro_batches=2)

def captured():
    return pw.capture(*parts(), name="mine")

def graph():
    return captured().graph

def number():
    return 7

def raises():
    raise ValueError("no\\nsuch thing")

def fails():
    model, _, optimizer, batch = parts()
    def loss(out, y):
        return out.sum() if out.sum() > 0 else y.sum()
    return model, loss, optimizer, batch

def raises_from():
    try:
        raises()
    except ValueError as problem:
        raise ImportError("no parts") from problem
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"steps_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.parametrize("function", ["parts", "step", "captured", "graph"])
def test_a_function_of_the_user_gives_a_graph(user_module: str, function: str) -> None:
    graph = load_graph(f"{user_module}:{function}")
    assert "addmm" in graph.ops.names
    assert graph.name == {"captured": "mine", "graph": "mine"}.get(function, f"{user_module}:{function}")
    assert np.unique(graph.ops.micro_batches).tolist() == ([-1, 0, 1] if function == "step" else [-1])


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("number", ModelError, "returned a int"),
        ("raises", ModelError, r"ValueError: no such thing \(\w+\.py:24\)$"),
        ("raises_from", ModelError, r"ImportError: no parts \(\w+\.py:\d+\); the cause: ValueError: no such thing$"),
        ("missing", ModelError, "there is no function 'missing'"),
        ("fails", CaptureError, r"a condition \(bool\) needs the value of a tensor.*\(\w+\.py:29\)$"),
    ],
)
def test_what_a_function_of_the_user_can_do_wrong(
    user_module: str, function: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        load_graph(f"{user_module}:{function}")
    assert "\n" not in str(caught.value)


def test_other_wrong_models(user_module: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"No module named 'nowhere'$"):
        load_graph("nowhere:step")
    with pytest.raises(ModelError, match=r"is neither a file, nor a function"):
        load_graph("no such model")
    with pytest.raises(ModelError, match=r"/dev/zero: can't be read: it is a device or a pipe"):
        load_graph("/dev/zero")
    with pytest.raises(ModelError, match="returns a graph, which can't be run"):
        load_step(f"{user_module}:graph")
    (tmp_path / "graph.json").write_text("{}")
    with pytest.raises(ModelError, match="is a graph file, which can't be run"):
        load_step(str(tmp_path / "graph.json"))
    assert isinstance(load_step(f"{user_module}:step").step, TrainingStep)
