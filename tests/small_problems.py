"""Small problems that the tests of several strategies share."""

from builders import graph_data, graph_of, mixed_cluster, op, tensor
from hypothesis import reject
from simulated import Step, gpus, takes

from placewise.core.cluster import Cluster
from placewise.core.errors import ProblemError
from placewise.core.graph import Graph
from placewise.core.problem import Problem


def two_chains(num_groups: int = 6, num_devices: int = 2) -> Problem:
    """Returns two independent chains of ops that take 1 s each, on equal GPUs; a copy takes 2 s."""
    tensors = [tensor(f"t{n}", 1) for n in range(num_groups)]
    ops = [takes(1.0, n, reads=[n - 2] if n >= 2 else [], writes=[n]) for n in range(num_groups)]
    return Step.of(graph_data(tensors, ops), gpus(num_devices)).problem


def one_for_each_kind() -> Problem:
    """Returns three ops on a GPU and a CPU: the second one runs only on the CPU, the third one only on the GPU."""
    rows = [op("a", 0), op("b", 1, devices=["cpu"]), op("c", 2, devices=["gpu"])]
    return Problem.of(graph_of([], rows), mixed_cluster())


def problem_or_reject(graph: Graph, cluster: Cluster) -> Problem:
    """Returns the problem of a drawn graph; rejects it if a group holds ops for different kinds of device."""
    try:
        return Problem.of(graph, cluster)
    except ProblemError:
        reject()
