"""Plans that are made for CUDA graphs: predicted with their launches wherever the plan goes, and run with them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import graph_data, tensor
from command_line import TINY_CLUSTER_TOML
from hypothesis import assume, given
from hypothesis import strategies as st
from simulated import Step, gpus, random_order, random_placements, steps, takes

import placewise as pw
from placewise.cli import main
from placewise.core.errors import InputError, PlanError
from placewise.formats.cluster_file import parse_cluster
from placewise.formats.plan_file import plan_fields
from placewise.machines.variants import GRAPHED, with_cuda_graphs
from placewise.search.budget import Budget
from placewise.search.planner import Planner
from placewise.search.request import Request
from placewise.simulate.simulator import Simulator

MODEL = "rnnlm:layers=1,hidden=8,steps=2,batch=4,vocab=11"


def test_launches_with_graphs_by_hand() -> None:
    """Launches of 100 s, of ops and copies: the second op begins after three, at 300 s, and takes 1 s.

    With CUDA graphs ops take 2 s, and the copy 200 s, for it ends the first graph: 2 + 200 + 2 + 1 s.
    """
    ops = [takes(1, 0, (), (0,)), takes(1, 1, (0,))]
    problem = Step.of(graph_data([tensor("t", 1)], ops), gpus(2, dispatch=100)).problem
    graphed = replace(problem, cluster=with_cuda_graphs(problem.cluster))
    for of, seconds in ((problem, 301.0), (graphed, 205.0)):
        assert Simulator(of).schedule(np.array([0, 1])).step_seconds == seconds
    assert with_cuda_graphs(graphed.cluster) is graphed.cluster


@given(steps(min_ops=1), st.booleans())
def test_graphs_mean_other_launch_times_and_nothing_else(drawn: tuple[Step, np.random.Generator], costs_more: bool) -> None:
    """What the kernels predict is the reference's step of the plain cluster with these two numbers replaced."""
    step, rng = drawn
    assume(any(device["kind"] == "gpu" for device in step.cluster["devices"]))
    cluster = dict(step.cluster)
    launch = cluster.get("dispatch_seconds", 0.0)
    copy = 1.5 * launch if costs_more else launch
    cluster["copy_dispatch_seconds"] = copy
    plain = Step.of(step.graph, cluster).problem
    (placement,), order = random_placements(plain, rng, 1), random_order(plain, rng)
    graphed = {**cluster, "dispatch_seconds": GRAPHED * launch, "copy_dispatch_seconds": copy + launch}
    expected = Step.of(step.graph, graphed).reference(placement, order)
    found = Simulator(replace(plain, cluster=with_cuda_graphs(plain.cluster))).schedule(placement, order)
    assert found.step_seconds == expected["step_seconds"]


def test_a_plan_for_graphs_is_predicted_alike_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """place, its run file, simulate, and place in Python."""
    plan_file, runs, cluster = (str(tmp_path / name) for name in ("plan.json", "runs.db", "cluster.toml"))
    Path(cluster).write_text(f"dispatch_seconds = 1e-3\n{TINY_CLUSTER_TOML}")
    search = ["place", MODEL, "--cluster", cluster, "--budget", "20", "--json", "--quiet"]
    recorded = [*search, "--cuda-graphs", "--run-file", runs, "-o", plan_file]
    answers = []
    for arguments in (search, recorded, recorded, ["simulate", MODEL, "--cluster", cluster, "--plan", plan_file, "--json"]):
        assert main(arguments) == 0
        answers.append(json.loads(capsys.readouterr().out))
    plain, placed, again, simulated = answers
    assert placed["cuda_graphs"] is True
    assert "cuda_graphs" not in plain
    assert placed["step_seconds"] == again["step_seconds"] == simulated["step_seconds"] < plain["step_seconds"]
    plan = pw.Plan.load(plan_file)
    assert plan.cuda_graphs
    assert "with CUDA graphs" in str(plan)
    assert main(["report", plan_file, "--graph", MODEL, "--cluster", cluster, "-o", str(tmp_path / "page.html")]) == 0
    assert "Launches are those with CUDA graphs." in (tmp_path / "page.html").read_text()


def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    step = Step.of(graph_data([], [takes(1, 0)]), gpus(1))
    cpu = {**gpus(1), "devices": [{**gpus(1)["devices"][0], "name": "cpu:0", "kind": "cpu"}]}
    with pytest.raises(InputError, match="cuda_graphs: cluster 'gpus' has no GPU"):
        pw.place(step.problem.graph, parse_cluster(cpu), evaluations=1, cuda_graphs=True)
    with pytest.raises(InputError, match="cuda_graphs can't be used when placements are measured"):
        pw.place(step.problem.graph, step.problem.cluster, measure=True, cuda_graphs=True)
    problem = replace(step.problem, cluster=with_cuda_graphs(step.problem.cluster))
    planner = Planner(problem, Request(budget=Budget(1)))
    plan = planner.plan(planner.search())
    assert plan.machine is not None
    assert plan.machine.cuda_graphs
    plan.save(tmp_path / "plan.json")
    assert (machine := pw.Plan.load(tmp_path / "plan.json").machine) is not None
    assert machine.cuda_graphs
    assert machine.digest == plan.machine.digest
    (tmp_path / "plan.json").write_text(json.dumps({**plan_fields(plan), "cuda_graphs": 1}))
    with pytest.raises(PlanError, match="cuda_graphs must be true or false, got 1"):
        pw.Plan.load(tmp_path / "plan.json")
