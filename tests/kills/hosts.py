"""Kills a rank of a training over hosts at random moments, under torchrun, and compares all losses with an undisturbed run.

python -m tests.kills.hosts --kills 10
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/train_over_hosts.py"

RANKS = 2


def train(folder: Path, steps: int, kills: int, rng: random.Random, longest: float) -> tuple[dict[int, set[str]], list[str]]:
    """Returns the losses that were printed for each step, and how each kill went; one kill follows each restart.

    A rank is killed at a random moment of the `longest` seconds after all have started, or have made a step.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
        "--max-restarts", str(3 * kills), str(EXAMPLE), "--steps", str(steps), "--every", "5",
        "--checkpoints", str(folder / "checkpoints"),
    ]  # fmt: skip
    printed = folder / "printed.txt"
    told: list[str] = []
    with printed.open("w") as output:
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see docs/hosts.md
        agent = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            ranks = list[int]()
            while len(told) < kills and agent.poll() is None:
                ranks = _new_ranks(agent, ranks)
                if rng.random() < 0.7:  # otherwise it is killed while it starts
                    _wait_for_step(agent, printed)
                time.sleep(rng.uniform(0, longest))
                victim = rng.randrange(RANKS)
                done = printed.read_text().count(": loss ")
                try:
                    os.kill(ranks[victim], signal.SIGKILL)
                except ProcessLookupError:  # torchrun has started others, because the ranks did not find each other
                    print("not killed: the ranks have ended, torchrun starts them again", flush=True)
                    continue
                killed = time.monotonic()
                _new_ranks(agent, ranks)
                told.append(
                    f"rank {victim} after {done} printed steps, all began again in {time.monotonic() - killed:.0f} s"
                )
                print(told[-1], flush=True)
                ranks = []
            if agent.wait() != 0:
                raise SystemExit(f"torchrun failed:\n{printed.read_text()[-4000:]}")
        finally:
            agent.kill()
    losses: dict[int, set[str]] = {}
    for number, loss in re.findall(r"step (\d+): loss (\S+)", printed.read_text()):
        losses.setdefault(int(number), set()).add(loss)
    return losses, told


def _new_ranks(agent: "subprocess.Popen[bytes]", known: list[int]) -> list[int]:
    """Returns the process ids of the ranks, when all of them are others than the known ones."""
    while agent.poll() is None:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        found = [pid for pid in map(int, children) if _is_rank(pid)]
        if len(found) == RANKS and not {*found} & {*known}:
            return found
        time.sleep(0.05)
    return known


def _wait_for_step(agent: "subprocess.Popen[bytes]", printed: Path) -> None:
    """Returns when one more step has ended than now."""
    before = printed.read_text().count(": loss ")
    while agent.poll() is None and printed.read_text().count(": loss ") == before:
        time.sleep(0.05)


def _is_rank(pid: int) -> bool:
    try:
        return EXAMPLE.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main() -> None:
    """Trains undisturbed, then with kills."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--longest", type=float, default=10, help="seconds after a start or a step in which a rank is killed"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="placewise-") as name:
        for part in ("undisturbed", "killed"):
            (Path(name) / part).mkdir()
        wanted, _ = train(Path(name) / "undisturbed", options.steps, 0, rng, options.longest)
        found, told = train(Path(name) / "killed", options.steps, options.kills, rng, options.longest)
    assert len(wanted) == options.steps
    different = [number for number in wanted if found.get(number) != wanted[number]]
    if different:
        raise SystemExit(f"other losses in steps {different[:10]}")
    print(f"{len(told)} kills; the losses of all {options.steps:,} steps, also of those that were repeated, are the same")


if __name__ == "__main__":
    main()
