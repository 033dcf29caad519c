"""Steps over hosts: ranks of torch.distributed on this machine, compared with eager code; parts that would never end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from placewise.core.errors import PlanError
from placewise.run.lower.instructions import CopyTensor, Instructions, RunOp
from placewise.run.lower.rank_part import check_parts, part_of

WORKER = Path(__file__).with_name("hosts_worker.py")


@pytest.mark.parametrize(("ranks", "networks"), [(2, 4), (4, 1)])
def test_random_networks_over_hosts_are_like_eager(ranks: int, networks: int, tmp_path: Path) -> None:
    """Five steps of random networks with random placements and orders; other plans are refused on every rank."""
    command = [sys.executable, str(WORKER), "--networks", str(networks), "--init", f"file://{tmp_path / 'store'}"]
    environments = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)]
    workers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for environment in environments
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for rank, output in enumerate(outputs):
        assert f"rank {rank}: {networks} networks like eager" in output, output


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
