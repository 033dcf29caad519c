"""Every file that is read: a good one, how it is mutated, and the commands that read it."""

import gzip
import json
import random
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from builders import op, profile_of_two_slices, tensor, tiny_data
from captured import GOLDEN
from command_line import TINY_CLUSTER_TOML, TINY_PLAN
from formats.test_importers import SMALL_PROFILE, small_partitioning
from small_steps import two_cpus

from fuzz.mutations import (
    json_text,
    mutate_record,
    mutate_run_file,
    mutated_bytes,
    mutated_lines,
    mutated_safetensors,
    mutated_tree,
    packed,
    toml_text,
)
from placewise.cli import main
from placewise.cli.outputs import warn
from placewise.core.errors import PlacewiseError
from placewise.core.problem import Problem
from placewise.core.profile import CheckedPrediction
from placewise.evaluate.measured import Measure
from placewise.experiments.bench import bench_rows
from placewise.experiments.policy import policy_training, teaching
from placewise.experiments.policy.corpus import Lesson
from placewise.formats.cluster_file import read_cluster
from placewise.formats.graph_file import read_graph
from placewise.formats.plan_file import read_plan
from placewise.formats.profile_file import format_profile, read_profile
from placewise.measure.profiler import apply_profile
from placewise.measure.random_batch import random_batch
from placewise.models import load_step
from placewise.report.terminal_text import printable
from placewise.rewrite.memory_options import memory_rewrites, rewrite_graph
from placewise.search import driver, planner
from placewise.search.budget import Budget
from placewise.search.driver import Progress
from placewise.search.planner import Planner
from placewise.search.request import Request, specify
from placewise.search.store import RunFile

TINY = ("--cluster", "cluster.toml")

CHECKS = (CheckedPrediction("on gpu:0", 0.5, 0.5), CheckedPrediction("on gpu:0 and gpu:1", 0.5, 1.5))

HOSTS_TOML = """
name = "hosts"
dispatch_seconds = 1e-6
[[devices]]
name = "gpu:0"
kind = "gpu"
host = "a"
memory = "1MiB"
flops = {float32 = 1e12, bfloat16 = 2e12}
bytes_per_second = 1e11
[[devices]]
name = "gpu:1"
kind = "gpu"
host = "b"
memory = "1MiB"
flops = 1e12
bytes_per_second = 1e11
[[links]]
from = "gpu:0"
to = "gpu:1"
both = true
latency_seconds = 0.001
bytes_per_second = 1e6
channel = ["a card", "b card"]
"""

STRATEGIES = (
    "auto", "random", "hill-climb", "annealing", "genetic", "heft", "cpop", "critical-path", "m-topo", "m-etf", "m-sct",
    "pipeline", "balanced", "expert", "towers", "gpu-only", "even", "round-robin", "post", "cross-entropy", "metis",
    "scotch", "mincut", "exact",
)  # fmt: skip

NETWORKS = ("colocrl", "spotlight", "hdp", "ppo", "policy-gradient", "graph-policy")  # torch is loaded for them

Mutate = Callable[[Path, random.Random], None]

Command = list[str] | Callable[[], int]  # arguments of `placewise`, or a function that returns an exit code


@dataclass(frozen=True)
class Target:
    """A kind of file: its name, how it is mutated, and the commands that read it."""

    name: str
    mutate: Mutate
    commands: Callable[[random.Random], Command]
    weight: int


# --- good files ---


def optional_data() -> dict[str, Any]:
    """Returns the tiny graph with relu once more for the backward pass; the second one, group 3, may be nowhere."""
    data = tiny_data()
    data["tensors"].append(tensor("h again", 2000, stands_for=2))
    again = op("relu again", 3, [0], [6], kind="aten.relu", seconds={"gpu": 0.001}, optional=True)
    data["ops"].insert(2, again | {"compute": "bfloat16"})
    data["ops"][3] |= {"reads": [3, 6]}
    return data | {"rewrites": ["options 3"]}


