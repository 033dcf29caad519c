"""Models of the papers and of today, built by name as training steps: `build_step("nmt:layers=4,batch=64")`.

Importing this package does not import torch; building a model does.
"""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placewise.core.errors import ModelError
from placewise.core.suggestions import did_you_mean
from placewise.zoo.options import Option, Value, read_options, signature_options, violation

if TYPE_CHECKING:
    from placewise.graph_capture.training_step import TrainingStep

__all__ = ["MODELS", "ZooModel", "build_step", "model_options", "parse_model"]


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo: its function, as 'module:function' in this package, and a one-line summary."""

    location: str
    summary: str


MODELS: dict[str, ZooModel] = {
    "inception-v3": ZooModel("inception:inception_v3", "Inception-V3 on ImageNet, with its auxiliary head, RMSprop"),
    "resnet": ZooModel("convnets:resnet", "ResNet-50, 101, 152 or 200 on ImageNet, SGD with momentum"),
    "cifar-cnn": ZooModel("convnets:cifar_cnn", "TensorFlow tutorial's CIFAR-10 network (Spotlight), SGD"),
    "rnnlm": ZooModel("recurrent:rnnlm", "language model of stacked LSTM cells, unrolled, Adam"),
    "nmt": ZooModel("recurrent:nmt", "LSTM encoder and decoder with attention, unrolled, Adam"),
    "gpt": ZooModel("transformers:gpt", "GPT-2 small, medium, large or xl, AdamW"),
    "bert": ZooModel("transformers:bert", "BERT base or large with its two pre-training heads, AdamW"),
}


def parse_model(text: str) -> tuple[str, dict[str, str]]:
    """Returns the model's name and its options as text; a ModelError for an unknown model or a malformed option."""
    name, colon, written = text.partition(":")
    _model(name)
    given: dict[str, str] = {}
    for item in written.split(",") if colon else []:
        option, equals, value = (part.strip() for part in item.partition("="))
        if not (option and equals and value):
            raise ModelError(f"model {name!r}: each option must be name=value, got {item!r}")
        if option in given:
            raise ModelError(f"model {name!r}: option {option!r} must be given once, got {text!r}")
        given[option] = value
    return name, given


def model_options(name: str) -> dict[str, Value]:
    """Returns each option of a model with its default, in the order of the function's parameters; imports torch."""
    return {option.name: option.default for option in _options(_function(name))}


def build_step(text: str, device: str = "meta") -> "TrainingStep":
    """Returns the training step that `text` names, with its tensors on `device`; on meta nothing is allocated.

    On a real device the parameters are initialized from torch's global generator, and the batch is a placeholder of
    zeros. A ModelError names an option that breaks a rule.
    """
    import torch

    name, given = parse_model(text)
    function = _function(name)
    values = read_options(name, _options(function), given)
    micro_batches, batch = values.pop("micro_batches"), values["batch"]
    assert isinstance(micro_batches, int)
    assert isinstance(batch, int)
    if batch % micro_batches:
        raise violation(name, "micro_batches", f"divide the batch of {batch}", micro_batches)
    if micro_batches > 1:
        # The model is called with micro-batches, so its rules must hold for one of them too.
        with torch.device("meta"):
            function(**values | {"batch": batch // micro_batches})
    with torch.device(device):
        return dataclasses.replace(function(**values), micro_batches=micro_batches)


def _model(name: str) -> ZooModel:
    if name not in MODELS:
        raise ModelError(f"unknown model {name!r}: {did_you_mean(name, MODELS)}")
    return MODELS[name]


def _function(name: str) -> Callable[..., "TrainingStep"]:
    module, _, attribute = _model(name).location.partition(":")
    function: Callable[..., TrainingStep] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return function


def _options(function: Callable[..., "TrainingStep"]) -> list[Option]:
    return [*signature_options(function), Option("micro_batches", int, 1)]
