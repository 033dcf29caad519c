"""Small training steps with optional ops: what the forward pass makes can be made again, or wait on another device."""

from typing import Any

import numpy as np
from builders import graph_data, op, tensor
from simulated import Step, random_cluster

from placewise.core.problem import NOWHERE, Problem
from placewise.formats.cluster_file import parse_cluster
from placewise.formats.graph_file import parse_graph
from placewise.simulate.simulator import Simulator


def optional_step(seed: int, num_layers: int, num_devices: int) -> Problem:
    """Returns a random step whose devices have 40 to 100% of the memory that it needs on one of them, without options.

    Layer i reads t[i] and writes t[i + 1]; its backward op reads both and a gradient, and writes the next gradient. Each
    t[i + 1] may wait elsewhere after the next layer has read it, and may be made again before the backward pass reads it.
    """
    rng = np.random.default_rng(seed)
    cluster = random_cluster(rng, num_devices, 1)
    graph = _graph(rng, num_layers)
    for device in cluster["devices"]:
        device["memory"] = 10**6
    whole = Problem.of(parse_graph(graph), parse_cluster(cluster))
    plain = np.where(whole.optional, NOWHERE, 0)
    needed = int(Simulator(whole, "program", threads=1).simulate(plain[None]).peak_bytes[0].max())
    for device in cluster["devices"]:
        device["memory"] = int(needed * rng.uniform(0.4, 1.0))
    cluster["devices"][-1]["memory"] = int(needed * rng.choice([0.5, 1.0, 2.0]))
    return Step.of(graph, cluster).problem


def _graph(rng: np.random.Generator, num_layers: int) -> dict[str, Any]:
    tensors: list[dict[str, Any]] = []
    ops: list[dict[str, Any]] = []

    def add(**fields: Any) -> int:
        tensors.append(tensor(f"t{len(tensors)}", int(rng.integers(1, 30)), **fields))
        return len(tensors) - 1

    def run(reads: list[int], writes: list[int], seconds: float, **fields: Any) -> None:
        ops.append(op(f"op{len(ops)}", len(ops), reads, writes, seconds={"gpu": seconds, "cpu": 2 * seconds}, **fields))

    seconds = rng.uniform(0.5, 4, num_layers).tolist()
    made, top = [add(kind="input", home=0)], {}
    for layer in range(num_layers):
        made.append(add())
        run([made[-2]], [made[-1]], seconds[layer])
        if layer > 0 and rng.random() < 0.7:
            top[made[layer]] = add(stands_for=made[layer])
            run([made[layer]], [top[made[layer]]], 0.0, optional=True)
    gradient = made[-1]
    for layer in reversed(range(num_layers)):
        t = made[layer]
        if layer and rng.random() < 0.7:
            again = add(stands_for=top.get(t, t))
            run(
                [top.get(made[layer - 1], made[layer - 1])], [again], seconds[layer - 1], optional=True, after=[len(ops) - 1]
            )
            top[t] = again
        following = add(kind="gradient")
        reads = [top.get(t, t), gradient, *([made[layer + 1]] if layer + 1 == num_layers else [])]
        run(list(dict.fromkeys(reads)), [following], 2 * seconds[layer], phase="backward")
        gradient = following
    return graph_data(tensors, ops, [gradient])
