"""How the simulator's time grows with the graph: `placewise bench scale`."""

import math
import time
from dataclasses import dataclass

from placewise.experiments.bench import Benchmark, Findings, Rows

SIZES = (*(1000 * 2**k for k in range(10)), 1_000_000)  # ops

REPEATS = 9


@dataclass(frozen=True)
class SimulatorScaling(Benchmark):
    """Time of one simulation for graphs of 1,000 to 1,000,000 ops."""

    def run(self) -> Findings:
        """Simulates generated graphs on two GPUs and a CPU.

        All sizes are timed in turns, and the shortest time counts: other work on the machine uses its caches too.
        """
        from placewise.core.cluster import Cluster
        from placewise.core.problem import Problem
        from placewise.experiments.bench.generated_problems import generated_graph, some_placements
        from placewise.simulate.simulator import Simulator

        problems = [Problem.of(generated_graph(size), Cluster.load("2xK80")) for size in SIZES]
        placements = [some_placements(problem, 1)["parts"] for problem in problems]
        rows: Rows = [{"ops": size} for size in SIZES]
        for order in ("program", "priority"):
            simulators = [Simulator(problem, order, 1) for problem in problems]
            best = [math.inf] * len(SIZES)
            for _ in range(REPEATS):
                for i, simulator in enumerate(simulators):
                    started = time.perf_counter()
                    simulator.simulate(placements[i])
                    best[i] = min(best[i], time.perf_counter() - started)
            for i, row in enumerate(rows):
                row[f"{order} ms"] = best[i] * 1e3
                row[f"{order}, to half the ops"] = best[i] / best[i - 1] if 0 < i < len(rows) - 1 else "-"
        return self.findings(rows)
