"""Trains a model under Hugging Face's Trainer with a placed step: a subclass of a few lines.

The Trainer keeps its loop, schedule, logging and checkpoints. Its `training_step` becomes ours, which includes the backward
pass, clipping and the update; the Trainer's own update then finds no gradients and does nothing. The same run with the plain
Trainer shows the same losses. It needs `pip install transformers accelerate`.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

import placewise as pw

MACHINE = Path(__file__).with_name("two_cpus.toml")  # None: this machine


class PlacedTrainer(Trainer):
    """A Trainer whose steps run where placewise puts them."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Trains on one batch and returns its loss."""
        if not hasattr(self, "train_step"):
            optimizer = self.optimizer.optimizer  # Accelerate has wrapped it
            self.train_step = pw.train_step(
                self.accelerator.unwrap_model(model), None, optimizer, cluster=MACHINE or "here", seconds=1, report=print,
                clip_grad_norm=self.args.max_grad_norm,
            )  # fmt: skip
        return self.train_step(self._prepare_inputs(inputs))


class Counting(Dataset):
    """Sequences that count up from a random number; the last batch of an epoch is smaller."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(16) + 3 * index % 40
        return {"input_ids": tokens, "labels": tokens}


def trained(kind: type[Trainer], folder: str) -> list[float]:
    """Returns the losses of a run with this kind of Trainer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64, use_cache=False
    )
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, num_train_epochs=3, learning_rate=0.01, warmup_steps=3, logging_steps=1,
        lr_scheduler_type="cosine", max_grad_norm=1.0, save_strategy="no", report_to="none", use_cpu=True, seed=0,
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = kind(LlamaForCausalLM(config), arguments, train_dataset=Counting())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


with tempfile.TemporaryDirectory() as folder:
    placed, plain = trained(PlacedTrainer, folder), trained(Trainer, folder)
for name, losses in (("placed", placed), ("plain", plain)):
    print(f"{name:6} " + " ".join(f"{loss:.3f}" for loss in losses[::3]))
print(f"largest difference {max(abs(a - b) for a, b in zip(placed, plain, strict=True)):.2g}")
