"""The graph policy on families of models that its weights have never seen: `placewise bench policy`."""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from placewise.experiments.bench import Benchmark, Findings, Rows, option, table_of

if TYPE_CHECKING:
    from placewise.core.cluster import Cluster
    from placewise.core.contracts import Strategy
    from placewise.core.graph import Graph
    from placewise.core.problem import Problem
    from placewise.experiments.policy.teaching import Prepared, Report
    from placewise.experiments.policy.teaching_record import TeachingRecord
    from placewise.simulate.simulator import Simulator

CLUSTERS = ("2xK80", "4xK80", "4xV100-nvlink", "4090+3060")

RECURRENT, CONVOLUTIONAL, OTHERS = ("nmt", "rnnlm"), ("inception", "resnet", "cifar"), ("gpt", "bert", "random")

FOLDS: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {  # families held out -> family -> models judged by those weights
    RECURRENT: {"nmt": ("nmt:layers=2", "nmt:layers=4,length=20"), "rnnlm": ("rnnlm", "rnnlm:layers=4,steps=20")},
    CONVOLUTIONAL: {
        "inception": ("inception-v3", "inception-v3:batch=16,micro_batches=4"),
        "resnet": ("resnet", "resnet:depth=101,batch=64"),
    },
    OTHERS: {
        "gpt": ("gpt", "gpt:layers=8,micro_batches=4"),
        "bert": ("bert", "bert:layers=8,micro_batches=4"),
        "transformers": ("placewise.experiments.outside_models:t5", "placewise.experiments.outside_models:wide_bert"),
        "random": ("random-step:1000001", "random-step:1000002", "random-step:1000003"),
    },
}

ONE_SHOT = (  # strategies that answer at once
    "gpu-only", "round-robin", "expert", "balanced", "pipeline", "towers", "heft", "cpop", "critical-path", "m-topo",
    "m-etf", "m-sct", "metis", "scotch", "mincut",
)  # fmt: skip

SLOW, FEW_OPS = ("m-sct",), 5000  # strategies that only answer at once for steps of at most this many ops

TUNED = {
    RECURRENT: (("nmt:layers=2", "2xK80"), ("nmt:layers=4", "4xK80")),
    CONVOLUTIONAL: (("inception-v3", "4xK80"),),
}

TUNED_EVALUATIONS, POST_EVALUATIONS = 200, 2400


POLICY, GREEDY = "graph-policy", "graph-policy, greedy"


@dataclass(frozen=True)
class UnseenFamilies(Benchmark):
    """The graph policy against every one-shot strategy on unseen families; with --tuned, fine-tuned against Post."""

    clusters: tuple[str, ...] = option("list", f"presets or files (default: {','.join(CLUSTERS)})", default=CLUSTERS)
    lessons: int = option("positive", "problems of the corpus, before families are left out", default=280)
    gradient: int = option("positive", "epochs of policy gradient of each of the three sets of weights", default=12)
    seconds: float = option("seconds", "of auto, with which all are compared", "S", default=10.0)
    also: tuple[str, ...] = option("repeated", "judge another model, by weights that saw no convolutions", "FAMILY=MODEL")
    tuned: bool = option("flag", "compare 200 evaluations with Post's 2,400 instead", default=False)
    seeds: int = option("positive", "searches of each, with --tuned", "K", default=5)
    run_file: str | None = option("file", "record labels and epochs, and continue an interrupted training", "RUNS.DB")

    def run(self) -> Findings:
        """Trains weights without some families, and judges them on these families."""
        from placewise.core.cluster import Cluster
        from placewise.core.errors import InputError
        from placewise.experiments.policy.teaching_record import opened_record

        for cluster in self.clusters:
            Cluster.load(cluster)
        others = [entry.partition("=") for entry in self.also or ()]
        if wrong := [name for name, equals, model in others if not (name and equals and model)]:
            raise InputError(f"--also must be FAMILY=MODEL, got {wrong[0]!r}")
        rows: Rows = []
        with opened_record(self.run_file) as record, TemporaryDirectory() as folder:
            weights = _Weights(self, record, folder)
            if self.tuned:
                for held_out, models in TUNED.items():
                    for model, cluster in models:
                        rows.append(_tune(weights.without(held_out), model, cluster, self.seeds))
                        _tell(rows[-1])
                return self.findings(rows)
            for held_out, families in FOLDS.items():
                judged = [(family, model) for family, models in families.items() for model in models]
                judged += [(name, model) for name, _, model in others] if held_out == CONVOLUTIONAL else []
                for family, model in judged:
                    for cluster in self.clusters:
                        rows.append(_judge(weights.without(held_out), family, model, cluster, self.seconds))
                        _tell(rows[-1])
        return Findings({self.name(): rows}, f"{table_of(_by_family(rows))}\n\n{_summary(rows)}")


