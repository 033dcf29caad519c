"""Graphs: what they compute, their rules on the smallest examples, and their digest."""

import dataclasses
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders import graph_data, graph_of, graphs, op, replaced, tensor, tiny_data, tiny_graph, wired
from hypothesis import given

from placewise.core.arrays import Ragged
from placewise.core.errors import GraphError
from placewise.core.graph import MAX_BYTES, Graph, Shape, _storage
from placewise.formats.graph_file import parse_graph

# --- what a graph computes ---


def test_writers_and_readers_of_the_tiny_graph() -> None:
    """x and w are resident; relu makes h, mm makes y, mm.backward makes g, and the update makes w' in w's memory."""
    graph = tiny_graph()
    assert graph.num_groups == 3
    assert graph.producer.tolist() == [-1, -1, 0, 1, 2, 3]
    assert graph.first_reader.tolist() == [0, 1, 1, 2, 3, -1]
    assert graph.storage.tolist() == [0, 1, 2, 3, 4, 1]
    assert graph.readers.lists() == [[0], [1, 3], [1, 2], [2], [3], []]
    assert [column.tolist() for column in graph.edges] == [[0, 1, 0, 2], [1, 2, 2, 3], [2, 3, 2, 4]]


def test_a_graph_prints_in_one_line() -> None:
    assert str(tiny_graph()) == repr(tiny_graph()) == "Graph('tiny': 4 ops in 3 groups, 6 tensors)"


def test_an_empty_graph_has_nothing() -> None:
    graph = graph_of([], [])
    assert (len(graph.ops), len(graph.tensors), graph.num_groups) == (0, 0, 0)
    assert [len(column) for column in graph.edges] == [0, 0, 0]


def test_a_home_counts_as_a_group() -> None:
    assert graph_of([tensor(home=1)], [op()]).num_groups == 2


def test_chains_of_aliases_end_at_one_storage_and_cycles_are_found() -> None:
    """4 -> 3 -> 2 -> 1 -> 0 is a chain of four; 0 -> 1 -> 0 and 0 -> 0 are cycles, 2 -> 0 leads into one."""
    chain = np.arange(-1, 4)
    assert _storage(chain).tolist() == [0] * 5
    assert _storage(np.arange(-1, 999)).tolist() == [0] * 1000
    assert _storage(np.array([1, 0, 0, -1])).tolist() == [-2, -2, -2, 3]
    assert _storage(np.array([0])).tolist() == [-2]


@given(graphs())
def test_writers_and_readers_are_what_a_plain_loop_finds(graph: Graph) -> None:
    ops = list(zip(graph.ops.reads.lists(), graph.ops.writes.lists(), strict=True))
    for t in range(len(graph.tensors)):
        writers = [n for n, (_, writes) in enumerate(ops) if t in writes]
        readers = [n for n, (reads, _) in enumerate(ops) for tensor in reads if tensor == t]
        root = t
        while graph.tensors.alias_of[root] >= 0:
            root = graph.tensors.alias_of[root]
        assert graph.producer[t] == next(iter(writers), -1)
        assert graph.first_reader[t] == next(iter(readers), -1)
        assert graph.readers[t].tolist() == readers
        assert graph.storage[t] == root
    edges = [(graph.producer[t], n, t) for n, (reads, _) in enumerate(ops) for t in reads if graph.producer[t] >= 0]
    assert list(zip(*(column.tolist() for column in graph.edges), strict=True)) == edges


# --- rules ---

