"""Plain convolutional networks: ResNet and the CIFAR-10 network of the TensorFlow tutorial."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from placewise.graph_capture.training_step import TrainingStep
from placewise.zoo.options import Pixels, violation

STAGE_BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}

EXPANSION = 4  # Output channels of a bottleneck per inner channel.


class Bottleneck(nn.Module):
    """A residual block of 1x1, 3x3 and 1x1 convolutions, with the stride in the 3x3 one."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = channels * EXPANSION
        self.conv1 = nn.Conv2d(inputs, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:  # [batch, inputs, h, w] -> [batch, 4 channels, h / stride, w / stride]
        y = self.relu(self.bn1(self.conv1(x)))  # [batch, channels, h, w]
        y = self.relu(self.bn2(self.conv2(y)))  # [batch, channels, h / stride, w / stride]
        y = self.bn3(self.conv3(y))  # [batch, 4 channels, h / stride, w / stride]
        out: Tensor = self.relu(y + self.shortcut(x))
        return out


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks, global average pooling and a linear classifier."""

    def __init__(self, stage_blocks: tuple[int, ...], num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs, stages = 64, []
        for stage, num_blocks in enumerate(stage_blocks):
            channels = 64 * 2**stage
            blocks = [Bottleneck(inputs, channels, stride=1 if stage == 0 else 2)]
            inputs = channels * EXPANSION
            blocks += [Bottleneck(inputs, channels, stride=1) for _ in range(num_blocks - 1)]
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:  # [batch, 3, h, w] -> [batch, classes]
        x = self.pool(self.relu(self.bn1(self.conv1(images))))  # [batch, 64, h / 4, w / 4]
        x = self.stages(x)  # [batch, 2048, h / 32, w / 32]
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class CifarCnn(nn.Module):
    """Two convolutions with local response normalization, then three linear layers."""

    def __init__(self, image: int) -> None:
        super().__init__()
        # The tutorial's alpha of 0.001 / 9 multiplies a sum over 9 neighbours; torch's multiplies their mean.
        self.conv1 = nn.Conv2d(3, 64, 5, padding=2)
        self.pool1 = nn.MaxPool2d(3, stride=2, padding=1)
        self.norm1 = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        self.norm2 = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)
        self.pool2 = nn.MaxPool2d(3, stride=2, padding=1)
        side = -(-image // 4)  # Each pooling halves the side, rounding up.
        self.fc1 = nn.Linear(64 * side * side, 384)
        self.fc2 = nn.Linear(384, 192)
        self.head = nn.Linear(192, 10)

    def forward(self, images: Tensor) -> Tensor:  # [batch, 3, h, w] -> [batch, 10]
        x = self.norm1(self.pool1(F.relu(self.conv1(images))))  # [batch, 64, h / 2, w / 2]
        x = self.pool2(self.norm2(F.relu(self.conv2(x))))  # [batch, 64, h / 4, w / 4]
        x = F.relu(self.fc1(x.flatten(1)))  # [batch, 384]
        x = F.relu(self.fc2(x))  # [batch, 192]
        logits: Tensor = self.head(x)
        return logits


def resnet(
    *, depth: Literal[50, 101, 152, 200] = 50, batch: int = 32, image: Pixels = 224, classes: int = 1000
) -> TrainingStep:
    """ResNet (He et al., 2016), with the stride in the 3x3 convolution as in torchvision.

    ResNet-200 has the blocks of He et al. 2016b, without their pre-activation. SGD as in the paper: learning rate 0.1,
    momentum 0.9, weight decay 1e-4.
    """
    # Batch normalization needs two values per channel, and 32 pixels shrink to one.
    if batch == 1 and image < 33:
        raise violation("resnet", "image", "be at least 33 for a (micro-)batch of 1", image)
    model = ResNet(STAGE_BLOCKS[depth], classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=False)
    images = torch.zeros(batch, 3, image, image)  # [batch, 3, image, image]
    labels = torch.zeros(batch, dtype=torch.long)  # [batch]
    return TrainingStep(model, F.cross_entropy, optimizer, (images, labels))


def cifar_cnn(*, batch: int = 128, image: Pixels = 24) -> TrainingStep:
    """The CIFAR-10 network of the TensorFlow tutorial, which Spotlight (Gao et al., ICML 2018) places.

    Spotlight does not state the settings; these are the tutorial's: 24x24 crops of the 32x32 images, batch 128,
    gradient descent with learning rate 0.1 and no momentum, weight decay 0.004 on the two hidden linear layers.
    """
    model = CifarCnn(image)
    decayed = [model.fc1.weight, model.fc2.weight]
    others = [p for p in model.parameters() if all(p is not weight for weight in decayed)]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.004}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.1, foreach=False)
    images = torch.zeros(batch, 3, image, image)  # [batch, 3, image, image]
    labels = torch.zeros(batch, dtype=torch.long)  # [batch]
    return TrainingStep(model, F.cross_entropy, optimizer, (images, labels))
