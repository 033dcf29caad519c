"""Setups in plain PyTorch whose loss, loop or optimizer is the point: derivatives of gradients, reinforcement,
self-supervision, graphs, packed sequences, optimizers as people write them, layers that are frozen on the way.
"""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from placewise.experiments.training_setups import optimizer_recipes as recipes
from placewise.experiments.training_setups.optimizer_recipes import recipe
from placewise.experiments.training_setups.training_setup import NUM_STEPS, OptimizerRecipe, Setup, StepOptions, Task

Forward = Callable[..., Tensor]


class Loss(nn.Module):
    """Some modules, and the loss that a function computes with them."""

    def __init__(self, function: Forward, **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def _mlp(inputs: int = 16, outputs: int = 4, middle: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), middle(), nn.Linear(32, outputs))


def _rows(width: int = 16, rows: int = 6) -> list[Any]:
    return [torch.randn(rows, width) for _ in range(NUM_STEPS)]


def _pairs() -> list[Any]:
    return [(torch.randn(6, 16), torch.randn(6, 4)) for _ in range(NUM_STEPS)]


# --- derivatives of gradients ---


def gradient_penalty(model: Any, real: Tensor) -> Tensor:
    """Returns WGAN-GP's loss of the critic (Gulrajani et al., 2017)."""
    fake, share = torch.randn_like(real), torch.rand(len(real), 1)
    mixed = (share * real + (1 - share) * fake).requires_grad_(True)
    (gradient,) = torch.autograd.grad(model.net(mixed).sum(), mixed, create_graph=True)
    wasserstein: Tensor = model.net(fake).mean() - model.net(real).mean()
    result: Tensor = wasserstein + 10 * (gradient.norm(2, 1) - 1).pow(2).mean()
    return result


