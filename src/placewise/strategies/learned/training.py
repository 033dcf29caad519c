"""What every strategy with a network needs: one thread, one seed, losses as pure functions, steps that are checked."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from placewise.core.arrays import Bools, Floats, Ints
from placewise.core.contracts import Evaluation, Proposal, Search
from placewise.core.problem import Problem
from placewise.strategies.learned.maths import check_finite, logits_of
from placewise.strategies.learned.networks import MASKED, Prior

NEARLY_ZERO = 0.1  # the weights of an output layer are so much smaller: the first distribution is nearly the bias alone

Network = TypeVar("Network", bound=nn.Module)


class Learner(Protocol):
    """Draws placements, and learns from their evaluation before it draws the next."""

    def draw(self) -> Ints:
        """Returns placements: [batch, groups]."""
        ...

    def learn(self, evaluation: Evaluation) -> dict[str, float]:
        """Takes in how good the last placements are; returns what there is to note."""
        ...


def learn_by_drawing(make: Callable[[], Learner]) -> Search:
    """Yields what a learner draws, without end, with the notes on the update before; torch works between the yields."""
    with one_thread():
        learner = make()
    notes: dict[str, float] = {}
    while True:
        with one_thread():
            placements = learner.draw()
        evaluation = yield Proposal(placements, notes=notes)
        with one_thread():
            notes = learner.learn(evaluation)


@contextmanager
def one_thread() -> Iterator[None]:
    """Has torch work on one thread inside: sums have one order then, whatever the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seeded(rng: np.random.Generator) -> torch.Generator:
    """Returns a generator of torch whose seed is drawn."""
    return torch.Generator().manual_seed(int(rng.integers(2**63)))


def build_network(make: Callable[[], Network], generator: torch.Generator) -> Network:
    """Returns a new network: weights even within 1 / sqrt(inputs), biases 0, layers named "output" nearly 0."""
    with torch.device("meta"):  # nothing is drawn from torch's global generator
        network = make()
    network.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1:
                parameter.zero_()
                continue
            reach = parameter.shape[1] ** -0.5 * (NEARLY_ZERO if "output" in name else 1.0)
            parameter.uniform_(-reach, reach, generator=generator)
    return network


def signals(cost: Floats) -> Floats:
    """Returns what a policy learns from: sqrt(cost), so that the worst placements do not drown the others: [batch]."""
    return np.sqrt(cost)


def failing_signal(problem: Problem) -> float:
    """Returns the signal of a placement that just does not fit: all ops in turn, each on its slowest device."""
    return float(np.sqrt(problem.op_seconds.max(axis=1, initial=0.0).sum()))


def notes_of(evaluation: Evaluation, update: int, **others: float) -> dict[str, float]:
    """Returns the notes on an update: its number, the average and the best time of its batch, and others."""
    cost = evaluation.cost
    return {"update": update, "average_seconds": float(cost.mean()), "best_seconds": float(cost.min()), **others}


def check_fields(strategy: Any, names: str, rule: Callable[[Any], bool], words: str) -> None:
    """Raises ValueError where a field of these names breaks a rule, which the words name: "must be at least 1"."""
    for name in names.split():
        if not rule(getattr(strategy, name)):
            raise ValueError(f"{name} {words}, it is {getattr(strategy, name)}")


def prior_of(probabilities: Floats, allowed: Bools, exploration: float) -> Prior:
    """Returns the prior with which logits of 0 are these probabilities: [blocks, devices] from [blocks, devices], twice.

    Its floor has `exploration` decisions of a placement, on average and at most all, drawn evenly from allowed devices.
    """
    share = min(exploration / max(len(allowed), 1), 1.0)
    even = allowed / np.maximum(allowed.sum(axis=1, keepdims=True), 1)
    return Prior(tensor(np.maximum(logits_of(probabilities), MASKED)), tensor(share * even))


def waits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns exponential waiting times, above 0."""
    return torch.empty(shape).exponential_(generator=generator).clamp_(min=1e-30)


def chosen(log_probabilities: Tensor, placements: Tensor) -> Tensor:
    """Returns the entries of what was chosen: [..., blocks] from [..., blocks, devices] and [..., blocks]."""
    return log_probabilities.gather(-1, placements[..., None])[..., 0]


def mean_entropy(log_probabilities: Tensor) -> Tensor:
    """Returns the mean entropy of a decision in nats: a scalar from [..., devices]."""
    return -(log_probabilities.exp() * log_probabilities).sum(dim=-1).mean()


def reinforce_loss(log_probabilities: Tensor, advantages: Tensor) -> Tensor:
    """Returns REINFORCE's loss (Williams 1992), -mean(advantage · log p): a scalar from [batch] and [batch]."""
    return -(advantages * log_probabilities).mean()


def adam(network: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Returns an optimizer of a network's parameters."""
    return torch.optim.Adam(network.parameters(), lr=learning_rate, fused=True)  # a third of the time on a CPU


def gradients(loss: Tensor, network: nn.Module, strategy: str, update: int) -> list[Tensor]:
    """Returns the loss's gradient for each parameter; an error where one is not finite."""
    found = torch.autograd.grad(loss, list(network.parameters()))
    norms = torch.stack([gradient.norm() for gradient in found])
    check_finite(norms.detach().numpy(), strategy, update)
    return list(found)


def descend(optimizer: torch.optim.Optimizer, network: nn.Module, found: Iterable[Tensor], max_norm: float = 0.0) -> None:
    """Makes one step of the optimizer along gradients, which are cut to a norm first (0: they are not)."""
    for parameter, gradient in zip(network.parameters(), found, strict=True):
        parameter.grad = gradient
    if max_norm > 0:
        nn.utils.clip_grad_norm_(network.parameters(), max_norm)
    optimizer.step()


def tensor(values: Floats) -> Tensor:
    """Returns floats as a tensor of the networks' precision."""
    return torch.tensor(values, dtype=torch.float32)


def numbers(placements: Tensor) -> Ints:
    """Returns whole numbers as an array."""
    result: Ints = placements.numpy().astype(np.int64)
    return result
