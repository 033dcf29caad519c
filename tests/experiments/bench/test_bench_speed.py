"""Whole steps of one model, run in several ways that take turns."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from eager_steps import Mixture, bitwise, snapshot, token_batches
from torch import nn

from placewise.core.errors import InputError
from placewise.experiments.bench import bench_speed
from placewise.experiments.bench.bench_speed import EAGER, OURS, StepSpeed, compare_ways, eager_step
from placewise.graph_capture.training_step import TrainingStep

SMALL = "rnnlm:layers=1,hidden=4,steps=2,batch=2,vocab=5"


def test_eager_and_placewise_train_the_same_step() -> None:
    """The first losses are of the same weights and the same batch."""
    rows, problems = compare_ways(SMALL, (EAGER, OURS), "cpu", 2)
    assert problems == []
    assert [row["way"] for row in rows] == [EAGER, OURS]
    assert rows[0]["first loss"] == pytest.approx(rows[1]["first loss"], rel=1e-6)
    assert (rows[0]["time / eager"], rows[0]["memory / eager"]) == (1.0, 1.0)
    assert all(row["ms"] > 0 and row["peak MiB"] > 0 for row in rows)


class _Connection:
    """Stands in for a process: its answers, then its end."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def send(self, question: str) -> None:
        pass

    def recv(self) -> Any:
        if not self.answers:
            raise EOFError
        return self.answers.pop(0)


def test_a_way_that_fails_has_no_figures_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager takes 2 s and 4 s (median 3), with 2 MiB; ours 1.5 s twice, with 1 MiB; the third one's process dies."""
    steps = {
        EAGER: [("loss", 1.0), ("seconds", 2.0), ("seconds", 4.0), ("peak", 2**21)],
        OURS: [("loss", 1.0), ("seconds", 1.5), ("seconds", 1.5), ("peak", 2**20)],
        "torch.compile": [("loss", 1.0), ("seconds", 1.0)],
    }

    @contextmanager
    def started(model: str, way: str, *_: Any) -> Iterator[bench_speed._Runner]:
        yield bench_speed._Runner(_Connection(steps[way]))  # type: ignore[arg-type]

    monkeypatch.setattr(bench_speed, "_started", started)
    found = StepSpeed((SMALL,), ways=(EAGER, OURS, "torch.compile"), rounds=2).run()
    eager, ours, dead = found.data["speed"]
    assert (eager["ms"], eager["peak MiB"]) == (3000, 2)
    assert (ours["time / eager"], ours["memory / eager"]) == (0.5, 0.5)
    assert dead["ms"] == "-"
    assert found.warnings == (f"{SMALL}, torch.compile: its process ended; perhaps there is too little memory",)


def test_the_eager_step_does_what_the_step_describes() -> None:
    """Two micro-batches, with clipping: the same bits as the loop written out here."""
    torch.manual_seed(0)
    (batch,) = token_batches(count=1)
    models = [Mixture(), Mixture()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    step = TrainingStep(models[0], nn.CrossEntropyLoss(), optimizers[0], batch, micro_batches=2, clip_grad_norm=0.5)
    torch.manual_seed(1)
    eager_step(step, batch, "cpu")()
    torch.manual_seed(1)
    for tokens, target in zip(*(part.chunk(2) for part in batch), strict=True):
        (nn.functional.cross_entropy(models[1](tokens), target) / 2).backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(models[1].parameters(), 0.5)
    optimizers[1].step()
    found, expected = (snapshot(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True))
    assert all(bitwise(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ways": ("eagre",)}, "--ways: there is no way 'eagre' on a cpu: did you mean 'eager'"),
        ({"models": ("no-such-model",)}, "no-such-model"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        StepSpeed(**options).run()
