"""Graph partitioners: parts of equal work with little copying between them; the order of ops does not count.

A group is a vertex whose weight is the time of its ops. The weight of an edge between two groups is the time to copy, once
each, the tensors that one of them makes (or is the home of) and the other reads.
"""

import contextlib
import ctypes
import importlib
import io
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from placewise.core.arrays import Floats, Ints
from placewise.core.contracts import Proposal, Search
from placewise.core.errors import StrategyError
from placewise.core.labels import sum_by_label
from placewise.core.problem import Problem
from placewise.simulate.flat_problem import tensor_groups
from placewise.strategies.hyper_parameters import check_fields
from placewise.strategies.single_device import accelerators, move_to_allowed

TOTAL_WEIGHT = 10**8  # of all vertices, and of all edges: partitioners compute with whole numbers
MAX_SEED = 2**31


@dataclass(frozen=True)
class Metis:
    """As many parts as GPUs, by Metis (Karypis and Kumar, SIAM J. Sci. Comput. 20, 1998).

    Part i is on GPU i and gets work in proportion to that GPU's speed. Groups that no GPU can run are left out and go to
    the CPU. Metis breaks ties with a seed drawn from `rng`.
    """

    imbalance: float = 0.03  # how much more than its share a part may have
    tries: int = 1  # partitions with different seeds

    def __post_init__(self) -> None:
        _check_imbalance(self)
        check_fields(self, "tries", lambda v: v >= 1, "must be at least 1")

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields all partitions at once."""
        pymetis = _load("pymetis")
        devices = accelerators(problem)
        graph = weigh(problem, devices)
        adjacency = pymetis.CSRAdjacency(graph.offsets, graph.neighbours)
        weights = {"vweights": graph.vertex_weights, "eweights": graph.edge_weights}
        shares = (graph.speeds / graph.speeds.sum()).tolist()
        parts = np.zeros((self.tries, len(graph.groups)), np.int64)  # all 0 if there are too few groups for several parts
        for row, seed in enumerate(rng.integers(MAX_SEED, size=self.tries).tolist()):
            options = pymetis.Options(seed=seed, ufactor=round(1000 * self.imbalance))
            if len(graph.groups) > len(devices):  # or else Metis prints a warning
                found = pymetis.part_graph(len(devices), adjacency, **weights, tpwgts=shares, options=options)
                parts[row] = found.vertex_part
        yield Proposal(_placements(problem, graph.groups, devices[parts]))


@dataclass(frozen=True)
class Scotch:
    """Static mapping to all devices, by Scotch (Pellegrini and Roman, HPCN-Europe 1996).

    The target is a complete graph of the devices, weighted by their speeds. A group that can't run where it was mapped
    goes to the CPU. Scotch breaks ties with a seed drawn from `rng`.
    """

    imbalance: float = 0.01  # Scotch's own default

    def __post_init__(self) -> None:
        _check_imbalance(self)

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the one mapping."""
        yield Proposal(_map(problem, np.arange(problem.num_devices), self.imbalance, rng))


@dataclass(frozen=True)
class MinCut:
    """Static mapping to the GPUs only, by Scotch: what Mirhoseini et al. (2017) call MinCut.

    Groups that no GPU can run are left out and go to the CPU; otherwise as `Scotch`.
    """

    imbalance: float = 0.01  # Scotch's own default

    def __post_init__(self) -> None:
        _check_imbalance(self)

    def search(self, problem: Problem, rng: np.random.Generator) -> Search:
        """Yields the one mapping."""
        yield Proposal(_map(problem, accelerators(problem), self.imbalance, rng))


class Weighted(NamedTuple):
    """An undirected graph of groups with whole weights; the neighbours of vertex v are at offsets[v] .. offsets[v + 1]."""

    groups: Ints  # [vertices], the groups that one of the devices can run
    offsets: Ints  # [vertices + 1]
    neighbours: Ints  # [2 * edges]
    vertex_weights: Ints  # [vertices]
    edge_weights: Ints  # [2 * edges]
    speeds: Floats  # [devices], 1 if every op is as fast as on its fastest device


def weigh(problem: Problem, devices: Ints) -> Weighted:
    """Returns the graph of the groups that these devices can run; copies take the mean time over their links."""
    groups = np.flatnonzero(problem.allowed[:, devices].any(axis=1))
    vertex = np.full(problem.num_groups, -1, np.int64)
    vertex[groups] = np.arange(len(groups))
    a, b, seconds = _copies(problem, devices)
    inside = (vertex[a] >= 0) & (vertex[b] >= 0)
    a, b, whole = vertex[a[inside]], vertex[b[inside]], _whole(seconds[inside])
    ends, others, weights = np.append(a, b), np.append(b, a), np.append(whole, whole)
    order = np.lexsort((others, ends))
    offsets = np.searchsorted(ends[order], np.arange(len(groups) + 1))
    seconds = _group_seconds(problem)[groups][:, devices]  # [vertices, devices]
    work = seconds.min(axis=1)
    total = seconds.sum(axis=0)
    speeds = np.divide(work.sum(), total, out=np.ones(len(devices)), where=total > 0)
    return Weighted(groups, offsets, others[order], _whole(work), weights[order], np.maximum(speeds, 1e-3))


