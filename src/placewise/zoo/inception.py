"""Inception-V3 (Szegedy et al., Rethinking the Inception Architecture, 2016), layer by layer as in torchvision."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from placewise.graph_capture.training_step import TrainingStep
from placewise.zoo.options import Pixels, violation

AUX_WEIGHT = 0.4  # The weight of the auxiliary loss in torchvision's reference training.

# (auxiliary head, batch of 1) -> the smallest image: below it a layer's kernel is larger than its input or, with a batch of
# 1, batch normalization has a single value per channel.
SMALLEST_IMAGE = {(False, False): 75, (False, True): 107, (True, False): 299, (True, True): 347}


class Conv(nn.Module):
    """A convolution without bias, batch normalization and ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:  # [batch, inputs, h, w] -> [batch, outputs, h', w']
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Branches(nn.Module):
    """Modules that read the same input; their outputs are concatenated along the channels. Branches can be nested."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        for name, branch in branches.items():
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:  # [batch, inputs, h, w] -> [batch, sum of outputs, h', w']
        return torch.cat([branch(x) for branch in self.children()], 1)


def inception_a(inputs: int, pooled: int) -> Branches:
    """Returns figure 5 of the paper, with 224 + pooled output channels."""
    return Branches(
        branch1x1=Conv(inputs, 64, 1),
        branch5x5=nn.Sequential(Conv(inputs, 48, 1), Conv(48, 64, 5, padding=2)),
        branch3x3dbl=nn.Sequential(Conv(inputs, 64, 1), Conv(64, 96, 3, padding=1), Conv(96, 96, 3, padding=1)),
        branch_pool=nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Conv(inputs, pooled, 1)),
    )


def inception_b(inputs: int) -> Branches:
    """Returns figure 10, which reduces 35x35 to 17x17, with 480 + inputs output channels."""
    return Branches(
        branch3x3=Conv(inputs, 384, 3, stride=2),
        branch3x3dbl=nn.Sequential(Conv(inputs, 64, 1), Conv(64, 96, 3, padding=1), Conv(96, 96, 3, stride=2)),
        branch_pool=nn.MaxPool2d(3, stride=2),
    )


def inception_c(inputs: int, inner: int) -> Branches:
    """Returns figure 6 with n = 7 and 768 output channels."""
    return Branches(
        branch1x1=Conv(inputs, 192, 1),
        branch7x7=nn.Sequential(
            Conv(inputs, inner, 1),
            Conv(inner, inner, (1, 7), padding=(0, 3)),
            Conv(inner, 192, (7, 1), padding=(3, 0)),
        ),
        branch7x7dbl=nn.Sequential(
            Conv(inputs, inner, 1),
            Conv(inner, inner, (7, 1), padding=(3, 0)),
            Conv(inner, inner, (1, 7), padding=(0, 3)),
            Conv(inner, inner, (7, 1), padding=(3, 0)),
            Conv(inner, 192, (1, 7), padding=(0, 3)),
        ),
        branch_pool=nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Conv(inputs, 192, 1)),
    )


def inception_d(inputs: int) -> Branches:
    """Returns the reduction of 17x17 to 8x8, with 512 + inputs output channels."""
    return Branches(
        branch3x3=nn.Sequential(Conv(inputs, 192, 1), Conv(192, 320, 3, stride=2)),
        branch7x7x3=nn.Sequential(
            Conv(inputs, 192, 1),
            Conv(192, 192, (1, 7), padding=(0, 3)),
            Conv(192, 192, (7, 1), padding=(3, 0)),
            Conv(192, 192, 3, stride=2),
        ),
        branch_pool=nn.MaxPool2d(3, stride=2),
    )


def inception_e(inputs: int) -> Branches:
    """Returns figure 7, whose 3x3 convolutions end in branches of 1x3 and 3x1, with 2048 output channels."""

    def fork() -> Branches:
        return Branches(a=Conv(384, 384, (1, 3), padding=(0, 1)), b=Conv(384, 384, (3, 1), padding=(1, 0)))

    return Branches(
        branch1x1=Conv(inputs, 320, 1),
        branch3x3=nn.Sequential(Conv(inputs, 384, 1), fork()),
        branch3x3dbl=nn.Sequential(Conv(inputs, 448, 1), Conv(448, 384, 3, padding=1), fork()),
        branch_pool=nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), Conv(inputs, 192, 1)),
    )


class AuxiliaryHead(nn.Module):
    """A classifier on the last 17x17 features, whose loss has a shorter path to the lower layers."""

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__()
        self.conv0 = Conv(inputs, 128, 1)
        self.conv1 = Conv(128, 768, 5)
        self.fc = nn.Linear(768, num_classes)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 768, 17, 17] -> [batch, classes]
        x = self.conv0(F.avg_pool2d(x, 5, stride=3))  # [batch, 128, 5, 5]
        x = self.conv1(x)  # [batch, 768, 1, 1]
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class InceptionV3(nn.Module):
    """The classification network; in training, with the auxiliary head, it returns (logits, auxiliary logits)."""

    def __init__(self, num_classes: int, auxiliary: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            Conv(3, 32, 3, stride=2),
            Conv(32, 32, 3),
            Conv(32, 64, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            Conv(64, 80, 1),
            Conv(80, 192, 3),
            nn.MaxPool2d(3, stride=2),
        )
        self.mixed5 = nn.Sequential(inception_a(192, 32), inception_a(256, 64), inception_a(288, 64))
        self.mixed6 = nn.Sequential(
            inception_b(288), inception_c(768, 128), inception_c(768, 160), inception_c(768, 160), inception_c(768, 192)
        )
        self.aux = AuxiliaryHead(768, num_classes) if auxiliary else None
        self.mixed7 = nn.Sequential(inception_d(768), inception_e(1280), inception_e(2048))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(2048, num_classes)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # [batch, 3, 299, 299] -> [batch, classes]
        x = self.mixed5(self.stem(images))  # [batch, 288, 35, 35]
        x = self.mixed6(x)  # [batch, 768, 17, 17]
        auxiliary: Tensor | None = self.aux(x) if self.aux is not None and self.training else None
        x = self.mixed7(x)  # [batch, 2048, 8, 8]
        logits: Tensor = self.fc(self.dropout(x.mean((2, 3))))
        return logits if auxiliary is None else (logits, auxiliary)


def classification_loss(output: Tensor | tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Returns the cross entropy of the logits, plus 0.4 of the auxiliary head's if there is one."""
    if isinstance(output, Tensor):
        return F.cross_entropy(output, labels)
    logits, auxiliary = output
    return F.cross_entropy(logits, labels) + AUX_WEIGHT * F.cross_entropy(auxiliary, labels)


def inception_v3(*, batch: int = 32, image: Pixels = 299, classes: int = 1000, aux: bool = True) -> TrainingStep:
    """Inception-V3 with ColocRL's sizes (299x299, batch 32), and RMSprop as in the Inception paper.

    Learning rate 0.045, decay 0.9, epsilon 1, no momentum.
    """
    smallest = SMALLEST_IMAGE[aux, batch == 1]
    if image < smallest:
        head = "with" if aux else "without"
        size = " and a (micro-)batch of 1" if batch == 1 else ""
        raise violation("inception-v3", "image", f"be at least {smallest} {head} the auxiliary head{size}", image)
    model = InceptionV3(classes, aux)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.045, alpha=0.9, eps=1.0, foreach=False)
    images = torch.zeros(batch, 3, image, image)  # [batch, 3, image, image]
    labels = torch.zeros(batch, dtype=torch.long)  # [batch]
    return TrainingStep(model, classification_loss, optimizer, (images, labels))
