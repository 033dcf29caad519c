"""What the graph policy makes of what it reads: each group of figures, replaced by its mean."""

import numpy as np
import pytest

from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.experiments.policy import ablation
from placewise.experiments.policy.ablation import GROUPS, OF_BLOCKS, SO_FAR, ablate, by_group
from placewise.experiments.policy.corpus import random_step
from placewise.experiments.policy.policy_figures import draw_ablation, draw_families
from placewise.strategies.blocks import Blocks
from placewise.strategies.learned.graph_policy.block_graph import BLOCK_FEATURES, merge_blocks, read_block_graph
from placewise.strategies.learned.graph_policy.graph_policy import read_network
from placewise.strategies.learned.graph_policy.placing import FEATURES
from placewise.strategies.learned.graph_policy.policy_network import GraphTensors


def test_each_figure_is_in_one_group() -> None:
    assert sorted(column for columns in SO_FAR.values() for column in columns) == list(range(FEATURES))
    assert sorted(column for columns in OF_BLOCKS.values() for column in columns) == list(range(BLOCK_FEATURES))


def test_every_group_is_measured() -> None:
    problem = Problem.of(random_step(3), Cluster.load("2xK80"))
    found = ablate(read_network("shipped"), problem, 16)
    assert tuple(found) == GROUPS
    assert min(found.values()) > 0
    assert found["all of the placement so far"] >= 1  # nothing tells devices apart: all is on one
    sampled = ablate(read_network("shipped"), problem, 16, candidates=4)
    assert sampled == ablate(read_network("shipped"), problem, 16, candidates=4)  # the same samples every time
    assert sampled != found


def test_a_figure_that_is_the_same_everywhere_changes_no_score() -> None:
    """With the mean of a figure in the place of the figure, scores are as if the figure had that value."""
    problem = Problem.of(random_step(3), Cluster.load("2xK80"))
    network = read_network("shipped")
    graph = read_block_graph(merge_blocks(problem, Blocks.of(problem, "coarse:8"), "coarse:8"))
    whole = network.scorer(GraphTensors.of(graph))
    means = np.arange(FEATURES) / FEATURES
    without = ablation._without("memory", network, graph, whole, means)
    columns = list(SO_FAR["memory"])
    figures = np.random.default_rng(0).normal(size=FEATURES)
    levelled = figures.copy()
    levelled[columns] = means[columns]
    known = whole.of_block + levelled @ whole.of_features
    assert np.allclose(without.of_block + figures @ without.of_features, known)
    assert not without.direct[columns].any()


def test_groups_are_in_order_and_drawn() -> None:
    ratios = {group: 1.0 + number / 100 for number, group in enumerate(GROUPS)}
    rows = by_group({"a": [ratios], "b": [ratios, ratios]})
    assert [row["without"] for row in rows] == list(reversed(GROUPS))
    assert rows[0]["all families"] == pytest.approx(ratios[GROUPS[-1]])
    picture = draw_ablation(rows)
    assert b"messages between blocks" in picture
    assert picture == draw_ablation(rows)


def test_the_families_are_drawn() -> None:
    entry = {
        "graph-policy": 1.1,
        "graph-policy, not refined": 1.2,
        "graph-policy, greedy": 1.4,
        "best of all": 1.3,
        "heft": 9.0,
        "metis": "-",
    }
    picture = draw_families([{"family": name, **entry} for name in ("nmt", "all families")])
    assert b">nmt</text>" in picture
    assert picture == draw_families([{"family": name, **entry} for name in ("nmt", "all families")])
