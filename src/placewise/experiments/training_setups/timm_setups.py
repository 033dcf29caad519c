"""Setups with models, losses and optimizers of timm, as its training script combines them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from placewise.experiments.training_setups import optimizer_recipes as recipes
from placewise.experiments.training_setups.training_setup import NUM_STEPS, OptimizerRecipe, Setup, StepOptions, Task

CLASSES = 5

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}


def _library() -> Any:
    """Returns timm with its parts, when a setup needs it."""
    import timm.data
    import timm.loss
    import timm.optim
    import timm.utils

    return timm


# --- batches and losses ---


def _images(size: int, rows: int = 4) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(rows, 3, size, size), torch.randint(CLASSES, (rows,))) for _ in range(NUM_STEPS)]


def _mixed(size: int) -> list[tuple[Tensor, Tensor]]:
    """Returns images that mixup and cutmix have blended, with soft targets."""
    mix = _library().data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    return [mix(images, target) for images, target in _images(size)]


def _smoothed() -> nn.Module:
    loss: nn.Module = _library().loss.LabelSmoothingCrossEntropy(0.1)
    return loss


def _soft() -> nn.Module:
    loss: nn.Module = _library().loss.SoftTargetCrossEntropy()
    return loss


def _binary() -> nn.Module:
    loss: nn.Module = _library().loss.BinaryCrossEntropy(smoothing=0.1)
    return loss


# --- models ---


def _setup(
    name: str,
    model: str,
    optimizer: OptimizerRecipe,
    config: dict[str, Any],
    size: int = 32,
    loss: Callable[[], nn.Module] = nn.CrossEntropyLoss,
    extras: str = "",
    averages: bool = False,
    checkpoints: bool = False,
    **options: Any,
) -> Setup:
    def build() -> Task:
        built = _library().create_model(model, num_classes=CLASSES, **config)
        if checkpoints:
            built.set_grad_checkpointing()
        batches = _mixed(size) if loss is _soft else _images(size)
        if not averages:
            return Task(built, batches, loss())
        average = _library().utils.ModelEmaV3(built, decay=0.9)
        return Task(built, batches, loss(), lambda: average.update(built), {"average": average.module})

    losses = {_smoothed: "label smoothing", _soft: "mixup and cutmix", _binary: "binary loss"}
    rate = config.get("drop_path_rate")
    words = [
        extras,
        losses.get(loss, ""),
        f"drop path {rate}" if rate else "",
        "average of weights (EMA)" if averages else "",
    ]
    words += ["gradient checkpointing" if checkpoints else ""]
    return Setup(name, "timm", model, optimizer, build, StepOptions(**options), extras=", ".join(filter(None, words)))


def _theirs(name: str, words: str, schedule: Any = None, **options: Any) -> OptimizerRecipe:
    """Returns the recipe of an optimizer by timm's name, with its parameter groups."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = _library().optim.create_optimizer_v2(model, opt=name, **options)
        return optimizer

    return OptimizerRecipe(words, make, schedule)


LAMB = _theirs("lamb", "LAMB of timm", lr=5e-3, weight_decay=0.02)
LION = _theirs("lion", "Lion of timm", lr=1e-4, weight_decay=0.1)
RMSPROP_TF = _theirs("rmsproptf", "RMSpropTF of timm", lr=1e-3, weight_decay=1e-5, momentum=0.9)
NADAMW = _theirs("nadamw", "NAdamW of timm", lr=1e-3, weight_decay=0.05)
ADAN = _theirs("adan", "Adan of timm", lr=1e-3, weight_decay=0.02)
ADABELIEF = _theirs("adabelief", "AdaBelief of timm", lr=1e-3, weight_decay=1e-2)
MUON = _theirs("muon", "Muon of timm", lr=1e-3, weight_decay=0.05)
SGDW = _theirs("sgdw", "SGDW of timm", lr=0.05, weight_decay=1e-4, momentum=0.9)
LAYER_DECAY = _theirs(
    "adamw", "AdamW, layer decay", recipes.warm_up_and_cosine, lr=1e-3, weight_decay=0.05, layer_decay=0.75
)
BF16, FP16 = torch.bfloat16, torch.float16

# fmt: off
SETUPS = (
    _setup("timm-resnet", "resnet10t", recipes.NESTEROV, {}, 64, _smoothed),
    _setup("timm-nf-resnet", "nf_resnet26", SGDW, {}, clip_grad_value=0.1, extras="standardized weights"),
    _setup("timm-efficientnet", "efficientnet_lite0", RMSPROP_TF, {"drop_path_rate": 0.2}, averages=True, loss=_smoothed),
    _setup("timm-convnext", "convnext_atto", LAYER_DECAY,
           {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32), "drop_path_rate": 0.1}, 64, _soft, averages=True),
    _setup("timm-convnext-autocast", "convnext_atto", recipes.ADAMW_COSINE,
           {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}, 64, _smoothed, autocast=BF16, clip_grad_norm=1.0),
    _setup("timm-vit", "vit_tiny_patch16_224", recipes.ADAMW_GROUPS, {**TINY, "drop_path_rate": 0.1}, loss=_soft,
           autocast=BF16, clip_grad_norm=1.0),
    _setup("timm-vit-float16", "vit_tiny_patch16_224", recipes.ADAMW_COSINE, {**TINY, "proj_drop_rate": 0.1}, autocast=FP16,
           grad_scale=2.0**16, clip_grad_norm=1.0),
    _setup("timm-deit3", "deit3_small_patch16_224", LAMB, {**TINY, "drop_path_rate": 0.1}, loss=_binary,
           extras="layer scale"),
    _setup("timm-eva02", "eva02_tiny_patch14_224", LAYER_DECAY, {**TINY, "drop_path_rate": 0.1}, checkpoints=True),
    _setup("timm-beit", "beit_base_patch16_224", recipes.ADAMW, TINY, extras="relative positions", micro_batches=2),
    _setup("timm-swin", "swin_tiny_patch4_window7_224", NADAMW,
           {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4),
            "drop_path_rate": 0.2}, loss=_smoothed, clip_grad_norm=5.0),
    _setup("timm-maxvit", "maxvit_rmlp_pico_rw_256", recipes.ADAMW, {"img_size": 64, "drop_path_rate": 0.1}, 64,
           autocast=BF16),
    _setup("timm-mobilenet-v3", "mobilenetv3_small_050", RMSPROP_TF, {"drop_rate": 0.2}, 64, averages=True),
    _setup("timm-mobilenet-v4", "mobilenetv4_conv_small_035", LION, {"drop_path_rate": 0.1}, 64, _smoothed),
    _setup("timm-regnet", "regnety_002", recipes.MOMENTUM_ONE_CYCLE, {}, 64),
    _setup("timm-gmlp", "gmlp_ti16_224", ADAN, {"img_size": 32}),
    _setup("timm-xcit", "xcit_nano_12_p16_224", ADABELIEF, {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4}),
    _setup("timm-davit", "davit_tiny", MUON,
           {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (2, 4), "window_size": 4}, outputs=True),
    _setup("timm-mobilevit", "mobilevit_xxs", recipes.ADAMW_GROUPS, {}, 64, _smoothed, clip_grad_norm=1.0),
    _setup("timm-fastvit", "fastvit_t8", recipes.ADAMW_COSINE, {"drop_path_rate": 0.1}, 64),
    _setup("timm-edgenext", "edgenext_xx_small", recipes.ADAMAX, {"drop_path_rate": 0.1}, 64),
)
# fmt: on
