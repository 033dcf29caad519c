"""Every hyper-parameter is read again in every step; one that changes which ops run is refused."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import compiled
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import placewise as pw
from placewise.core.errors import ExecutionError

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")

Change = Callable[[torch.optim.Optimizer, int], None]


def one_cycle(optimizer: torch.optim.Optimizer) -> Change:
    schedule = OneCycleLR(optimizer, 0.1, total_steps=20)
    return lambda optimizer, step: schedule.step()


def setting(**values: Callable[[int], Any]) -> Callable[[torch.optim.Optimizer], Change]:
    def change(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group.update({name: value(step) for name, value in values.items()})

    return lambda optimizer: change


def train(make: Callable[[Any], torch.optim.Optimizer], changes: Any, num_steps: int = 8) -> None:
    """Trains eagerly and compiled, and compares the bits of losses and parameters in every step."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [make(model.parameters()) for model in models]
    after_step = [changes(optimizer) for optimizer in optimizers]
    batches = [(torch.randn(16, 6), torch.randint(3, (16,))) for _ in range(num_steps)]
    step = pw.capture(models[0], nn.functional.cross_entropy, optimizers[0], batches[0])
    train_step = compiled(step)
    for number, batch in enumerate(batches):
        optimizers[1].zero_grad()
        loss = nn.functional.cross_entropy(models[1](batch[0]), batch[1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[1].step()
        assert torch.equal(train_step(batch), loss.detach()), f"step {number}"
        for optimizer, change in zip(optimizers, after_step, strict=True):
            change(optimizer, number)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (lambda p: torch.optim.Adam(p, 0.01), one_cycle),
        (lambda p: torch.optim.AdamW(p, 0.01), one_cycle),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), one_cycle),
        (lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5), one_cycle),
        (lambda p: torch.optim.AdamW(p, 0.01), setting(weight_decay=lambda i: 0.02 * (i + 1), eps=lambda i: 1e-8 * 2**i)),
        (lambda p: torch.optim.Adam(p, 0.01), setting(betas=lambda i: (0.9 - 0.01 * i, 0.999 - 0.01 * i))),
        (lambda p: torch.optim.Adagrad(p, 0.1), setting(lr_decay=lambda i: 0.01 * i)),
        (lambda p: torch.optim.SGD(p, 0.1), setting(initial_lr=lambda i: 0.1)),
    ],
    ids=["Adam", "AdamW", "SGD", "RMSprop", "weight_decay and eps", "betas", "lr_decay", "one that nothing reads"],
)
def test_hyper_parameters_are_followed(make: Any, changes: Any, same_kernels: None) -> None:
    train(make, changes)


@pytest.mark.parametrize(
    ("make", "changes", "subject"),
    [
        (lambda p: torch.optim.Adam(p, 0.01), setting(weight_decay=lambda i: 0.1), "'weight_decay' of parameter group 0"),
        (lambda p: torch.optim.SGD(p, 0.01), setting(maximize=lambda i: True), "'maximize' of parameter group 0"),
        (lambda p: torch.optim.SGD(p, 0.01, 0.9), setting(momentum=lambda i: 0.0), "'momentum' of parameter group 0"),
        (lambda p: torch.optim.RAdam(p, 0.01), setting(), "a number that the optimizer computes"),
    ],
    ids=["weight decay begins", "maximize", "momentum ends", "RAdam's sixth step"],
)
def test_another_branch_is_refused(make: Any, changes: Any, subject: str, same_kernels: None) -> None:
    with pytest.raises(ExecutionError, match=f"^{subject} has changed so that the step is another one: capture and compile"):
        train(make, changes)


class Counting(torch.optim.Optimizer):
    """Gradient descent whose rate is a function of the learning rate and of a counter in the group."""

    def __init__(self, parameters: Any, rate: Callable[[Any, Any], Any]) -> None:
        self.rate = rate
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-self.rate(group["lr"], group["count"]))


RATES: dict[str, Callable[[Any, Any], Any]] = {
    "remainder": lambda lr, n: lr * (n % 3 + 1),
    "whole quotient": lambda lr, n: lr / (1 + n // 2) / (1 + 7 // n),
    "both": lambda lr, n: lr * (divmod(n, 3)[0] + divmod(n, 3)[1]),
    "rounded": lambda lr, n: round(lr * n, 3) + round(n / 3),
    "floor and ceiling": lambda lr, n: lr * (math.floor(n / 2) + math.ceil(n / 3) + math.trunc(n / 2)),
    "magnitude": lambda lr, n: abs(-lr),
    "math": lambda lr, n: lr * math.hypot(math.fmod(n, 3), 1),
}


def steps_of_lr(optimizer: torch.optim.Optimizer) -> Change:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return lambda optimizer, step: schedule.step()


@pytest.mark.parametrize("name", RATES)
def test_arithmetic_of_python_is_followed(name: str, same_kernels: None) -> None:
    train(lambda p: Counting(p, RATES[name]), steps_of_lr)


DECISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "every third step": lambda lr, n: lr if n % 3 == 0 else 0.1 * lr,
    "a plain number": lambda lr, n: float(lr),
    "a whole number": lambda lr, n: lr / int(n),
    "an entry of a list": lambda lr, n: lr * [i / 9 for i in range(9)][n],
    "an entry of a dict": lambda lr, n: lr * {i: i / 9 for i in range(9)}[n],
    "nearly equal": lambda lr, n: lr * (2 if math.isclose(n, 2, rel_tol=1e-6) else 1),
    "a sum in C": lambda lr, n: math.fsum([lr, lr]),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_what_python_decides_by_a_counter_is_refused_when_it_changes(name: str, same_kernels: None) -> None:
    with pytest.raises(ExecutionError, match="has changed so that the step is another one: capture and compile"):
        train(lambda p: Counting(p, DECISIONS[name]), steps_of_lr)
