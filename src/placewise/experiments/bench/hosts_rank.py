"""One rank of `placewise bench hosts`: measures steps over two hosts, and predicts them from what it has measured itself.

It is started with the environment that torchrun gives, and a JSON object of its settings.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, Device
from placewise.core.problem import Problem
from placewise.graph_capture.capture import CapturedStep, capture
from placewise.machines.composed import Connection, join_hosts
from placewise.measure.all_hosts import measure_network
from placewise.measure.ops_in_steps import op_timings_in_steps
from placewise.measure.random_batch import load_with_deferred_weights, random_batch
from placewise.run.devices import RealDevice
from placewise.run.step.compiling import compile_part
from placewise.search.planner import place
from placewise.simulate.simulator import Simulator

GIB = 2**30

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, ROWS, MICRO_BATCHES = 1000, 128, 4, 6, 64, 32, 8  # of the GPT that is pipelined

TIMEOUT = timedelta(minutes=10)

LATENCY_SECONDS = 2e-4  # that is assumed of a network that a plan is made for and that is not measured


def two_hosts(there: Connection, back: Connection) -> Cluster:
    """Returns two hosts with a CPU device each and this network from the first to the second, and back."""
    one = Cluster("one", (Device("cpu", "cpu", 64 * GIB, 1e10, 1e10),), ())
    return join_hosts("hosts", ["a", "b"], [one, one], lambda source, target: (there, back)[source], "")


def with_measured_ops(step: CapturedStep, cluster: Cluster) -> CapturedStep:
    """Returns the step with the times of its ops in whole steps, which all ranks measure at once.

    In a good plan all of them work at once, too, and hosts on one machine share its memory.
    """
    names, device = list(map(str, range(len(step.graph.ops)))), cluster.devices[dist.get_rank()]
    dist.barrier()
    found = op_timings_in_steps(step, replace(device, name="cpu"), RealDevice("cpu", "cpu", "cpu", threads=1), names)
    times = list[Any]([None] * len(cluster.devices))
    dist.all_gather_object(times, [found[name].seconds for name in names])
    seconds = {name: np.array(own, np.float64) for name, own in zip(cluster.device_names, times, strict=True)}
    return replace(step, graph=replace(step.graph, ops=replace(step.graph.ops, seconds=seconds)))


def _network_here() -> tuple[Connection, Connection]:
    """Returns the measured network from the first host to the second, and back."""
    found = measure_network()
    for ends in ((0, 1), (1, 0)):
        _tell({"from": ends[0], **found[ends]._asdict()})
    return found[0, 1], found[1, 0]


def plan_of(step: CapturedStep, cluster: Cluster, strategy: str, seconds: float) -> tuple[Ints, Ints | None]:
    """Returns the placement [groups] and launch order [ops] that a strategy of the first rank finds on this cluster.

    All ranks have the same.
    """
    placed: list[Any] = [None]
    problem = Problem.of(step.graph, cluster)
    if dist.get_rank() == 0:
        plan = place(step, cluster, strategy=strategy, seconds=seconds)
        placed = [plan.resolve(problem)]
    dist.broadcast_object_list(placed)
    placement, order = placed[0]
    return np.asarray(placement), None if order is None else np.asarray(order)


def measure(
    step: CapturedStep, cluster: Cluster, plan: tuple[Ints, Ints | None], steps: int, weights: Any
) -> dict[str, Any]:
    """Returns the predicted seconds of a step, and the measured ones: the median over some steps."""
    problem = Problem.of(step.graph, cluster)
    schedule = Simulator(problem, "program").schedule(*plan)
    train_step = compile_part(problem, *plan, step, weights)
    batch, times = random_batch(step), []
    for _ in range(2 + steps):
        dist.barrier()
        began = time.perf_counter()
        train_step(batch)
        times.append(time.perf_counter() - began)
    train_step.close()
    devices = [int((schedule.devices == device).sum()) for device in range(problem.num_devices)]
    return {
        "ops a/b": "/".join(f"{count:,}" for count in devices),
        "copies": len(schedule.copy_tensors),
        "predicted ms": 1e3 * schedule.step_seconds,
        "measured ms": 1e3 * float(np.median(times[2:])),
        "from ms": 1e3 * float(np.percentile(times[2:], 25)),
        "to ms": 1e3 * float(np.percentile(times[2:], 75)),
    }


def predictions(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each model and placement."""
    network, rows = _network_here(), []
    cluster = two_hosts(*network)
    for model in settings["models"]:
        for strategy in settings["placements"]:
            step, weights = load_with_deferred_weights(model)  # a step is compiled once: its weights then live somewhere
            if strategy == settings["placements"][0]:
                timed = with_measured_ops(_whole(model), cluster)
            step = replace(step, graph=timed.graph)
            plan = plan_of(step, cluster, strategy, settings["seconds"])
            rows.append({
                "model": model.partition(":")[0], "placement": strategy,
                **measure(step, cluster, plan, settings["steps"], weights),
            })  # fmt: skip
            _tell(rows[-1])
    return rows


