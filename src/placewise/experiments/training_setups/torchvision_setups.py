"""Setups with models of torchvision, as its reference scripts train them: classification, segmentation, flow, video."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placewise.experiments.training_setups import optimizer_recipes as recipes
from placewise.experiments.training_setups.training_setup import NUM_STEPS, OptimizerRecipe, Setup, StepOptions, Task

CLASSES = 5


def _models() -> Any:
    """Returns torchvision's models, when a setup needs them."""
    import torchvision

    return torchvision.models


# --- batches and losses ---


def _images(size: int, rows: int) -> list[Any]:
    return [(torch.randn(rows, 3, size, size), torch.randint(CLASSES, (rows,))) for _ in range(NUM_STEPS)]


def _maps(size: int = 64, rows: int = 2) -> list[Any]:
    """Returns images with a class for each pixel; 255 is no class."""
    batches = []
    for _ in range(NUM_STEPS):
        target = torch.randint(CLASSES, (rows, size, size))
        batches.append((torch.randn(rows, 3, size, size), target.masked_fill(torch.rand(target.shape) < 0.1, 255)))
    return batches


def _clips() -> list[Any]:
    return [(torch.randn(2, 3, 4, 16, 16), torch.randint(CLASSES, (2,))) for _ in range(NUM_STEPS)]


def _frames() -> list[Any]:
    return [
        ((torch.rand(1, 3, 128, 128), torch.rand(1, 3, 128, 128)), torch.randn(1, 2, 128, 128)) for _ in range(NUM_STEPS)
    ]


def _smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


def _auxiliary_loss(output: Any, target: Tensor) -> Tensor:
    """Returns the loss of a network with one or two auxiliary heads."""
    main, *others = output
    loss = F.cross_entropy(main, target)
    for other in others:
        loss = loss + 0.3 * F.cross_entropy(other, target)
    return loss


def _pixel_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Returns the reference script's loss of segmentation, with the auxiliary head if there is one."""
    losses = {name: F.cross_entropy(logits, target, ignore_index=255) for name, logits in output.items()}
    return losses["out"] + 0.5 * losses["aux"] if "aux" in losses else losses["out"]


def _flow_loss(predictions: list[Tensor], flow: Tensor) -> Tensor:
    """Returns RAFT's loss: later predictions weigh more."""
    weights = [0.8 ** (len(predictions) - i - 1) for i in range(len(predictions))]
    return torch.stack([w * (p - flow).abs().mean() for w, p in zip(weights, predictions, strict=True)]).sum()


# --- models ---


def _setup(
    name: str,
    model: str,
    optimizer: OptimizerRecipe,
    make: Callable[[Any], nn.Module],
    extras: str = "",
    size: int = 32,
    rows: int = 4,
    batches: Callable[[], list[Any]] | None = None,
    loss_fn: Callable[..., Tensor] = F.cross_entropy,
    channels_last: bool = False,
    **options: Any,
) -> Setup:
    def build() -> Task:
        built, given = make(_models()).train(), batches() if batches else _images(size, rows)
        if channels_last:
            built = built.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            given = [(images.to(memory_format=torch.channels_last), target) for images, target in given]
        return Task(built, given, loss_fn)

    words = ", ".join(filter(None, [extras, "channels_last" if channels_last else ""]))
    return Setup(name, "torchvision", model, optimizer, build, StepOptions(**options), extras=words)


def _efficientnet(models: Any) -> nn.Module:
    block = models.efficientnet.MBConvConfig
    blocks = [block(1, 3, 1, 8, 8, 1, 1.0, 1.0), block(4, 3, 2, 8, 16, 2, 1.0, 1.0)]
    built: nn.Module = models.EfficientNet(blocks, 0.2, stochastic_depth_prob=0.2, num_classes=CLASSES, last_channel=32)
    return built


def _convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    built: nn.Module = models.ConvNeXt([block(8, 16, 1), block(16, None, 2)], 0.2, num_classes=CLASSES)
    return built


def _swin(models: Any, version: int) -> nn.Module:
    parts = models.swin_transformer
    kinds = {"block": parts.SwinTransformerBlockV2, "downsample_layer": parts.PatchMergingV2} if version == 2 else {}
    sizes = {"patch_size": [2, 2], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    built: nn.Module = models.SwinTransformer(**sizes, stochastic_depth_prob=0.2, num_classes=CLASSES, **kinds)
    return built


def _video(models: Any) -> nn.Module:
    parts = models.video.resnet
    built: nn.Module = models.video.VideoResNet(
        parts.BasicBlock, [parts.Conv3DSimple] * 4, [1, 1, 1, 1], parts.BasicStem, num_classes=CLASSES
    )
    return built


class Flow(nn.Module):
    """RAFT with few updates."""

    def __init__(self, models: Any) -> None:
        super().__init__()
        self.raft = models.optical_flow.raft_small()

    def forward(self, first: Tensor, second: Tensor) -> list[Tensor]:
        flows: list[Tensor] = self.raft(first, second, num_flow_updates=2)
        return flows


class Detector(nn.Module):
    """RetinaNet, which finds its anchors' objects in data-dependent ways."""

    def __init__(self, models: Any) -> None:
        super().__init__()
        make = models.detection.retinanet_resnet50_fpn
        self.detector = make(weights=None, weights_backbone=None, num_classes=4, min_size=64, max_size=64)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        targets = [{"boxes": box, "labels": label} for box, label in zip(boxes, labels, strict=True)]
        losses: dict[str, Tensor] = self.detector(list(images), targets)
        return torch.stack(list(losses.values())).sum()


def _detection() -> Task:
    box = torch.tensor([[[4.0, 4.0, 40.0, 40.0]], [[10.0, 8.0, 30.0, 50.0]]])
    batches = [(torch.rand(2, 3, 64, 64), box, torch.randint(1, 4, (2, 1))) for _ in range(NUM_STEPS)]
    return Task(Detector(_models()), batches)


BF16 = torch.bfloat16
REFERENCE = OptimizerRecipe(
    "SGD, momentum, step schedule",
    lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4),
    lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1),
)

