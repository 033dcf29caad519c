"""The benchmark of steps that may use only a part of a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from placewise.core.errors import InputError
from placewise.core.plan import Plan
from placewise.experiments.bench.bench_memory import LimitedMemory, LimitedStep, _row, memory_page
from placewise.experiments.bench.bench_speed import EAGER, PLAN, SHARDED, prepare_way

SMALL = "gpt:layers=2,hidden=16,heads=2,length=4,batch=4,vocab=9,dropout=0,micro_batches=2"


def test_the_page_has_what_was_predicted_beside_what_was_measured(tmp_path: Path) -> None:
    """Eager takes 10 ms in 3 GiB; ours may use 2 GiB, takes 11 ms for 10.5 predicted, and 1,950 MiB for 1,900."""
    step = LimitedStep("resnet", "resnet:batch=32", 2 * 2**30, ())
    file = tmp_path / "plan.json"
    Plan(("gpu:0",), step_seconds=0.0105, peak_bytes={"gpu:0": 1900 * 2**20}).save(file)
    rows: list[dict[str, Any]] = [
        {"model": step.model, "way": EAGER, "ms": 10.0, "peak MiB": 3072.0, "time / eager": 1.0, "memory / eager": 1.0},
        {"model": step.model, "way": "save-on-cpu", "ms": "-", "peak MiB": "-", "time / eager": "-", "memory / eager": "-"},
        {"model": step.model, "way": PLAN, "ms": 11.0, "peak MiB": 1950.0, "time / eager": 1.1, "memory / eager": 0.63},
    ]
    lines = memory_page([_row(step, row, file) for row in rows], 9)
    assert lines[-3:] == [
        "| `resnet:batch=32` | 2 GiB | eager | 10 ms | 1.00 | - | 3,072 MiB | - |",
        "|  |  | save-on-cpu | - | - | - | - | - |",
        "|  |  | plan | 11 ms | 1.10 | 10.5 ms | 1,950 MiB | 1,900 MiB |",
    ]


def test_what_can_not_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match=r"there is no step 'alexnet': the steps are resnet, "):
        LimitedMemory(("alexnet",)).run()
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="finds no GPU here"):
            LimitedMemory().run()


def test_fully_sharded_steps_train_like_eager_ones() -> None:
    """With checkpointed blocks, two groups of parameters and two micro-batches; on a CPU nothing is offloaded."""
    losses = [
        [float(step.run()) for _ in range(3)] for step in (prepare_way(SMALL, way, "cpu", 0) for way in (EAGER, SHARDED))
    ]
    assert losses[0] == losses[1]
    torch.distributed.destroy_process_group()
