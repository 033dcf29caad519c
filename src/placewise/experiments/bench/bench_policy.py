"""The graph policy on families of models that its weights have never seen: `placewise bench policy`."""

import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

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

PUBLIC: dict[tuple[str, ...], dict[str, tuple[str, ...]]] = {  # the same for graphs that others measured, on their machines
    RECURRENT: {
        "dnn-partitioning": ("dnn-partitioning/latency-inputs/LayerGraphs/gnmt_inference.json",),
        "pipedream": ("pipedream/gnmt.txt",),
    },
    CONVOLUTIONAL: {
        "dnn-partitioning": (
            "dnn-partitioning/latency-inputs/LayerGraphs/inceptionv3_inference.json",
            "dnn-partitioning/latency-inputs/LayerGraphs/resnet50_inference.json",
            "dnn-partitioning/latency-inputs/OperatorGraphs/resnet50_inference.json",
        ),
        "pipedream": tuple(f"pipedream/{name}.txt" for name in ("densenet121", "inception_v3", "resnet50", "vgg16")),
    },
    OTHERS: {
        "dnn-partitioning": (
            "dnn-partitioning/latency-inputs/LayerGraphs/bert24_inference.json",
            "dnn-partitioning/latency-inputs/OperatorGraphs/bert_l-3_inference.json",
            "dnn-partitioning/latency-inputs/OperatorGraphs/bert_l-6_inference.json",
            "dnn-partitioning/latency-inputs/OperatorGraphs/bert_l-12_inference.json",
        ),
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


POLICY, CHOSEN, GREEDY = "graph-policy", "graph-policy, not refined", "graph-policy, greedy"


@dataclass(frozen=True)
class UnseenFamilies(Benchmark):
    """The graph policy against every one-shot strategy on unseen families; with --tuned, fine-tuned against Post."""

    clusters: tuple[str, ...] = option("list", f"presets or files (default: {','.join(CLUSTERS)})", default=CLUSTERS)
    lessons: int = option("positive", "problems of the corpus, before families are left out", default=280)
    gradient: int = option("positive", "epochs of policy gradient of each of the three sets of weights", default=12)
    seconds: float = option("seconds", "of processor time for auto, with which all are compared", "S", default=10.0)
    also: tuple[str, ...] = option("repeated", "judge another model, by weights that saw no convolutions", "FAMILY=MODEL")
    public: str | None = option(
        "source", "judge the public graphs of dnn-partitioning and pipedream in this folder, too", "FOLDER"
    )
    tuned: bool = option("flag", "compare 200 evaluations with Post's 2,400 instead", default=False)
    ablate: bool = option(
        "flag", "measure instead what the network makes of each group of figures that it reads", default=False
    )
    starts: bool = option(
        "flag", "compare auto with and without the policy's answer as one more start instead", default=False
    )
    seeds: int = option("positive", "searches of each, with --tuned and --starts", "K", default=5)
    plots: str | None = option("folder", "write a picture into this folder; also with --ablate", "DIR")
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
        if self.plots is not None:
            from placewise.experiments.search_figures import check_drawing

            check_drawing()
        with opened_record(self.run_file) as record, TemporaryDirectory() as folder:
            weights = _Weights(self, record, folder)
            if self.tuned:
                return self.findings(list(self._tune(weights)))
            if self.starts:
                return self.findings(list(self._start(weights)))
            if self.ablate:
                return self._ablate(weights)
            rows = []
            _compile()
            for judged in self._problems():
                rows.append(_judge(weights.without(judged.held_out), judged, self.seconds))
                _tell(rows[-1])
        table = _by_family(rows)
        if self.plots is not None:
            from placewise.experiments.policy.policy_figures import write_families

            write_families(self.plots, table)
        return Findings({self.name(): rows}, f"{table_of(table)}\n\n{_summary(rows)}", tuple(self._skipped()))

    def _problems(self) -> "Iterator[_Judged]":
        """Yields all problems, each with the families that its weights must not have seen."""
        from placewise.core.problem import Problem

        for held_out, families in FOLDS.items():
            judged = [(family, model) for family, models in families.items() for model in models]
            if held_out == CONVOLUTIONAL:
                judged += [(name, model) for name, _, model in (entry.partition("=") for entry in self.also or ())]
            for family, model in judged:
                for cluster in self.clusters:
                    yield _Judged(held_out, family, model, cluster, Problem.of(_graph(model), _cluster(cluster)))
        for held_out, families in PUBLIC.items() if self.public is not None else ():
            for family, paths in families.items():
                for path in paths:
                    yield _Judged(held_out, family, path, "its own", _public_problem(Path(self.public or ".") / path))

    def _skipped(self) -> Iterator[str]:
        if self.public is None:
            yield "dnn-partitioning and pipedream are skipped: --public names a folder with their graphs"

    def _tune(self, weights: "_Weights") -> Iterator[dict[str, Any]]:
        for held_out, models in TUNED.items():
            for model, cluster in models:
                row = _tune(weights.without(held_out), model, cluster, self.seeds)
                _tell(row)
                yield row

    def _start(self, weights: "_Weights") -> Iterator[dict[str, Any]]:
        _compile()
        for judged in self._problems():
            row = _start(weights.without(judged.held_out), judged, self.seconds, self.seeds)
            _tell(row)
            yield row

    def _ablate(self, weights: "_Weights") -> Findings:
        from placewise.experiments.policy.ablation import ablate, by_group
        from placewise.strategies.learned.graph_policy.graph_policy import read_network

        found: dict[str, list[dict[str, float]]] = {}  # by family
        for judged in self._problems():
            network = read_network(weights.without(judged.held_out))
            found.setdefault(judged.family, []).append(ablate(network, judged.problem))
        rows = by_group(found)
        if self.plots is not None:
            from placewise.experiments.policy.policy_figures import write_ablation

            write_ablation(self.plots, rows)
        return Findings({self.name(): rows}, table_of(rows), tuple(self._skipped()))


class _Judged(NamedTuple):
    """A problem to judge weights on."""

    held_out: tuple[str, ...]  # families that the weights must not have seen
    family: str
    model: str
    cluster: str
    problem: "Problem"


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


def _judge(weights: str, judged: _Judged, seconds: float) -> dict[str, Any]:
    """Returns the step seconds of all strategies on a problem, None for what does not fit, without what can't be used."""
    from placewise.simulate.simulator import Simulator
    from placewise.strategies import make

    problem = judged.problem
    simulator = Simulator(problem)
    found: dict[str, float | None] = {}
    for name in ONE_SHOT:
        if name not in SLOW or problem.num_ops <= FEW_OPS:
            best = _best(problem, simulator, make(name))
            if best is not UNUSABLE:
                found[name] = best
    _best(problem, simulator, _policy(weights))  # compiles
    began = time.process_time()
    found[POLICY] = _best(problem, simulator, _policy(weights))
    spent = time.process_time() - began
    found[CHOSEN] = _best(problem, simulator, _policy(weights, refinements=0))
    found[GREEDY] = _best(problem, simulator, _policy(weights, candidates=1, refinements=0))
    began = time.process_time()
    auto = _best(problem, simulator, make("auto"), seconds)
    times = {"policy cpu s": spent, "auto cpu s": time.process_time() - began}
    row = {"family": judged.family, "model": judged.model, "cluster": judged.cluster, "ops": problem.num_ops, **times}
    return {**row, "auto": auto, **found}


def _compile() -> None:
    """Lets auto search a small step, so that compiling does not count where it is judged."""
    from placewise.core.problem import Problem
    from placewise.simulate.simulator import Simulator
    from placewise.strategies import make

    problem = Problem.of(_graph("random-step:1"), _cluster("2xK80"))
    _best(problem, Simulator(problem), make("auto"), 1.0)


UNUSABLE = -1.0  # for a strategy that is not installed, or can't place such a graph


def _best(
    problem: "Problem", simulator: "Simulator", strategy: "Strategy", seconds: float = math.inf, seed: int = 0
) -> float | None:
    """Returns the best step that fits: of all proposals in so many seconds of processor time, or of a policy's answer."""
    import numpy as np

    from placewise.core.errors import StrategyError
    from placewise.strategies.learned.graph_policy.graph_policy import GraphPolicy

    began = time.process_time()
    proposals = strategy.search(problem, np.random.default_rng(seed))
    best = math.inf
    try:
        proposal = next(proposals)
        while not isinstance(strategy, GraphPolicy) or proposal.notes["stage"] in ("policy", "repair"):
            evaluation = simulator(proposal.placements, proposal.orders)
            fits = evaluation.overflow_bytes == 0
            best = min(best, float(evaluation.step_seconds[fits].min(initial=math.inf)))
            if time.process_time() - began >= seconds:
                break
            proposal = proposals.send(evaluation)
    except StopIteration:
        pass
    except StrategyError:
        return best if math.isfinite(best) else UNUSABLE
    finally:
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


def _start(weights: str, judged: _Judged, seconds: float, seeds: int) -> dict[str, Any]:
    """Returns what auto finds in so many seconds of processor time, and with the policy's answer as one more start."""
    from collections.abc import Iterator as Iterates

    import numpy as np

    from placewise.simulate.simulator import Simulator
    from placewise.strategies.auto.auto import Auto
    from placewise.strategies.auto.candidates import Candidate, best_first

    class Begun(Auto):
        """Auto whose portfolio has the policy's answer; its time counts."""

        def begun(self, model: Simulator, growing: Iterates[list[Candidate]]) -> Iterates[list[Candidate]]:
            answer = next(_policy(weights).search(model.problem, np.random.default_rng(0)))
            known = [Candidate.of(model, answer.placements[0])]
            for starts in growing:
                yield best_first([*known, *starts])

    problem, row = judged.problem, {"family": judged.family, "model": judged.model, "cluster": judged.cluster}
    simulator = Simulator(problem)
    found: dict[str, float | None] = {}
    for name, strategy in (("auto", Auto()), ("with the policy", Begun())):
        steps = [_best(problem, simulator, strategy, seconds, seed) for seed in range(seeds)]
        known = [step for step in steps if step is not None]
        found[f"{name} ms"] = statistics.fmean(known) * 1e3 if known else None
        found[f"± of {name}"] = statistics.pstdev(known) * 1e3 if known else None
    return {**row, **found}


@lru_cache(maxsize=1)
def _graph(model: str) -> "Graph":
    from placewise.experiments.policy.corpus import graph_of_lesson

    return graph_of_lesson(model)


def _cluster(name: str) -> "Cluster":
    from placewise.core.cluster import Cluster

    return Cluster.load(name)


def _public_problem(path: Path) -> "Problem":
    """Returns a public graph on the machine that its file describes, or on the four GPUs of docs/importers.md."""
    from placewise.core.problem import Problem
    from placewise.formats.importers import dnn_partitioning_cluster, pipedream_cluster, read_any_graph

    cluster = dnn_partitioning_cluster(path) if path.suffix == ".json" else pipedream_cluster()
    return Problem.of(read_any_graph(path), cluster)


def _by_family(rows: Rows) -> Rows:
    """Returns a row for each family and two for all.

    They have geometric means of step time / auto's over the problems where a strategy's plan fits, and in the last row those
    of the policy's step time / the strategy's over the problems where both fit; families count alike.
    """
    families = list(dict.fromkeys(row["family"] for row in rows))
    groups = [[row for row in rows if row["family"] == family] for family in families]
    names = [POLICY, CHOSEN, GREEDY, "best of all", *(name for name in ONE_SHOT if any(name in row for row in rows))]
    steps = [[{**row, "best of all": _best_of_all(row)} for row in group] for group in groups]
    table = [
        {"family": family, **{name: _mean_ratio(group, name, "auto") for name in names}}
        for family, group in zip(families, steps, strict=True)
    ]
    means = {name: _mean([row[name] for row in table]) for name in names}
    against = {name: _mean([_mean_ratio(group, POLICY, name) for group in steps]) for name in names}
    return [*table, {"family": "all families", **means}, {"family": "policy / it", **against}]


def _best_of_all(row: dict[str, Any]) -> float | None:
    return min((row[name] for name in ONE_SHOT if row.get(name) is not None), default=None)


def _mean_ratio(rows: Rows, name: str, other: str) -> float | str:
    both = [row for row in rows if row.get(name) is not None and row.get(other) is not None]
    return _mean([row[name] / row[other] for row in both])


def _mean(ratios: Sequence[float | str]) -> float | str:
    """Returns the geometric mean of what are numbers."""
    logs = [math.log(ratio) for ratio in ratios if isinstance(ratio, float)]
    return math.exp(statistics.fmean(logs)) if logs else "-"


def _summary(rows: Rows) -> str:
    """Returns the medians, and what does not fit, in words."""
    ratios = [row[POLICY] / row["auto"] for row in rows if row[POLICY] is not None and row["auto"] is not None]
    failures = {name: sum(row.get(name, 0.0) is None for row in rows) for name in ("auto", POLICY, *ONE_SHOT)}
    fails = ", ".join(f"{name} {count}" for name, count in failures.items() if count)
    others = sum(row[POLICY] is None and any(row.get(name) is not None for name in ("auto", *ONE_SHOT)) for row in rows)
    slowest, given = max(rows, key=lambda row: row["policy cpu s"]), statistics.median(row["auto cpu s"] for row in rows)
    return (
        f"{len(rows)} problems: the policy's first answer takes {statistics.median(ratios):.3f} times as long as auto's "
        f"plan in the median, {max(ratios):.3f} at most; nothing that fits: {fails or 'nowhere'}; where the policy finds "
        f"nothing that fits, another does {others} times; the policy takes at most {slowest['policy cpu s']:.2f} s of "
        f"processor time ({slowest['ops']:,} ops), auto {given:.1f} s in the median"
    )


def _tell(row: dict[str, Any]) -> None:
    """Shows a row on standard error of a terminal."""
    if sys.stderr.isatty():
        print(", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{value}" for name, value in row.items()),
              file=sys.stderr)  # fmt: skip


def _tell_epoch(report: "Report") -> None:
    if sys.stderr.isatty() and report.number == report.total:
        print(f"{report.stage}: {report.number} of {report.total}, greedy / auto {report.ratio:.3f}", file=sys.stderr)