class _Weights:
    """Files of weights that have not seen some families; all learn from the same problems, which are labelled once."""

    def __init__(self, benchmark: UnseenFamilies, record: "TeachingRecord", folder: str) -> None:
        self._benchmark, self._record, self._folder = benchmark, record, folder
        self._prepared: list[Prepared] = []

    def without(self, held_out: tuple[str, ...]) -> str:
        """Returns the file of the weights that have not seen these families."""
        from placewise.experiments.policy.corpus import draw_lessons
        from placewise.experiments.policy.policy_training import Training, learn, write_network
        from placewise.experiments.policy.teaching import prepare

        path = Path(self._folder) / f"without-{'-'.join(held_out)}.safetensors"
        if not path.exists():
            options = self._benchmark
            training = Training(lessons=options.lessons, gradient_epochs=options.gradient, hold_out=held_out)
            if not self._prepared:
                self._prepared = prepare(draw_lessons(training.lessons, training.seed), self._record, _tell_epoch)
            seen = [one for one in self._prepared if one.lesson.family not in held_out]
            write_network(learn(seen, training, self._record, _tell_epoch), path, training)
        return str(path)


def _judge(weights: str, family: str, model: str, cluster: str, seconds: float) -> dict[str, Any]:
    """Returns the step seconds of all strategies on a problem, None for what does not fit or is not installed."""
    from placewise.core.problem import Problem
    from placewise.search.budget import Budget
    from placewise.search.driver import search
    from placewise.simulate.simulator import Simulator
    from placewise.strategies import make

    problem = Problem.of(_graph(model), _cluster(cluster))
    simulator = Simulator(problem)
    found: dict[str, float | None] = {}
    for name in ONE_SHOT:
        if name not in SLOW or problem.num_ops <= FEW_OPS:
            found[name] = _one_shot(problem, simulator, make(name))
    _one_shot(problem, simulator, _policy(weights))  # compiles
    began = time.process_time()
    found[POLICY] = _one_shot(problem, simulator, _policy(weights))
    spent = time.process_time() - began
    found[GREEDY] = _one_shot(problem, simulator, _policy(weights, candidates=1))
    began = time.process_time()
    outcome = search(problem, make("auto"), simulator, budget=Budget(seconds=seconds), seed=0)
    times = {"policy cpu s": spent, "auto cpu s": time.process_time() - began}
    row = {"family": family, "model": model, "cluster": cluster, "ops": problem.num_ops, **times}
    return {**row, "auto": outcome.step_seconds, **found}


def _one_shot(problem: "Problem", simulator: "Simulator", strategy: "Strategy") -> float | None:
    """Returns the best step that fits of a strategy's answer: all its proposals, or at most the first two of a policy."""
    import numpy as np

    from placewise.core.errors import StrategyError
    from placewise.strategies.learned.graph_policy.graph_policy import GraphPolicy

    proposals = strategy.search(problem, np.random.default_rng(0))
    best = math.inf
    try:
        proposal = next(proposals)
        while not (isinstance(strategy, GraphPolicy) and proposal.notes["stage"] == "evolution"):
            evaluation = simulator(proposal.placements, proposal.orders)
            fits = evaluation.overflow_bytes == 0
            best = min(best, float(evaluation.step_seconds[fits].min(initial=math.inf)))
            proposal = proposals.send(evaluation)
    except (StopIteration, StrategyError):
        pass
    proposals.close()
    return best if math.isfinite(best) else None