TWO = [tensor("a"), tensor("b")]
RULES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], list[int], str]] = {
    "written twice": (TWO, [op(writes=[0]), op(writes=[0])], [], "tensors[0] 'a': is written by ops 0 and 1"),
    "written twice by one": (TWO, [op(writes=[1, 1])], [], "tensors[1] 'b': is written by ops 0 and 0"),
    "read before": (TWO, [op(reads=[0]), op("late", writes=[0])], [], "ops[0] 'op': reads tensor 0 'a' before op 1"),
    "reads its own": (TWO, [op(reads=[0], writes=[0])], [], "ops[0] 'op': reads tensor 0 'a' before op 0"),
    "reads nothing known": (TWO, [op(reads=[2])], [], "ops[0] 'op': reads names tensor 2, there are only 2"),
    "writes nothing known": (TWO, [op(writes=[7])], [], "ops[0] 'op': writes names tensor 7, there are only 2"),
    "output unknown": (TWO, [op()], [0, 2], "outputs[1]: names tensor 2, there are only 2"),
    "after itself": (TWO, [op(after=[0])], [], "ops[0] 'op': after names op 0, which does not come before it"),
    "after a later op": (TWO, [op(after=[1]), op()], [], "ops[0] 'op': after names op 1, which does not come"),
    "after no op": (TWO, [op(after=[5])], [], "ops[0] 'op': after names op 5, there are only 1"),
    "group too high": (TWO, [op(group=3)], [], "ops[0] 'op': group must be at least 0 and below 3, got 3"),
    "home too high": ([tensor(home=2)], [op()], [], "tensors[0] 't': home must be a group, got 2"),
    "too many bytes": ([tensor(nbytes=MAX_BYTES + 1)], [], [], "tensors[0] 't': nbytes must be at least 0"),
    "too many bytes together": ([tensor(nbytes=MAX_BYTES)] * 4, [], [], "tensors: must have at most 2**62 bytes together"),
    "alias of itself": ([tensor(alias_of=0)], [], [], "tensors[0] 't': alias_of must not lead back to itself"),
    "alias in a cycle": ([tensor(alias_of=1), tensor(alias_of=0)], [], [], "tensors[0] 't': alias_of must not lead back"),
    "alias of none": ([tensor(alias_of=1)], [], [], "tensors[0] 't': alias_of names tensor 1, there are only 1"),
    "home of a product": ([tensor(home=0)], [op(writes=[0])], [], "tensors[0] 't': has a home, but op 0 writes it"),
    "alias of a later one": (
        [tensor(), tensor("v", alias_of=0)],
        [op(writes=[1]), op(writes=[0])],
        [],
        "tensors[1] 'v': shares the memory of tensor 0, which is written later",
    ),
    "alias of a later version": (
        [tensor(home=0), tensor("v", alias_of=0), tensor("u", alias_of=1)],
        [op(writes=[2]), op(writes=[1])],
        [],
        "tensors[2] 'u': shares the memory of tensor 1, which is written later",
    ),
    "resident alias with another home": (
        [tensor(home=0), tensor("v", alias_of=0)],
        [op()],
        [],
        "tensors[1] 'v': shares the memory of tensor 0 and must have its home, 0",
    ),
    "resident alias of a product": (
        [tensor(), tensor("v", alias_of=0)],
        [op(writes=[0])],
        [],
        "tensors[1] 'v': shares the memory of tensor 0, which is written later",
    ),
    "optional without stands_for": (
        [tensor(), tensor("v")],
        [op(writes=[1], optional=True)],
        [],
        "tensors[1] 'v': must have stands_for, because op 0, which writes it, is optional",
    ),
    "stands_for of an op that always runs": (
        [tensor(), tensor("v", stands_for=0)],
        [op(writes=[1])],
        [],
        "tensors[1] 'v': has stands_for, but no optional op writes it",
    ),
    "stands_for of something later": (
        [tensor("v", stands_for=1), tensor()],
        [op(writes=[0], optional=True), op(group=1, writes=[1])],
        [],
        "tensors[0] 'v': stands for tensor 1, which is not written before it",
    ),
    "stands_for of nothing": (
        [tensor("v", stands_for=7)],
        [op(writes=[0], optional=True)],
        [],
        "tensors[0] 'v': stands_for names tensor 7, there are only 1",
    ),
    "half of a group is optional": (
        [tensor(), tensor("v", stands_for=0)],
        [op(writes=[1], optional=True), op("other")],
        [],
        "ops[1] 'other': is not optional, but others of its group 0 are",
    ),
    "a home that may be nowhere": (
        [tensor("w", home=0), tensor("v", stands_for=0)],
        [op(writes=[1], optional=True)],
        [],
        "tensors[0] 'w': its home 0 is a group of optional ops, which may be nowhere",
    ),
    "in place in another group": (
        [tensor(home=1), tensor("v", alias_of=0)],
        [op("add_", writes=[1])],
        [],
        "ops[0] 'add_': writes the memory of tensor 0 in place and must be in group 1, its group is 0",
    ),
    "in place, made elsewhere": (
        [tensor(), tensor("v", alias_of=0)],
        [op(writes=[0]), op("add_", 1, writes=[1])],
        [],
        "ops[1] 'add_': writes the memory of tensor 0 in place and must be in group 0, its group is 1",
    ),
    "in place without a home": (
        [tensor("w"), tensor("v", alias_of=0)],
        [op("add_", writes=[1])],
        [],
        "ops[0] 'add_': writes the memory of tensor 0 in place and needs tensor 0 'w' to have home = 0",
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_a_broken_rule_names_the_element(case: str) -> None:
    tensors, ops, outputs, message = RULES[case]
    with pytest.raises(GraphError) as caught:
        parse_graph(graph_data(tensors, ops, outputs))
    assert str(caught.value).startswith(f"graph: {message}")
    assert "\n" not in str(caught.value)


ARRAY_RULES: list[tuple[str, dict[str, Any], str]] = [
    ("ops", {"phases": [0, 0, 3, 0]}, "ops[2] 'mm.backward': phase must be"),
    ("ops", {"groups": [0, -1, 2, 1]}, "ops[1] 'mm': group must be"),
    ("ops", {"flops": [0, np.nan, 0, 0]}, "ops[1] 'mm': flops must be"),
    ("ops", {"flops": [0, 0, 0, 1e300]}, "ops[3] 'w.update': flops must be"),
    ("ops", {"compute": [0, 7, 0, 0]}, "ops[1] 'mm': compute must be at least 0 and below 7, got 7"),
    ("ops", {"compute": [0, 0]}, "graph: every array must have one entry for each op"),
    ("ops", {"bytes_moved": [-1, 0, 0, 0]}, "ops[0] 'relu': nbytes_moved must be"),
    ("ops", {"bytes_moved": [0, 0, np.inf, 0]}, "ops[2] 'mm.backward': nbytes_moved must be"),
    ("ops", {"seconds": {"gpu": [0, 0, -1, 0]}}, "ops[2] 'mm.backward': seconds['gpu'] must be"),
    ("ops", {"seconds": {"gpu": [0, 0, 0, np.inf]}}, "ops[3] 'w.update': seconds['gpu'] must be"),
    ("ops", {"seconds": {"gpu": [0, 0, 0]}}, "graph: every array"),
    ("ops", {"micro_batches": [0, -2, 0, 0]}, "ops[1] 'mm': micro_batch must be"),
    ("ops", {"devices": (None, ("gpu",), (), None)}, "ops[2] 'mm.backward': devices must"),
    ("ops", {"kinds": ("mm",)}, "graph: every array"),
    ("ops", {"reads": Ragged.of([[], []])}, "graph: every array"),
    ("tensors", {"nbytes": [0, 0, 0, -1, 0, 0]}, "tensors[3] 'y': nbytes must be"),
    ("tensors", {"nbytes": [0]}, "graph: every array"),
    ("tensors", {"kinds": [0, 0, 0, 0, 0, 7]}, 'tensors[5] "w\'": kind must be one of input, parameter'),
    ("tensors", {"home": [-2, 1, -1, -1, -1, -1]}, "tensors[0] 'x': home must be"),
    ("tensors", {"alias_of": [-1, -1, -2, -1, -1, 1]}, "tensors[2] 'h': alias_of names tensor -2"),
]


@pytest.mark.parametrize(("part", "arrays", "message"), ARRAY_RULES)
def test_a_broken_array_names_the_element(part: str, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError) as caught:
        replaced(tiny_graph(), **{part: arrays})
    assert str(caught.value).startswith(message)


def test_views_and_versions_of_one_storage_are_fine_in_one_group() -> None:
    """v0 is made, v1 is its version in place, u a view of v1, all in group 0; r is a resident view of a resident."""
    tensors = [tensor("v0"), tensor("v1", alias_of=0), tensor("u", alias_of=1), tensor("w"), tensor("r", alias_of=3)]
    graph = graph_of(tensors, [op(writes=[0]), op(reads=[0], writes=[1, 2])])
    assert graph.storage.tolist() == [0, 0, 0, 3, 3]


# --- shapes ---


def test_a_tensor_knows_its_shape_or_does_not() -> None:
    graph = replaced(
        tiny_graph(), tensors={"shapes": (Shape("float32", (5, 50)), Shape("int64", ())), "shape": [0, 1, *[-1] * 4]}
    )
    assert [str(graph.tensors.shape_of(t)) for t in range(3)] == ["float32 [5, 50]", "int64 []", "None"]
    assert tiny_graph().tensors.shape_of(0) is None


@pytest.mark.parametrize(
    ("column", "rule"),
    [
        ([0, 1, 0, 0, 0, 0], "tensors[1] 'w': shape must be one of the 1 shapes, got number 1"),
        ([0, 0, -2, 0, 0, 0], "tensors[2] 'h': shape must be one of the 1 shapes, got number -2"),
        ([0], "graph: every array must have one entry"),
    ],
)
def test_a_shape_that_is_none_is_refused(column: list[int], rule: str) -> None:
    with pytest.raises(GraphError) as caught:
        replaced(tiny_graph(), tensors={"shapes": (Shape("float32", (5,)),), "shape": column})
    assert str(caught.value).startswith(rule)
    with pytest.raises(GraphError, match=r"^shapes: every size must be at least 0, there is float32 \[5, -1\]$"):
        replaced(tiny_graph(), tensors={"shapes": (Shape("float32", (5, -1)),)})


# --- its arrays are read-only ---


def arrays_of(graph: Graph) -> dict[str, np.ndarray[Any, Any]]:
    """Returns every array that a graph holds or computes, by name."""
    found: dict[str, Any] = {"outputs": graph.outputs}
    for part in (graph.tensors, graph.ops):
        found |= {f"{type(part).__name__}.{f.name}": getattr(part, f.name) for f in dataclasses.fields(part)}
    found |= {f"seconds[{key}]": value for key, value in graph.ops.seconds.items()}
    found |= {name: getattr(graph, name) for name in ("producer", "first_reader", "storage", "readers")}
    found |= {f"edges[{i}]": column for i, column in enumerate(graph.edges)}
    for name, value in list(found.items()):
        if isinstance(value, Ragged):
            found |= {f"{name}.offsets": value.offsets, f"{name}.values": value.values}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def test_no_array_can_be_written() -> None:
    found = arrays_of(tiny_graph())
    assert len(found) > 20
    assert {name for name, array in found.items() if array.flags.writeable} == set()
    with pytest.raises(ValueError, match="read-only"):
        found["Tensors.nbytes"][0] = 1


# --- digest ---


def set_field(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Returns a change of one field: 'ops.1.flops' is the flops of op 1."""

    def change(data: Any) -> None:
        *parents, last = path.split(".")
        for key in parents:
            data = data[int(key) if isinstance(data, list) else key]
        data[int(last) if isinstance(data, list) else last] = value

    return change


CHANGES = {
    "name": "other",
    "outputs": [2],
    "tensors.0.name": "z",
    "tensors.0.nbytes": 1001,
    "tensors.0.kind": "buffer",
    "tensors.0.home": 1,
    "tensors.0": tensor("x", 1000, "input", home=1, alias_of=1),
    "ops.0.name": "gelu",
    "ops.0.kind": "aten.gelu",
    "ops.0.phase": "backward",
    "ops.0.group": 2,
    "ops.0.reads": [0, 1],
    "ops.3.reads": [4, 1],
    "ops.2.writes": [],
    "ops.3.after": [0],
    "ops.1.flops": 1,
    "ops.1.nbytes_moved": 1,
    "ops.1.compute": "bfloat16",
    "ops.2.compute": "bfloat16",
    "ops.2": tiny_data()["ops"][2] | {"compute": "float16"},
    "ops.1.devices": ["gpu"],
    "ops.1.micro_batch": 0,
    "ops.1.seconds": {"gpu": 0.005},
    "ops.0.seconds": {"cpu": 0.001},
    "ops.2.seconds": {"gpu": 0.003, "cpu": 1},
}


def test_the_digest_changes_with_every_field() -> None:
    digests = [tiny_graph().digest]
    for path, value in CHANGES.items():
        data = tiny_data()
        set_field(path, value)(data)
        digests.append(parse_graph(data).digest)
    assert len(set(digests)) == 1 + len(CHANGES)


def test_shapes_do_not_change_the_digest() -> None:
    """A plan names the digest of its graph: one that was made before shapes were known stays valid."""
    graph = tiny_graph()
    known = replaced(graph, tensors={"shapes": (Shape("float32", (5, 50)),), "shape": [0, -1, -1, 0, -1, -1]})
    assert (known.digest, known.untimed_digest) == (graph.digest, graph.untimed_digest)


def test_the_type_that_an_op_computes_in_is_in_the_digest_but_not_in_that_of_a_plan() -> None:
    """A plan stays valid if TF32 is switched on after it was made; recorded times do not."""
    graph = tiny_graph()
    with_tf32 = replaced(graph, ops={"compute": [0, 1, 1, 0]})
    assert with_tf32.digest != graph.digest
    assert with_tf32.untimed_digest == graph.untimed_digest
    assert replaced(graph, ops={"compute": [0, 0, 0, 0]}).digest == graph.digest


def test_the_digest_depends_on_where_a_row_ends() -> None:
    """Op 0 reads 0 and 1, or op 0 reads 0 and op 1 reads 1: the same values, other rows."""
    tensors = [tensor("a"), tensor("b")]
    one = graph_of(tensors, [op(reads=[0, 1]), op()])
    other = graph_of(tensors, [op(reads=[0]), op(reads=[1])])
    assert one.digest != other.digest


def test_the_digest_does_not_depend_on_how_the_graph_was_written() -> None:
    data = tiny_data()
    data["ops"][0] = dict(reversed(data["ops"][0].items())) | {"flops": 0, "after": [], "nbytes_moved": -0.0}
    data["ops"][1]["seconds"] = {"gpu": 0.004, "cpu": 2}
    other = tiny_data()
    other["ops"][1]["seconds"] = {"cpu": 2.0, "gpu": 0.004}
    assert parse_graph(data).digest == parse_graph(other).digest


def test_equal_numbers_have_equal_digests() -> None:
    """-0.0 counts as 0.0, all NaNs are the same, and times that are given for no op are left out."""
    graph = tiny_graph()
    changed = replaced(
        graph,
        ops={
            "flops": [-0.0] * 4,
            "seconds": {"gpu": [0.001, 0.004, 0.003, 0.002], "cpu": [np.nan, -np.nan, np.nan, np.nan]},
        },
    )
    assert changed.digest == graph.digest
    assert list(changed.ops.seconds) == ["gpu"]


def test_the_digest_is_the_same_in_another_process_with_another_hash_seed() -> None:
    code = "from builders import tiny_graph; print(tiny_graph().digest)"
    folder = os.path.dirname(os.path.dirname(__file__))
    seen = {tiny_graph().digest, pickle.loads(pickle.dumps(tiny_graph())).digest}
    for seed in ("0", "12345"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )
        seen.add(result.stdout.strip())
    assert seen == {TINY_DIGEST}


# It changes only with the meaning of a digest: recorded runs name it.
TINY_DIGEST = "de0bac7db2bedf850def1971b9768ddcfd46cd56b5bb994ba7a3df9961abbe98"


def test_wired_builds_the_edges_that_it_is_given() -> None:
    graph = wired([(0, 1), (0, 2), (1, 2)], 3)
    assert [column.tolist() for column in graph.edges] == [[0, 0, 1], [1, 2, 2], [0, 0, 1]]
