"""A network that is trained by several ranks, saved, and trained on by one process."""

from typing import Any

import torch
from torch import nn

from placewise.graph_capture.training_step import TrainingStep


def network_with_buffers(seed: int) -> TrainingStep:
    """Returns a step with parameters, buffers and state of the optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    return TrainingStep(model, nn.functional.mse_loss, torch.optim.Adam(model.parameters(), lr=0.01), batch, 1)


def some_batches() -> list[Any]:
    """Returns six batches for random networks."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(6)]
