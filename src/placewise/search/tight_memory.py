"""Graphs with optional ops where memory is tight: there, a step may recompute tensors or let them wait elsewhere."""

import numpy as np

from placewise.core.problem import Problem
from placewise.rewrite.memory_options import memory_rewrites, rewrite_graph
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.single_device import move_to_allowed

QUICK = ("pipeline", "expert")  # strategies whose placements say, besides single devices, whether memory costs time


def memory_is_tight(problem: Problem) -> bool:
    """Returns whether the fastest of a few quick placements does not fit: memory then costs time, or nothing fits."""
    simulator, devices = Simulator(problem, "program"), np.arange(problem.num_devices)
    tried = [move_to_allowed(problem, np.tile(devices[:, None], (1, problem.num_groups)))]
    tried += [next(make(name).search(problem, np.random.default_rng(0))).placements for name in QUICK]
    found = simulator.simulate(np.concatenate(tried))
    if not problem.num_ops:
        return False
    return bool((found.peak_bytes[found.step_seconds.argmin()] > problem.cluster.memory_bytes).any())


def with_options_if_tight(problem: Problem, *, recompute: bool = True, park: bool = True) -> Problem:
    """Returns the problem, with optional ops if memory is tight and there is something to recompute or to park."""
    names = memory_rewrites(recompute, park)
    if problem.graph.has_options or not names or not memory_is_tight(problem):
        return problem
    return add_memory_options(problem, recompute=recompute, park=park)


def add_memory_options(problem: Problem, *, recompute: bool = True, park: bool = True) -> Problem:
    """Returns the problem with optional ops, or itself if its graph has nothing to recompute or to park."""
    graph = rewrite_graph(problem.graph, memory_rewrites(recompute, park))
    return Problem.of(graph, problem.cluster, problem.grouping) if graph.has_options else problem
