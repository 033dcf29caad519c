"""One rank of `placewise bench hosts`: measures steps over two hosts, and predicts them from what it has measured itself.

It is started with the environment that torchrun gives, and a JSON object of its settings.
"""

import json
import os
import resource
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster, Device
from placewise.core.problem import Problem
from placewise.graph_capture.capture import CapturedStep
from placewise.machines.composed import join_hosts
from placewise.measure.hosts import measure_link
from placewise.measure.ops_in_steps import op_timings_in_steps
from placewise.measure.random_batch import load_with_deferred_weights, random_batch
from placewise.run.devices import RealDevice
from placewise.run.step.compiling import compile_part
from placewise.search.planner import place
from placewise.simulate.simulator import Simulator

GIB = 2**30

TIMEOUT = timedelta(minutes=10)

LATENCY_SECONDS = 2e-4  # that is assumed of a network that a plan is made for and that is not measured


def measured_network() -> tuple[tuple[float, float], ...]:
    """Returns (bytes per second, latency seconds) from host a to b, and back: the first rank's and the second's figures."""
    found = [measure_link(0, 1), measure_link(1, 0)]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, found)
    return tuple((figures[1], figures[0]) for figures in (everyone[0][0], everyone[1][1]))


def two_hosts(network: tuple[tuple[float, float], ...]) -> Cluster:
    """Returns two hosts with a CPU device each and these figures of the links between them."""
    one = Cluster("one", (Device("cpu", "cpu", 64 * GIB, 1e10, 1e10),), ())
    return join_hosts("hosts", ["a", "b"], [one, one], lambda source, target: network[source], "")


def with_measured_ops(step: CapturedStep, cluster: Cluster) -> CapturedStep:
    """Returns the step with the times of its ops in whole steps on the first rank's device; both devices are alike."""
    times: list[Any] = [None]
    if dist.get_rank() == 0:
        device, real = cluster.devices[0], RealDevice("cpu", "cpu", "cpu", threads=1)
        ops = len(step.graph.ops)
        found = op_timings_in_steps(step, replace(device, name="cpu"), real, list(map(str, range(ops))))
        times = [[found[str(op)].seconds for op in range(ops)]]
    dist.broadcast_object_list(times)
    return replace(
        step, graph=replace(step.graph, ops=replace(step.graph.ops, seconds={"cpu": np.array(times[0], np.float64)}))
    )


def plan_of(step: CapturedStep, cluster: Cluster, strategy: str, seconds: float) -> Ints:
    """Returns the placement [groups] that a strategy of the first rank finds on this cluster; all ranks have the same."""
    placed: list[Any] = [None]
    problem = Problem.of(step.graph, cluster)
    if dist.get_rank() == 0:
        plan = place(
            step, cluster, strategy=strategy, seconds=seconds, order="program", simple=0.0 if strategy == "auto" else None
        )
        placed = [plan.resolve(problem)[0]]
    dist.broadcast_object_list(placed)
    return np.asarray(placed[0])


def measure(step: CapturedStep, cluster: Cluster, placement: Ints, steps: int, weights: Any) -> dict[str, Any]:
    """Returns the predicted seconds of a step in program order, and the measured ones: the median over some steps."""
    problem = Problem.of(step.graph, cluster)
    schedule = Simulator(problem, "program").schedule(placement, None)
    train_step = compile_part(problem, placement, None, step, weights)
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
    network, rows = measured_network(), []
    cluster = two_hosts(network)
    for model in settings["models"]:
        for strategy in settings["placements"]:
            step, weights = load_with_deferred_weights(model)  # a step is compiled once: its weights then live somewhere
            if strategy == settings["placements"][0]:
                timed = with_measured_ops(_whole(model), cluster)
            step = replace(step, graph=timed.graph)
            placement = plan_of(step, cluster, strategy, settings["seconds"])
            rows.append({
                "model": model.partition(":")[0], "placement": strategy,
                **measure(step, cluster, placement, settings["steps"], weights),
            })  # fmt: skip
            _tell(rows[-1])
    return rows


def plans(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each model and each network that `auto` has planned for; all are measured on this network."""
    here, rows = measured_network(), []
    for model in settings["models"]:
        timed = with_measured_ops(_whole(model), two_hosts(here))
        for name, gigabits in (("this network", None), ("10 Gbit/s", 10.0)):
            there = here if gigabits is None else ((gigabits * 1e9 / 8, LATENCY_SECONDS),) * 2
            step, weights = load_with_deferred_weights(model)
            step = replace(step, graph=timed.graph)
            placement = plan_of(step, two_hosts(there), "auto", settings["seconds"])
            found = measure(step, two_hosts(here), placement, settings["steps"], weights)
            rows.append({"model": model.partition(":")[0], "planned for": name, **found})
            _tell(rows[-1])
    return rows


def memory(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each rank: what its process holds after some steps, with its own part or with the whole model."""
    step, weights = (load_with_deferred_weights if settings["own"] else lambda model: (_whole(model), None))(
        settings["models"][0]
    )
    before = _resident_bytes()
    cluster = two_hosts(((1e9, 1e-4),) * 2)
    placement = plan_of(step, cluster, "pipeline", 1.0)
    train_step = compile_part(Problem.of(step.graph, cluster), placement, None, step, weights)
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


def _whole(model: str) -> CapturedStep:
    from placewise.measure.random_batch import load_with_weights

    return load_with_weights(model)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _tell(row: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        print(json.dumps(row), file=sys.stderr, flush=True)


PARTS = {"predictions": predictions, "plans": plans, "memory": memory}


def main() -> None:
    """Measures what the settings name; the first rank writes the rows to a file."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if "CORE" in os.environ and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(os.environ["CORE"])})
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rows = PARTS[settings["part"]](settings)
    if dist.get_rank() == 0:
        with open(settings["output"], "w") as file:
            json.dump(rows, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