def differential_equation(model: Any, x: Tensor) -> Tensor:
    """Returns how far a network is from u'' = -u, as physics-informed networks are trained."""
    x = x.clone().requires_grad_(True)
    u = model.net(x)
    (first,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    (second,) = torch.autograd.grad(first, x, torch.ones_like(u), create_graph=True)
    result: Tensor = (second + u).pow(2).mean()
    return result


def meta_learning(model: Any, x: Tensor) -> Tensor:
    """Returns MAML's loss: that of the weights after one step on half of the rows."""
    weights = dict(model.net.named_parameters())
    loss = torch.func.functional_call(model.net, weights, (x[:3],)).pow(2).mean()
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    result: Tensor = torch.func.functional_call(model.net, moved, (x[3:],)).pow(2).mean()
    return result


# --- reinforcement and preferences ---


def clipped_policy(model: Any, seen: Tensor, action: Tensor, before: Tensor, advantage: Tensor, value: Tensor) -> Tensor:
    """Returns PPO's loss with its entropy bonus (Schulman et al., 2017)."""
    policy = torch.distributions.Categorical(logits=model.policy(seen))
    ratio = (policy.log_prob(action) - before).exp()  # type: ignore[no-untyped-call]
    gain: Tensor = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    bonus: Tensor = policy.entropy().mean()  # type: ignore[no-untyped-call]
    return 0.5 * F.mse_loss(model.value(seen)[:, 0], value) - gain - 0.01 * bonus


def _games() -> list[Any]:
    return [
        (torch.randn(8, 16), torch.randint(3, (8,)), torch.randn(8), torch.randn(8), torch.randn(8))
        for _ in range(NUM_STEPS)
    ]


def preferences(model: Any, tokens: Tensor) -> Tensor:
    """Returns DPO's loss: the first half of the rows is preferred to the second."""

    def likelihood(net: nn.Module, tokens: Tensor) -> Any:
        return net(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(-1)

    chosen, rejected = tokens.chunk(2)
    with torch.no_grad():
        reference = likelihood(model.reference, chosen) - likelihood(model.reference, rejected)
    return -F.logsigmoid(0.1 * (likelihood(model.net, chosen) - likelihood(model.net, rejected) - reference)).mean()


def _preferred() -> Task:
    net = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    model = Loss(preferences, net=net, reference=copy.deepcopy(net).requires_grad_(False).eval())
    return Task(model, [torch.randint(50, (4, 9)) for _ in range(NUM_STEPS)])


# --- self-supervision, with a state that the step itself moves ---


def own_latent(model: Any, x: Tensor) -> Tensor:
    """Returns BYOL's loss; the step moves the teacher's weights towards the student's."""
    with torch.no_grad():
        for ours, theirs in zip(model.student.parameters(), model.teacher.parameters(), strict=True):
            theirs.mul_(0.99).add_(ours, alpha=0.01)
        target = model.teacher(x + 0.1 * torch.randn_like(x))
    return 2 - 2 * F.cosine_similarity(model.head(model.student(x)), target).mean()


def _teacher() -> Task:
    student = _mlp(16, 8, lambda: nn.Sequential(nn.BatchNorm1d(32), nn.ReLU()))
    teacher = copy.deepcopy(student).requires_grad_(False)
    return Task(Loss(own_latent, student=student, teacher=teacher, head=nn.Linear(8, 8)), _rows())


class Queue(nn.Module):
    """MoCo: keys of earlier batches, in a ring whose place the step reads and moves."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 8), nn.Linear(16, 8).requires_grad_(False)
        self.keys: Tensor
        self.place: Tensor
        self.register_buffer("keys", F.normalize(torch.randn(8, 24), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        query, place = F.normalize(self.query(x), dim=1), int(self.place)
        with torch.no_grad():
            key = F.normalize(self.key(x + 0.1), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.keys.clone()], 1) / 0.07
        self.keys[:, place : place + len(x)] = key.T
        self.place[0] = (place + len(x)) % 24
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))


class Codebook(nn.Module):
    """A vector-quantised autoencoder whose codes are moving averages (van den Oord et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(8, 16)
        self.codes: Tensor
        self.counts: Tensor
        self.sums: Tensor
        self.register_buffer("codes", torch.randn(10, 8))
        self.register_buffer("counts", torch.ones(10))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        latent = self.encoder(x)
        nearest = torch.cdist(latent, self.codes).argmin(1)
        with torch.no_grad():
            chosen = F.one_hot(nearest, 10).type_as(latent)
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.t() @ latent, alpha=0.1)
            self.codes.copy_(self.sums / self.counts.clamp_min(1e-5)[:, None])
        code = self.codes[nearest]
        return F.mse_loss(self.decoder(latent + (code - latent).detach()), x) + 0.25 * F.mse_loss(latent, code.detach())


# --- graphs, packed sequences, low precision ---


def messages(model: Any, nodes: Tensor, edges: Tensor) -> Tensor:
    """Returns a layer of a graph network: the mean of what the neighbours send."""
    sent = model.send(nodes)[edges[0]]
    degree = torch.bincount(edges[1], minlength=len(nodes)).clamp(min=1)
    received = torch.zeros(len(nodes), 8).index_add(0, edges[1], sent) / degree[:, None]
    result: Tensor = model.output(received.relu())
    return result


def _graphs() -> Task:
    batches = [((torch.randn(6, 16), torch.randint(6, (2, 14))), torch.randn(6, 4)) for _ in range(NUM_STEPS)]
    return Task(Loss(messages, send=nn.Linear(16, 8), output=nn.Linear(8, 4)), batches, nn.MSELoss())


def packed_attention(model: Any, tokens: Tensor, documents: Tensor) -> Tensor:
    """Returns logits of tokens that see earlier ones of their own document."""
    parts = model.qkv(model.embedding(tokens)).chunk(3, -1)
    query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
    length = tokens.shape[1]
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    mask = mask & torch.ones(length, length, dtype=torch.bool).tril()
    result: Tensor = model.output(F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2))
    return result


def _packed() -> Task:
    model = Loss(packed_attention, embedding=nn.Embedding(50, 16), qkv=nn.Linear(16, 48), output=nn.Linear(16, 50))
    batches = [
        ((torch.randint(50, (4, 12)), torch.randint(2, (4, 12)).cumsum(1)), torch.randint(50, (4, 12)))
        for _ in range(NUM_STEPS)
    ]
    return Task(model, batches, lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()))


