"""Places your own model on two CPU devices and trains it there; no GPU is needed.

The model has two branches of equal size, so the plan puts one on each device. `plan.compile` turns the step into a function
that runs forward, backward and update on the devices of the plan and changes the model in place. Afterwards it is an
ordinary model, ready for `state_dict`, evaluation and checkpoints.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

import placewise as pw


class TwoBranches(nn.Module):
    """Two branches that see the same input; their scores are added."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
        self.right = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the scores of ten classes."""
        return self.left(inputs) + self.right(inputs)


torch.manual_seed(0)
model = TwoBranches()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs = torch.randn(256, 256)
batch = (inputs, inputs[:, :10].argmax(dim=1))  # which of the first ten numbers is the largest?

machine = pw.Cluster.load(str(Path(__file__).with_name("two_cpus.toml")))
step = pw.capture(model, nn.functional.cross_entropy, optimizer, batch)
plan = pw.place(step, machine, seconds=2)
print(plan)

train_step = plan.compile(step, machine)
losses = [float(train_step(batch)) for _ in range(20)]
print(f"loss {losses[0]:.3f} before the first step, {losses[-1]:.3f} before the last")
with torch.no_grad():
    print(f"the model itself was trained: {(model(batch[0]).argmax(dim=1) == batch[1]).float().mean():.0%} are right")
train_step.close()
