"""Starts of auto for a machine whose GPUs can't hold the optimizer's state."""

from dataclasses import replace

import numpy as np
import pytest

from placewise.core.cluster import Cluster, Device, Link
from placewise.core.graph import PHASES, Graph
from placewise.core.problem import Problem
from placewise.models import load_graph
from placewise.simulate.simulator import Simulator
from placewise.strategies.auto.offload import offloads
from placewise.strategies.auto.starts import portfolio

UPDATE = PHASES.index("update")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load_graph("gpt:layers=4,hidden=64,heads=2,length=16,batch=4,vocab=500,micro_batches=2")


def machine(num_gpus: int, gpu_bytes: int) -> Cluster:
    """Returns GPUs a hundred times faster than the CPU, which has room for everything."""
    gpus = [Device(f"gpu:{i}", "gpu", gpu_bytes, 1e12, 1e11) for i in range(num_gpus)]
    devices = (*gpus, Device("cpu:0", "cpu", 2**40, 1e10, 1e9))
    names = [device.name for device in devices]
    return Cluster("tight", devices, tuple(Link(a, b, 1e9, 1e-6) for a in names for b in names if a != b))


def on_one_gpu(graph: Graph) -> int:
    """Returns the bytes that one GPU needs for everything, one micro-batch after the other."""
    problem = Problem.of(graph, machine(1, 2**40))
    everything = np.zeros((1, problem.num_groups), np.int64)
    return int(Simulator(problem, "program").simulate(everything).peak_bytes[0, 0])


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_what_does_not_fit_fits_with_updates_on_the_cpu(graph: Graph, num_gpus: int) -> None:
    """A fifth of the bytes is missing; half of them are state. All other ops stay on GPUs, and so do some updates."""
    model = Simulator(Problem.of(graph, machine(num_gpus, int(on_one_gpu(graph) * 0.8 / num_gpus))))
    is_update = np.zeros(model.problem.num_groups, np.bool_)
    is_update[model.problem.op_groups[graph.ops.phases == UPDATE]] = True
    best = min(offloads(model), key=lambda candidate: candidate.cost)
    assert best.overflow_bytes == 0
    assert (best.placement[~is_update] < num_gpus).all()
    assert 0 < (best.placement[is_update] == num_gpus).sum() < is_update.sum()


def test_where_there_is_room_all_updates_come_home(graph: Graph) -> None:
    model = Simulator(Problem.of(graph, machine(1, 2 * on_one_gpu(graph))))
    assert all((candidate.placement == 0).all() for candidate in offloads(model))


def test_the_portfolio_has_them_where_memory_costs_time(graph: Graph) -> None:
    """With 60% of what one GPU needs, all others that fit are far slower."""
    model = Simulator(Problem.of(graph, machine(1, int(on_one_gpu(graph) * 0.6))))
    first = portfolio(model, np.random.default_rng(0))[0]
    cpu_only = float(model(np.ones((1, model.problem.num_groups), np.int64)).step_seconds[0])
    assert first.overflow_bytes == 0
    assert first.seconds < cpu_only / 2


def test_a_machine_without_a_cpu_has_none(graph: Graph) -> None:
    cluster = machine(2, 2**40)
    alone = replace(cluster, devices=cluster.devices[:2], links=cluster.links[:1] + cluster.links[2:3])
    assert offloads(Simulator(Problem.of(graph, alone))) == []