def write_good_files(folder: Path) -> None:
    """Writes a good file of each kind into the current folder."""
    (folder / "graph.json").write_text(json.dumps(tiny_data()))
    (folder / "graph.json.gz").write_bytes(gzip.compress(json.dumps(tiny_data()).encode(), 1, mtime=0))
    (folder / "captured.json").write_bytes(gzip.decompress((GOLDEN / "captured.json.gz").read_bytes()))
    (folder / "cluster.toml").write_text(TINY_CLUSTER_TOML)
    (folder / "optional.json").write_text(json.dumps(optional_data()))
    (folder / "hosts.toml").write_text(HOSTS_TOML)
    (folder / "nowhere.json").write_text(
        json.dumps({**TINY_PLAN, "placement": ["gpu:0", "gpu:1", "gpu:0", None], "rewrites": ["options 3"]})
    )
    plan = {**TINY_PLAN, "order": [0, 1, 2, 3], "strategy": "random", "seed": 0, "history": [[1, 0.5], [2, 0.25]]}
    (folder / "plan.json").write_text(json.dumps({**plan, "peak_bytes": {"gpu:0": 9}, "parameters": {"batch": 4}}))
    (folder / "profile.json").write_text(format_profile(replace(profile_of_two_slices(), checks=CHECKS)))
    (folder / "pipedream.txt").write_text(SMALL_PROFILE)
    (folder / "partitioning.json").write_text(json.dumps(small_partitioning()))
    assert main(["simulate", "graph.json", *TINY, "--plan", "plan.json", "--trace", "trace.json"]) == 0
    for name in ("captured.json", "pipedream.txt", "partitioning.json"):
        assert main(["place", name, "--cluster", "2xK80", "--strategy", "heft", "-o", f"{name}.plan", "--quiet"]) == 0
    _write_runs(folder / "runs.db")
    _write_run_plan(folder / "run.plan")
    _write_weights(folder / "weights.safetensors", folder / "record.db")
    found = {"step_seconds": 0.5, "evaluations": 8, "search_seconds": 0.1, "problem": ""}
    facts = {"ops": 4, "groups": 3, "bound": "work", "bound_seconds": 0.25, "pipelined_seconds": None}
    results = {"strategies": {"auto": found, "gpu-only": {**found, "step_seconds": None}}}
    rows = [{**asdict(row), **facts, **results} for row in bench_rows.ROWS[:2]]
    head = {"format": bench_rows.FORMAT, "version": bench_rows.VERSION, "effort": asdict(bench_rows.RowBudget())}
    (folder / "rows.json").write_text(json.dumps({**head, "rows": rows}))


def _write_runs(path: Path) -> None:
    """Writes a finished run, one that was stopped, and one that is to be measured."""
    graph, cluster = read_graph("graph.json"), read_cluster("cluster.toml")
    problem = Problem.of(graph, cluster)

    def stop(progress: Progress) -> None:
        if progress.evaluations >= 4:
            raise KeyboardInterrupt

    for number, listen in enumerate((None, stop)):
        request = Request("random", {"batch": "2"}, Budget(8), number, model="graph.json", cluster="cluster.toml")
        Planner(problem, request).search(listen, record=path)
    with RunFile(path) as file:
        request = Request("random", {}, Budget(8), model="os:abort", cluster="cluster.toml", measure=Measure())
        file.create(specify(problem, request), problem).close()


def _write_run_plan(path: Path) -> None:
    """Writes a plan with optional ops for the captured step."""
    planner = Planner(
        Problem.of(rewrite_graph(_captured().graph, memory_rewrites()), two_cpus()), Request("random", {}, Budget(2))
    )
    planner.plan(planner.search()).save(path)


def _write_weights(weights: Path, record: Path) -> None:
    """Writes weights of graph-policy, and the record of how they were made."""
    training = _training()
    with _few_lessons():
        policy_training.train(replace(training, gradient_epochs=1), weights, record, lambda report: None)


def _training() -> Any:
    return policy_training.Training(width=3, rounds=1, imitation_epochs=1, gradient_epochs=2, samples=2, batch=2, lessons=3)


@contextmanager
def _few_lessons() -> Iterator[None]:
    """Three random steps, and a quick teacher."""
    lessons = [Lesson("random", f"random-step:{n}", "2xK80", n, 4) for n in range(3)]
    drawn = patch.object(policy_training, "draw_lessons", lambda count, seed, hold_out: lessons)
    with drawn, patch.object(teaching, "TEACHER_PROPOSALS", 2):
        yield


# --- how they are mutated ---


