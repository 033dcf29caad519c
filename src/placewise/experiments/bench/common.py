"""Benchmarks that anyone can repeat: `placewise bench`. Each returns rows of named figures, measured in one run."""

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from typing import Any

import numpy as np

from placewise import zoo
from placewise.core.arrays import Ints, Ragged
from placewise.core.cluster import Cluster
from placewise.core.graph import Graph, Ops, Tensors
from placewise.core.problem import Problem
from placewise.formats.cluster_file import format_cluster
from placewise.formats.graph_file import format_graph
from placewise.models import load_graph

Rows = list[dict[str, Any]]

CAPTURED = (
    *("inception-v3", "resnet:depth=50", "resnet:depth=200", "cifar-cnn", "rnnlm", "nmt:layers=2", "nmt:layers=8"),
    *("gpt", "gpt:size=xl", "gpt:micro_batches=8", "bert"),
)

SIMULATED = ("nmt:layers=2", "inception-v3", "gpt")

ORDERED = (
    "inception-v3",
    "resnet",
    "cifar-cnn",
    "rnnlm",
    "nmt:layers=4",
    "gpt",
    "gpt:micro_batches=8",
    "bert:micro_batches=4",
)


def bench_capture(models: tuple[str, ...]) -> Rows:
    """Returns what it takes to capture each model: building it on the meta device, recording, building the graph."""
    from placewise.graph_capture.capture import capture_step

    capture_step(zoo.build_step("rnnlm:layers=1,hidden=2,steps=1,batch=1,vocab=2"))  # loads what torch loads late
    rows = []
    for model in models or CAPTURED:
        started = time.perf_counter()
        graph = capture_step(zoo.build_step(model), model).graph
        seconds = time.perf_counter() - started
        row = {"model": model, "ops": len(graph.ops), "groups": graph.num_groups, "seconds": seconds}
        rows.append({**row, "µs per op": seconds / len(graph.ops) * 1e6})
    return rows


def bench_simulate(models: tuple[str, ...]) -> Rows:
    """Returns millions of ops x placements a second on two GPUs and a CPU, for random and for contiguous placements."""
    rows = []
    for model in models or SIMULATED:
        problem = Problem.of(load_graph(model), Cluster.load("2xK80"))
        for kind, placements in some_placements(problem, 64).items():
            rows.append({"model": model, "placements": kind, **_speeds(problem, placements)})
    return rows


def some_placements(problem: Problem, batch: int) -> dict[str, Ints]:
    """Returns placements at random, and in contiguous parts with one group in fifty elsewhere: [batch, groups] each."""
    rng = np.random.default_rng(0)
    anywhere = rng.integers(problem.num_devices, size=(batch, problem.num_groups))
    parts = np.arange(problem.num_groups) * problem.num_devices // problem.num_groups
    return {"random": anywhere, "parts": np.where(rng.random(anywhere.shape) < 0.02, anywhere, parts)}


def _speeds(problem: Problem, placements: Ints) -> dict[str, float]:
    """Returns millions of ops x placements a second of every form of simulation."""
    from placewise.simulate import kernels
    from placewise.simulate.reference import simulate
    from placewise.simulate.simulator import Simulator

    one, all_cores = Simulator(problem, "program", 1), Simulator(problem, "program")
    work, program = kernels.new_workspace(one.flat, problem.num_groups), np.arange(problem.num_ops, dtype=np.int32)[None]
    seconds, peaks = np.zeros(len(placements)), np.zeros((len(placements), problem.num_devices), np.int64)
    by_priority, priority_all = Simulator(problem, "priority", 1), Simulator(problem, "priority")
    graph, cluster = json.loads(format_graph(problem.graph)), tomllib.loads(format_cluster(problem.cluster))
    names = problem.expand(placements[0])

    def time_only() -> None:
        kernels.simulate_batch(one.flat, placements, program, work, None, seconds, peaks)

    batch = len(placements)
    runs: dict[str, tuple[Callable[[], object], int]] = {
        "time": (time_only, batch),
        "time+memory": (lambda: one.simulate(placements), batch),
        "all cores": (lambda: all_cores.simulate(placements), batch),
        "priority": (lambda: by_priority.simulate(placements), batch),
        "priority, all cores": (lambda: priority_all.simulate(placements), batch),
        "plain Python": (lambda: simulate(graph, cluster, names), 1),
    }
    return {name: count * problem.num_ops / _best_seconds(run) / 1e6 for name, (run, count) in runs.items()}


