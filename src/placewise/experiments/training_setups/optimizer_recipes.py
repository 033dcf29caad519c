"""Optimizers and schedules as training scripts have them; only parameters that require gradients are given to them."""

from collections.abc import Callable
from math import cos, pi
from typing import Any

from torch import nn, optim

from placewise.experiments.training_setups.training_setup import NUM_STEPS, OptimizerRecipe

Make = Callable[..., optim.Optimizer]


def recipe(words: str, kind: Make, schedule: Any = None, **options: Any) -> OptimizerRecipe:
    """Returns the recipe of an optimizer class with its options."""
    return OptimizerRecipe(words, lambda model: kind(trained_parameters(model), **options), schedule)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns two parameter groups: matrices with weight decay, biases and norms without."""
    parameters = trained_parameters(model)
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def warm_up_and_cosine(optimizer: optim.Optimizer) -> Any:
    """Returns a schedule that rises for two steps and falls like a cosine."""
    return optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / 3 if step < 2 else 0.5 * (1 + cos(pi * (step - 2) / NUM_STEPS))
    )


def one_cycle(optimizer: optim.Optimizer) -> Any:
    """Returns the schedule that moves beta1 or momentum against the learning rate."""
    return optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=NUM_STEPS + 1)


SGD = recipe("SGD", optim.SGD, lr=0.05)
MOMENTUM = recipe("SGD, momentum", optim.SGD, lr=0.01, momentum=0.9, weight_decay=1e-4)
NESTEROV = recipe("SGD, Nesterov", optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4)
MOMENTUM_ONE_CYCLE = recipe("SGD, momentum, OneCycle", optim.SGD, one_cycle, lr=0.01, momentum=0.9)
ADAM = recipe("Adam", optim.Adam, lr=1e-3)
ADAM_FOREACH = recipe("Adam, foreach", optim.Adam, lr=1e-3, foreach=True)
AMSGRAD = recipe("AdamW, AMSGrad", optim.AdamW, lr=1e-3, amsgrad=True)
ADAMW = recipe("AdamW", optim.AdamW, lr=1e-3)
ADAMW_FUSED = recipe("AdamW, fused", optim.AdamW, lr=1e-3, fused=True)
ADAMW_COSINE = recipe("AdamW, warm-up and cosine", optim.AdamW, warm_up_and_cosine, lr=2e-3, betas=(0.9, 0.95))
ADAMW_ONE_CYCLE = recipe("AdamW, OneCycle", optim.AdamW, one_cycle, lr=1e-3)
ADAMW_GROUPS = OptimizerRecipe(
    "AdamW, no decay of biases, warm-up and cosine",
    lambda model: optim.AdamW(decay_groups(model), lr=2e-3, betas=(0.9, 0.95)),
    warm_up_and_cosine,
)
RMSPROP = recipe("RMSprop", optim.RMSprop, lr=1e-3, momentum=0.9)
RMSPROP_CENTERED = recipe("RMSprop, centered", optim.RMSprop, lr=1e-3, centered=True)
ADAGRAD = recipe("Adagrad", optim.Adagrad, lr=1e-2)
ADADELTA = recipe("Adadelta", optim.Adadelta, lr=1.0)
ADAMAX = recipe("Adamax", optim.Adamax, lr=2e-3)
NADAM = recipe("NAdam", optim.NAdam, lr=1e-3)
RADAM = recipe("RAdam", optim.RAdam, lr=1e-3)
ASGD = recipe("ASGD", optim.ASGD, lr=0.01)
RPROP = recipe("Rprop", optim.Rprop, lr=1e-3)
ADAFACTOR = recipe("Adafactor", optim.Adafactor, lr=1e-2)
MUON = recipe("Muon", optim.Muon, lr=1e-3)
LBFGS = recipe("LBFGS", optim.LBFGS, lr=0.1)
