"""Benchmarks that anyone can repeat: `placewise bench`."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from placewise.capture import zoo

CAPTURED = (
    *("inception-v3", "resnet:depth=50", "resnet:depth=200", "cifar-cnn", "rnnlm", "nmt:layers=2", "nmt:layers=8"),
    *("gpt", "gpt:size=xl", "gpt:micro_batches=8", "bert"),
)


@dataclass(frozen=True)
class CaptureFigures:
    """What it took to capture one model."""

    model: str
    num_ops: int
    num_groups: int
    seconds: float  # building the model on the meta device, recording the step, building and checking the graph
    microseconds_per_op: float


def bench_capture(models: tuple[str, ...] = CAPTURED) -> list[dict[str, Any]]:
    """Returns the figures of each model, captured one after the other in this process; torch is loaded before."""
    from placewise.capture.training import capture_step

    capture_step(zoo.build("rnnlm:layers=1,hidden=2,steps=1,batch=1,vocab=2"))  # loads what torch loads late
    figures = []
    for model in models:
        started = time.perf_counter()
        graph = capture_step(zoo.build(model), model).graph
        seconds = time.perf_counter() - started
        per_op = seconds / len(graph.ops) * 1e6
        figures.append(asdict(CaptureFigures(model, len(graph.ops), graph.num_groups, seconds, per_op)))
    return figures
