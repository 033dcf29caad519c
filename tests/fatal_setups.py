"""Setups that end their process, and some that don't."""

import os
import signal

import torch
from torch import nn

from placewise.experiments.training_setups.optimizer_recipes import SGD
from placewise.experiments.training_setups.training_setup import Setup, Task


def build_fine() -> Task:
    return Task(nn.Linear(3, 2), [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(4)], nn.MSELoss())


def build_abort() -> Task:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def build_exit() -> Task:
    os._exit(3)


def build_wrong() -> Task:
    raise ValueError("no such\nmodel")


def find_fatal(name: str) -> Setup:
    """Returns the setup of a name."""
    return Setup(name, "torch", "linear", SGD, globals()[f"build_{name}"])
