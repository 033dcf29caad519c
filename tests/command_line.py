"""Commands to test: what a refused one must do, and the files of the tiny step that they read."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_data

from placewise.cli import main

TINY_CLUSTER_TOML = """
name = "tiny"
[[devices]]
name = "gpu:0"
kind = "gpu"
memory = "1MiB"
flops = 1e12
bytes_per_second = 1e11
[[devices]]
name = "gpu:1"
kind = "gpu"
memory = "1MiB"
flops = 1e12
bytes_per_second = 1e11
[default_link]
latency_seconds = 0.001
bytes_per_second = 1e6
"""
TINY_PLAN: dict[str, Any] = {"format": "placewise-plan", "version": 1, "placement": ["gpu:0", "gpu:1", "gpu:0"]}


def write_tiny_files(folder: Path) -> None:
    """Writes the tiny graph, its cluster and a plan into a folder."""
    (folder / "graph.json").write_text(json.dumps(tiny_data()))
    (folder / "cluster.toml").write_text(TINY_CLUSTER_TOML)
    (folder / "plan.json").write_text(json.dumps(TINY_PLAN))


def simulate_command(folder: Path, *others: str) -> list[str]:
    """Returns the arguments of `placewise simulate` for the files in a folder."""
    graph, cluster, plan = (str(folder / name) for name in ("graph.json", "cluster.toml", "plan.json"))
    return ["simulate", graph, "--cluster", cluster, "--plan", plan, *others]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the one line on standard error of a command that must end with code 2 and print nothing else."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert len(captured.err.splitlines()) == 1, captured.err
    return captured.err


def script_command(script: Path, *options: str) -> list[str]:
    """Returns the command for a Python script, also for one that imports a torchvision without its compiled ops."""
    first = "from placewise.experiments.training_setups.torchvision_ops import declare_missing_ops; declare_missing_ops()"
    run = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return [sys.executable, *options, "-c", f"{first}; {run}", str(script)]


def heed_ctrl_c() -> None:
    """Lets Ctrl-C interrupt a child (preexec_fn) even if the tests run in the background, where SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """Returns what a command prints on a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    base = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm", "COLUMNS": "80"}
    subprocess.run([sys.executable, "-m", "placewise", *arguments], stdout=theirs, check=True, env=base | environment)
    os.close(theirs)
    return read_terminal(ours)


def read_terminal(ours: int, until: str | None = None) -> str:
    """Returns what a command writes to a terminal, until a text appears or the command has ended."""
    text = b""
    try:
        while until is None or until.encode() not in text:
            if not (part := os.read(ours, 4096)):
                break
            text += part
    except OSError:  # Linux: the other end is closed
        pass
    if until is None:
        os.close(ours)
    return text.decode()