def _group_seconds(problem: Problem) -> Floats:
    """Returns the time of each group's ops, one after the other: [groups, devices]."""
    columns = [sum_by_label(problem.op_groups, seconds, problem.num_groups) for seconds in problem.op_seconds.T]
    return np.stack(columns, axis=1)


def _copies(problem: Problem, devices: Ints) -> tuple[Ints, Ints, Floats]:
    """Returns the pairs of groups a < b with tensors between them, and the mean time to copy these once: [pairs]."""
    cluster, graph = problem.cluster, problem.graph
    apart = ~np.eye(len(devices), dtype=np.bool_)
    links = np.ix_(devices, devices)
    # The mean of copy_seconds over these links, which is linear in the bytes:
    latency = cluster.latency_seconds[links][apart].mean() if len(devices) > 1 else 0.0
    seconds_per_byte = (1 / cluster.bytes_per_second[links][apart]).mean() if len(devices) > 1 else 0.0
    owner = tensor_groups(problem)[graph.ops.reads.values]  # of each read
    reader = problem.op_groups[graph.ops.reads.rows]
    reads = np.unique(np.stack([owner, reader, graph.ops.reads.values]), axis=1)  # a tensor counts once for a pair
    owner, reader, tensors = reads[:, reads[0] != reads[1]]
    keys = np.minimum(owner, reader) * problem.num_groups + np.maximum(owner, reader)
    pairs, inverse = np.unique(keys, return_inverse=True)
    seconds = sum_by_label(inverse, latency + seconds_per_byte * graph.tensors.nbytes[tensors], len(pairs))
    return pairs // max(problem.num_groups, 1), pairs % max(problem.num_groups, 1), seconds


def _whole(weights: Floats) -> Ints:
    """Returns the weights as whole numbers, in proportion and each at least 1."""
    total = weights.sum()
    scaled = np.rint(weights / total * TOTAL_WEIGHT) if total > 0 else weights
    return np.maximum(scaled, 1).astype(np.int64)


def _map(problem: Problem, devices: Ints, imbalance: float, rng: np.random.Generator) -> Ints:
    """Returns Scotch's mapping to these devices: [1, groups].

    By default Scotch uses all cores, and its answer changes from call to call; in its deterministic mode the answer still
    depends on the number of cores. On one thread, with its own random numbers, only the seed decides.
    """
    scotch = _load("pyscotch")
    source = weigh(problem, devices)
    seed = int(rng.integers(MAX_SEED))
    mapped = np.zeros(len(source.groups), np.int64)
    if len(mapped):  # Scotch does not take an empty graph
        speeds = np.maximum(np.rint(1000 * source.speeds / source.speeds.max()), 1).astype(np.int64)
        with scotch.Graph() as graph, scotch.Architecture() as target, scotch.Context() as context, scotch.Strategy() as how:
            graph.build(source.offsets, source.neighbours, source.vertex_weights, source.edge_weights)
            target.complete_weighted(len(devices), speeds)
            how.request_mapping(balance=imbalance)
            scotch.libscotch.SCOTCH_contextThreadSpawn(ctypes.byref(context._ctx), 1, None)  # not wrapped by pyscotch
            context.random_clone()
            context.random_seed(seed)
            context.random_reset()
            with context.bind_graph(graph) as bound:
                mapped[:] = bound.map(target, how)
    return _placements(problem, source.groups, devices[mapped][None])


def _placements(problem: Problem, groups: Ints, devices: Ints) -> Ints:
    """Returns placements with these groups on devices [batch, groups], and all that can't run there on the CPU."""
    wanted = np.zeros((len(devices), problem.num_groups), np.int64)
    wanted[:, groups] = devices
    return move_to_allowed(problem, wanted)


def _load(name: str) -> Any:
    """Returns an optional package, without the messages that pyscotch prints when it loads."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            package = importlib.import_module(name)
            if name == "pyscotch":
                importlib.import_module("pyscotch.graph")  # loads Scotch itself, which pyscotch postpones
    except (ImportError, OSError) as reason:
        raise StrategyError(f"this strategy needs {name}: pip install 'placewise[partition]' ({reason})") from None
    return package


def _check_imbalance(strategy: Metis | Scotch | MinCut) -> None:
    check_fields(strategy, "imbalance", lambda v: 0.001 <= v <= 1, "must be at least 0.001 and at most 1")