class Signs(torch.autograd.Function):
    """Signs whose gradient is passed straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        passed: Tensor = gradient * (ctx.saved_tensors[0].abs() < 1)
        return passed


def binary(model: Any, x: Tensor) -> Tensor:
    """Returns what a layer makes of activations of one bit."""
    result: Tensor = model.second(Signs.apply(model.first(x)))  # type: ignore[no-untyped-call]
    return result


def quantized(model: Any, x: Tensor) -> Tensor:
    """Returns what a layer computes with numbers of eight bits, as training for quantisation has them."""
    weight, scales = model.first.weight, torch.full((32,), 0.01)
    weight = torch.fake_quantize_per_channel_affine(weight, scales, torch.zeros(32, dtype=torch.int32), 0, -128, 127)
    hidden = F.relu(F.linear(x, weight, model.first.bias))
    result: Tensor = model.second(torch.fake_quantize_per_tensor_affine(hidden, 0.05, 0, -128, 127))
    return result


def _two_layers(function: Forward) -> Callable[[], Task]:
    return lambda: Task(Loss(function, first=nn.Linear(16, 32), second=nn.Linear(32, 4)), _pairs(), nn.MSELoss())


# --- layers that hooks compute, that are recomputed, frozen or averaged ---


def _computed_weights() -> Task:
    first, last = nn.utils.weight_norm(nn.Linear(16, 32)), nn.utils.spectral_norm(nn.Linear(32, 4))
    return Task(nn.Sequential(first, nn.ReLU(), last), _pairs(), nn.MSELoss())


def _pruned() -> Task:
    model = _mlp()
    prune.l1_unstructured(model[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    return Task(model, _pairs(), nn.MSELoss())


def recomputed(model: Any, x: Tensor) -> Tensor:
    """Returns what a checkpointed block with dropout makes, the old way."""
    hidden = model.first(x)
    result: Tensor = model.last(hidden + checkpoint(model.block, hidden, use_reentrant=True))
    return result


def _recomputed() -> Task:
    block = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.GELU())
    return Task(Loss(recomputed, first=nn.Linear(16, 32), block=block, last=nn.Linear(32, 4)), _pairs(), nn.MSELoss())


def _then_frozen() -> Task:
    """Returns a model whose first layer is frozen after two steps."""
    model, steps = _mlp(), iter(range(NUM_STEPS))

    def freeze() -> None:
        model[0].requires_grad_(next(steps) < 1)

    return Task(model, _pairs(), nn.MSELoss(), freeze)


def annealed(model: Any, x: Tensor) -> Tensor:
    """Returns the loss of an autoencoder with a weight that the loop moves."""
    code = model.encoder(x)
    result: Tensor = F.mse_loss(model.decoder(code), x) + model.config.weight * code.pow(2).mean()
    return result


def _annealed() -> Task:
    """Returns a model with a term of the loss that counts more in each step."""
    model = Loss(annealed, encoder=_mlp(), decoder=_mlp(4, 16))
    config = SimpleNamespace(weight=0.0)
    model.config = config  # type: ignore[assignment]

    def raise_weight() -> None:
        config.weight += 0.1

    return Task(model, _rows(), after_step=raise_weight)


class Centred(nn.Module):
    """DINO's loss, with a centre that follows what the model returns (Caron et al., 2021)."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        expected = ((target - self.center) * 4).softmax(-1)
        loss = F.cross_entropy(output, expected)
        self.center = self.center * 0.9 + output.detach().mean(0, keepdim=True) * 0.1
        return loss


def _centred() -> Task:
    loss = Centred()
    return Task(_mlp(), _pairs(), loss, companions={"loss": loss})


def _stochastic_average() -> Task:
    model = _mlp()
    average = torch.optim.swa_utils.AveragedModel(model)
    return Task(model, _pairs(), nn.MSELoss(), lambda: average.update_parameters(model), {"average": average})


# --- optimizers as people write them ---


