"""What is printed: names can't command the terminal, and a standard output that fails is one line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import TINY_CLUSTER_TOML, heed_ctrl_c, refused, simulate_command, write_tiny_files

from placewise.cli import main
from placewise.cli.standard_output import StandardOutput

HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b[31mred\r\nfake: line\u202e\u2028"


def write_hostile_files(folder: Path) -> None:
    """Writes the tiny step with names that would clear the screen and fake lines."""
    write_tiny_files(folder)
    graph = json.loads((folder / "graph.json").read_text())
    graph["name"] = HOSTILE
    for op in graph["ops"]:
        op["name"] = op["kind"] = HOSTILE + op["name"]
    (folder / "graph.json").write_text(json.dumps(graph))
    cluster = TINY_CLUSTER_TOML.replace('"tiny"', json.dumps(HOSTILE))
    (folder / "cluster.toml").write_text(cluster.replace('"gpu:0"', json.dumps("gpu:0" + HOSTILE)))
    plan = json.loads((folder / "plan.json").read_text())
    plan["placement"] = [name.replace("gpu:0", "gpu:0" + HOSTILE) for name in plan["placement"]]
    (folder / "plan.json").write_text(json.dumps(plan))


def commands(folder: Path) -> list[list[str]]:
    graph, cluster = str(folder / "graph.json"), str(folder / "cluster.toml")
    with_cluster = [graph, "--cluster", cluster]
    searched = ["--strategy", "random", "--budget", "4", "--run-file", str(folder / "runs.db")]
    return [
        ["info", *with_cluster],
        ["bound", *with_cluster],
        simulate_command(folder),
        ["place", *with_cluster, *searched],
        ["compare", *with_cluster, "--strategies", "random", "--budget", "4"],
        ["runs", str(folder / "runs.db")],
        ["simulate", graph, "--cluster", "2xK80", "--plan", str(folder / "plan.json")],
        ["info", str(folder / "no\x1b[2Jfile")],
    ]


@pytest.mark.parametrize("number", range(8))
def test_names_from_files_do_not_reach_the_terminal_raw(
    tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hostile_files(tmp_path)
    if number == 5:
        assert main(commands(tmp_path)[3]) == 0
    main(commands(tmp_path)[number])
    said = "".join(capsys.readouterr())
    assert said
    assert all(character.isprintable() or character == "\n" for character in said)
    assert "\nfake" not in said


def test_our_own_styles_pass(capsys: pytest.CaptureFixture[str]) -> None:
    with StandardOutput():
        print("\x1b[1mbold\x1b[0m", "\x1b[2Jcleared", "tab\t", "back\b")
    assert capsys.readouterr().out == "\x1b[1mbold\x1b[0m \\x1b[2Jcleared tab\\t back\\x08\n"


def run(arguments: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    command = " ".join([sys.executable, "-m", "placewise", *arguments])
    return subprocess.run(["sh", "-c", f"{command} {redirection}"], capture_output=True, text=True, check=False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["clusters"], ["clusters", "2xK80", "--json"], ["--help"]])
def test_a_full_or_closed_standard_output_is_one_line(arguments: list[str]) -> None:
    for redirection, reason in ((">/dev/full", "No space left on device"), (">&-", "Bad file descriptor")):
        done = run(arguments, redirection)
        assert (done.returncode, done.stderr) == (1, f"placewise: standard output can't be written: {reason}\n")


def test_a_closed_standard_error_changes_nothing() -> None:
    done, whole = run(["clusters"], "2>&-"), run(["clusters"], "")
    assert (done.returncode, done.stdout, done.stderr) == (0, whole.stdout, "")
    assert run(["info", "nothing"], "2>&-").returncode == 2


ENDED = """
import os, signal, sys, tempfile
from placewise.cli import main
import placewise.machines.detect
def wait():
    with tempfile.TemporaryDirectory() as folder:
        print(folder, file=sys.stderr, flush=True)
        while True:
            signal.pause()
placewise.machines.detect.detect = wait
sys.exit(main(["detect"]))
"""


@pytest.mark.parametrize(("number", "line"), [(signal.SIGTERM, "ended by SIGTERM"), (signal.SIGINT, "stopped")])
def test_a_signal_ends_a_command_and_removes_its_files(number: signal.Signals, line: str) -> None:
    command: Any = [sys.executable, "-c", ENDED]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c) as process:
        assert process.stderr is not None
        folder = process.stderr.readline().strip()
        assert os.path.isdir(folder)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (128 + number, f"placewise: {line}\n")
    assert not os.path.exists(folder)


def test_what_loads_a_command_is_loaded_within_main() -> None:
    """So that Ctrl-C while it loads is one line: importing the entry point loads nothing of ours but itself."""
    code = "import sys; before = set(sys.modules); import placewise.cli; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name.startswith("placewise")] == ["placewise", "placewise.cli"]


def test_a_wrong_name_is_shown_as_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no\\x1b[2J\\nfile: is neither a file" in refused(["info", "no\x1b[2J\nfile"], capsys)


def test_ctrl_c_when_the_command_is_over_prints_nothing() -> None:
    """What was registered before the command runs at the interpreter's end, as numba's and torch's own endings do."""
    script = (
        "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); "
        "from placewise.cli import main; raise SystemExit(main(['clusters']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, preexec_fn=heed_ctrl_c, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "2xK80" in done.stdout
