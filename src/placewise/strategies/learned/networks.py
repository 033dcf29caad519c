"""A sequence-to-sequence network that places one block after the other: one LSTM reads all blocks, another one decides.

The attention is by content, with a bilinear score (Luong et al. 2015): the additive score of Bahdanau et al. needs a hidden
layer for each pair of steps. The decoder attends after its step, not before it, so a known placement takes a single pass.

A block's logits also read the block itself, past the decoder: its input and the encoder's state. A decoder's states are much
alike for all blocks (their mean cosine is 0.9 before any update), so without this path an update of one block moves all.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

DEVICE_WIDTH = 32  # of the embedding of the last block's device
KIND_WIDTH = 20  # of the embedding of an op's kind
LEAST = 1e-30  # replaces a probability of 0 in a logarithm
MASKED = -1e9  # the bias of a device that a block can't run on: its probability is exactly 0


class Memory(NamedTuple):
    """What the encoder has read."""

    states: Tensor  # [blocks, encoder's units]
    keys: Tensor  # [blocks, units], compared with the decoder's state
    hidden: Tensor  # [layers, 1, units], where the decoder begins
    cell: Tensor  # [layers, 1, units]
    own: Tensor  # [blocks, devices], the part of the logits that a block has from itself


class Prior(NamedTuple):
    """A bias that holds before anything is learned, and a floor that always holds."""

    bias: Tensor  # [blocks, devices], added to the logits
    floor: Tensor  # [blocks, devices], no probability falls below it

    def probabilities(self, logits: Tensor) -> Tensor:
        """Returns (1 - the floors' sum) · softmax(logits + bias) + floor: [..., blocks, devices]."""
        rest = 1 - self.floor.sum(dim=-1, keepdim=True)
        return rest * torch.softmax(logits + self.bias, dim=-1) + self.floor

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Returns their logarithms; an arbitrary finite number where a probability is 0."""
        return self.probabilities(logits).clamp(min=LEAST).log()

    def at(self, block: int) -> "Prior":
        """Returns the prior of one block: [devices]."""
        return Prior(self.bias[block], self.floor[block])


class Seq2Seq(nn.Module):
    """Reads blocks [blocks, width] and gives logits for each block's device, from the devices of the blocks before it.

    With a `ceiling` C and a `temperature` T, the logits become C tanh(logits / T). With `table_blocks` there is a learned
    table of logits besides, which no layer shares: [table_blocks, devices].
    """

    def __init__(
        self,
        width: int,
        num_devices: int,
        *,
        units: int,
        layers: int,
        two_ways: bool = False,
        ceiling: float = 0.0,
        temperature: float = 1.0,
        table_blocks: int = 0,
    ) -> None:
        super().__init__()
        wide = units * (2 if two_ways else 1)
        self.encoder = nn.LSTM(width, units, layers, bidirectional=two_ways)
        self.last_device = nn.Embedding(num_devices + 1, DEVICE_WIDTH)  # the last index: there is no block before
        self.decoder = nn.LSTM(wide + DEVICE_WIDTH, units, layers)
        self.key = nn.Linear(wide, units, bias=False)
        self.output = nn.Linear(units + wide, num_devices)
        self.own_output = nn.Linear(wide + width, num_devices, bias=False)
        self.table = nn.Embedding(table_blocks, num_devices) if table_blocks else None
        self.num_devices, self.ceiling, self.temperature = num_devices, ceiling, temperature

    def read(self, inputs: Tensor) -> Memory:
        """Returns what the encoder reads in the blocks: [blocks, width]."""
        read, (hidden, cell) = self.encoder(inputs[:, None])
        states = read[:, 0]
        ways = 2 if self.encoder.bidirectional else 1
        own = self.own_output(torch.cat([states, inputs], dim=1))
        if self.table is not None:
            own = own + self.table.weight
        return Memory(states, self.key(states), hidden[::ways], cell[::ways], own)

    def forward(self, memory: Memory, placements: Tensor) -> Tensor:
        """Returns the logits of each block given the placement of those before it: [batch, blocks, devices].

        The placements are [batch, blocks]; the devices of a block and of later ones do not change the block's logits.
        """
        batch = len(placements)
        before = placements.new_full((batch, 1), self.num_devices)
        fed = self.last_device(torch.cat([before, placements[:, :-1]], dim=1).T)  # [blocks, batch, DEVICE_WIDTH]
        states = memory.states[:, None].expand(-1, batch, -1)
        begin = tuple(state.expand(-1, batch, -1).contiguous() for state in (memory.hidden, memory.cell))
        decided, _ = self.decoder(torch.cat([states, fed], dim=2), begin)  # [blocks, batch, units]
        return self._logits(memory, decided, memory.own[:, None]).transpose(0, 1)

    @torch.no_grad()
    def sample(self, memory: Memory, prior: Prior, waits: Tensor) -> Tensor:
        """Returns placements [batch, blocks], drawn block after block.

        `waits` [batch, blocks, devices] are exponential times: the device whose wait / probability is the shortest is a
        sample from the probabilities.
        """
        batch, blocks, _ = waits.shape
        steps = _Steps(self, memory, batch)
        last = torch.full((batch,), self.num_devices)
        placements = torch.empty((batch, blocks), dtype=torch.int64)
        for block in range(blocks):
            logits = self._logits(memory, steps.next(block, last), memory.own[block])
            probabilities = prior.at(block).probabilities(logits)
            last = (probabilities / waits[:, block]).argmax(dim=1)
            placements[:, block] = last
        return placements

    def _logits(self, memory: Memory, decided: Tensor, own: Tensor) -> Tensor:
        """Returns the logits [..., devices] of decoder states [..., units] and the blocks' own parts [..., devices]."""
        attended = torch.softmax(decided @ memory.keys.T, dim=-1) @ memory.states
        logits: Tensor = self.output(torch.cat([decided, attended], dim=-1)) + own
        return self.ceiling * torch.tanh(logits / self.temperature) if self.ceiling else logits


class _Steps:
    """The decoder, one step at a time: the same as nn.LSTM, but five times as fast for a single step."""

    def __init__(self, network: Seq2Seq, memory: Memory, batch: int) -> None:
        lstm = network.decoder
        layers = range(lstm.num_layers)
        self.own: list[Tensor] = [getattr(lstm, f"weight_hh_l{layer}").T.contiguous() for layer in layers]
        self.below = [getattr(lstm, f"weight_ih_l{layer}").T.contiguous() for layer in layers]
        self.bias = [getattr(lstm, f"bias_ih_l{layer}") + getattr(lstm, f"bias_hh_l{layer}") for layer in layers]
        wide = memory.states.shape[1]
        self.given = memory.states @ self.below[0][:wide] + self.bias[0]  # [blocks, 4 units]
        self.fed = network.last_device.weight @ self.below[0][wide:]  # [devices + 1, 4 units]
        self.hidden: list[Tensor] = [state.expand(batch, -1) for state in memory.hidden]
        self.cell = [state.expand(batch, -1) for state in memory.cell]

    def next(self, block: int, last: Tensor) -> Tensor:
        """Returns the decoder's state at a block, from the last block's devices [batch]: [batch, units]."""
        for layer, own in enumerate(self.own):
            below = (
                self.given[block] + self.fed[last]
                if layer == 0
                else torch.addmm(self.bias[layer], self.hidden[layer - 1], self.below[layer])
            )
            enter, keep, candidate, leave = torch.addmm(below, self.hidden[layer], own).chunk(4, dim=1)
            self.cell[layer] = torch.sigmoid(keep) * self.cell[layer] + torch.sigmoid(enter) * torch.tanh(candidate)
            self.hidden[layer] = torch.sigmoid(leave) * torch.tanh(self.cell[layer])
        return self.hidden[-1]


class KindEmbedding(nn.Module):
    """Replaces the shares of the kinds of op, a row's first columns, by the average embedding of its ops."""

    def __init__(self, num_kinds: int) -> None:
        super().__init__()
        self.kinds = nn.Linear(num_kinds, KIND_WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the inputs [rows, kinds + others] with the embedding: [rows, 20 + others]."""
        num_kinds = self.kinds.in_features
        return torch.cat([self.kinds(inputs[:, :num_kinds]), inputs[:, num_kinds:]], dim=1)


class Policy(nn.Module):
    """A distribution over placements: a network, its inputs for the blocks, and a prior."""

    def __init__(self, network: Seq2Seq, inputs: Tensor, prior: Prior, embed: nn.Module | None = None) -> None:
        super().__init__()
        self.network, self.embed = network, nn.Identity() if embed is None else embed
        self.inputs = inputs  # [blocks, width before `embed`]
        self.prior = prior

    def forward(self, placements: Tensor) -> Tensor:
        """Returns the logarithms of the probabilities at every block of placements: [batch, blocks, devices]."""
        logits = self.network(self.network.read(self.embed(self.inputs)), placements)
        return self.prior.log_probabilities(logits)

    @torch.no_grad()
    def sample(self, waits: Tensor) -> Tensor:
        """Returns placements [batch, blocks] from exponential waiting times [batch, blocks, devices]."""
        return self.network.sample(self.network.read(self.embed(self.inputs)), self.prior, waits)
