"""How fast the simulator is: `placewise bench simulate`."""

import json
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from placewise.experiments.bench import Benchmark, Findings, Rows, option

if TYPE_CHECKING:
    from placewise.core.arrays import Ints
    from placewise.core.problem import Problem

BATCH, REPEATS = 64, 5


@dataclass(frozen=True)
class SimulatorSpeed(Benchmark):
    """Millions of ops x placements per second, for every way to simulate and for plain Python."""

    models: tuple[str, ...] = option("models", "only these models", default=("nmt:layers=2", "inception-v3", "gpt"))

    def run(self) -> Findings:
        """Simulates random and contiguous placements on two GPUs and a CPU."""
        from placewise.core.cluster import Cluster
        from placewise.core.problem import Problem
        from placewise.experiments.bench.generated_problems import some_placements
        from placewise.models import load_graph

        rows: Rows = []
        for model in self.models:
            problem = Problem.of(load_graph(model), Cluster.load("2xK80"))
            for kind, placements in some_placements(problem, BATCH).items():
                rows.append({"model": model, "placements": kind, **_speeds(problem, placements)})
        return self.findings(rows)


def _speeds(problem: "Problem", placements: "Ints") -> dict[str, float]:
    """Returns millions of ops x placements per second for each way to simulate."""
    import numpy as np

    from placewise.formats.cluster_file import format_cluster
    from placewise.formats.graph_file import format_graph
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


def _best_seconds(run: Callable[[], object]) -> float:
    """Returns the shortest of several calls after a warm-up: other work on the machine only makes a call longer."""
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
