"""Our placements in Placeto's own simulator: `placewise bench placeto`, with a copy of its public code.

The simulator (sim/tf_placement_sim of aravic/generalizable-device-placement) is plain Python. It reads a TensorFlow graph
and its measured costs only through a few attributes, so it can be given our graphs. Its rules are: a device runs what is
ready first, and rests 5.7 µs after each op; each output is sent once, however many devices read it, at 7.6 GB/s; a device
sends one output at a time, with 25 µs between two of them. Memory is not limited.
"""

import importlib
import math
import sys
import time
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from placewise.experiments.bench import Benchmark, Findings, Rows, option, table_of

if TYPE_CHECKING:
    from placewise.core.arrays import Ints
    from placewise.core.cluster import Cluster
    from placewise.core.problem import Problem

SENT_BYTES_PER_SECOND, LATENCY_SECONDS = 7.6e9, 25e-6  # of the links, as in Placeto's simulator

MODELS = ("nmt:layers=2,length=6", "cifar-cnn:micro_batches=4", "rnnlm:layers=2,steps=8")

STRATEGIES = (
    "gpu-only", "round-robin", "expert", "balanced", "pipeline", "heft", "cpop", "m-topo", "m-etf", "m-sct", "metis",
)  # fmt: skip

RANDOM_PLACEMENTS = 20  # with which the ranks of the two simulators are compared


@dataclass(frozen=True)
class PlacetoSimulator(Benchmark):
    """Our placements judged by Placeto's simulator, beside ours, on equal GPUs with its links."""

    models: tuple[str, ...] = option("models", f"default: {' '.join(MODELS)}", default=MODELS)
    checkout: str | None = option("source", "a copy of aravic/generalizable-device-placement", "FOLDER")
    devices: int = option("positive", "GPUs", default=2)
    seconds: float = option("seconds", "of processor time for auto", "S", default=10.0)
    weights: str = option("source", "of the graph policy, a file (default: shipped)", "FILE", default="shipped")

    def run(self) -> Findings:
        """Returns the step times in both simulators, and how far they agree on random placements."""
        from placewise.core.errors import InputError

        if self.checkout is None:
            raise InputError("--checkout must name a copy of Placeto's code: aravic/generalizable-device-placement")
        rows: Rows = []
        texts = []
        for model in self.models:
            found, agreement = self._compare(model)
            rows += found
            texts.append(f"{table_of(found)}\n\n{agreement}")
        return Findings({self.name(): rows}, "\n\n".join(texts))

    def _compare(self, model: str) -> tuple[Rows, str]:
        import numpy as np

        from placewise.core.problem import Problem
        from placewise.experiments.policy.corpus import graph_of_lesson
        from placewise.simulate.simulator import Simulator

        problem = Problem.of(graph_of_lesson(model), placeto_machine(self.devices))
        simulator, theirs = Simulator(problem), PlacetoProblem(problem, str(self.checkout))
        rows: Rows = []
        for name, ours, placement in self._placements(problem, simulator):
            rows.append({"model": model, "strategy": name, "ours ms": ours * 1e3, "placeto ms": theirs(placement) * 1e3})
        rng = np.random.default_rng(0)
        drawn = rng.integers(0, self.devices, (RANDOM_PLACEMENTS, problem.num_groups))
        steps = simulator(drawn).step_seconds
        began = time.process_time()
        judged = np.array([theirs(placement) for placement in drawn])
        spent = (time.process_time() - began) / RANDOM_PLACEMENTS
        agreement = float(np.corrcoef(steps.argsort().argsort(), judged.argsort().argsort())[0, 1])
        return rows, (
            f"{RANDOM_PLACEMENTS} random placements of {problem.num_ops:,} ops: rank correlation {agreement:.2f}, Placeto's "
            f"times are {np.median(judged / steps):.3f} of ours in the median; it takes {spent * 1e3:.0f} ms for each"
        )

    def _placements(self, problem: "Problem", simulator: Any) -> "list[tuple[str, float, Ints]]":
        """Returns what each strategy finds that fits: its name, step seconds and placement."""
        from placewise.strategies import make
        from placewise.strategies.learned.graph_policy.graph_policy import GraphPolicy

        policies: tuple[tuple[str, dict[str, Any]], ...] = (
            ("graph-policy", {}),
            ("graph-policy, greedy", {"candidates": 1, "refinements": 0}),
        )
        chosen = [
            *((name, make(name), math.inf) for name in STRATEGIES),
            *((name, GraphPolicy(weights=self.weights, **settings), math.inf) for name, settings in policies),
            ("auto", make("auto"), self.seconds),
        ]
        found = [(name, *_searched(problem, simulator, strategy, seconds)) for name, strategy, seconds in chosen]
        return [(name, step, placement) for name, step, placement in found if placement is not None]


