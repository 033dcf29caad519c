"""Recurrent networks, unrolled: every step of every layer has its own ops, so each can be placed separately."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from placewise.graph_capture.training_step import TrainingStep

State = tuple[Tensor, Tensor]  # Hidden and cell state of one layer, both [batch, hidden].


def lstm_layers(num_layers: int, hidden: int, width: int | None = None) -> nn.ModuleList:
    """Returns stacked LSTM cells with inputs and outputs of the same width, or with inputs of `width` for the first."""
    widths = [hidden if width is None else width, *[hidden] * (num_layers - 1)]
    return nn.ModuleList(nn.LSTMCell(of, hidden) for of in widths)


def advance(layers: nn.ModuleList, x: Tensor, states: Sequence[State | None]) -> list[State]:
    """Returns each layer's state after one step with the input x [batch, hidden]; a state of None means zeros."""
    new_states: list[State] = []
    for layer, state in zip(layers, states, strict=True):
        new_state: State = layer(x, state)
        new_states.append(new_state)
        x = new_state[0]  # [batch, hidden]
    return new_states


def sequence_loss(logits: list[Tensor], labels: Tensor) -> Tensor:
    """Returns the mean cross entropy over the steps; logits [batch, vocab] for each step, labels [batch, steps]."""
    losses = [F.cross_entropy(step, target) for step, target in zip(logits, labels.unbind(1), strict=True)]
    return torch.stack(losses).mean()


class Rnnlm(nn.Module):
    """Embedding, stacked LSTM cells, and a projection to the vocabulary at every step."""

    def __init__(self, num_layers: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = lstm_layers(num_layers, hidden)
        self.projection = nn.Linear(hidden, vocab)

    def forward(self, tokens: Tensor) -> list[Tensor]:  # [batch, steps] -> steps x [batch, vocab]
        # One lookup for all steps: one per step would make a dense gradient of the whole embedding for each.
        embedded = self.embedding(tokens)  # [batch, steps, hidden]
        states: Sequence[State | None] = [None] * len(self.layers)
        logits: list[Tensor] = []
        for x in embedded.unbind(1):  # [batch, hidden]
            new_states = advance(self.layers, x, states)
            logits.append(self.projection(new_states[-1][0]))
            states = new_states
        return logits


class Recurrence(nn.Module):
    """The embedding and the cells of an encoder or a decoder."""

    def __init__(self, num_layers: int, hidden: int, vocab: int, width: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = lstm_layers(num_layers, hidden, width)


class Attention(nn.Module):
    """Additive content attention (Bahdanau, Cho, Bengio, 2015, A.1.2), then one layer that joins context and query.

    Joining them after the attention, not in the next step's input, is Luong, Pham, Manning (2015, Eq. 5).
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, query: Tensor, keys: Tensor, memory: Tensor) -> Tensor:
        """Returns the attentional state [batch, hidden]; query [batch, hidden], keys and memory [batch, length, hidden]."""
        mixed = torch.tanh(keys + self.query(query).unsqueeze(1))  # [batch, length, hidden]
        weights = torch.softmax(self.score(mixed), 1)  # [batch, length, 1]
        context = torch.bmm(weights.transpose(1, 2), memory).squeeze(1)  # [batch, hidden]
        return torch.tanh(self.join(torch.cat([context, query], 1)))


class Nmt(nn.Module):
    """An encoder and a decoder of the same depth; the top of the decoder attends to the top of the encoder.

    With input feeding (Luong, Pham, Manning 2015, section 3.3) a step of the decoder also reads what the attention gave at
    the step before it, so that no step can begin before the last one has ended.
    """

    def __init__(self, num_layers: int, hidden: int, vocab: int, input_feeding: bool = False) -> None:
        super().__init__()
        self.input_feeding = input_feeding
        self.encoder = Recurrence(num_layers, hidden, vocab)
        self.decoder = Recurrence(num_layers, hidden, vocab, 2 * hidden if input_feeding else hidden)
        self.attention = Attention(hidden)
        self.projection = nn.Linear(hidden, vocab)

    def forward(self, source: Tensor, target: Tensor) -> list[Tensor]:  # 2 x [batch, length] -> length x [batch, vocab]
        states: Sequence[State | None] = [None] * len(self.encoder.layers)
        encoded: list[Tensor] = []
        for x in self.encoder.embedding(source).unbind(1):  # [batch, hidden]
            new_states = advance(self.encoder.layers, x, states)
            encoded.append(new_states[-1][0])
            states = new_states
        memory = torch.stack(encoded, 1)  # [batch, length, hidden]
        keys = self.attention.key(memory)  # [batch, length, hidden], the same at every step
        logits: list[Tensor] = []
        attended: Tensor | None = None  # [batch, hidden]
        for x in self.decoder.embedding(target).unbind(1):  # [batch, hidden]
            if self.input_feeding:
                x = torch.cat([x, torch.zeros_like(x) if attended is None else attended], 1)  # [batch, 2 * hidden]
            new_states = advance(self.decoder.layers, x, states)
            attended = self.attention(new_states[-1][0], keys, memory)  # [batch, hidden]
            logits.append(self.projection(attended))
            states = new_states
        return logits


def rnnlm(*, layers: int = 2, hidden: int = 2048, steps: int = 40, batch: int = 64, vocab: int = 10000) -> TrainingStep:
    """The language model of ColocRL and HDP (Post uses 4 layers), after Zaremba et al. (2014) without dropout.

    The papers do not state the vocabulary; ours is the Penn Treebank's. Adam with its default learning rate of 0.001.
    """
    model = Rnnlm(layers, hidden, vocab)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    tokens, labels = (torch.zeros(batch, steps, dtype=torch.long) for _ in range(2))  # [batch, steps]
    return TrainingStep(model, sequence_loss, optimizer, (tokens, labels))


def nmt(
    *,
    layers: int = 2,
    hidden: int = 1024,
    length: int = 40,
    batch: int = 64,
    vocab: int = 32000,
    input_feeding: bool = False,
) -> TrainingStep:
    """The translation model of ColocRL and, with 4 and 8 layers, of HDP and Post; `layers` in each half.

    All layers are unidirectional, without residual connections; each decoder layer starts from its encoder layer's last
    state. Source and target have their own embeddings. The attention reads the top of the decoder and feeds nothing back
    unless `input_feeding` is on, so the papers' expert placement (a layer per GPU, attention and softmax with the last) can
    overlap the steps. The papers do not state the vocabulary; this one is our choice. Adam with its default learning
    rate of 0.001.
    """
    model = Nmt(layers, hidden, vocab, input_feeding)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    source, target, labels = (torch.zeros(batch, length, dtype=torch.long) for _ in range(3))  # [batch, length]
    return TrainingStep(model, sequence_loss, optimizer, ((source, target), labels))