# fmt: off
SETUPS = (
    _setup("resnet18", "resnet18", REFERENCE, lambda m: m.resnet18(num_classes=CLASSES)),
    _setup("resnet18-autocast", "resnet18", recipes.NESTEROV, lambda m: m.resnet18(num_classes=CLASSES), size=64,
           channels_last=True, autocast=BF16, loss_fn=_smoothed),
    _setup("resnext", "ResNeXt", recipes.MOMENTUM_ONE_CYCLE,
           lambda m: m.ResNet(m.resnet.Bottleneck, [1, 1, 1, 1], CLASSES, groups=4, width_per_group=4), outputs=True),
    _setup("densenet", "DenseNet", recipes.ADAM,
           lambda m: m.DenseNet(4, (2, 2), 8, drop_rate=0.1, num_classes=CLASSES, memory_efficient=True),
           "checkpointed layers"),
    _setup("googlenet", "GoogLeNet", REFERENCE,
           lambda m: m.GoogLeNet(CLASSES, aux_logits=True, init_weights=False), "two auxiliary heads", 64, 2,
           loss_fn=_auxiliary_loss),
    _setup("inception-v3", "Inception v3", recipes.RMSPROP,
           lambda m: m.Inception3(CLASSES, aux_logits=True, init_weights=False), "auxiliary head", 299, 2,
           loss_fn=_auxiliary_loss),
    _setup("efficientnet", "EfficientNet", recipes.RMSPROP_CENTERED, _efficientnet, "stochastic depth"),
    _setup("mobilenet-v2", "mobilenet_v2", REFERENCE, lambda m: m.mobilenet_v2(num_classes=CLASSES, width_mult=0.25),
           size=96, channels_last=True),
    _setup("mobilenet-v3", "mobilenet_v3_small", recipes.RMSPROP,
           lambda m: m.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.5), micro_batches=2),
    _setup("convnext-tv", "ConvNeXt", recipes.ADAMW_COSINE, _convnext, "stochastic depth", loss_fn=_smoothed),
    _setup("swin-tv", "SwinTransformer", recipes.ADAMW_GROUPS, lambda m: _swin(m, 1), "stochastic depth",
           clip_grad_norm=5.0),
    _setup("swin-v2", "SwinTransformer v2", recipes.ADAMW, lambda m: _swin(m, 2), "stochastic depth", autocast=BF16),
    _setup("vit-tv", "VisionTransformer", recipes.ADAMW_COSINE,
           lambda m: m.VisionTransformer(32, 8, 2, 4, 32, 64, dropout=0.1, num_classes=CLASSES), clip_grad_norm=1.0),
    _setup("shufflenet", "shufflenet_v2_x0_5", recipes.NESTEROV, lambda m: m.shufflenet_v2_x0_5(num_classes=CLASSES)),
    _setup("squeezenet", "squeezenet1_1", recipes.ADADELTA, lambda m: m.squeezenet1_1(num_classes=CLASSES), "dropout"),
    _setup("regnet", "regnet_x_400mf", recipes.AMSGRAD, lambda m: m.regnet_x_400mf(num_classes=CLASSES)),
    _setup("deeplab-v3", "deeplabv3_mobilenet_v3_large", REFERENCE,
           lambda m: m.segmentation.deeplabv3_mobilenet_v3_large(weights_backbone=None, num_classes=CLASSES, aux_loss=True),
           "auxiliary head", batches=_maps, loss_fn=_pixel_loss),
    _setup("lraspp", "lraspp_mobilenet_v3_large", recipes.ADAMW,
           lambda m: m.segmentation.lraspp_mobilenet_v3_large(weights_backbone=None, num_classes=CLASSES), batches=_maps,
           loss_fn=_pixel_loss, autocast=BF16),
    _setup("raft", "raft_small", recipes.ADAMW_ONE_CYCLE, Flow, batches=_frames, loss_fn=_flow_loss, clip_grad_norm=1.0),
    _setup("video-resnet", "VideoResNet", REFERENCE, _video, batches=_clips),
    Setup("retinanet", "torchvision", "retinanet_resnet50_fpn", REFERENCE, _detection),
)
# fmt: on
