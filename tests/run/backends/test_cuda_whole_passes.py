"""Attention and recurrent layers as whole ops on a real GPU, against eager code there; skipped if there is no GPU.

It needs only pytest: python -m pytest tests/run/backends/test_cuda_whole_passes.py -q
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placewise.core.cluster import Cluster, Device
from placewise.core.problem import Problem
from placewise.experiments.bench.bench_speed import eager_step
from placewise.graph_capture.capture import capture_step
from placewise.graph_capture.training_step import TrainingStep
from placewise.run.devices import real_devices
from placewise.run.step.compiling import compile_placement

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk"),
]

ROWS, LENGTH, HEADS, WIDTH = 8, 32, 4, 32


class Attention(nn.Module):
    """Attention over [length, batch] as layers of torch have it, or over [batch, length]."""

    def __init__(self, is_batch_first: bool, dropout: float) -> None:
        super().__init__()
        self.project, self.is_batch_first, self.dropout = (
            nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH),
            is_batch_first,
            dropout,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, width]."""
        x = x if self.is_batch_first else x.transpose(0, 1).contiguous()
        parts = [part.unflatten(-1, (HEADS, WIDTH)) for part in self.project(x).chunk(3, -1)]
        parts = [part.transpose(1, 2) if self.is_batch_first else part.permute(1, 2, 0, 3) for part in parts]
        query, key, value = parts
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout).transpose(1, 2)
        return out.flatten(2)


class First(nn.Module):
    """The result of recurrent layers."""

    def __init__(self, layers: nn.RNNBase) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, width]."""
        found: Tensor = self.layers(x)[0]
        return found


MODELS: dict[str, Any] = {
    "attention": lambda: Attention(True, 0.0),
    "attention with dropout": lambda: Attention(True, 0.2),
    "attention, length first, with dropout": lambda: Attention(False, 0.2),
    "lstm": lambda: First(nn.LSTM(HEADS * WIDTH, HEADS * WIDTH, 2, batch_first=True)),
    "gru": lambda: First(nn.GRU(HEADS * WIDTH, HEADS * WIDTH, batch_first=True)),
}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_eagers_on_the_gpu(name: str, autocast: torch.dtype | None) -> None:
    """The same kernels, which draw the same numbers: losses are equal to rounding."""
    torch.manual_seed(0)
    model = MODELS[name]()
    batch = tuple(torch.randn(2, ROWS, LENGTH, HEADS * WIDTH))
    step = TrainingStep(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), batch, whole_layers=True)
    twin = copy.deepcopy(model)
    eager = eager_step(
        replace(step, model=twin, optimizer=torch.optim.SGD(twin.parameters(), 0.1), autocast=autocast), batch, "cuda"
    )
    captured = capture_step(replace(step, autocast=autocast))
    cluster = Cluster("gpu", (Device("gpu:0", "gpu", 2**40, 1e13, 1e12),), ())
    problem = Problem.of(captured.graph, cluster)
    train_step = compile_placement(problem, np.zeros(problem.num_groups, np.int64), None, captured, real_devices(cluster))
    for seed in range(3):
        torch.manual_seed(seed)
        expected = float(eager())
        torch.manual_seed(seed)
        assert float(train_step(batch)) == pytest.approx(expected, rel=1e-2 if autocast else 1e-5)
    train_step.close()
