"""Whole steps of one model, run in several ways that take turns."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled_steps import cpu_cluster
from eager_steps import Mixture, bitwise, snapshot, token_batches
from torch import nn

from placewise.core.errors import ModelError, PlacewiseError
from placewise.core.plan import Plan, digest_of_graph
from placewise.core.problem import NOWHERE, Problem
from placewise.experiments.bench import bench_speed
from placewise.experiments.bench.bench_speed import (
    EAGER,
    OURS,
    StepSpeed,
    checkpoint_blocks,
    eager_step,
    prepare_way,
)
from placewise.graph_capture.training_step import TrainingStep
from placewise.models import load_graph
from placewise.rewrite.augmented_graph import add_options

SMALL = "rnnlm:layers=1,hidden=4,steps=2,batch=2,vocab=5"


def test_eager_and_placewise_train_the_same_step(tmp_path: Path) -> None:
    """The first losses are of the same weights and the same batch; the page has a line for the model."""
    page = tmp_path / "speed.md"
    found = StepSpeed((SMALL,), ways=(EAGER, OURS), rounds=2, output=str(page)).run()
    assert found.warnings == ()
    rows = found.data["speed"]
    assert [row["way"] for row in rows] == [EAGER, OURS]
    (line,) = [line for line in page.read_text().splitlines() if line.startswith(f"| `{SMALL}` |")]
    assert line.endswith(f"| {rows[1]['time / eager']:.2f}, {rows[1]['memory / eager']:.2f} |")
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
        EAGER: [("ready", None), ("loss", 1.0), ("seconds", 2.0), ("seconds", 4.0), ("peak", 2**21)],
        OURS: [("ready", None), ("loss", 1.0), ("seconds", 1.5), ("seconds", 1.5), ("peak", 2**20)],
        "torch.compile": [("ready", None), ("loss", 1.0), ("seconds", 1.0)],
    }

    @contextmanager
    def started(model: str, way: str, *_: Any) -> Iterator[bench_speed._Runner]:
        yield bench_speed._Runner(_Connection(steps[way]))  # type: ignore[arg-type]

    monkeypatch.setattr(bench_speed, "started", started)
    found = StepSpeed((SMALL,), ways=(EAGER, OURS, "torch.compile"), rounds=2).run()
    eager, ours, dead = found.data["speed"]
    assert (eager["ms"], eager["peak MiB"]) == (3000, 2)
    assert (ours["time / eager"], ours["memory / eager"]) == (0.5, 0.5)
    assert dead["ms"] == "-"
    assert found.warnings == (f"{SMALL}, torch.compile: its process ended; perhaps there is too little memory",)


def test_models_are_prepared_together_and_measured_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three models start at once; each one's processes end before the next model's first question."""
    events: list[str] = []

    class Talking(_Connection):
        def __init__(self, model: str) -> None:
            super().__init__([("ready", None), ("loss", 1.0), ("seconds", 1.0), ("peak", 1)])
            self.model = model

        def send(self, question: str) -> None:
            events.append(f"{question} {self.model}")

    @contextmanager
    def started(model: str, *_: Any) -> Iterator[bench_speed._Runner]:
        events.append(f"start {model}")
        yield bench_speed._Runner(Talking(model))  # type: ignore[arg-type]
        events.append(f"end {model}")

    monkeypatch.setattr(bench_speed, "started", started)
    models = ("nmt", "gpt", "rnnlm")
    rows = StepSpeed(models, ways=(EAGER,), rounds=1, at_once=2).run().data["speed"]
    assert [row["model"] for row in rows] == list(models)
    measured = [[f"{event} {model}" for event in ("warm-up", "step", "peak", "end")] for model in models]
    assert events == ["start nmt", "start gpt", *measured[0], *measured[1], "start rnnlm", *measured[2]]


def test_kernels_of_a_model_that_can_not_be_run_are_a_problem_and_no_row() -> None:
    refused, fine = (
        bench_speed._Runner(_Connection(answers))  # type: ignore[arg-type]
        for answers in ([("problem", "no kernels")], [("loss", 1.0), ("kernels", {})])
    )
    assert bench_speed.compare_kernels("m", {EAGER: refused, OURS: fine}) == []
    assert refused.problem == "no kernels"


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


class Sums(nn.Module):
    """Two blocks in a list of lists, and a layer that is none."""

    def __init__(self) -> None:
        super().__init__()
        block = [nn.Sequential(Mixed()), nn.Sequential(Mixed())]
        self.stages = nn.ModuleList([nn.Sequential(*block), nn.Linear(3, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class Mixed(nn.Module):
    """A block that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.runs = nn.Linear(3, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        made: torch.Tensor = self.inner(x).tanh()
        return made


def test_blocks_are_computed_again() -> None:
    model = Sums()
    assert checkpoint_blocks(model) == 2
    model(torch.ones(2, 3)).sum().backward()
    assert [module.runs for module in model.modules() if isinstance(module, Mixed)] == [2, 2]
    with pytest.raises(ModelError, match="no blocks"):
        checkpoint_blocks(nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_ways_that_spare_memory_train_the_same_step(tmp_path: Path) -> None:
    """With a plan that leaves half of the options nowhere; its cluster is in the plan."""
    model = "gpt:layers=2,hidden=8,heads=2,length=4,batch=2,vocab=7"
    graph = add_options(load_graph(model)).graph
    problem = Problem.of(graph, cpu_cluster(1))
    placement = np.where(problem.optional & (np.arange(problem.num_groups) % 2 > 0), NOWHERE, 0)
    plan = Plan(
        problem.expand(placement), graph_digest=digest_of_graph(graph), rewrites=graph.rewrites, machine=problem.cluster
    )
    plan.save(tmp_path / "plan.json")
    ways = (EAGER, "checkpointing", "save-on-cpu", "plan")
    losses = [float(prepare_way(model, way, "cpu", 0, str(tmp_path / "plan.json")).run()) for way in ways]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ways": ("eager", "plan")}, "--plan: give the plan of one MODEL, and `plan` among the --ways"),
        ({"models": ("rnnlm",), "plan": "no-such-plan.json"}, "no-such-plan.json"),
        ({"ways": ("eagre",)}, "--ways: there is no way 'eagre' on a cpu: did you mean 'eager'"),
        ({"models": ("no-such-model",)}, "no-such-model"),
        ({"models": ("step_that_is_not_there:step",)}, "No module named 'step_that_is_not_there'"),
        ({"models": ("operator:neg",), "ways": (EAGER,)}, "model 'operator:neg': TypeError"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlacewiseError, match=words):
        StepSpeed(**options).run()
