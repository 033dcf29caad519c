"""How fast compiled steps run: `placewise bench execute`."""

from dataclasses import dataclass

from placewise.experiments.bench import Benchmark, Findings


@dataclass(frozen=True)
class Execution(Benchmark):
    """Two CPU devices compared with one, and the host time of a launch compared with a plain loop."""

    def run(self) -> Findings:
        """Compares times within one run; `executor_speed` has the steps."""
        from placewise.experiments.bench.executor_speed import compare_executions

        return self.findings(compare_executions())
