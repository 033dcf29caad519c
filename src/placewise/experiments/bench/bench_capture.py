"""How fast models are captured: `placewise bench capture`."""

import time
from dataclasses import dataclass

from placewise.experiments.bench import Benchmark, Findings, Rows, option

MODELS = (
    "inception-v3",
    "resnet:depth=50",
    "resnet:depth=200",
    "cifar-cnn",
    "rnnlm",
    "nmt:layers=2",
    "nmt:layers=8",
    "gpt",
    "gpt:size=xl",
    "gpt:micro_batches=8",
    "bert",
)


@dataclass(frozen=True)
class CaptureSpeed(Benchmark):
    """Microseconds per op to capture models of the zoo."""

    models: tuple[str, ...] = option("models", "only these models", default=MODELS)

    def run(self) -> Findings:
        """Times building each model on the meta device, recording its step, and building the graph."""
        from placewise import zoo
        from placewise.graph_capture.capture import capture_step

        capture_step(zoo.build_step("rnnlm:layers=1,hidden=2,steps=1,batch=1,vocab=2"))  # loads what torch loads late
        rows: Rows = []
        for model in self.models:
            started = time.perf_counter()
            graph = capture_step(zoo.build_step(model), model).graph
            seconds = time.perf_counter() - started
            row = {"model": model, "ops": len(graph.ops), "groups": graph.num_groups, "seconds": seconds}
            rows.append({**row, "µs per op": seconds / len(graph.ops) * 1e6})
        return self.findings(rows)
