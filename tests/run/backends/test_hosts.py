"""Steps over hosts: ranks of torch.distributed on this machine, compared with eager code; parts that would never end."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from placewise.core.errors import ExecutionError, PlanError
from placewise.run.backends.hosts import joined_ranks
from placewise.run.lower.instructions import CopyTensor, Instructions, RunOp
from placewise.run.lower.rank_part import check_parts, part_of

WORKER = Path(__file__).with_name("hosts_worker.py")


@pytest.mark.parametrize(("ranks", "networks"), [(2, 4), (4, 1)])
def test_random_networks_over_hosts_are_like_eager(ranks: int, networks: int, tmp_path: Path) -> None:
    """Five steps of random networks with random placements and orders; other plans are refused on every rank."""
    outputs = run_ranks(ranks, ranks, tmp_path, "--networks", str(networks))
    for rank, output in enumerate(outputs):
        assert f"rank {rank}: {networks} networks like eager" in output, output


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("end", r"rank {} \(host '{}'\) ended or hangs, so the step can't go on"),
        ("stop", r"rank {} \(host '{}'\) ended or hangs, so the step can't go on"),
        ("wait", r"rank {} \(host '{}'\) did not come to the step in time"),
        ("fail", r"rank {} \(host '{}'\) failed: .*"),
    ],
)
def test_a_rank_with_a_fault_ends_the_others_with_its_name(fault: str, line: str, tmp_path: Path) -> None:
    """The last rank ends, is stopped, waits for its batch or fails; the first ones say so and end."""
    ranks = 3 if fault == "stop" else 2
    for rank, output in enumerate(run_ranks(ranks, ranks - 1, tmp_path, "--fault", fault, "--timeout", "10")):
        found = re.fullmatch(rf"rank {rank} ends after [0-9.]+ s: " + line.format(ranks - 1, ranks - 1), output.strip())
        assert found, output


def run_ranks(ranks: int, count: int, folder: Path, *options: str) -> list[str]:
    """Starts the ranks of the worker, and returns what the first of them have printed when they have ended."""
    command = [sys.executable, str(WORKER), *options, "--init", f"file://{folder / 'store'}"]
    environments = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for environment in environments
    ]
    try:
        return [worker.communicate(timeout=120)[0] for worker in workers[:count]]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def test_parts_that_wait_for_each_other_are_refused() -> None:
    """Rank 0 sends tensor 0 and then receives 1; if rank 1 also sends first what it makes of 0, neither goes on."""
    there, back = CopyTensor(0, 0, 1), CopyTensor(1, 1, 0)
    whole = Instructions(("a", "b"), (RunOp(0, 0), there, RunOp(1, 1), back, RunOp(2, 0)))
    parts = {rank: part_of(whole, [0, 1], rank) for rank in (0, 1)}
    assert parts[0].sequence == (RunOp(0, 0), there, back, RunOp(2, 0))
    assert parts[1].sequence == (there, RunOp(1, 1), back)
    check_parts(parts, [0, 1])
    swapped = Instructions(whole.device_names, (back, there, RunOp(1, 1)))
    with pytest.raises(PlanError, match="wait for each other forever"):
        check_parts({0: parts[0], 1: swapped}, [0, 1])
    with pytest.raises(PlanError, match="wait for each other forever"):
        check_parts({0: parts[0], 1: Instructions(whole.device_names, (there, RunOp(1, 1)))}, [0, 1])
    with pytest.raises(PlanError, match="is on a device of rank 0"):
        check_parts({0: parts[0], 1: whole}, [0, 1])


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"RANK": "abc"}, "RANK must be a whole number, got 'abc'"),
        ({"RANK": "0"}, "WORLD_SIZE must be a whole number, got ''"),
        ({"RANK": "2", "MASTER_PORT": "9"}, "RANK must be below WORLD_SIZE, got 2 and 2"),
        ({"MASTER_PORT": "65536"}, "MASTER_ADDR and MASTER_PORT are no address: '127.0.0.1', 65536"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR and MASTER_PORT are no address: '', 9"),
        ({"MASTER_ADDR": "a..b"}, "nothing answers at a..b:9 .*; rank 0 must run there"),
        ({}, "nothing answers at 127.0.0.1:9 .*Connection refused.*; rank 0 must run there"),
    ],
)
def test_ranks_that_can_not_meet_are_one_line(
    environment: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch prints a stack of C++ calls where nothing answers; rank 1 is refused before torch tries."""
    usual = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name in usual:
        monkeypatch.delenv(name, raising=False)
    for name, value in (environment if line.startswith("WORLD_SIZE") else usual | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExecutionError, match=f"^can't join the other ranks: {line}$"), joined_ranks(0.2):
        pass
    assert capfd.readouterr().err == ""
