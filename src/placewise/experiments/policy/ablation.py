"""What the graph policy makes of each group of figures that it reads: what it finds when it reads their mean instead."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from placewise.core.arrays import Floats
from placewise.core.problem import Problem
from placewise.experiments.policy.teaching import new_network
from placewise.simulate.simulator import Simulator
from placewise.strategies.blocks import Blocks
from placewise.strategies.learned.graph_policy.block_graph import (
    BLOCK_FEATURES,
    DEVICE_FEATURES,
    BlockGraph,
    merge_blocks,
    read_block_graph,
)
from placewise.strategies.learned.graph_policy.drawing import place_greedily, samples
from placewise.strategies.learned.graph_policy.placing import FEATURES, Scorer, place_blocks
from placewise.strategies.learned.graph_policy.policy_network import GraphTensors, PolicyNetwork
from placewise.strategies.learned.training import one_thread

SO_FAR: dict[str, tuple[int, ...]] = {  # figures of a block on a device, for the placement so far; see placing.py
    "start and end of the block there": (0, 1, 2, 18, 19),
    "how busy the device is": (3, 4, 20, 23),
    "the block's speed there": (5,),
    "copies of its inputs": (6, 7, 8),
    "parameters and homes elsewhere": (9, 10, 11),
    "copies to blocks placed before": (12,),
    "memory": (13, 14, 15),
    "the last device, unused devices": (16, 17),
    "how far the placement is": (21, 22, 24),
}

OF_BLOCKS: dict[str, tuple[int, ...]] = {  # see block_graph.py
    "block: work": (0, 1),
    "block: paths, slack, position": (2, 3, 4, 5),
    "block: phase": (6, 7, 8),
    "block: bytes in and out": (9, 10, 11, 12, 13, 14, 15),
    "block: memory": (16, 17),
    "block: intensity, ops": (18, 19),
}

MESSAGES, DEVICES, UNTAUGHT = "messages between blocks", "all of the device", "nothing learned: the first weights"

GROUPS = (*SO_FAR, *OF_BLOCKS, "all of the block", MESSAGES, DEVICES, "all of the placement so far", UNTAUGHT)


def ablate(network: PolicyNetwork, problem: Problem, num_blocks: int = 64, candidates: int = 1) -> dict[str, float]:
    """Returns the best candidate's step without each group of figures over that with all: by group.

    One candidate is the greedy placement; more are greedy ones for the 1, 2, 3 ... fastest devices, and samples.
    """
    grouping = f"coarse:{num_blocks}"
    merged = merge_blocks(problem, Blocks.of(problem, grouping), grouping)
    model, graph = Simulator(merged, threads=1), read_block_graph(merged)
    with one_thread():
        whole = network.scorer(GraphTensors.of(graph))
        means = _means(graph, whole)
        best = _cost(graph, model, whole, candidates)
        changed = {group: _without(group, network, graph, whole, means) for group in GROUPS}
        return {group: _cost(graph, model, scorer, candidates) / best for group, scorer in changed.items()}


def by_group(found: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Returns a row for each group, worst first: geometric means of each family, and of all, which count alike."""
    rows = []
    for group in GROUPS:
        means = {family: _geometric_mean([one[group] for one in ratios]) for family, ratios in found.items()}
        rows.append({"without": group, "all families": _geometric_mean(list(means.values())), **means})
    return sorted(rows, key=lambda row: -row["all families"])


def _geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _cost(graph: BlockGraph, model: Simulator, scorer: Scorer, candidates: int) -> float:
    greedy = place_greedily(graph, model, scorer, candidates)
    drawn = samples(graph, scorer, candidates - len(greedy), 1.0, greedy[0].room, np.random.default_rng(0))
    placements = [*(one.placement for one in greedy), *(one.placement for one in drawn)]
    return float(model(np.stack(placements)).cost.min())


def _means(graph: BlockGraph, scorer: Scorer) -> Floats:
    """Returns the mean of each figure over all that could be chosen on the way to the greedy placement: [FEATURES]."""
    shape = graph.placing.block_seconds.shape
    free, usable = np.full(shape[0], -1), np.ones(shape[1], np.bool_)
    placed = place_blocks(graph.placing, scorer, np.zeros(shape), free, 1.0, usable)
    return np.asarray(placed.features[placed.is_open].mean(axis=0), np.float64)


def _without(group: str, network: PolicyNetwork, graph: BlockGraph, whole: Scorer, means: Floats) -> Scorer:
    """Returns the network's scores when a group of figures is the same everywhere: its mean in this problem."""
    if group in SO_FAR or group == "all of the placement so far":
        columns = list(SO_FAR.get(group, range(FEATURES)))
        weights, direct = whole.of_features.copy(), whole.direct.copy()
        weights[columns], direct[columns] = 0.0, 0.0
        known = whole.of_block + means[columns] @ whole.of_features[columns]
        return whole._replace(of_block=known, of_features=weights, direct=direct)
    if group == UNTAUGHT:
        return new_network(network.of_block.in_features, len(network.messages), 0).scorer(GraphTensors.of(graph))
    if group == MESSAGES:
        none = np.zeros_like(graph.inputs)
        changed = graph._replace(inputs=none, outputs=none, residents=none)
    elif group == DEVICES:
        changed = graph._replace(devices=_levelled(graph.devices, range(DEVICE_FEATURES)))
    else:
        changed = graph._replace(blocks=_levelled(graph.blocks, OF_BLOCKS.get(group, range(BLOCK_FEATURES))))
    return network.scorer(GraphTensors.of(changed))


def _levelled(figures: Floats, columns: Sequence[int]) -> Floats:
    """Returns the figures with the columns' means in these columns."""
    changed = figures.copy()
    changed[:, list(columns)] = figures[:, list(columns)].mean(axis=0)
    return changed
