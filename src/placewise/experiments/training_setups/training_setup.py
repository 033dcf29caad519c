"""The nouns: a setup is a task (model, loss, batches) with an optimizer, its schedule, and the options of the step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

NUM_STEPS = 4

DTYPE_WORDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, eq=False)
class Task:
    """A model with its loss and a batch for each step; `TrainingStep` describes how the model is called with a batch."""

    model: nn.Module
    batches: Sequence[Any]  # [steps]
    loss_fn: Callable[..., Tensor] | None = None
    after_step: Callable[[], None] = lambda: None  # what the loop does besides: an average of weights, for example
    companions: Mapping[str, nn.Module] = field(default_factory=dict)  # other modules whose values count, by name


@dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer in a table's words, and how it is made for a model; a schedule moves its hyper-parameters each step."""

    words: str
    make: Callable[[nn.Module], torch.optim.Optimizer]
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None


@dataclass(frozen=True)
class StepOptions:
    """What `pw.capture` is told about the step, and what the eager loop does by PyTorch's own recipes."""

    micro_batches: int = 1
    autocast: torch.dtype | None = None  # with a GPU's casts
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    grad_scale: float | None = None  # where a GradScaler starts
    outputs: bool = False  # the model's output is returned and compared too

    @property
    def words(self) -> list[str]:
        """The options in a table's words, without the precision."""
        given = {
            f"{self.micro_batches} micro-batches": self.micro_batches > 1,
            f"norm clipped at {self.clip_grad_norm}": self.clip_grad_norm is not None,
            f"gradients clipped at {self.clip_grad_value}": self.clip_grad_value is not None,
            "outputs": self.outputs,
        }
        return [word for word, is_given in given.items() if is_given]


@dataclass(frozen=True)
class Setup:
    """A training setup as somebody would have it, small enough to train a step in milliseconds."""

    name: str
    library: str
    model: str  # in a table's words
    optimizer: OptimizerRecipe
    build: Callable[[], Task]  # draws from the default generators only
    options: StepOptions = StepOptions()
    weights: torch.dtype = torch.float32  # of the model that `build` makes
    extras: str = ""  # what is special about it, in a table's words

    @property
    def precision(self) -> str:
        """The precision in a table's words."""
        if self.options.autocast is None:
            return DTYPE_WORDS[self.weights]
        scaled = "" if self.options.grad_scale is None else ", GradScaler"
        return f"autocast {DTYPE_WORDS[self.options.autocast]}{scaled}"

    @property
    def extra_words(self) -> str:
        """What the step has besides model, optimizer and precision, in a table's words."""
        return ", ".join(filter(None, [self.extras, *self.options.words]))