def plans(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each model and each network that `auto` has planned for; all are measured on this network."""
    here, rows = _network_here(), []
    for model in settings["models"]:
        timed = with_measured_ops(_whole(model), two_hosts(*here))
        for name, gigabits in (("this network", None), ("10 Gbit/s", 10.0)):
            other = Connection(1e9 / 8 * (gigabits or 0.0), LATENCY_SECONDS)
            planned = here if gigabits is None else (other, other)
            step, weights = load_with_deferred_weights(model)
            step = replace(step, graph=timed.graph)
            plan = plan_of(step, two_hosts(*planned), "auto", settings["seconds"])
            found = measure(step, two_hosts(*here), plan, settings["steps"], weights)
            rows.append({"model": model.partition(":")[0], "planned for": name, **found})
            _tell(rows[-1])
    return rows


def memory(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each rank: what its process holds after some steps, with its own part or with the whole model."""
    step, weights = (load_with_deferred_weights if settings["own"] else lambda model: (_whole(model), None))(
        settings["models"][0]
    )
    before = _resident_bytes()
    cluster = two_hosts(Connection(1e9, 1e-4), Connection(1e9, 1e-4))
    train_step = compile_part(Problem.of(step.graph, cluster), *plan_of(step, cluster, "pipeline", 1.0), step, weights)
    batch = random_batch(step)
    for _ in range(3):
        train_step(batch)
    assert step.step.optimizer is not None
    tensors = [*step.step.model.parameters(), *step.step.model.buffers()]
    tensors += [
        value for state in step.step.optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    row = {
        "rank": dist.get_rank(),
        "model and state MiB": sum(tensor.nbytes for tensor in tensors if not tensor.is_meta) / 2**20,
        "before compiling MiB": before / 2**20,
        "after three steps MiB": _resident_bytes() / 2**20,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }
    train_step.close()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, row)
    return everyone


def pipelining(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for PyTorch's own pipeline in two stages (1F1B), for each cut of the blocks, and one for placewise."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rows, generator = [], torch.Generator().manual_seed(0)
    words = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    for blocks in range(BLOCKS // 2, BLOCKS):
        layers = gpt_layers()
        own = layers[: 1 + blocks] if dist.get_rank() == 0 else layers[1 + blocks :]
        optimizer = torch.optim.AdamW(own.parameters())
        stage = PipelineStage(own, dist.get_rank(), 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, MICRO_BATCHES, next_words)

        def run(schedule: Any = schedule, optimizer: Any = optimizer) -> None:
            schedule.step(words) if dist.get_rank() == 0 else schedule.step(target=words)
            optimizer.step()
            optimizer.zero_grad()

        rows.append(
            {
                "by": f"1F1B, {blocks} of {BLOCKS} blocks on a",
                **_timed(run, settings["steps"]),
                "predicted ms": "-",
                "copies": "-",
            }
        )
        _tell(rows[-1])
    model, cluster = gpt_layers(), two_hosts(*_network_here())
    step = capture(model, next_words, torch.optim.AdamW(model.parameters()), (words, words), micro_batches=MICRO_BATCHES)
    step = with_measured_ops(step, cluster)
    for strategy in ("auto", "pipeline", "cpu-only"):
        plan = plan_of(step, cluster, strategy, settings["seconds"])
        problem = Problem.of(step.graph, cluster)
        train_step = compile_part(problem, *plan, step)
        found = Simulator(problem, "program").schedule(*plan)
        predicted = 1e3 * found.step_seconds
        run = partial(train_step, (words, words))
        rows.append(
            {
                "by": f"placewise, {strategy}",
                **_timed(run, settings["steps"]),
                "predicted ms": predicted,
                "copies": len(found.copy_tensors),
            }
        )
        _tell(rows[-1])
        train_step.close()
    return rows


def gpt_layers() -> nn.Sequential:
    """Returns a GPT whose layers can be cut into stages: the embedding, blocks, and the head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *[StageBlock() for _ in range(BLOCKS)], nn.Linear(WIDTH, VOCABULARY)
    )


def next_words(scores: Tensor, words: Tensor) -> Tensor:
    """Returns the loss of predicting each next word."""
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), words[:, 1:].flatten())


class StageBlock(nn.Module):
    """A block of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the next hidden states: [rows, length, width]."""
        parts = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.heads(self.before(x)).chunk(3, -1)]
        query, key, value = parts
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        made: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.between(x))))
        return made


def _timed(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    times = []
    for _ in range(2 + steps):
        dist.barrier()
        began = time.perf_counter()
        run()
        dist.barrier()
        times.append(time.perf_counter() - began)
    return {
        "measured ms": 1e3 * float(np.median(times[2:])),
        "from ms": 1e3 * float(np.percentile(times[2:], 25)),
        "to ms": 1e3 * float(np.percentile(times[2:], 75)),
    }


def _whole(model: str) -> CapturedStep:
    from placewise.measure.random_batch import load_with_weights

    return load_with_weights(model)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _tell(row: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(row), file=sys.stderr, flush=True)


PARTS = {"predictions": predictions, "plans": plans, "memory": memory, "pipelining": pipelining}


def measure_as_rank() -> None:
    """Measures what the settings name; the first rank writes the rows to a file."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if settings.get("group") and os.environ["RANK"] == "1":
        Path(settings["group"], "cgroup.procs").write_text(str(os.getpid()))
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rows = PARTS[settings["part"]](settings)
    if dist.get_rank() == 0:
        with open(settings["output"], "w") as file:
            json.dump(rows, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    measure_as_rank()
