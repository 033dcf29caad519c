"""What a better launch order gains: `placewise bench orders`."""

from dataclasses import dataclass

from placewise.experiments.bench import Benchmark, Findings, Rows, option

MODELS = (
    "inception-v3",
    "resnet",
    "cifar-cnn",
    "rnnlm",
    "nmt:layers=4",
    "gpt",
    "gpt:micro_batches=8",
    "bert:micro_batches=4",
)


@dataclass(frozen=True)
class OrderGain(Benchmark):
    """Step time in program order divided by step time in priority order."""

    models: tuple[str, ...] = option("models", "only these models", default=MODELS)

    def run(self) -> Findings:
        """Compares the orders on four GPUs, for the expert's placement and for 100 random ones."""
        import numpy as np

        from placewise.core.cluster import Cluster
        from placewise.core.problem import Problem
        from placewise.models import load_graph
        from placewise.simulate.simulator import Simulator
        from placewise.strategies import make

        rows: Rows = []
        for model in self.models:
            problem = Problem.of(load_graph(model), Cluster.load("4xK80"))
            rng = np.random.default_rng(0)
            expert = next(make("expert").search(problem, rng)).placements[:1]
            anywhere = rng.integers(problem.num_devices - 1, size=(100, problem.num_groups))
            program, priority = Simulator(problem, "program"), Simulator(problem, "priority")
            by_program, by_priority = (float(s.simulate(expert).step_seconds[0]) for s in (program, priority))
            gain = program.simulate(anywhere).step_seconds / priority.simulate(anywhere).step_seconds
            row = {"model": model, "expert, program s": by_program, "priority s": by_priority}
            row |= {"gain": by_program / by_priority, "random: median gain": float(np.median(gain))}
            rows.append({**row, "least": float(gain.min()), "most": float(gain.max())})
        return self.findings(rows)
