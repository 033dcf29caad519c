"""How large and how fast a page is: `placewise bench page`."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from placewise.experiments.bench import Benchmark, Findings, Rows, option

MODELS = ("nmt:layers=2", "gpt:batch=64,micro_batches=64")  # 7,394 and more than 50,000 ops


@dataclass(frozen=True)
class PageSpeed(Benchmark):
    """Size of a page, time until it can be used and frames per second when zooming, in headless Chromium."""

    models: tuple[str, ...] = option("models", "only these models", default=MODELS)

    def run(self) -> Findings:
        """Writes and opens a page for each model on four V100s."""
        from placewise.core.cluster import Cluster
        from placewise.core.problem import Problem
        from placewise.experiments.bench.generated_problems import some_placements
        from placewise.experiments.bench.headless_browser import open_browser, page_speed
        from placewise.models import load_graph
        from placewise.report.comparisons import simulate_comparisons
        from placewise.report.page.html import write_page
        from placewise.report.page.page_data import ShownPlan
        from placewise.report.search_curves import curve_of
        from placewise.search.planner import find_bound
        from placewise.simulate.simulator import Simulator

        rows: Rows = []
        with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
            for model in self.models:
                problem = Problem.of(load_graph(model), Cluster.load("4xV100-nvlink"))
                schedule = Simulator(problem).schedule(some_placements(problem, 1)["parts"][0])
                path = Path(folder) / "page.html"
                started = time.perf_counter()
                write_page(
                    [ShownPlan("parts", schedule, find_bound(problem), simulate_comparisons(problem), curve_of(()))], path
                )
                row = {"model": model, "ops": problem.num_ops, "copies": len(schedule.copy_tensors)}
                row |= {"written s": time.perf_counter() - started, "MB": path.stat().st_size / 1e6}
                rows.append({**row, **page_speed(browser, path)})
        return self.findings(rows)
