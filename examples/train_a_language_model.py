"""A complete training loop: sequences of two lengths, a ragged last batch, warm-up and cosine, clipping, mixed precision,
evaluation, checkpoints and resuming. The losses are those of the plain PyTorch loop, which runs beside it.

`pw.train_step` plans the step at the first batch of each shape; everything else is ordinary PyTorch. It trains on two CPU
devices here, so that it runs everywhere; leave `cluster` out to use your own machine.
"""

import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import placewise as pw

MACHINE = Path(__file__).with_name("two_cpus.toml")
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ALPHABET = sorted(set("".join(WORDS)) | {" "})
EPOCHS, BATCH, STEPS = 2, 16, 12  # STEPS of an epoch
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    """Attention to earlier letters, then two layers for each letter."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, letters, width]."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.layers(self.norms[1](x))


class Speller(nn.Module):
    """A small transformer that spells numbers letter by letter."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.letters, self.positions = nn.Embedding(len(ALPHABET), width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.output = nn.Linear(width, len(ALPHABET))

    def forward(self, text: Tensor) -> Tensor:
        """Returns the scores of the next letter: [batch, letters, alphabet]."""
        x = self.letters(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        return self.output(self.blocks(x))


def next_letters(scores: Tensor, text: Tensor) -> Tensor:
    """Returns the loss of predicting each letter from those before it."""
    return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())


def batches(seed: int) -> Iterator[Tensor]:
    """Yields the batches of an epoch as a loader with buckets gives them; the last one is smaller."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(STEPS):
        length, rows = (24, 40)[number % 2], BATCH if number < STEPS - 1 else BATCH // 3
        digits = torch.randint(10, (rows, length), generator=generator).tolist()
        text = [" ".join(WORDS[d] for d in row)[:length] for row in digits]
        yield torch.tensor([[ALPHABET.index(letter) for letter in line] for line in text])


class Training:
    """A model with its optimizer and schedule, all of which a checkpoint holds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Speller()
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up_and_cosine)
        self.losses: list[float] = []

    def run(self, train_step: Callable[[Any], Tensor], epochs: range) -> None:
        """Trains for some epochs."""
        for epoch in epochs:
            for text in batches(epoch):
                self.losses.append(float(train_step((text, text))))
                self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """Returns all that a run needs to go on."""
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes back to a checkpoint."""
        for name, value in state.items():
            getattr(self, name).load_state_dict(value)


def warm_up_and_cosine(step: int) -> float:
    """Returns the factor of the learning rate."""
    return min((step + 1) / 4, 0.5 + 0.5 * math.cos(math.pi * step / (EPOCHS * STEPS)))


def eager_step(training: Training) -> Callable[[Any], Tensor]:
    """Returns the step of a plain PyTorch loop."""

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        training.optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = next_letters(training.model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()
        return loss.detach()

    return step


def placed_step(training: Training) -> Any:
    """Returns the same step, placed on the machine."""
    options = {"autocast": torch.autocast(DEVICE, torch.bfloat16), "clip_grad_norm": 1.0}
    return pw.train_step(
        training.model, next_letters, training.optimizer, cluster=MACHINE, seconds=1, report=print, **options
    )


training, eager = Training(), Training()
train_step = placed_step(training)
training.run(train_step, range(1))
checkpoint = io.BytesIO()  # a file, in a real script
torch.save(training.state_dict(), checkpoint)
training.run(train_step, range(1, EPOCHS))

eager.run(eager_step(eager), range(EPOCHS))
for name, run in (("placewise", training), ("eager", eager)):
    print(f"{name:9} " + " ".join(f"{loss:.3f}" for loss in run.losses[:: STEPS // 4]))
print(f"largest difference {max(abs(a - b) for a, b in zip(training.losses, eager.losses, strict=True)):.2g}")

training.model.eval()
text = next(batches(99))
print(
    f"evaluation {next_letters(train_step.evaluate(text), text):.3f}, the last norm of gradients {train_step.grad_norm:.2f}"
)
train_step.close()

checkpoint.seek(0)
resumed = Training()
resumed.load_state_dict(torch.load(checkpoint))
train_step = placed_step(resumed)
resumed.run(train_step, range(1, EPOCHS))
train_step.close()
print(f"resumed from the checkpoint, the losses are the same: {resumed.losses == training.losses[STEPS:]}")
