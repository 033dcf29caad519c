"""Every model of the zoo at a size that trains in a moment, and batches with random values."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

TINY_ZOO = {
    "inception-v3": "inception-v3:image=75,batch=2,classes=4,aux=false",
    "resnet": "resnet:depth=50,image=32,batch=4,classes=4",
    "cifar-cnn": "cifar-cnn:batch=4",
    "rnnlm": "rnnlm:layers=2,hidden=8,steps=3,batch=4,vocab=11",
    "nmt": "nmt:layers=2,hidden=8,length=3,batch=4,vocab=11",
    "gpt": "gpt:layers=2,hidden=16,heads=2,length=8,batch=4,vocab=13",
    "bert": "bert:layers=2,hidden=16,heads=2,length=8,batch=4,vocab=13",
}


def randomized(batch: Any, generator: torch.Generator | None = None) -> Any:
    """Returns a batch with random images, and tokens and labels of 0 or 1, which every model has; masks stay the same."""

    def draw(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator)
        if tensor.dtype == torch.bool:
            return tensor
        return torch.where(tensor < 0, tensor, torch.randint(0, 2, tensor.shape, generator=generator))

    return tree_map(draw, batch)