class _Written(torch.optim.Optimizer):
    """An optimizer that moves each parameter by a function of it, its gradient, its state and its group."""

    def __init__(self, parameters: Any, move: Callable[..., None], **options: Any) -> None:
        self.move = move
        super().__init__(parameters, {**options, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.move(parameter, parameter.grad, self.state[parameter], group)


def lion(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Moves a parameter by the sign of a momentum (Chen et al., 2023)."""
    if not state:
        state["mean"] = torch.zeros_like(parameter)
    parameter.mul_(1 - group["lr"] * 0.01)
    parameter.add_((state["mean"] * 0.9 + gradient * 0.1).sign_(), alpha=-group["lr"])
    state["mean"].mul_(0.99).add_(gradient, alpha=0.01)


def schedule_free(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Moves a parameter by schedule-free SGD (Defazio et al., 2024)."""
    if not state:
        state["fast"] = parameter.clone()
    share = 1 / group["count"]
    parameter.lerp_(state["fast"], share)
    parameter.add_(gradient, alpha=group["lr"] * (0.9 * (1 - share) - 1))
    state["fast"].sub_(gradient, alpha=group["lr"])


def look_ahead(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Moves a parameter, and every second time slow weights towards it (Zhang et al., 2019)."""
    if not state:
        state["slow"] = parameter.clone()
    parameter.add_(gradient, alpha=-group["lr"])
    if group["count"] % 2 == 0:
        parameter.copy_(state["slow"].lerp_(parameter, 0.5))


def _written(words: str, move: Callable[..., None]) -> OptimizerRecipe:
    return recipe(words, partial(_Written, move=move), lr=1e-2)


def _setup(
    name: str, model: str, optimizer: OptimizerRecipe, build: Callable[[], Task], extras: str = "", **options: Any
) -> Setup:
    return Setup(name, "torch", model, optimizer, build, StepOptions(**options), extras=extras)


CRITIC = recipe("Adam", torch.optim.Adam, lr=1e-4, betas=(0.0, 0.9))
SWA = recipe("SGD, SWALR", torch.optim.SGD, lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05, 2), lr=0.1)

# fmt: off
SETUPS = (
    _setup("wgan-critic", "WGAN's critic", CRITIC,
           lambda: Task(Loss(gradient_penalty, net=_mlp(16, 1, lambda: nn.LeakyReLU(0.2))), _rows()), "gradient penalty"),
    _setup("physics-informed", "MLP", recipes.ADAM, lambda: Task(Loss(differential_equation, net=_mlp(1, 1)), _rows(1)),
           "second derivatives"),
    _setup("meta-learning", "MLP", recipes.ADAM, lambda: Task(Loss(meta_learning, net=_mlp(16, 1)), _rows()),
           "MAML: a step within the step"),
    _setup("ppo", "policy and value", recipes.ADAM,
           lambda: Task(Loss(clipped_policy, policy=_mlp(16, 3), value=_mlp(16, 1)), _games()),
           "torch.distributions, checks of arguments", clip_grad_norm=0.5),
    _setup("dpo", "language model", recipes.ADAMW, _preferred, "frozen reference"),
    _setup("byol", "student and teacher", recipes.ADAMW, _teacher, "the step averages the teacher's weights"),
    _setup("moco", "queue of keys", recipes.MOMENTUM, lambda: Task(Queue(), _rows()), "a buffer decides where to write"),
    _setup("codebook", "vector-quantised autoencoder", recipes.ADAM, lambda: Task(Codebook(), _rows()),
           "moving averages as codes"),
    _setup("graph-network", "graph network", recipes.ADAM, _graphs, "index_add, bincount"),
    _setup("packed-sequences", "attention", recipes.ADAMW, _packed, "documents packed in rows"),
    _setup("binary-activations", "MLP", recipes.ADAM, _two_layers(binary), "autograd function"),
    _setup("quantization-aware", "MLP", recipes.ADAM, _two_layers(quantized), "fake quantization"),
    _setup("weights-from-hooks", "MLP", recipes.MOMENTUM, _computed_weights, "old weight_norm and spectral_norm"),
    _setup("pruned", "MLP", recipes.ADAM, _pruned, "half of the weights are 0"),
    _setup("checkpoint-reentrant", "MLP", recipes.ADAMW, _recomputed, "dropout in a checkpointed block",
           autocast=torch.bfloat16),
    _setup("frozen-on-the-way", "MLP", recipes.ADAMW, _then_frozen, "first layer frozen after two steps"),
    _setup("annealed-loss", "autoencoder", recipes.ADAM, _annealed, "a weight of the loss moves in each step"),
    _setup("centred-loss", "MLP", recipes.ADAM, _centred, "a buffer of the loss follows the outputs"),
    _setup("stochastic-average", "MLP", SWA, _stochastic_average, "average of weights (SWA)"),
    _setup("lion", "MLP", _written("Lion, written by hand", lion), lambda: Task(_mlp(), _pairs(), nn.MSELoss())),
    _setup("schedule-free", "MLP", _written("schedule-free SGD, written by hand", schedule_free),
           lambda: Task(_mlp(), _pairs(), nn.MSELoss())),
    _setup("look-ahead", "MLP", _written("Lookahead, written by hand", look_ahead),
           lambda: Task(_mlp(), _pairs(), nn.MSELoss()), "every second step is another one"),
)
# fmt: on
