"""Setups in plain PyTorch: its tutorials' models, and what people write in their own."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from placewise.experiments.training_setups import optimizer_recipes as recipes
from placewise.experiments.training_setups.training_setup import NUM_STEPS, OptimizerRecipe, Setup, StepOptions, Task

VOCAB = 50


def _setup(
    name: str, model: str, optimizer: OptimizerRecipe, build: Callable[[], Task], extras: str = "", **options: Any
) -> Setup:
    return Setup(name, "torch", model, optimizer, build, StepOptions(**options), extras=extras)


def _images(size: int = 12, rows: int = 4, classes: int = 5) -> list[Any]:
    return [(torch.randn(rows, 3, size, size), torch.randint(classes, (rows,))) for _ in range(NUM_STEPS)]


def _texts(rows: int = 4, length: int = 9) -> list[Any]:
    return [(torch.randint(VOCAB, (rows, length)), torch.randint(VOCAB, (rows, length))) for _ in range(NUM_STEPS)]


def _features(width: int = 16, rows: int = 6) -> list[Any]:
    return [(torch.randn(rows, width), torch.randn(rows, 4)) for _ in range(NUM_STEPS)]


def per_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Returns the cross-entropy of logits [rows, length, vocab]."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


# --- recurrent ---


class RecurrentLanguageModel(nn.Module):
    """Embedding, recurrent layers and a projection, whose weights may be tied."""

    def __init__(self, kind: Any, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 24)
        self.layers = kind(24, 24, 2, batch_first=True, **options)
        self.output = nn.Linear(48 if options.get("bidirectional") else 24, VOCAB)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.output(self.layers(self.embedding(tokens))[0])
        return result


class CellByCell(nn.Module):
    """An LSTM that is unrolled in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.output = nn.Embedding(VOCAB, 24), nn.LSTMCell(24, 24), nn.Linear(24, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        state: Any = None
        outputs = []
        for token in self.embedding(tokens).unbind(1):
            state = self.cell(token, state)
            outputs.append(self.output(state[0]))
        return torch.stack(outputs, 1)


# --- transformers ---


class Translator(nn.Module):
    """nn.Transformer with a padding mask and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(VOCAB, 24, padding_idx=0), nn.Linear(24, VOCAB)
        self.transformer = nn.Transformer(24, 4, 2, 2, 48, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = source == 0
        hidden = self.transformer(
            self.embedding(source), self.embedding(target), tgt_mask=causal, src_key_padding_mask=padding.float() * -1e9
        )
        result: Tensor = self.output(hidden)
        return result


class Block(nn.Module):
    """A block of a GPT with PyTorch's own attention function; its rotation is by complex numbers if asked for."""

    def __init__(self, width: int = 32, heads: int = 4, dropout: float = 0.1, rotary: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout, self.rotary = heads, dropout, rotary
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False), nn.Dropout(dropout)
        )
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        if self.rotary:
            query, key = _rotated(query), _rotated(key)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


def _rotated(x: Tensor) -> Tensor:
    """Returns rotary embeddings as Llama's first code has them: a product of complex numbers."""
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    angles = torch.outer(torch.arange(x.shape[2]).float(), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


class TinyGPT(nn.Module):
    """A GPT with tied embeddings; blocks may be checkpointed."""

    def __init__(self, checkpointed: bool = False, **options: Any) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding, self.positions = nn.Embedding(VOCAB, 32), nn.Embedding(16, 32)
        self.blocks = nn.ModuleList([Block(**options) for _ in range(2)])
        self.output = nn.Linear(32, VOCAB, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        result: Tensor = self.output(x)
        return result


class Matrices(nn.Module):
    """A language model of matrices alone, which is what Muon trains."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB, bias=False)
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(2)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + F.silu(layer(x))
        result: Tensor = self.output(x)
        return result


class UnderAutocast(nn.Module):
    """Calls a model, and its loss, under the CPU's autocast."""

    def __init__(self, inner: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.loss_fn, self.dtype = inner, loss_fn, dtype

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.loss_fn(self.inner(inputs), target)


class Experts(nn.Module):
    """A mixture of experts that computes all of them and keeps the best two, so that no size depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4)])
        self.output = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(x.shape[0], 4).scatter(1, chosen, shares)
        mixed = torch.stack([expert(x) for expert in self.experts], 1)
        result: Tensor = self.output(x + (weights.unsqueeze(-1) * mixed).sum(1))
        return result


# --- images ---


def small_convnet(classes: int = 5) -> nn.Sequential:
    """Returns convolutions with batch norm and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 1), nn.Dropout(0.2), nn.ReLU(inplace=True), nn.Conv2d(32, 32, 3, groups=4), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


class VariationalAutoencoder(nn.Module):
    """PyTorch's own example: the reparametrisation trick, and a loss of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 32), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
        self.mean, self.log_variance = nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence: Tensor = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return F.binary_cross_entropy_with_logits(self.decoder(sample), x, reduction="sum") + divergence


class Generator(nn.Module):
    """The generator's step of a GAN: a discriminator that is not trained judges what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 8), nn.Flatten()
        ).requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        judged = self.discriminator(self.generator(noise))
        return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))


