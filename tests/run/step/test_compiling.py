"""Plans that compile on this machine, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_steps import capture_with_mse, cpu_cluster, plan_by_op, small_training
from torch import nn

import placewise as pw
from placewise.core.errors import ClusterError, ExecutionError, PlacewiseError, PlanError
from placewise.formats.cluster_file import write_cluster

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


def test_a_plan_compiles() -> None:
    model, optimizer, batch = small_training()
    step = capture_with_mse(model, optimizer, batch)
    plan = plan_by_op(step, lambda name: "cpu:1" if name.startswith("2") else "cpu:0")
    train_step = plan.compile(step, cpu_cluster())
    first = train_step(batch)
    assert float(train_step(batch)) < float(first)
    assert {type(s).__name__ for s in train_step.placed.instructions.sequence} == {"RunOp", "CopyTensor", "FreeTensor"}
    with pytest.raises(PlanError, match="there is no device 'cpu:1'"):
        plan.compile(step, cpu_cluster(1))
    with pytest.raises(ExecutionError, match="cuda_graphs: cluster 'cpus' has no GPU"):
        plan.compile(step, cpu_cluster(), cuda_graphs=True)


def test_the_error_says_that_the_machine_was_detected() -> None:
    model, optimizer, batch = small_training()
    step = capture_with_mse(model, optimizer, batch)
    plan = replace(plan_by_op(step, lambda name: "cpu:7"), cluster="my own")
    with pytest.raises(PlanError, match="no cluster was given, so this machine was detected"):
        plan.compile(step)


def test_what_is_not_a_step_is_refused() -> None:
    model, optimizer, batch = small_training()
    step = capture_with_mse(model, optimizer, batch)
    with pytest.raises(
        PlacewiseError, match=re.escape("step must be a captured step (placewise.capture) or a Graph, got a Sequential")
    ):
        pw.place(model, cpu_cluster(), evaluations=1)  # type: ignore[arg-type]
    with pytest.raises(ExecutionError, match=re.escape("step must be a captured step (placewise.capture), got a Graph")):
        pw.place(step, "laptop", evaluations=1).compile(step.graph)
    with pytest.raises(PlacewiseError, match=re.escape("model must be a torch.nn.Module, got a function")):
        pw.capture(lambda x: x, nn.MSELoss(), optimizer, batch)  # type: ignore[arg-type]
    with pytest.raises(PlacewiseError, match=re.escape("optimizer must be a torch.optim.Optimizer or None, got a type")):
        pw.capture(model, nn.MSELoss(), torch.optim.Adam, batch)  # type: ignore[arg-type]


def test_what_is_not_a_cluster_is_refused(tmp_path: Path) -> None:
    model, optimizer, batch = small_training()
    step = capture_with_mse(model, optimizer, batch)
    plan = plan_by_op(step, lambda name: "cpu:0")
    with pytest.raises(ClusterError, match="cluster must be a Cluster, or the name of a preset or a file, got a Sequential"):
        plan.compile(step, model)
    for virtual in (4, "cuda:0=4", {"cuda:0": "4"}):
        with pytest.raises(
            ExecutionError, match=re.escape('virtual must be a dict from GPUs to numbers of slices, as in {"cuda:0"')
        ):
            plan.compile(step, cpu_cluster(), virtual=virtual)  # type: ignore[arg-type]
    write_cluster(cpu_cluster(), tmp_path / "cpus.toml")
    assert plan.compile(step, tmp_path / "cpus.toml")(batch).isfinite()
