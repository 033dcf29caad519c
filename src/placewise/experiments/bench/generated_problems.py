"""Graphs and placements that benchmarks generate."""

import numpy as np

from placewise.core.arrays import Ints, Ragged
from placewise.core.graph import Graph, Ops, Tensors
from placewise.core.problem import Problem


def generated_graph(num_ops: int, seed: int = 0) -> Graph:
    """Returns a graph whose ops each read one to three of the last 200 tensors; there is a parameter for every tenth op."""
    rng = np.random.default_rng(seed)
    num_parameters = num_ops // 10
    n = np.arange(num_ops)
    reads = [np.maximum(n - 1 - rng.integers(200, size=num_ops), 0) for _ in range(3)]
    keep = [n > 0, (n > 0) & (rng.random(num_ops) < 0.6), (n > 0) & (rng.random(num_ops) < 0.3)]
    readers = np.concatenate([n[kept] for kept in keep] + [rng.permutation(num_ops)[:num_parameters]])
    tensors = np.concatenate(
        [read[kept] for read, kept in zip(reads, keep, strict=True)] + [num_ops + np.arange(num_parameters)]
    )
    count = num_ops + num_parameters
    home = np.full(count, -1)
    home[num_ops:] = rng.integers(num_ops, size=num_parameters)
    kinds = np.where(np.arange(count) < num_ops, 5, 1)
    names = tuple(f"t{i}" for i in range(count))
    empty = Ragged(np.zeros(num_ops + 1, np.int64), np.zeros(0, np.int64))
    return Graph(
        f"generated-{num_ops}",
        Tensors(names, rng.integers(1, 2**20, size=count), kinds, home, np.full(count, -1)),
        Ops(
            tuple(f"op{i}" for i in range(num_ops)), ("op",) * num_ops, np.zeros(num_ops, np.int64), n,
            Ragged.grouped(readers, tensors, num_ops), Ragged(np.arange(num_ops + 1), n), empty,
            rng.uniform(1e6, 1e9, size=num_ops), rng.uniform(1e4, 1e7, size=num_ops),
            (None,) * num_ops, np.full(num_ops, -1),
        ),
        np.array([num_ops - 1]),
    )  # fmt: skip


def some_placements(problem: Problem, batch: int) -> dict[str, Ints]:
    """Returns random placements, and contiguous parts with one group in fifty elsewhere: [batch, groups] each."""
    rng = np.random.default_rng(0)
    anywhere = rng.integers(problem.num_devices, size=(batch, problem.num_groups))
    parts = np.arange(problem.num_groups) * problem.num_devices // problem.num_groups
    return {"random": anywhere, "parts": np.where(rng.random(anywhere.shape) < 0.02, anywhere, parts)}
