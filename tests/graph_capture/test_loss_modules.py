"""A loss that is a module has parameters and buffers of its own, as DINO's centre and ArcFace's class weights."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import compiled
from torch import Tensor, nn

import placewise as pw
from placewise.core.errors import CaptureError, StepChanged
from placewise.graph_capture.training_step import StepModules

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


class Centred(nn.Module):
    """DINO's loss, whose centre follows what the model returns."""

    center: Tensor

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("center", torch.zeros(1, 4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = ((output - target - self.center) ** 2).mean()
        mean = output.detach().mean(0, keepdim=True)
        if self.in_place:
            self.center.mul_(0.9).add_(mean, alpha=0.1)
        else:
            self.center = self.center * 0.9 + mean * 0.1
        return loss


class Weighted(nn.Module):
    """Two losses weighted by learned uncertainty."""

    def __init__(self) -> None:
        super().__init__()
        self.variances = nn.Parameter(torch.zeros(2))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        both = torch.stack([F.mse_loss(output, target), F.l1_loss(output, target)])
        return (both * (-self.variances).exp() + self.variances).sum()


class Normed(nn.Module):
    """A loss with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def compute(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.norm(output), target)


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "replaced buffer": lambda: Centred(False), "buffer in place": lambda: Centred(True), "parameters": Weighted,
    "batch norm": Normed,
}  # fmt: skip


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=generator), torch.randn(6, 4, generator=generator)) for _ in range(3)]


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_state_trains_as_in_eager_code(name: str) -> None:
    model, criterion = nn.Linear(4, 4), LOSSES[name]()
    twins = copy.deepcopy(model), copy.deepcopy(criterion)

    def parts(model: nn.Module, criterion: Any) -> tuple[Any, torch.optim.Optimizer]:
        trained = [*model.parameters(), *criterion.parameters()]
        return getattr(criterion, "compute", criterion), torch.optim.Adam(trained, 0.1)

    loss_fn, optimizer = parts(model, criterion)
    eager_loss, eager_optimizer = parts(*twins)
    train_step = compiled(pw.capture(model, loss_fn, optimizer, batches()[0]))
    for given, target in batches():
        loss = eager_loss(twins[0](given), target)
        eager_optimizer.zero_grad()
        loss.backward()
        eager_optimizer.step()
        assert torch.equal(train_step((given, target)), loss.detach())
    train_step.close()
    for mine, theirs in ((model, twins[0]), (criterion, twins[1])):
        assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in mine.state_dict().items())


def test_a_loss_with_state_is_checked_in_every_step() -> None:
    model, criterion = nn.Linear(4, 4), Weighted()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.1)
    train_step = compiled(pw.capture(model, criterion, optimizer, batches()[0]))
    criterion.variances.requires_grad_(False)
    with pytest.raises(StepChanged, match=r"^requires_grad of the loss\.variances is False now"):
        train_step(batches()[0])
    train_step.close()


def test_parameters_of_nobody_are_refused() -> None:
    model, loose = nn.Linear(4, 4), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*model.parameters(), loose], 0.1)
    with pytest.raises(CaptureError, match=r"neither in the model nor in a loss that is a module: make it one of the model"):
        pw.capture(model, lambda output, target: F.mse_loss(output, target) * loose, optimizer, batches()[0])


def test_names_of_a_model_and_its_loss() -> None:
    """`loss:` begins the loss's names, also where the loss has the model; a part of the model is no loss of its own."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert [name for name, _ in StepModules(model, model[1]).named_parameters()] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]
    criterion = Weighted()
    criterion.model = model
    modules = StepModules(model, criterion.forward)
    assert [name for name, _ in modules.named_parameters()][-1] == "loss:variances"
    assert len(list(modules.parameters())) == 5
    assert "loss:variances" in modules.state_dict()


class Trainer:
    """What computes the loss has a lock, a file and the data."""

    def __init__(self) -> None:
        self.lock, self.scale = threading.Lock(), 2.0
        self.loader = iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(3))))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * F.mse_loss(output, target)


def test_a_loss_of_a_trainer_is_recorded() -> None:
    """Its lock and its data can't be copied, and need not be."""
    model, trainer = nn.Linear(4, 4), Trainer()
    train_step = compiled(pw.capture(model, trainer.loss, torch.optim.SGD(model.parameters(), 0.1), batches()[0]))
    given, target = batches()[0]
    expected = trainer.loss(model(given), target).detach()
    assert torch.equal(train_step((given, target)), expected)
    train_step.close()
