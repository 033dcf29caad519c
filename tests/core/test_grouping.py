"""Groupings, by hand and against slow oracles."""

from typing import Any

import numpy as np
import pytest
from builders import graph_of, graphs, op, random_dag, tensor, tiny_graph, wired
from hypothesis import given
from hypothesis import strategies as st

from placewise.core.arrays import Ints
from placewise.core.errors import ProblemError
from placewise.core.graph import Graph
from placewise.core.grouping import (
    GROUPINGS,
    _called_modules,
    _calls,
    _cells,
    group_edges,
    group_ops,
    group_work,
    module_path,
)
from placewise.core.labels import renumber

# --- edges and work between groups ---


def test_group_edges_by_hand() -> None:
    """Ops 0 and 1 are group 0, 2 and 3 group 1. Tensor 0 (1 B) goes to 2 and 3 and counts once, tensor 1 (2 B) to 3."""
    graph = wired([(0, 1), (0, 2), (0, 3), (1, 3)], 4, group=[0, 0, 1, 1], flops=[1e13, 1e13, 0, 2e13])
    source, target, nbytes = group_edges(graph)
    assert (source.tolist(), target.tolist(), nbytes.tolist()) == ([0], [1], [3])
    assert group_work(graph).tolist() == [2, 2]


# --- groupings by hand ---


def test_colocated_is_the_graphs_own_groups() -> None:
    assert group_ops(tiny_graph(), "colocated").tolist() == [0, 1, 2]


def test_single_consumer_by_hand() -> None:
    """0 -> 1 -> 2 is a chain and one group; 3 feeds 4 and 5, which both feed 6: these two join it, and then so does 3."""
    edges = [(0, 1), (1, 2), (3, 4), (3, 5), (4, 6), (5, 6)]
    assert group_ops(wired(edges, 7), "single-consumer").tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_single_consumer_keeps_apart_what_two_read() -> None:
    """1 and 2 read 0, and nothing reads them."""
    assert group_ops(wired([(0, 1), (0, 2)], 3), "single-consumer").tolist() == [0, 1, 2]


def test_single_consumer_on_the_tiny_graph() -> None:
    """relu is read by mm and its backward; mm is read by the backward alone, which is read by the update, of mm's group."""
    assert group_ops(tiny_graph(), "single-consumer").tolist() == [0, 0, 0]


MODULES: dict[str, Any] = {
    "name": [
        *("encoder.0.mm", "encoder.0.mm_1", "encoder.1.mm", "loss"),
        *("encoder.1.mm.backward", "encoder.0.mm.backward_12", "encoder.0.weight.add_.update", "head.bias.add_.update"),
    ],
    "phase": ["forward"] * 4 + ["backward"] * 2 + ["update"] * 2,
    "micro_batch": [0, 1, 0, 1, 0, 1, 0, 0],
}


@pytest.mark.parametrize(
    ("grouping", "expected"),
    [
        ("name-prefix:1", [0, 0, 1, 2, 1, 0, 0, 3]),  # encoder.0, encoder.1, loss, head: a number is no level of its own
        ("name-prefix:2", [0, 0, 1, 2, 1, 0, 3, 4]),  # encoder.0.mm, encoder.1.mm, loss, encoder.0.weight, head.bias
        ("name-prefix:3", [0, 0, 1, 2, 1, 0, 3, 4]),
        ("name-prefix:99", [0, 0, 1, 2, 1, 0, 3, 4]),
        ("module", [0, 0, 1, 2, 1, 0, 0, 3]),  # encoder.0, encoder.1, the model itself, head
        ("module-by-micro-batch", [0, 1, 2, 3, 2, 1, 0, 4]),
        ("colocated", list(range(8))),
    ],
)
def test_groupings_by_name(grouping: str, expected: list[int]) -> None:
    assert group_ops(wired([], 8, **MODULES), grouping).tolist() == expected


def test_a_name_that_begins_with_a_number_has_levels_too() -> None:
    graph = wired([], 3, name=["0.mm", "0.relu", "1.0.mm"])
    assert group_ops(graph, "name-prefix:1").tolist() == [0, 0, 1]
    assert group_ops(graph, "name-prefix:2").tolist() == [0, 1, 2]


def test_calls_of_a_module_are_cells_with_their_gradients() -> None:
    """Module a is called twice in a row (ops 0 to 5), then b with its child b.c (6, 7), then a again (8 to 10).

    The backward op 11 of a reads what op 8 wrote; op 12 of a reads nothing that a call of a made, and follows it. Op 13 of
    b.c reads what op 6 of b wrote. Op 14 of a reads what both op 0 and op 2 read and wrote. The two updates of a are a cell.
    Every op of the forward pass is read by the loss, too, so that nothing has a single consumer.
    """
    names = ["a.mm", "a.add", "a.tanh"] * 2 + ["b.mm", "b.c.mm", "a.mm", "a.add", "a.tanh"]
    names += ["a.mm.backward", "a.mm.backward_1", "b.c.mm.backward", "a.mm.backward_2", "a.w.add_.update", "a.v.add_.update"]
    phases = ["forward"] * 11 + ["backward"] * 4 + ["update"] * 2
    reads: list[list[int]] = [[], [0], [1], [2], [3], [4], [5], [6], [7], [8], [9], [8], [], [6], [0, 2], [], []]
    graph = graph_of(
        [tensor(f"t{n}", 1) for n in range(17)],
        [
            op(name, n, reads[n], [n], kind=name.split(".")[-1 if n < 11 else -2], phase=phases[n])
            for n, name in enumerate(names)
        ],
    )
    assert _cells(graph).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 2, 0, 4, 4]


