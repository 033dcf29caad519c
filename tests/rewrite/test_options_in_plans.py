"""Plans of augmented graphs: they carry the rewrite's name, and are compiled from the captured step."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_steps import capture_with_mse, cpu_cluster, small_training

import placewise as pw
from placewise.core.plan import Plan, digest_of_graph
from placewise.core.problem import NOWHERE, Problem
from placewise.models import load_step
from placewise.rewrite.augmented_graph import OPTIONS, add_options
from placewise.rewrite.memory_options import PARK, RECOMPUTE, graph_of_plan, rewrite_graph
from placewise.rewrite.rewritten_steps import FUSE, rewrite


def test_a_plan_is_compiled_from_the_captured_step(tmp_path: Path) -> None:
    """The plan says which rewrite made its graph; the step is rewritten in the same way, and the digests are compared."""
    torch.manual_seed(0)
    model, optimizer, batch = small_training()
    step = capture_with_mse(model, optimizer, batch)
    graph, cluster = add_options(step.graph).graph, cpu_cluster()
    assert graph.rewrites == (OPTIONS,)
    assert digest_of_graph(rewrite(step, [OPTIONS]).graph) == digest_of_graph(graph)
    problem = Problem.of(graph, cluster)
    placement = np.where(problem.optional, np.arange(problem.num_groups) % 3 - 1, 0)
    assert {NOWHERE, 0, 1} == set(placement.tolist())
    plan = Plan(problem.expand(placement), graph_digest=digest_of_graph(graph), rewrites=graph.rewrites)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.rewrites == (OPTIONS,)
    train_step = loaded.compile(step, cluster)
    expected = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    torch.testing.assert_close(train_step(batch), expected.detach())
    train_step.close()
    with pytest.raises(pw.PlanError, match="which this version does not have"):
        replace(loaded, rewrites=("options 0",)).compile(step, cluster)
    for rewrites in ((OPTIONS,) * 1000, (FUSE, FUSE), (FUSE, RECOMPUTE, PARK)):
        hostile = replace(loaded, rewrites=rewrites, graph_digest="0" * 64)
        with pytest.raises(pw.PlanError, match=r"rewrites must all be different, and at most one may add optional ops"):
            hostile.compile(step, cluster)
    with pytest.raises(pw.PlanError, match=r"its 1000 rewrites must all be different"):
        graph_of_plan(step.graph, replace(loaded, rewrites=(OPTIONS,) * 1000, graph_digest="0" * 64))
    with pytest.raises(pw.PlanError, match="is for another graph"):
        replace(loaded, graph_digest="0" * 64).compile(step, cluster)


def test_measured_times_change_no_option() -> None:
    """A plan that is placed with a profile's times, however wild, is one of the captured step."""
    step = load_step("gpt:layers=2,hidden=32,heads=2,length=8,batch=2,vocab=20")
    untimed, wild = step.graph, np.random.default_rng(0).exponential(size=len(step.graph.ops)) ** 9
    timed = replace(untimed, ops=replace(untimed.ops, seconds={"gpu:0": wild}))
    assert digest_of_graph(rewrite_graph(timed, [OPTIONS])) == digest_of_graph(rewrite_graph(untimed, [OPTIONS]))
