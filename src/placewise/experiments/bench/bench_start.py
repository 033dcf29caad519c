"""How fast a new process has its first answer: `placewise bench start`."""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from placewise.experiments.bench import Benchmark, Findings, Rows

SCRIPT = """
import numpy as np
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.experiments.bench.generated_problems import generated_graph
from placewise.simulate.simulator import Simulator
problem = Problem.of(generated_graph(1000), Cluster.load("2xK80"))
Simulator(problem, "{order}")(np.zeros((1, problem.num_groups), np.int64))
"""

STARTS = 4  # the first one compiles


@dataclass(frozen=True)
class ProcessStart(Benchmark):
    """Seconds until a new process has simulated 1,000 ops, with and without cached kernels."""

    def run(self) -> Findings:
        """Times whole processes, the first with an empty cache."""
        rows: Rows = []
        for order in ("program", "priority"):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-c", SCRIPT.format(order=order)]
                environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
                times = []
                for _ in range(STARTS):
                    started = time.perf_counter()
                    subprocess.run(command, env=environment, check=True)
                    times.append(time.perf_counter() - started)
            rows.append({"order": order, "first, compiling s": times[0], "second s": min(times[1:])})
        return self.findings(rows)