def placeto_machine(num_gpus: int) -> "Cluster":
    """Returns K80s with the links of Placeto's simulator: what a GPU sends waits for what it sent before."""
    from placewise.core.cluster import Cluster, Link

    gpus = [device for device in Cluster.load("8xK80").devices if device.kind == "gpu"][:num_gpus]
    links = [
        Link(a.name, b.name, SENT_BYTES_PER_SECOND, LATENCY_SECONDS, f"{a.name} sends") for a in gpus for b in gpus if a != b
    ]
    return Cluster(f"{num_gpus} K80s of Placeto", tuple(gpus), tuple(links))


class PlacetoProblem:
    """A problem in Placeto's simulator: each op and each resident tensor is a node; a node runs where its group is."""

    def __init__(self, problem: "Problem", checkout: str) -> None:
        from placewise.simulate.flat_problem import tensor_groups

        graph, groups = problem.graph, tensor_groups(problem)
        nodes: list[Any] = []
        self._groups: list[int] = []
        self._names: list[str] = []
        made: dict[int, str] = {}  # tensor -> node:output
        outputs: dict[str, list[int]] = {}
        for t, nbytes in enumerate(graph.tensors.nbytes.tolist()):
            if graph.producer[t] < 0 and groups[t] >= 0 and nbytes > 0 and graph.storage[t] == t:
                made[t] = f"tensor{t}:0"
                self._add(nodes, f"tensor{t}", [], int(groups[t]))
                outputs[f"tensor{t}"] = [nbytes]
        costs = dict.fromkeys(outputs, 0.0)
        for n, (reads, writes, after) in enumerate(zip(graph.ops.reads, graph.ops.writes, graph.ops.after, strict=True)):
            name = f"op{n}"
            made |= {t: f"{name}:{i}" for i, t in enumerate(writes.tolist())}
            read = [t if t in made else int(graph.storage[t]) for t in reads.tolist()]
            inputs = [made[t] for t in read if t in made and not made[t].startswith(f"{name}:")]
            self._add(nodes, name, [*inputs, *(f"^op{m}" for m in after.tolist())], int(problem.op_groups[n]))
            outputs[name] = graph.tensors.nbytes[writes].tolist()
            costs[name] = float(problem.op_seconds[n, 0]) * 1e6  # µs
        memory = [SimpleNamespace(node=k, op_memory=SimpleNamespace(output_memory=v)) for k, v in outputs.items()]
        times = [
            SimpleNamespace(node_name=k, all_start_micros=0, all_end_rel_micros=v, op_start_rel_micros=0, output=[])
            for k, v in costs.items()
        ]
        profile = SimpleNamespace(dev_stats=[SimpleNamespace(device="all", node_stats=times)])
        metagraph = SimpleNamespace(graph_def=SimpleNamespace(node=nodes))
        devices = [f"/device:GPU:{device}" for device in range(problem.num_devices)]
        self._simulator = _placeto_module(checkout).ImportantOpsSimulator(metagraph, memory, profile, devices)

    def _add(self, nodes: list[Any], name: str, inputs: list[str], group: int) -> None:
        nodes.append(SimpleNamespace(name=name, op="op", device="/device:GPU:0", input=list(dict.fromkeys(inputs))))
        self._names.append(name)
        self._groups.append(group)

    def __call__(self, placement: "Ints") -> float:
        """Returns the step seconds of a placement [groups] in Placeto's simulator."""
        devices = {name: str(placement[group]) for name, group in zip(self._names, self._groups, strict=True)}
        return float(self._simulator.simulate(devices)) / 1e6


def _placeto_module(checkout: str) -> Any:
    """Returns the module of the simulator in a copy of Placeto's repository."""
    from placewise.core.errors import InputError

    folder, package = f"{checkout}/sim", "tf_placement_sim"
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]  # another copy's
    sys.path.insert(0, folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it compares with `is`
            return importlib.import_module(f"{package}.tf_pl_simulator")
    except ImportError as problem:
        raise InputError(f"{checkout}: is no copy of aravic/generalizable-device-placement: {problem}") from None
    finally:
        sys.path.remove(folder)


def _searched(problem: "Problem", simulator: Any, strategy: Any, seconds: float) -> "tuple[float, Ints | None]":
    """Returns the best step and placement of a strategy's answer, or of all that it proposes in so many seconds."""
    import numpy as np

    from placewise.core.errors import StrategyError

    began, best, found = time.process_time(), math.inf, None
    proposals = strategy.search(problem, np.random.default_rng(0))
    try:
        proposal = next(proposals)
        while proposal.notes.get("stage") not in ("tuning", "evolution"):
            evaluation = simulator(proposal.placements, proposal.orders)
            cost = np.where(evaluation.overflow_bytes == 0, evaluation.step_seconds, np.inf)
            row = int(cost.argmin())
            if cost[row] < best:
                best, found = float(cost[row]), np.array(proposal.placements[row])
            if time.process_time() - began >= seconds:
                break
            proposal = proposals.send(evaluation)
    except (StopIteration, StrategyError):
        pass
    finally:
        proposals.close()
    return best, found