def _json(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    if rng.randrange(3):
        data = json_text(mutated_tree(json.loads(data), rng)).encode("utf-8", "replace")
    else:
        data = mutated_bytes(data, rng)
    path.write_bytes(data if rng.randrange(12) else packed(data, rng))


def _packed_json(path: Path, rng: random.Random) -> None:
    _json(plain := path.with_suffix(""), rng)
    path.write_bytes(packed(plain.read_bytes(), rng))


def _toml(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    kind = rng.randrange(4)
    if kind < 2:
        data = toml_text(mutated_tree(tomllib.loads(data.decode()), rng)).encode("utf-8", "replace")
    else:
        data = mutated_bytes(data, rng) if kind == 2 else mutated_lines(data.decode(), rng).encode()
    path.write_bytes(data)


def _text(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(mutated_bytes(data, rng) if rng.randrange(2) else mutated_lines(data.decode(), rng).encode())


def _safetensors(path: Path, rng: random.Random) -> None:
    path.write_bytes(mutated_safetensors(path.read_bytes(), rng))


# --- the commands that read them ---


def _on(graph: str, cluster: str, plan: str, rng: random.Random) -> Command:
    with_cluster = [graph, "--cluster", cluster]
    search = [
        "--strategy",
        rng.choice(NETWORKS if not rng.randrange(20) else STRATEGIES),
        "--budget",
        str(rng.choice((1, 3, 9))),
        "--seed",
        "1",
    ]
    kind = rng.randrange(9)
    if kind < 2:
        return ["info", *(with_cluster if kind else [graph]), *rng.choice(([], ["--json"]))]
    if kind == 2:
        return ["bound", *with_cluster, *rng.choice(([], ["--check"], ["--json"]))]
    if kind < 5:
        more = rng.choice(
            (["--trace", "out.json"], ["--disturb", "10%"], ["--memory", "gpu:0=9KiB"], ["--order", "program"])
        )
        return ["simulate", *with_cluster, "--plan", plan, *more]
    if kind == 5:
        return ["compare", *with_cluster, "--strategies", "random,heft", "--budget", "3", "--seeds", "1"]
    grouping = [
        "--grouping",
        rng.choice(("module", "coarse:2", "single-consumer", "name-prefix:2", "module-by-micro-batch")),
    ]
    outputs = ["-o", "out.json", "--report", "page.html"]
    return [
        "place",
        *with_cluster,
        *search,
        *rng.choice(([], grouping)),
        *rng.choice(([], outputs, ["--run-file", "new.db"])),
    ]


def _plan(rng: random.Random) -> Command:
    return rng.choice(
        (
            ["simulate", "graph.json", *TINY, "--plan", "plan.json", "--json"],
            ["report", "plan.json", "--graph", "graph.json", *TINY, "-o", "page.html"],
            ["place", "graph.json", *TINY, "--budget", "3", "--strategy", "post", "--set", "start=plan.json"],
        )
    )


def _start(rng: random.Random) -> Command:
    """A plan as the start of a search: of the same graph, or carried over to another one by names."""
    on = rng.choice((("graph.json", *TINY), *((name, "--cluster", "2xK80") for name in ("captured.json", "pipedream.txt"))))
    strategy = rng.choice(("auto", "auto", "post", "graph-policy"))
    return ["place", *on, "--strategy", strategy, "--budget", "3", "--start", "captured.json.plan"]


def _nowhere(rng: random.Random) -> Command:
    on = ["optional.json", "--cluster", "hosts.toml"]
    more = rng.choice((["--trace", "out.json"], ["--disturb", "20%"], ["--json"]))
    page = ["report", "nowhere.json", "--graph", *on, "-o", "page.html"]
    return rng.choice((["simulate", *on, "--plan", "nowhere.json", *more], page))


def _runs(rng: random.Random) -> Command:
    place = ["place", "graph.json", *TINY, "--strategy", "random", "--set", "batch=2", "--budget", "8"]
    return rng.choice(
        (
            ["runs", "runs.db"],
            ["runs", "runs.db", "--json"],
            ["runs", "runs.db", "--recover", "new.db"],
            ["report", "runs.db", "-o", "page.html"],
            ["report", "runs.db", "2", "-o", "page.html"],
            partial(_resume, rng.choice((1, 2, 2, 3))),
            [*place, "--seed", rng.choice("012"), "--run-file", "runs.db"],
        )
    )


def _resume(number: int) -> int:
    """Does what `placewise resume` does, but with a short search: a changed budget may be very long."""

    def search(*given: Any, budget: Budget, **others: Any) -> Any:
        return driver.search(*given, budget=Budget(min(budget.evaluations or 20, 20), 2.0), **others)

    with patch.object(planner, "search", search):
        return main(["resume", str(number), "--run-file", "runs.db", "--quiet"])


def _profile(rng: random.Random) -> Command:
    return _apply_profile


def _apply_profile() -> int:
    """Reads a profile and applies it to a captured step, as every command with --profile does."""
    cluster = read_cluster("cluster.toml")
    with _refusing() as refusal:
        profile = read_profile("profile.json")
        profile.check_covers(cluster, "profile.json")
        print(printable(profile.doubt() or "no doubt"))
        apply_profile(_captured(), cluster, profile, 0.5)
    return refusal.code


@cache
def _captured(device: str = "meta") -> Any:
    return load_step("rnnlm:layers=1,hidden=4,steps=2,batch=2,vocab=5", device)


def _run_plan(rng: random.Random) -> Command:
    return _compile_and_run


def _compile_and_run() -> int:
    """Compiles a plan, as its file says that its graph was made, and runs a step of it."""
    with _refusing() as refusal:
        step = _captured("cpu")
        train_step = read_plan("run.plan").compile(step, two_cpus())
        try:
            train_step(random_batch(step, 0))
        finally:
            train_step.close()
    return refusal.code


def _weights(rng: random.Random) -> Command:
    on = rng.choice((["graph.json", *TINY], ["captured.json", "--cluster", "2xK80"]))
    settings = ["--set", "weights=weights.safetensors", "--set", "candidates=4", "--set", "refinements=12"]
    return ["place", *on, "--strategy", "graph-policy", *settings, "--budget", rng.choice("13")]


def _record(rng: random.Random) -> Command:
    return _go_on_training


def _go_on_training() -> int:
    """Continues a training of graph-policy that was stopped."""
    with _refusing() as refusal, _few_lessons():
        policy_training.train(_training(), "new.safetensors", "record.db", lambda report: None)
    return refusal.code


def _bench_rows(rng: random.Random) -> Command:
    return _read_rows


def _read_rows() -> int:
    """Reads the results of `bench rows`, and prints its tables."""
    with _refusing() as refusal:
        results = bench_rows._read("rows.json", bench_rows.RowBudget())
        for line in bench_rows.rows_page(list(results.values())):
            print(printable(line))
    return refusal.code


class _Refusal:
    """The exit code of something that is not a command."""

    code = 0


@contextmanager
def _refusing() -> Iterator[_Refusal]:
    refusal = _Refusal()
    try:
        yield refusal
    except PlacewiseError as problem:
        warn(str(problem))
        refusal.code = 2


def _import(name: str, rng: random.Random) -> Command:
    command = ["import", name, "-o", "out.json", *rng.choice(([], ["--cluster-output", "out.toml"]))]
    return rng.choice((command, _on(name, "2xK80", f"{name}.plan", rng)))


def _trace(rng: random.Random) -> Command:
    return ["report", "plan.json", "--graph", "graph.json", *TINY, "--measured", "trace.json", "-o", "page.html"]


TARGETS = (
    Target("graph.json", _json, partial(_on, "graph.json", "cluster.toml", "plan.json"), 6),
    Target("captured.json", _json, partial(_on, "captured.json", "2xK80", "captured.json.plan"), 2),
    Target("graph.json.gz", _packed_json, partial(_on, "graph.json.gz", "cluster.toml", "plan.json"), 2),
    Target("cluster.toml", _toml, partial(_on, "graph.json", "cluster.toml", "plan.json"), 5),
    Target("optional.json", _json, partial(_on, "optional.json", "hosts.toml", "nowhere.json"), 4),
    Target("hosts.toml", _toml, partial(_on, "optional.json", "hosts.toml", "nowhere.json"), 4),
    Target("nowhere.json", _json, _nowhere, 2),
    Target("plan.json", _json, _plan, 3),
    Target("profile.json", _json, _profile, 2),
    Target("trace.json", _json, _trace, 2),
    Target("runs.db", mutate_run_file, _runs, 6),
    Target("pipedream.txt", _text, partial(_import, "pipedream.txt"), 2),
    Target("partitioning.json", _json, partial(_import, "partitioning.json"), 2),
    Target("rows.json", _json, _bench_rows, 1),
    Target("captured.json.plan", _json, _start, 2),
    Target("run.plan", _json, _run_plan, 2),
    Target("weights.safetensors", _safetensors, _weights, 2),
    Target("record.db", mutate_record, _record, 2),
)
