"""Setups with autocast in bfloat16 for a whole GPU, or small ones that rehearse the same on CPU devices."""

from functools import partial

import torch
from torch import nn

from placewise.experiments.training_setups import optimizer_recipes as recipes
from placewise.experiments.training_setups.training_setup import Setup, StepOptions, Task

CAREFUL = recipes.recipe("SGD, momentum", torch.optim.SGD, lr=1e-3, momentum=0.9)  # it learns from any batch

AUTOCAST = StepOptions(autocast=torch.bfloat16)


def autocast_setups(num_steps: int, is_small: bool) -> dict[str, Setup]:
    """Returns the setups by name, with a batch for each step."""
    given = [
        ("llama", "transformers", "LlamaForCausalLM", recipes.ADAMW, _llama),
        ("resnet50", "torchvision", "resnet50", CAREFUL, _resnet50),
        ("vit", "torchvision", "VisionTransformer" if is_small else "vit_b_16", recipes.ADAMW, _vit),
    ]
    return {
        name: Setup(name, library, model, recipe, partial(build, num_steps, is_small), AUTOCAST)
        for name, library, model, recipe, build in given
    }


def _llama(num_steps: int, is_small: bool) -> Task:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers, vocab, rows, length = (64, 2, 256, 4, 16) if is_small else (1024, 8, 32000, 4, 256)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=width // 16,
        num_key_value_heads=width // 32, vocab_size=vocab, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    texts = [torch.randint(vocab, (rows, length)) for _ in range(num_steps)]
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return Task(model, [{"input_ids": text, "labels": text} for text in texts])


def _images(model: nn.Module, num_steps: int, rows: int, size: int) -> Task:
    batches = [(torch.randn(rows, 3, size, size), torch.randint(10, (rows,))) for _ in range(num_steps)]
    return Task(model, batches, nn.CrossEntropyLoss())


def _resnet50(num_steps: int, is_small: bool) -> Task:
    from torchvision.models import resnet50

    return _images(resnet50(num_classes=10), num_steps, *((4, 64) if is_small else (32, 224)))


def _vit(num_steps: int, is_small: bool) -> Task:
    from torchvision.models import VisionTransformer, vit_b_16

    if is_small:
        return _images(VisionTransformer(64, 16, 2, 4, 64, 128, num_classes=10), num_steps, 4, 64)
    return _images(vit_b_16(num_classes=10), num_steps, 16, 224)
