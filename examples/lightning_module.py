"""Trains a LightningModule with a placed step: manual optimization, and two lines in `training_step`.

Lightning keeps its loop, loggers, callbacks and checkpoints. The same module with automatic optimization shows the same
losses. It needs `pip install lightning`.
"""

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what Lightning imports
    import lightning

import placewise as pw

MACHINE = Path(__file__).with_name("two_cpus.toml")  # None: this machine


class Classifier(lightning.LightningModule):
    """A network that Lightning trains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        """Returns the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        """Returns the loss of a batch."""
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.losses.append(float(loss))
        return loss


class PlacedClassifier(Classifier):
    """The same network, whose steps run where placewise puts them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_train_start(self) -> None:
        """Makes the step when the optimizer exists."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.train_step = pw.train_step(
            self.network, nn.functional.cross_entropy, optimizer, cluster=MACHINE or "here", seconds=1, report=print
        )

    def training_step(self, batch: list[Tensor], number: int) -> None:
        """Trains on a batch, with backward and update."""
        self.losses.append(float(self.train_step(batch)))

    def on_train_epoch_end(self) -> None:
        """Moves the schedule, which manual optimization leaves to us."""
        self.lr_schedulers().step()


def trained(kind: type[Classifier]) -> list[float]:
    """Returns the losses of three epochs; the last batch of each is smaller."""
    torch.manual_seed(0)
    inputs = torch.randn(70, 20)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :5].argmax(1)), batch_size=32)
    model = kind()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers
        lightning.Trainer(max_epochs=3, accelerator="cpu", devices=1, **quiet).fit(model, loader)
    return model.losses


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
placed, plain = trained(PlacedClassifier), trained(Classifier)
for name, losses in (("placed", placed), ("plain", plain)):
    print(f"{name:6} " + " ".join(f"{loss:.3f}" for loss in losses))
print(f"largest difference {max(abs(a - b) for a, b in zip(placed, plain, strict=True)):.2g}")
