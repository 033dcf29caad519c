"""How well the simulator predicts real steps: `placewise bench measured`."""

import sys
from dataclasses import dataclass

from placewise.core.errors import InputError
from placewise.experiments.bench import Benchmark, Findings, option, required, table_of

STRATEGIES = ("gpu-only", "expert", "balanced", "m-etf", "auto", "post")


@dataclass(frozen=True)
class Prediction(Benchmark):
    """Predicted and measured step times: MODEL is profiled on CLUSTER, and what strategies find is run."""

    model: str = required("run-model")
    cluster: str = required("cluster")
    strategies: tuple[str, ...] = option(
        "strategies", f"names or families (default: {','.join(STRATEGIES)})", default=STRATEGIES
    )
    seconds: float = option("seconds", "time for auto", default=10.0)
    budget: int = option("positive", "evaluations for all others", default=2400)
    virtual: tuple[tuple[str, int], ...] = option("virtual", default=())
    plan: tuple[str, ...] = option("repeated", "run this plan.json too", "PLAN", default=())
    measurements: int = option("count", "placements that Post measures after its search in the simulator", default=60)
    rounds: int = option("positive", "how often to profile, and to run what was found", default=1)
    cuda_graphs: bool = option("flag", "run everything a second time, with CUDA graphs", default=False)
    keep: str | None = option("folder", "write the profile, and a plan for each placement, into this folder", "DIR")
    measuring_seconds: float = 90.0  # at most, for the measurements of Post
    busy: float = 1.0  # share of the time in which a search takes other devices on the same hardware to be busy
    warm_up: int = 2
    steps: int = 5

    def run(self) -> Findings:
        """Returns a row for each placement, and how well the predictions and their order agree with what was measured."""
        from placewise.core.cluster import Cluster
        from placewise.experiments.bench.measured_steps import predict_and_measure, prediction_quality

        cluster = Cluster.load(self.cluster)
        if self.cuda_graphs and all(device.kind != "gpu" for device in cluster.devices):
            raise InputError(f"--cuda-graphs: cluster {cluster.name!r} has no GPU")
        rows, is_complete = predict_and_measure(self, cluster, lambda line: print(line, file=sys.stderr, flush=True))
        quality = prediction_quality(rows)
        lines = (f"{name}: {'-' if value is None else f'{value:.3g}'}" for name, value in quality.items())
        data = {self.name(): rows, **quality, "is_complete": is_complete}
        return Findings(data, "\n".join([table_of(rows), "", *lines]), is_complete=is_complete)