def _policy(weights: str, **settings: Any) -> "Strategy":
    from placewise.strategies.learned.graph_policy.graph_policy import GraphPolicy

    return GraphPolicy(weights=weights, **settings)


def _tune(weights: str, model: str, cluster: str, seeds: int) -> dict[str, Any]:
    """Returns what a few evaluations after the policy find, and many of Post: the means over seeds, and how they spread."""
    from placewise.core.problem import Problem
    from placewise.search.budget import Budget
    from placewise.search.driver import search
    from placewise.simulate.simulator import Simulator
    from placewise.strategies import make

    problem = Problem.of(_graph(model), _cluster(cluster))
    simulator = Simulator(problem)
    row: dict[str, Any] = {"model": model, "machine": cluster}
    contestants = (
        ("first", _policy(weights), 1), ("policy, 200", _policy(weights), TUNED_EVALUATIONS),
        ("post, 200", make("post"), TUNED_EVALUATIONS), ("post, 2,400", make("post"), POST_EVALUATIONS),
    )  # fmt: skip
    for name, strategy, evaluations in contestants:
        found = [
            search(problem, strategy, simulator, budget=Budget(evaluations), seed=seed).step_seconds for seed in range(seeds)
        ]
        row[f"{name} ms"] = statistics.fmean(found) * 1e3
        row[f"± of {name}"] = statistics.pstdev(found) * 1e3
    return row


@lru_cache(maxsize=1)
def _graph(model: str) -> "Graph":
    from placewise.experiments.policy.corpus import graph_of_lesson

    return graph_of_lesson(model)


def _cluster(name: str) -> "Cluster":
    from placewise.core.cluster import Cluster

    return Cluster.load(name)


def _by_family(rows: Rows) -> Rows:
    """Returns a row for each family and one for all: geometric means of step time / auto's, over problems where it fits."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    table = [{"family": family, **_ratios([row for row in rows if row["family"] == family])} for family in families]
    means = {
        name: _geometric_mean([row[name] for row in table if isinstance(row[name], float)])
        for name in table[0] if name != "family"
    }  # fmt: skip
    return [*table, {"family": "all families", **means}]


def _ratios(rows: Rows) -> dict[str, float | str]:
    names = [POLICY, GREEDY, *ONE_SHOT]
    found = {name: [row[name] / row["auto"] for row in rows if row.get(name) is not None] for name in names}
    best = [min(row[name] for name in ONE_SHOT if row.get(name) is not None) / row["auto"] for row in rows]
    means = {name: _geometric_mean(ratios) if ratios else "-" for name, ratios in found.items()}
    return {POLICY: means.pop(POLICY), GREEDY: means.pop(GREEDY), "best of all": _geometric_mean(best), **means}


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _summary(rows: Rows) -> str:
    """Returns the medians, and what does not fit, in words."""
    ratios = [row[POLICY] / row["auto"] for row in rows if row[POLICY] is not None]
    failures = {name: sum(row.get(name, 0.0) is None for row in rows) for name in (POLICY, *ONE_SHOT)}
    fails = ", ".join(f"{name} {count}" for name, count in failures.items() if count)
    slowest, given = max(row["policy cpu s"] for row in rows), statistics.median(row["auto cpu s"] for row in rows)
    return (
        f"{len(rows)} problems: the policy's first answer takes {statistics.median(ratios):.3f} times as long as auto's "
        f"plan in the median, {max(ratios):.3f} at most; nothing that fits: {fails or 'nowhere'}; "
        f"the policy takes at most {slowest:.2f} s of processor time, auto {given:.1f} s in the median"
    )


def _tell(row: dict[str, Any]) -> None:
    """Shows a row on standard error of a terminal."""
    if sys.stderr.isatty():
        print(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in row.items()),
              file=sys.stderr)  # fmt: skip


def _tell_epoch(report: "Report") -> None:
    if sys.stderr.isatty() and report.number == report.total:
        print(f"{report.stage}: {report.number} of {report.total}, greedy / auto {report.ratio:.3f}", file=sys.stderr)
