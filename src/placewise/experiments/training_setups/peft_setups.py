"""Setups with adapters of peft on models of transformers: most parameters are frozen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from placewise.experiments.training_setups import optimizer_recipes as recipes
from placewise.experiments.training_setups.training_setup import OptimizerRecipe, Setup, StepOptions, Task
from placewise.experiments.training_setups.transformers_setups import (
    DECODER,
    IMAGE,
    TEXT,
    classified_texts,
    image_batches,
    next_tokens,
)

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def _libraries() -> tuple[Any, Any]:
    """Returns peft and transformers, when a setup needs them."""
    import peft
    import transformers

    return peft, transformers


def _llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    transformers = _libraries()[1]
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)).to(dtype)
    return model


def _bert() -> nn.Module:
    transformers = _libraries()[1]
    model: nn.Module = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT))
    return model


def _vit() -> nn.Module:
    transformers = _libraries()[1]
    model: nn.Module = transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE))
    return model


def _setup(
    name: str,
    model: str,
    optimizer: OptimizerRecipe,
    base: Callable[[], nn.Module],
    adapter: Callable[[Any], Any],
    batches: Callable[[], list[Any]] = next_tokens,
    extras: str = "",
    checkpoints: bool = False,
    weights: torch.dtype = torch.float32,
    **options: Any,
) -> Setup:
    def build() -> Task:
        peft = _libraries()[0]
        built: Any = base()
        if checkpoints:
            built.gradient_checkpointing_enable()
            built.enable_input_require_grads()
        return Task(peft.get_peft_model(built, adapter(peft)).train(), batches())

    words = ", ".join(filter(None, [extras, "gradient checkpointing" if checkpoints else ""]))
    return Setup(name, "peft", model, optimizer, build, StepOptions(**options), weights, words)


BF16 = torch.bfloat16

# fmt: off
SETUPS = (
    _setup("lora", "LoRA on Llama", recipes.ADAMW_COSINE, _llama,
           lambda peft: peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.05, target_modules=ATTENTION),
           clip_grad_norm=0.3),
    _setup("lora-bfloat16", "LoRA on Llama", recipes.ADAMW_FUSED, lambda: _llama(BF16),
           lambda peft: peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"),
           extras="frozen bfloat16 base, float32 adapters", autocast=BF16),
    _setup("lora-checkpointed", "LoRA on Llama", recipes.ADAMW, _llama,
           lambda peft: peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=ATTENTION),
           checkpoints=True, micro_batches=2),
    _setup("dora", "DoRA on Llama", recipes.ADAMW, _llama,
           lambda peft: peft.LoraConfig(task_type="CAUSAL_LM", r=4, use_dora=True, target_modules=ATTENTION)),
    _setup("rslora-plus", "LoRA on ViT", recipes.ADAMW, _vit,
           lambda peft: peft.LoraConfig(r=4, use_rslora=True, target_modules=["q_proj", "v_proj"],
                                        modules_to_save=["classifier"]), image_batches, "trained classifier"),
    _setup("ia3", "IA3 on Llama", recipes.ADAM, _llama,
           lambda peft: peft.IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"],
                                       feedforward_modules=["down_proj"])),
    _setup("vera", "VeRA on Llama", recipes.ADAMW, _llama,
           lambda peft: peft.VeraConfig(r=4, target_modules=["q_proj"])),
    _setup("pissa", "LoRA on Llama", recipes.ADAMW, _llama,
           lambda peft: peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights="pissa", target_modules=ATTENTION),
           extras="begins at singular vectors", autocast=BF16),
    _setup("boft", "BOFT on Llama", recipes.ADAMW, _llama,
           lambda peft: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"]), extras="butterfly factors"),
    _setup("prefix-tuning", "prefix tuning of Llama", recipes.ADAMW, _llama,
           lambda peft: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)),
    _setup("prompt-tuning", "prompt tuning of Llama", recipes.ADAMW, _llama,
           lambda peft: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), outputs=True),
    _setup("lokr", "LoKr on BERT", recipes.ADAGRAD, _bert,
           lambda peft: peft.LoKrConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]), classified_texts,
           "trained classifier"),
    _setup("oft", "OFT on BERT", recipes.ADAMW, _bert,
           lambda peft: peft.OFTConfig(task_type="SEQ_CLS", oft_block_size=4, target_modules=["query", "value"]),
           classified_texts, "orthogonal matrices"),
)
# fmt: on