class SpatialTransformer(nn.Module):
    """PyTorch's tutorial: a network predicts how its input is turned and scaled before it is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.classify = nn.Linear(3 * 144, 6), small_convnet()
        nn.init.normal_(self.turn.weight, std=1e-3)
        self.turn.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.turn(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        result: Tensor = self.classify(F.grid_sample(x, grid, align_corners=False))
        return result


# --- signals, words, and what people write in forward ---


class FourierMixer(nn.Module):
    """FNet's mixing by a two-dimensional FFT, and a learned filter in the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, 16, dtype=torch.complex64) * 0.1)
        self.feed, self.output = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft2(x).real
        filtered = torch.fft.irfft(torch.fft.rfft(F.gelu(self.feed(mixed)), dim=1) * self.filter, n=x.shape[1], dim=1)
        result: Tensor = self.output(filtered.mean(1))
        return result


class Logging(nn.Module):
    """Notes the size of its activations, and stops at a NaN, as people do while they debug."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.output = nn.Linear(16, 32), nn.Linear(32, 4)
        self.sizes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x).relu()
        self.sizes.append(hidden.abs().mean().item())
        assert not torch.isnan(hidden).any(), "NaN"
        result: Tensor = self.output(hidden)
        return result


class TwoTowers(nn.Module):
    """CLIP's loss of two towers with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 24), nn.Linear(16, 24)
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        a, b = F.normalize(self.left(left), dim=-1), F.normalize(self.right(right), dim=-1)
        logits = a @ b.t() * self.temperature.exp()
        target = torch.arange(len(a), device=a.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


class Distilled(nn.Module):
    """A student learns from a frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).requires_grad_(False).eval()
        self.student = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = F.log_softmax(self.teacher(x) / 2, -1)
        return F.kl_div(F.log_softmax(self.student(x) / 2, -1), taught, reduction="batchmean", log_target=True) * 4


class BagOfWords(nn.Module):
    """Text classification by the mean of word vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.output = nn.EmbeddingBag(VOCAB, 24, mode="mean"), nn.Linear(24, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.output(self.words(tokens))
        return result


class Recommender(nn.Module):
    """Matrix factorisation with biases, as for ratings of films."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(20, 8), nn.Embedding(30, 8)
        self.biases = nn.ModuleList([nn.Embedding(20, 1), nn.Embedding(30, 1)])

    def forward(self, pairs: Tensor) -> Tensor:
        user, film = pairs.unbind(1)
        both: Tensor = (self.users(user) * self.films(film)).sum(1) + self.biases[0](user)[:, 0] + self.biases[1](film)[:, 0]
        return both


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))


def _parametrized() -> nn.Sequential:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(16, 32)), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(32, 32)),
        nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip


def _averaged() -> Task:
    """Returns a model whose weights are averaged after each step."""
    model, ema = _mlp(), torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=ema)
    return Task(model, _features(), nn.MSELoss(), lambda: average.update_parameters(model), {"average": average})


def _channels_last() -> Task:
    model = small_convnet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    batches = [(x.to(memory_format=torch.channels_last), y) for x, y in _images()]
    return Task(model, batches, nn.CrossEntropyLoss())


def _vectors(width: int, rows: int = 6) -> list[Tensor]:
    return [torch.rand(rows, width) for _ in range(NUM_STEPS)]


def _autocast_inside() -> Task:
    return Task(UnderAutocast(TinyGPT(), per_token_loss, torch.bfloat16), _texts())


def _compiled() -> Task:
    """Returns a compiled model; PyTorch's own compiler would take a minute for it."""
    model: Any = torch.compile(TinyGPT(dropout=0.0), backend="eager")
    return Task(model, _texts(), per_token_loss)


def _gpt(**options: Any) -> Callable[[], Task]:
    return lambda: Task(TinyGPT(**options), _texts(), per_token_loss)


def _convnet() -> Task:
    return Task(small_convnet(), _images(), nn.CrossEntropyLoss())


def _regression(make: Callable[[], nn.Module] = _mlp) -> Callable[[], Task]:
    return lambda: Task(make(), _features(), nn.MSELoss())


def _fourier() -> Task:
    return Task(FourierMixer(), [(torch.randn(4, 16, 16), torch.randn(4, 4)) for _ in range(NUM_STEPS)], nn.MSELoss())


def _words() -> Task:
    batches = [(torch.randint(VOCAB, (4, 7)), torch.randint(5, (4,))) for _ in range(NUM_STEPS)]
    return Task(BagOfWords(), batches, nn.CrossEntropyLoss())


def _ratings() -> Task:
    return Task(Recommender(), [(torch.randint(20, (8, 2)), torch.rand(8)) for _ in range(NUM_STEPS)], nn.MSELoss())


def _towers() -> Task:
    return Task(TwoTowers(), [(torch.randn(6, 16), torch.randn(6, 16)) for _ in range(NUM_STEPS)])


GAN_ADAM = recipes.recipe("Adam", torch.optim.Adam, lr=2e-4, betas=(0.5, 0.999))

# fmt: off
SETUPS = (
    _setup("lstm-language-model", "LSTM", recipes.SGD,
           lambda: Task(RecurrentLanguageModel(nn.LSTM, tied=True, dropout=0.2), _texts(), per_token_loss), "tied weights",
           clip_grad_norm=0.25),
    _setup("gru-bidirectional", "GRU, bidirectional", recipes.ADAM,
           lambda: Task(RecurrentLanguageModel(nn.GRU, bidirectional=True), _texts(), per_token_loss)),
    _setup("lstm-cells", "LSTM by cells", recipes.RMSPROP, lambda: Task(CellByCell(), _texts(), per_token_loss),
           clip_grad_value=0.1),
    _setup("nn-transformer", "nn.Transformer", recipes.ADAM_FOREACH,
           lambda: Task(Translator(), [((a, b), b) for a, b in _texts()], per_token_loss), "padding mask"),
    _setup("gpt", "GPT", recipes.ADAMW_GROUPS, _gpt(), "tied weights", clip_grad_norm=1.0),
    _setup("gpt-accumulated", "GPT", recipes.ADAMW_COSINE, _gpt(), "tied weights", micro_batches=4, clip_grad_norm=0.5),
    _setup("gpt-checkpointed", "GPT", recipes.ADAMW_FUSED, _gpt(checkpointed=True), "dropout in checkpointed blocks"),
    _setup("gpt-autocast", "GPT", recipes.ADAMW, _gpt(), autocast=torch.bfloat16),
    _setup("gpt-autocast-inside", "GPT", recipes.ADAMW, _autocast_inside, 'torch.autocast("cpu", bfloat16) in the model'),
    _setup("gpt-float16", "GPT", recipes.ADAMW_COSINE, _gpt(), autocast=torch.float16, grad_scale=2.0**16,
           clip_grad_norm=1.0),
    _setup("gpt-compiled", "GPT", recipes.ADAM, _compiled, "torch.compile"),
    _setup("gpt-complex-rotary", "GPT, complex rotary embeddings", recipes.NADAM, _gpt(rotary=True), outputs=True),
    _setup("matrices-muon", "matrices alone", recipes.MUON, lambda: Task(Matrices(), _texts(), per_token_loss)),
    _setup("mixture-of-experts", "mixture of experts", recipes.ADAMW, _regression(Experts)),
    _setup("convnet", "small ConvNet", recipes.NESTEROV, _convnet, outputs=True),
    _setup("convnet-channels-last", "small ConvNet", recipes.MOMENTUM_ONE_CYCLE, _channels_last, "channels_last"),
    _setup("convnet-float16", "small ConvNet", recipes.MOMENTUM, _convnet, "steps that overflow are skipped",
           autocast=torch.float16, grad_scale=2.0**18),
    _setup("vae", "variational autoencoder", recipes.ADAM, lambda: Task(VariationalAutoencoder(), _vectors(64))),
    _setup("gan-generator", "DCGAN's generator", GAN_ADAM,
           lambda: Task(Generator(), [torch.randn(4, 16, 1, 1) for _ in range(NUM_STEPS)]), "frozen discriminator"),
    _setup("spatial-transformer", "spatial transformer", recipes.ADAMAX,
           lambda: Task(SpatialTransformer(), _images(), nn.CrossEntropyLoss())),
    _setup("fourier-mixer", "FFT layers, complex weights", recipes.ADAMW, _fourier),
    _setup("logging-in-forward", "MLP", recipes.SGD, _regression(Logging), ".item(), assert not isnan"),
    _setup("two-towers", "contrastive towers", recipes.RADAM, _towers),
    _setup("distillation", "student", recipes.ADADELTA, lambda: Task(Distilled(), _vectors(16)), "frozen teacher"),
    _setup("bag-of-words", "EmbeddingBag", recipes.ADAGRAD, _words),
    _setup("recommender", "matrix factorisation", recipes.ADAGRAD, _ratings),
    _setup("parametrized-layers", "weight norm, spectral norm", recipes.ASGD, _regression(_parametrized)),
    _setup("averaged-weights", "MLP", recipes.AMSGRAD, _averaged, "average of weights (EMA)"),
    _setup("mlp-rprop", "MLP", recipes.RPROP, _regression(), micro_batches=2),
    _setup("mlp-adafactor", "MLP", recipes.ADAFACTOR, _regression()),
    _setup("mlp-lbfgs", "MLP", recipes.LBFGS, _regression()),
)
# fmt: on
