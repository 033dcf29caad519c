"""Transformers: GPT-2 and BERT, with attention as plain matrix products, which are the same ops on every device."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from placewise.graph_capture.training_step import TrainingStep
from placewise.zoo.options import Override, Probability, Range, violation

BERT_POSITIONS = 512

IGNORED = -100  # The label of a token that is not predicted.


@dataclass(frozen=True)
class Size:
    """The depth and width of a transformer."""

    num_layers: int
    hidden: int
    num_heads: int


GPT_SIZES = {
    "small": Size(12, 768, 12),
    "medium": Size(24, 1024, 16),
    "large": Size(36, 1280, 20),
    "xl": Size(48, 1600, 25),
}

BERT_SIZES = {"base": Size(12, 768, 12), "large": Size(24, 1024, 16)}


def override(model: str, size: Size, layers: int, hidden: int, heads: int) -> Size:
    """Returns the size with the overrides that are not 0; a ModelError if the heads do not divide the hidden width."""
    chosen = Size(layers or size.num_layers, hidden or size.hidden, heads or size.num_heads)
    if chosen.hidden % chosen.num_heads:
        raise violation(model, "hidden", f"be a multiple of the {chosen.num_heads} heads", chosen.hidden)
    return chosen


def attend(query: Tensor, key: Tensor, value: Tensor, masked: Tensor, num_heads: int, drop: nn.Dropout) -> Tensor:
    """Returns multi-head scaled dot-product attention (Vaswani et al., 2017, Eq. 1), all [batch, length, hidden].

    `masked` [..., length, length] is True where a token (row) must not attend to another (column).
    """
    split = (*query.shape[:2], num_heads, query.shape[2] // num_heads)
    q, k, v = (x.view(split).transpose(1, 2) for x in (query, key, value))  # [batch, heads, length, hidden / heads]
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])  # [batch, heads, length, length]
    # Not -inf: a row that attends to nothing (all padding) would become nan.
    scores = scores.masked_fill(masked, torch.finfo(scores.dtype).min)
    weights: Tensor = drop(torch.softmax(scores, 3))  # [batch, heads, length, length]
    return (weights @ v).transpose(1, 2).flatten(2)  # [batch, length, hidden]


class GptBlock(nn.Module):
    """Attention and feed-forward, each with its norm before it and a residual around both."""

    future: Tensor

    def __init__(self, size: Size, length: int, dropout: float) -> None:
        super().__init__()
        hidden = size.hidden
        self.num_heads = size.num_heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, 4 * hidden)
        self.contract = nn.Linear(4 * hidden, hidden)
        self.drop = nn.Dropout(dropout)
        # Every block has its own mask; a shared one would be copied to each device in every step.
        future = torch.ones(length, length, dtype=torch.bool).triu(1)  # [length, length]
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, hidden] -> the same
        length = x.shape[1]
        query, key, value = self.qkv(self.norm1(x)).chunk(3, 2)  # [batch, length, hidden]
        attended = attend(query, key, value, self.future[:length, :length], self.num_heads, self.drop)
        x = x + self.drop(self.out(attended))
        inner = F.gelu(self.expand(self.norm2(x)), approximate="tanh")  # [batch, length, 4 hidden]
        out: Tensor = x + self.drop(self.contract(inner))
        return out


class Gpt(nn.Module):
    """Token and position embeddings, blocks, and a head that shares the token embedding's weights."""

    def __init__(self, size: Size, length: int, vocab: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, size.hidden)
        self.position = nn.Embedding(length, size.hidden)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GptBlock(size, length, dropout) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, vocab, bias=False)
        self.head.weight = self.embedding.weight
        initialize(self)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "contract.weight")):  # Ends of residual branches (GPT-2, section 2.3).
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * size.num_layers))

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocab]
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # [length]
        x = self.drop(self.embedding(tokens) + self.position(positions))  # [batch, length, hidden]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class BertBlock(nn.Module):
    """Attention and feed-forward, each with its norm after the residual sum."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        hidden = size.hidden
        self.num_heads = size.num_heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm1 = nn.LayerNorm(hidden, eps=1e-12)
        self.expand = nn.Linear(hidden, 4 * hidden)
        self.contract = nn.Linear(4 * hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden, eps=1e-12)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:  # [batch, length, hidden], [batch, 1, 1, length]
        attended = attend(self.query(x), self.key(x), self.value(x), padding, self.num_heads, self.drop)
        x = self.norm1(x + self.drop(self.out(attended)))  # [batch, length, hidden]
        inner = F.gelu(self.expand(x))  # [batch, length, 4 hidden]
        out: Tensor = self.norm2(x + self.drop(self.contract(inner)))  # [batch, length, hidden]
        return out


class Bert(nn.Module):
    """The body, the pooler, and two heads: masked tokens (with the embedding's weights) and next sentence."""

    def __init__(self, size: Size, vocab: int, dropout: float) -> None:
        super().__init__()
        hidden = size.hidden
        self.embedding = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(BERT_POSITIONS, hidden)
        self.segment = nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden, eps=1e-12)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(BertBlock(size, dropout) for _ in range(size.num_layers))
        self.pooler = nn.Linear(hidden, hidden)
        self.transform = nn.Linear(hidden, hidden)
        self.transform_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.token_head = nn.Linear(hidden, vocab)
        self.token_head.weight = self.embedding.weight
        self.sentence_head = nn.Linear(hidden, 2)
        initialize(self)

    def forward(self, tokens: Tensor, segments: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns token logits [batch, length, vocab] and sentence logits [batch, 2]; the inputs are [batch, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # [length]
        embedded = self.embedding(tokens) + self.position(positions) + self.segment(segments)
        x = self.drop(self.norm(embedded))  # [batch, length, hidden]
        padding = mask.logical_not()[:, None, None, :]  # [batch, 1, 1, length]
        for block in self.blocks:
            x = block(x, padding)
        pooled = torch.tanh(self.pooler(x[:, 0]))  # [batch, hidden]
        token_logits = self.token_head(self.transform_norm(F.gelu(self.transform(x))))
        return token_logits, self.sentence_head(pooled)


def initialize(model: nn.Module) -> None:
    """Draws all weights with a standard deviation of 0.02 and zeros the biases, as GPT-2 and BERT do."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross entropy of logits [batch, length, vocab] and labels [batch, length] that are not -100."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def pretraining_loss(logits: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> Tensor:
    """Returns BERT's loss, masked tokens plus next sentence; the labels are [batch, length] and [batch]."""
    return token_loss(logits[0], labels[0]) + F.cross_entropy(logits[1], labels[1])


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """Returns AdamW with weight decay 0.01 on weight matrices and embeddings, and none on biases and norms."""
    parameters = list(model.parameters())
    decayed = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.01, foreach=False)


def gpt(
    *,
    size: Literal["small", "medium", "large", "xl"] = "small",
    batch: int = 8,
    length: int = 1024,
    vocab: int = 50257,
    layers: Override = 0,
    hidden: Override = 0,
    heads: Override = 0,
    dropout: Probability = 0.1,
) -> TrainingStep:
    """GPT-2 (Radford et al., 2019); layers, hidden and heads override the size's unless they are 0.

    There are as many position embeddings as `length`. GPT-2's training settings are not published: dropout 0.1, learning
    rate 2.5e-4 and weight decay 0.01 are those of GPT (Radford et al., 2018).
    """
    model = Gpt(override("gpt", GPT_SIZES[size], layers, hidden, heads), length, vocab, dropout)
    tokens, labels = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))  # [batch, length]
    return TrainingStep(model, token_loss, adamw(model, lr=2.5e-4), (tokens, labels))