def test_a_module_that_holds_a_list_is_not_called_as_a_whole() -> None:
    """net has ops of its own and the list net.0, net.1, so its elements are calls; net.1 has an op and the child net.1.c."""
    paths = ["net", "net.0.c", "net.1", "net.1.c", "", "other.c"]
    assert _called_modules(paths) == ["net", "net.0.c", "net.1", "net.1", "", "other.c"]


def test_repetitions_are_calls() -> None:
    assert _calls(["mm", "add", "tanh"] * 4) == 4
    assert _calls(["mm", "add", "mm", "add"]) == 1  # two kinds are too few to be a call
    assert _calls(["mm", "add", "tanh", "mm"]) == 1
    assert _calls([]) == 1


def test_module_paths_by_hand() -> None:
    graph = wired([], 8, **MODULES)
    paths = [module_path(graph, n) for n in range(8)]
    assert paths == ["encoder.0", "encoder.0", "encoder.1", "", "encoder.1", "encoder.0", "encoder.0", "head"]


def test_a_group_goes_by_its_first_op_and_one_without_ops_stays_alone() -> None:
    """Group 0 is only a home; group 1 has a.x and b.x, and joins group 2 of a.y."""
    graph = graph_of([tensor(home=0)], [op("a.x", 1), op("b.x", 1), op("a.y", 2)])
    for grouping in ("module", "name-prefix:1", "module-by-micro-batch"):
        assert group_ops(graph, grouping).tolist() == [0, 1, 1]


def test_coarse_by_hand() -> None:
    """Two chains of three ops with heavy edges inside become the two groups; more than there are changes nothing."""
    graph = wired([(0, 1), (1, 2), (3, 4), (4, 5)], 6, flops=[1e13] * 6)
    assert group_ops(graph, "coarse:2").tolist() == [0, 0, 0, 1, 1, 1]
    assert group_ops(graph, "coarse:1").tolist() == [0] * 6
    for many in ("coarse:6", "coarse:7", "coarse:999999999"):
        assert group_ops(graph, many).tolist() == list(range(6))


def test_coarse_contracts_heavy_edges_first() -> None:
    """0 -> 2 carries 1 byte, 1 -> 2 carries 2: of three nodes, 1 and 2 join."""
    assert group_ops(wired([(0, 2), (1, 2)], 3), "coarse:2").tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "name",
    [
        *("", "finest", "colocated:2", "module:1", "coarse", "coarse:", "coarse:0", "coarse:-1", "coarse:1.5", "coarse:x"),
        *("coarse:N", "coarse: 3", "coarse:3:4", "name-prefix", "name-prefix:0", "name-prefix:K", "Module", "coarse:٣"),
        *("coarse:" + "9" * 400, "coarse:" + "9" * 5000, "single-consumer:"),
    ],
    ids=lambda name: name[:20] or "empty",
)
def test_unknown_groupings_are_refused(name: str) -> None:
    with pytest.raises(ProblemError) as caught:
        group_ops(tiny_graph(), name)
    assert str(caught.value).startswith(f"unknown grouping {name!r}: ")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("colocatd", "did you mean 'colocated'?"),
        ("coarse:0", "did you mean 'coarse:N'? (K and N are whole numbers above 0)"),
        ("finest", f"expected one of {', '.join(GROUPINGS)} (K and N are whole numbers above 0)"),
    ],
)
def test_a_misspelt_grouping_gets_a_hint(name: str, hint: str) -> None:
    with pytest.raises(ProblemError) as caught:
        group_ops(tiny_graph(), name)
    assert str(caught.value) == f"unknown grouping {name!r}: {hint}"


# --- against slow oracles ---


def naive_single_consumer(graph: Graph) -> Ints:
    """Joins the first group whose outputs one other group alone reads, and starts again, until there is none."""
    label = list(range(graph.num_groups))
    writers, readers, _ = graph.edges
    edges = list(zip(graph.ops.groups[writers].tolist(), graph.ops.groups[readers].tolist(), strict=True))
    while True:
        for group in range(graph.num_groups):
            consumers = {label[b] for a, b in edges if label[a] == label[group] and label[b] != label[group]}
            if len(consumers) == 1:
                mine, other = label[group], consumers.pop()
                label = [other if entry == mine else entry for entry in label]
                break
        else:
            return renumber(np.array(label, np.int64))


@given(graphs())
def test_single_consumer_is_the_naive_fixed_point(graph: Graph) -> None:
    assert group_ops(graph, "single-consumer").tolist() == naive_single_consumer(graph).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_single_consumer_is_the_naive_fixed_point_on_random_dags(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ops = int(rng.integers(1, 40))
    source, target = random_dag(rng, num_ops, int(rng.integers(0, 2 * num_ops)))
    groups = rng.integers(0, num_ops, num_ops).tolist() if seed % 2 else range(num_ops)
    graph = wired(list(zip(source.tolist(), target.tolist(), strict=True)), num_ops, group=groups)
    assert group_ops(graph, "single-consumer").tolist() == naive_single_consumer(graph).tolist()


@given(graph=graphs(), grouping=st.sampled_from(["colocated", "single-consumer", "name-prefix:1", "module", "coarse:2"]))
def test_groups_are_numbered_by_first_member_without_gaps(graph: Graph, grouping: str) -> None:
    merged = group_ops(graph, grouping)
    assert len(merged) == graph.num_groups
    assert renumber(merged).tolist() == merged.tolist()
