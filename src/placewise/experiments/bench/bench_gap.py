"""Whether a gap is the search's or the bound's: `placewise bench gap`."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placewise.experiments.bench import Benchmark, Findings, option

if TYPE_CHECKING:
    from placewise.core.cluster import Cluster
    from placewise.core.graph import Graph

FAST = 1e6  # how many times as fast links are where copies cost nothing

LONGER = 4  # how many times as long the last search is

COLUMNS = ("machine", "search", "bound ms", "kind", "found ms", "gap", "devices busy", "busiest channel")


@dataclass(frozen=True)
class Gap(Benchmark):
    """Whether a gap is the search's or the bound's: machines that differ in one thing, and a longer search.

    If the gap closes where copies cost nothing, the bound does not count what copies cost, or the search pays for too many.
    If it closes with a longer search, the search was at fault.
    """

    model: str = option("model", default="nmt:layers=4")
    cluster: str = option("cluster", default="4xK80")
    seconds: float = option("seconds", f"of each search; the last one takes {LONGER} times as long", "S", default=60.0)
    seed: int = option("count", "of each search", default=0)

    def run(self) -> Findings:
        """Bounds and places the model on each machine, and once more with a longer search."""
        from placewise.core.cluster import Cluster
        from placewise.models import load_graph
        from placewise.report.terminal_text import table

        graph, cluster, rows, is_complete = load_graph(self.model), Cluster.load(self.cluster), list[dict[str, Any]](), True
        cases = [(name, other, self.seconds) for name, other in machines(cluster).items()]
        cases.append(("as it is", cluster, LONGER * self.seconds))
        try:
            for name, other, seconds in cases:
                rows.append({"machine": name, "seconds": seconds, **self._place(graph, other, seconds)})
                print(" ".join(_cells(rows[-1])), file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            is_complete = False
        return Findings({"gap": rows}, table(list(COLUMNS), [_cells(row) for row in rows]), is_complete=is_complete)

    def _place(self, graph: "Graph", cluster: "Cluster", seconds: float) -> dict[str, Any]:
        import numpy as np

        from placewise.bounds.best_bound import bound
        from placewise.core.problem import Problem
        from placewise.search.planner import place
        from placewise.simulate.simulator import Simulator

        problem = Problem.of(graph, cluster)
        limit = bound(problem, seconds=seconds)
        plan = place(graph, cluster, seconds=seconds, seed=self.seed, simple=0.0)
        schedule = Simulator(problem).schedule(*plan.resolve(problem))
        step, timeline = schedule.step_seconds or 1.0, schedule.timeline
        channels = cluster.channels[timeline.copy_source, timeline.copy_target]
        busy = np.bincount(channels, weights=timeline.copy_end - timeline.copy_start, minlength=1)
        return {
            "bound_seconds": limit.seconds,
            "bound": limit.name,
            "step_seconds": schedule.step_seconds,
            "gap": schedule.step_seconds / limit.seconds - 1 if limit.seconds else 0.0,
            "busy": [float(device) / step for device in schedule.busy_seconds],
            "busiest_channel": float(busy.max()) / step,
        }


def machines(cluster: "Cluster") -> "dict[str, Cluster]":
    """Returns the cluster and what differs from it in one thing, by what that is."""
    from placewise.machines.variants import with_faster_links, without

    found = {"as it is": cluster, "copies cost nothing": with_faster_links(cluster, FAST)}
    cpus = [device.name for device in cluster.devices if device.kind == "cpu"]
    if 0 < len(cpus) < len(cluster.devices):
        rest = cluster
        for name in cpus:
            rest = without(rest, name)
        found["without the CPU"] = rest
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    busy = " ".join(f"{share:.0%}" for share in row["busy"])
    times = [f"{row['bound_seconds'] * 1e3:.1f}", row["bound"], f"{row['step_seconds'] * 1e3:.1f}"]
    return [row["machine"], f"{row['seconds']:g} s", *times, f"{row['gap']:.1%}", busy, f"{row['busiest_channel']:.0%}"]
