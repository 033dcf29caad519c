"""placewise bound: what it prints, as text and as JSON."""

import json
from pathlib import Path

import pytest
from builders import tiny_data
from captured import GOLDEN
from command_line import refused

from placewise.bounds.check.certificates import check
from placewise.cli import main
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.formats.graph_file import read_graph

CAPTURED = str(GOLDEN / "captured.json.gz")


def output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns what a command prints that must succeed."""
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_every_bound_is_printed_and_the_best_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(["bound", CAPTURED, "--cluster", "2xK80", "--seconds", "10", "--check"], capsys)
    lines = text.splitlines()
    assert "no placement has a step below" in lines[0]
    for name in ("host", "path", "work", "window", "segments"):
        assert sum(line.startswith(f"{name} ") for line in lines) == 1
    assert sum("<- best" in line for line in lines) == 1
    assert any(line.startswith("The limit is ") for line in lines)
    assert any("alone takes" in line and "above the bound" in line for line in lines)
    assert lines[-1] == "All certificates were checked."


def test_json_has_a_certificate_that_holds(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(output(["bound", CAPTURED, "--cluster", "2xK80", "--grouping", "module", "--json"], capsys))
    problem = Problem.of(read_graph(CAPTURED), Cluster.load("2xK80"), "module")
    check(problem, data["bound"], data["bound_seconds"], data["certificate"])
    assert data["bound_seconds"] == max(data["bounds"].values())
    assert data["bound_seconds"] <= data["one_device"]["step_seconds"]
    assert "segments" not in data["bounds"]  # which needs more time


def test_where_one_device_is_the_best_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """relu, mm, mm.backward and the update are a chain: 1 + 4 + 3 + 2 ms, and copies take 1 ms and more."""
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(tiny_data()), encoding="utf-8")
    machine = tmp_path / "tiny.toml"
    devices = "".join(
        f'[[devices]]\nname = "gpu:{d}"\nkind = "gpu"\nmemory = "1MiB"\nflops = 1e12\nbytes_per_second = 1e11\n'
        for d in range(2)
    )
    link = "[default_link]\nlatency_seconds = 0.001\nbytes_per_second = 1e6\n"
    machine.write_text(f'format = "placewise-cluster"\nversion = 1\nname = "tiny"\n{link}{devices}', encoding="utf-8")
    text = output(["bound", str(file), "--cluster", str(machine)], capsys)
    assert "no placement has a step below 10 ms" in text
    assert "gpu:0 alone takes 10 ms: that is the bound, no other device can help." in text


def test_wrong_arguments_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere" in refused(["bound", CAPTURED, "--cluster", "nowhere"], capsys)
    assert "grouping" in refused(["bound", CAPTURED, "--cluster", "2xK80", "--grouping", "none"], capsys)
    assert "no-such-model" in refused(["bound", "no-such-model", "--cluster", "2xK80"], capsys)
