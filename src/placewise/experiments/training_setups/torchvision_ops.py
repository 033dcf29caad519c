"""torchvision beside a PyTorch that it was not built for: a CUDA build beside a CPU build, for example.

It can't load its compiled ops then, and importing it fails, because it describes two ops that don't exist. timm, and most
models of transformers, import it too. With the two ops declared, everything works that does not call them.
"""

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

OPS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


@cache
def declare_missing_ops() -> None:
    """Declares torchvision's ops if it is installed and can't load them; call it before torchvision is imported."""
    found = find_spec("torchvision")
    if "torchvision" in sys.modules or found is None or found.origin is None:
        return
    import torch

    try:
        for library in Path(found.origin).parent.glob("_C.*"):
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError:
        for name in OPS:
            torch.library.define(f"torchvision::{name}", SCHEMA)