def bert(
    *,
    size: Literal["base", "large"] = "base",
    batch: int = 32,
    length: Annotated[int, Range(1, BERT_POSITIONS)] = 128,
    vocab: int = 30522,
    layers: Override = 0,
    hidden: Override = 0,
    heads: Override = 0,
    dropout: Probability = 0.1,
) -> TrainingStep:
    """BERT's pre-training (Devlin et al., 2019); layers, hidden and heads override the size's unless they are 0.

    Sequences of 128 tokens, as in 90% of BERT's steps; learning rate 1e-4 and weight decay 0.01 as in the paper. The token
    head reads every position; only every seventh label counts (the paper has 15%), the others are ignored.
    """
    model = Bert(override("bert", BERT_SIZES[size], layers, hidden, heads), vocab, dropout)
    tokens, segments = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))  # [batch, length]
    mask = torch.ones(batch, length, dtype=torch.bool)  # [batch, length], True where there is a token
    token_labels = torch.full((batch, length), IGNORED)  # [batch, length]
    token_labels[:, ::7] = 0
    sentence_labels = torch.zeros(batch, dtype=torch.long)  # [batch]
    batch_labels = (token_labels, sentence_labels)
    return TrainingStep(model, pretraining_loss, adamw(model, lr=1e-4), ((tokens, segments, mask), batch_labels))
