"""What every strategy with a network needs: one thread, one seed, losses as pure functions, checked steps."""

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

NEARLY_ZERO = 0.1  # scale of an output layer's weights, so that the first distribution is nearly the bias alone

Network = TypeVar("Network", bound=nn.Module)


class Learner(Protocol):
    """Draws placements and learns from their evaluation, in turn."""

    def draw(self) -> Ints:
        """Returns placements: [batch, groups]."""
        ...

    def learn(self, evaluation: Evaluation) -> dict[str, float]:
        """Learns from the evaluation of the last placements; returns the notes."""
        ...


def learn_by_drawing(make: Callable[[], Learner]) -> Search:
    """Yields what a learner draws, without end, with the notes of the last update; torch only works between the yields."""
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
    """Makes torch use one thread inside, so that sums have the same order on any number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seeded_generator(rng: np.random.Generator) -> torch.Generator:
    """Returns a torch generator with a seed drawn from `rng`."""
    return torch.Generator().manual_seed(int(rng.integers(2**63)))


def build_network(make: Callable[[], Network], generator: torch.Generator) -> Network:
    """Returns a new network: weights uniform within 1 / sqrt(inputs), biases 0, layers named "output" nearly 0, tables 0.

    The biases of an LSTM's forget gates are 1 (Gers et al. 2000), so that it begins by remembering.
    """
    with torch.device("meta"):  # nothing is drawn from torch's global generator
        network = make()
    network.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1 or "table" in name:
                parameter.zero_()
                if "bias_ih_l" in name:  # the gates of an LSTM are in, forget, cell and out
                    parameter.view(4, -1)[1] = 1.0
                continue
            inputs = 1 if "last_device" in name else parameter.shape[1]
            reach = inputs**-0.5 * (NEARLY_ZERO if "output" in name else 1.0)
            parameter.uniform_(-reach, reach, generator=generator)
    return network


def signals(cost: Floats) -> Floats:
    """Returns what a policy learns from: sqrt(cost), so that the worst placements do not drown out the others: [batch]."""
    return np.sqrt(cost)


def failing_signal(problem: Problem) -> float:
    """Returns the signal of a placement that barely fails to fit: all ops in turn, each on its slowest device."""
    return float(np.sqrt(problem.op_seconds.max(axis=1, initial=0.0).sum()))


def notes_of(evaluation: Evaluation, update: int, **others: float) -> dict[str, float]:
    """Returns the notes of an update: its number, the average and the best time of its batch, and others."""
    cost = evaluation.cost
    return {"update": update, "average_seconds": float(cost.mean()), "best_seconds": float(cost.min()), **others}


def prior_of(probabilities: Floats, allowed: Bools, exploration: float) -> Prior:
    """Returns the prior with which logits of 0 give these probabilities [blocks, devices].

    Its floor makes `exploration` decisions of a placement, on average and at most all, uniform over the allowed devices.
    """
    share = min(exploration / max(len(allowed), 1), 1.0)
    even = allowed / np.maximum(allowed.sum(axis=1, keepdims=True), 1)
    return Prior(to_tensor(np.maximum(logits_of(probabilities), MASKED)), to_tensor(share * even))


def waiting_times(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns exponential waiting times above 0."""
    return torch.empty(shape).exponential_(generator=generator).clamp_(min=1e-30)


def chosen(log_probabilities: Tensor, placements: Tensor) -> Tensor:
    """Returns the entries of the chosen devices: [..., blocks] from [..., blocks, devices] and [..., blocks]."""
    return log_probabilities.gather(-1, placements[..., None])[..., 0]


def mean_entropy(log_probabilities: Tensor) -> Tensor:
    """Returns the mean entropy of a decision in nats: a scalar from [..., devices]."""
    return -(log_probabilities.exp() * log_probabilities).sum(dim=-1).mean()


def reinforce_loss(log_probabilities: Tensor, advantages: Tensor) -> Tensor:
    """Returns REINFORCE's loss (Williams 1992), -mean(advantage · log p): a scalar from [batch] and [batch]."""
    return -(advantages * log_probabilities).mean()


def rated(
    network: nn.Module, learning_rate: float, output_rate: float | None = None, table_rate: float = 0.0
) -> list[dict[str, Any]]:
    """Returns a network's parameters for an optimizer: rates of their own for the output layers and for the table."""
    rates: dict[float, list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        rate = table_rate if "table" in name else output_rate if output_rate and "output" in name else learning_rate
        rates.setdefault(rate, []).append(parameter)
    return [{"params": found, "lr": rate} for rate, found in rates.items()]


def adam(parts: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Returns Adam for parameters and their rates."""
    return torch.optim.Adam(parts, fused=True)  # takes a third of the time on a CPU


def gradients(loss: Tensor, network: nn.Module, strategy: str, update: int) -> list[Tensor]:
    """Returns the loss's gradient for each parameter; raises StrategyError if one is not finite."""
    found = torch.autograd.grad(loss, list(network.parameters()))
    norms = torch.stack([gradient.norm() for gradient in found])
    check_finite(norms.detach().numpy(), strategy, update)
    return list(found)


def descend(optimizer: torch.optim.Optimizer, network: nn.Module, found: Iterable[Tensor], max_norm: float = 0.0) -> None:
    """Makes one step of the optimizer along gradients, clipped to a norm first unless it is 0."""
    for parameter, gradient in zip(network.parameters(), found, strict=True):
        parameter.grad = gradient
    if max_norm > 0:
        nn.utils.clip_grad_norm_(network.parameters(), max_norm)
    optimizer.step()


def to_tensor(values: Floats) -> Tensor:
    """Returns floats as a tensor of the networks' precision."""
    return torch.tensor(values, dtype=torch.float32)


def to_array(placements: Tensor) -> Ints:
    """Returns placements as an array."""
    result: Ints = placements.numpy().astype(np.int64)
    return result
