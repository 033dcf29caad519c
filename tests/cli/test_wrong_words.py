"""Words on the command line that can't be meant: each is refused in one line, before any work, and nothing is written."""

import json
from pathlib import Path

import pytest
from builders import tiny_cluster, tiny_data
from command_line import refused

from placewise.cli import main
from placewise.formats.cluster_file import write_cluster

PLACE = ["place", "graph.json", "--cluster", "tiny.toml", "--budget", "1"]
PROFILE = ["profile", "cifar-cnn:batch=2", "--cluster", "tiny.toml"]
SUITE = ["bench", "suite", "graph.json", "--clusters", "tiny.toml", "--strategies", "random", "--budget", "1"]
OVERWRITES = "refusing to overwrite an input file"
WRONG: list[tuple[list[str], str]] = [
    ([*PLACE, "-o", ""], "output: must not be empty"),
    ([*PLACE, "--strategy", ""], "strategy: must not be empty"),
    ([*PLACE, "--tensorboard", ""], "tensorboard: must not be empty"),
    (["bench", "rows", "--strategies", ""], "strategies: must not be empty"),
    (["report", "runs.db", "", "-o", "page.html"], "sources: must not be empty"),
    ([*PLACE, "-o", "same", "--report", "./same"], "./same: can't be written: two outputs have this name"),
    ([*PROFILE, "-o", "same", "--graph-output", "same"], "same: can't be written: two outputs have this name"),
    ([*PLACE, "--run-file", "none/runs.db"], "none/runs.db: can't be written: there is no folder"),
    ([*PLACE, "--run-file", "."], ".: can't be written: it is a folder"),
    ([*PLACE, "--tensorboard", "tiny.toml/curves"], "tiny.toml is not a folder"),
    ([*PLACE, "--measure", "--target-gap", "0.1"], "--target-gap can't be used with --measure: the bound holds only for"),
    ([*PLACE, "--memory", "gpu:7=1GiB"], "memory: there is no device 'gpu:7'"),
    ([*PLACE, "--memory", "gpu:0=900TiB"], "memory: 'gpu:0' has "),
    ([*PLACE, "--busy", "0.5"], "--busy needs --profile"),
    (["run", "cifar-cnn", "--cluster", "tiny.toml", "--plan", "plan.json", "--busy", "1"], "--busy needs --profile"),
    (
        ["report", "plan.json", "--graph", "graph.json", "--cluster", "tiny.toml", "-o", "./plan.json"],
        OVERWRITES,
    ),
    (
        ["simulate", "graph.json", "--cluster", "tiny.toml", "--plan", "plan.json", "--trace", "plan.json"],
        OVERWRITES,
    ),
    (
        ["run", "cifar-cnn", "--cluster", "tiny.toml", "--plan", "plan.json", "--trace", "plan.json"],
        OVERWRITES,
    ),
    ([*PLACE, "-o", "tiny.toml"], "tiny.toml: refusing to overwrite an input file"),
    ([*PROFILE, "-o", "tiny.toml"], "tiny.toml: refusing to overwrite an input file"),
    (["resume", "1", "--run-file", "runs.db", "-o", "runs.db"], "runs.db: refusing to overwrite an input file"),
    (["import", "graph.json", "-o", "graph.json"], "graph.json: refusing to overwrite an input file"),
    (["import", "graph.json", "-o", "new.json", "--cluster-output", "graph.json"], OVERWRITES),
    (["capture", "step.py:build", "-o", "step.py"], "step.py: refusing to overwrite an input file"),
    (["place", "step.py:build", "--cluster", "tiny.toml", "-o", "step.py"], OVERWRITES),
    (["capture", "graph.json", "-o", "graph.json"], OVERWRITES),
    ([*SUITE, "-o", "graph.json"], OVERWRITES),
    ([*SUITE, "-o", "tiny.toml"], OVERWRITES),
    (
        [*PLACE, "--run-file", "runs.db", "--report", "runs.db-wal"],
        "runs.db-wal: a file of this name would be a part of runs.db",
    ),
    (
        ["resume", "1", "--run-file", "runs.db", "-o", "runs.db-journal"],
        "runs.db-journal: a file of this name would be a part of runs.db",
    ),
    (["report", "runs.db", "1", "-o", "runs.db-shm"], "runs.db-shm: a file of this name would be a part of runs.db"),
    (["bench", "measured", "cifar-cnn", "tiny.toml", "--keep", "plan.json"], "plan.json is not a folder"),
    (["report", "runs.db", "9" * 30, "-o", "page.html"], "expected run numbers after the run file, got"),
    (["detect", "--cpus", "99999"], "must be cut into 1 to 256 slices, got 99999"),
    (["bench", "measured", "cifar-cnn", "tiny.toml", "--plan", "none.json"], "none.json: there is no such file"),
    ([*SUITE, "--plots", "tiny.toml"], "tiny.toml is not a folder"),
    (["reproduce", "post", "--quick", "--plots", "tiny.toml/plots"], "tiny.toml is not a folder"),
    (["reproduce", "post", "--quick", "--run-file", "none/runs.db"], "there is no folder"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with a graph, a cluster, a plan and a run file, where the commands run."""
    monkeypatch.chdir(tmp_path)
    Path("graph.json").write_text(json.dumps(tiny_data()))
    Path("step.py").write_text("def build(): raise AssertionError('it was called')")
    write_cluster(tiny_cluster(), "tiny.toml")
    assert main([*PLACE, "-o", "plan.json", "--run-file", "runs.db"]) == 0
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize(("arguments", "rule"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_words_are_refused(arguments: list[str], rule: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}

    before = contents()
    assert rule in refused(arguments, capsys)
    assert contents() == before


def test_two_outputs_may_go_nowhere(folder: Path) -> None:
    assert main([*PLACE, "-o", "/dev/null", "--report", "/dev/null", "--quiet"]) == 0
