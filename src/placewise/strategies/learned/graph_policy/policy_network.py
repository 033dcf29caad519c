"""The network of the graph policy: messages between blocks, then a score for each block on each device."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from placewise.strategies.learned.graph_policy.block_graph import BLOCK_FEATURES, DEVICE_FEATURES, BlockGraph
from placewise.strategies.learned.graph_policy.placing import FEATURES, Scorer

MASKED = -1e9  # the logit of a device that a block can't run on


BEFORE_LEARNING = {1: -8.0, 10: -4.0, 12: -4.0}  # direct weights: ends late, reads parameters elsewhere, is read elsewhere


class GraphTensors(NamedTuple):
    """A block graph as tensors."""

    blocks: Tensor  # [blocks, BLOCK_FEATURES]
    devices: Tensor  # [devices, DEVICE_FEATURES]
    inputs: Tensor  # [blocks, blocks]
    outputs: Tensor  # [blocks, blocks]
    residents: Tensor  # [blocks, blocks]

    @classmethod
    def of(cls, graph: BlockGraph) -> "GraphTensors":
        """Returns the tensors of a block graph."""
        arrays = (graph.blocks, graph.devices, graph.inputs, graph.outputs, graph.residents)
        return cls(*(torch.tensor(array, dtype=torch.float32) for array in arrays))


class PolicyNetwork(nn.Module):
    """Reads blocks and devices, any number of both, and scores every block on every device.

    Nothing in it depends on the number or the order of the devices, or on names.
    """

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.block_input = nn.Linear(BLOCK_FEATURES, width)
        self.device_input = nn.Linear(DEVICE_FEATURES, width)
        self.messages = nn.ModuleList(nn.Linear(5 * width, width) for _ in range(rounds))
        self.of_block = nn.Linear(width, width)
        self.of_device = nn.Linear(3 * width, width, bias=False)
        self.of_features = nn.Linear(FEATURES, width, bias=False)
        self.second = nn.Linear(width, width)
        self.output = nn.Linear(width, 1, bias=False)
        self.direct = nn.Linear(FEATURES, 1, bias=False)

    def read(self, graph: GraphTensors) -> tuple[Tensor, Tensor]:
        """Returns what the first layer of the score gets from blocks and from devices: [blocks, width], [devices, width]."""
        state = torch.relu(self.block_input(graph.blocks))
        for layer in self.messages:
            everywhere = state.mean(dim=0, keepdim=True).expand_as(state)
            near = [graph.inputs @ state, graph.outputs @ state, graph.residents @ state]
            state = state + torch.relu(layer(torch.cat([state, *near, everywhere], dim=1)))
        devices = torch.relu(self.device_input(graph.devices))
        context = torch.cat([devices.mean(dim=0), state.mean(dim=0)]).expand(len(devices), -1)
        return self.of_block(state), self.of_device(torch.cat([devices, context], dim=1))

    def score(self, of_block: Tensor, of_device: Tensor, features: Tensor, is_open: Tensor) -> Tensor:
        """Returns logits from [..., blocks, devices, FEATURES] and what can be chosen: [..., blocks, devices]."""
        hidden = torch.relu(of_block[:, None] + of_device + self.of_features(features))
        logits = (self.output(torch.relu(self.second(hidden))) + self.direct(features))[..., 0]
        masked: Tensor = logits.masked_fill(~is_open, MASKED)
        return masked

    @torch.no_grad()
    def scorer(self, graph: GraphTensors) -> Scorer:
        """Returns the score's layers for one graph, as arrays."""
        of_block, of_device = self.read(graph)
        weights = (
            self.of_features.weight.T,
            self.second.weight.T,
            self.second.bias,
            self.output.weight[0],
            self.direct.weight[0],
        )
        return Scorer(*(np.ascontiguousarray(w.numpy().astype(np.float64)) for w in (of_block, of_device, *weights)))