def _best_seconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Returns the shortest of several runs, after one that does not count: others use this machine too."""
    run()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


START = """
import numpy as np
from placewise.experiments.bench.common import generated_graph
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.simulate.simulator import Simulator
problem = Problem.of(generated_graph(1000), Cluster.load("2xK80"))
Simulator(problem, "{order}")(np.zeros((1, problem.num_groups), np.int64))
"""


def bench_start(models: tuple[str, ...]) -> Rows:
    """Returns the seconds of a whole new process that simulates one placement of 1,000 ops, first and second time."""
    rows = []
    for order in ("program", "priority"):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", START.format(order=order)]
            environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
            times = []
            for _ in range(4):
                started = time.perf_counter()
                subprocess.run(command, env=environment, check=True)
                times.append(time.perf_counter() - started)
        rows.append({"order": order, "first, compiling s": times[0], "second s": min(times[1:])})
    return rows


def bench_scale(models: tuple[str, ...]) -> Rows:
    """Returns the time of one simulation of generated graphs of 1,000 to 1,000,000 ops on two GPUs and a CPU.

    All sizes are timed in turns, and the shortest time counts: others use this machine's caches too.
    """
    from placewise.simulate.simulator import Simulator

    sizes = [1000 * 2**k for k in range(10)] + [1_000_000]
    problems = [Problem.of(generated_graph(size), Cluster.load("2xK80")) for size in sizes]
    placements = [some_placements(problem, 1)["parts"] for problem in problems]
    rows: Rows = [{"ops": size} for size in sizes]
    for order in ("program", "priority"):
        simulators = [Simulator(problem, order, 1) for problem in problems]
        best = [np.inf] * len(sizes)
        for _ in range(9):
            for i, simulator in enumerate(simulators):
                started = time.perf_counter()
                simulator.simulate(placements[i])
                best[i] = min(best[i], time.perf_counter() - started)
        for i, row in enumerate(rows):
            row[f"{order} ms"] = best[i] * 1e3
            row[f"{order}, to half the ops"] = best[i] / best[i - 1] if 0 < i < len(rows) - 1 else "-"
    return rows


def generated_graph(num_ops: int, seed: int = 0) -> Graph:
    """Returns a graph of ops that each read one to three of the 200 tensors made last, with a parameter for every tenth."""
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


def bench_orders(models: tuple[str, ...]) -> Rows:
    """Returns program order's time over priority order's on four GPUs: the expert's placement, and 100 random ones."""
    from placewise.simulate.simulator import Simulator
    from placewise.strategies import make

    rows = []
    for model in models or ORDERED:
        problem = Problem.of(load_graph(model), Cluster.load("4xK80"))
        rng = np.random.default_rng(0)
        expert = next(make("expert").search(problem, rng)).placements[:1]
        anywhere = rng.integers(problem.num_devices - 1, size=(100, problem.num_groups))
        program, priority = Simulator(problem, "program"), Simulator(problem, "priority")
        by_program, by_priority = (float(s.simulate(expert).step_seconds[0]) for s in (program, priority))
        gain = program.simulate(anywhere).step_seconds / priority.simulate(anywhere).step_seconds
        row = {"model": model, "expert, program s": by_program, "priority s": by_priority, "gain": by_program / by_priority}
        row |= {"random: median gain": float(np.median(gain)), "least": float(gain.min()), "most": float(gain.max())}
        rows.append(row)
    return rows
