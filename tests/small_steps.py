"""Small steps to measure: an MLP, which is also a MODEL of the command line, and a model of words; and two CPUs for them."""

from typing import Any

import torch
from torch import nn

import placewise as pw
from placewise.core.cluster import Cluster
from placewise.formats.cluster_file import parse_cluster
from placewise.graph_capture.capture import CapturedStep
from placewise.measure.ops import op_calls

MLP = "small_steps:mlp_step"


def mlp_step(batch: int = 4) -> tuple[nn.Module, Any, torch.optim.Optimizer, Any]:
    """Returns model, loss, optimizer and batch."""
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    batches = (torch.zeros(batch, 6), torch.zeros(batch, 3))
    return model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), batches


class Words(nn.Module):
    """Looks up words, and guesses the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.output = nn.Linear(8, 13)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.output(self.embedding(words))
        return found


def words_step() -> CapturedStep:
    """Returns the step of a model of 13 words with Adam, for batches of 4."""
    model = Words()
    batch = (torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    return pw.capture(model, nn.functional.cross_entropy, torch.optim.Adam(model.parameters()), batch, name="words")


def signatures_of(step: CapturedStep) -> list[str]:
    """Returns the signature of each op."""
    return [call.signature for call in op_calls(step.program, len(step.graph.ops))]


def two_cpus() -> Cluster:
    """Returns two equal CPU devices, 10 µs and 1 GB/s apart."""
    cpu = {"kind": "cpu", "memory": "1GiB", "flops": 1e10, "bytes_per_second": 1e10}
    link = {"latency_seconds": 1e-5, "bytes_per_second": 1e9}
    devices = [{"name": "cpu:0", **cpu}, {"name": "cpu:1", **cpu}]
    return parse_cluster({"name": "two", "devices": devices, "default_link": link})
