"""Trains over two hosts, with checkpoints from which a restart goes on.

Alone, `python train_over_hosts.py` runs both hosts' devices on this machine. On two machines, run on each of them

    torchrun --nnodes 2 --nproc-per-node 1 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint FIRST:29500
        train_over_hosts.py --checkpoints /shared/folder

Each machine makes only its own part of the weights. If one fails, torchrun starts all ranks again, and they go on from the
last whole checkpoint.
"""

import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import placewise as pw


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Returns the batch of a step."""
    inputs = torch.randn(32, 128, generator=torch.Generator().manual_seed(number))
    return inputs, inputs[:, :10].argmax(dim=1)


def last_checkpoint(folder: Path) -> int:
    """Returns the step of the newest whole checkpoint, 0 if there is none; its metadata are written last."""
    return max((int(path.parent.name) for path in folder.glob("*/.metadata")), default=0)


def main() -> None:
    """Trains, or goes on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    is_first = not dist.is_initialized() or dist.get_rank() == 0

    torch.manual_seed(0)
    with pw.DeferredWeights() as weights:
        layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = pw.capture(model, nn.functional.cross_entropy, optimizer, batch_of(0))
    cluster = pw.Cluster.load(str(Path(__file__).with_name("two_hosts.toml")))
    plan = pw.place(step, cluster, strategy="pipeline")  # the same on all hosts, which a time limit would not be
    train_step = plan.compile(step, cluster, weights=weights)

    first = last_checkpoint(options.checkpoints) if options.checkpoints else 0
    if first:
        dcp.load({"training": train_step}, checkpoint_id=options.checkpoints / str(first))
    for number in range(first + 1, options.steps + 1):
        loss = train_step(batch_of(number))
        if is_first:
            print(f"step {number}: loss {float(loss):.9f}", flush=True)
        if options.checkpoints and number % options.every == 0:
            dcp.save({"training": train_step}, checkpoint_id=options.checkpoints / str(number))
    train_step.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
