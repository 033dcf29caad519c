"""Optional ops: what they read is right for every choice of options, and without options the graph is the captured one."""

import numpy as np
import pytest
import torch
from builders import graph_of, op, tensor
from compiled_steps import RandomNet, capture_with_mse
from tiny_zoo import TINY_ZOO
from torch import nn

from placewise.core.arrays import Bools
from placewise.core.graph import Graph
from placewise.core.optional_ops import leave_out
from placewise.models import load_graph
from placewise.rewrite.augmented_graph import CAPTURED, KEEPING, REPEATED, TAKING, WAITING, AugmentedGraph, add_options
from placewise.rewrite.optional_tensors import RANDOM, OptionalTensors

ALL = OptionalTensors(smallest_share=0)


def chain() -> Graph:
    """Returns y = relu(x @ w) in two ops and their backward pass; w is updated in place."""
    return graph_of(
        [
            tensor("x", 10, "input"),
            tensor("w", 40, "parameter", home=4),
            tensor("h", 20),
            tensor("y", 30),
            tensor("dy", 30, "gradient"),
            tensor("dh", 20, "gradient"),
            tensor("dw", 40, "gradient"),
            tensor("w'", 40, "parameter", alias_of=1),
        ],
        [
            op("mm", 0, [0, 1], [2], nbytes_moved=70),
            op("relu", 1, [2], [3], nbytes_moved=50),
            op("loss.backward", 2, [], [4], "backward"),
            op("relu.backward", 3, [4, 3], [5], "backward"),
            op("mm.backward", 5, [5, 0], [6], "backward"),
            op("w.add_.update", 4, [1, 6], [7], "update", after=[0]),
        ],
    )


def rows(graph: Graph) -> list[str]:
    """Returns each op as 'name: what it reads -> what it writes; after'."""
    t, names, found = graph.tensors.names, graph.ops.names, []
    for n, name in enumerate(names):
        reads, writes, after = (array[n].tolist() for array in (graph.ops.reads, graph.ops.writes, graph.ops.after))
        line = f"{name}: {' '.join(t[i] for i in reads)} -> {' '.join(t[i] for i in writes)}"
        found.append(line + (f"; {' '.join(names[i] for i in after)}" if after else ""))
    return found


def test_a_chain_by_hand() -> None:
    """relu.backward reads y, so y may wait or be repeated, and h, which only relu reads, is repeated for it.

    Repetitions run after the op that makes dy. The repeated mm reads w, so w's update comes after it. Nobody reads w again
    in the backward pass, so it has no visits, but its repetition is one: it reads w in the second pass.
    """
    augmented = add_options(chain(), ALL)
    assert rows(augmented.graph) == [
        "mm: x w -> h",
        "relu: h -> y",
        "y.wait: y -> y.wait",
        "loss.backward:  -> dy",
        "w.wait: w -> w.wait; loss.backward",
        "mm.repeat: x w.wait -> h.repeat; loss.backward",
        "relu.repeat: h.repeat -> y.repeat; loss.backward",
        "relu.backward: dy y.repeat -> dh",
        "mm.backward: dh x -> dw",
        "w.add_.update: w dw -> w'; mm w.wait mm.repeat",
    ]
    t = augmented.graph.tensors
    assert {t.names[i]: t.names[t.stands_for[i]] for i in range(len(t)) if t.stands_for[i] >= 0} == {
        "y.wait": "y", "w.wait": "w", "h.repeat": "h", "y.repeat": "y.wait"
    }  # fmt: skip
    assert augmented.roles.tolist() == [CAPTURED] * 2 + [WAITING, CAPTURED, WAITING] + [REPEATED] * 2 + [CAPTURED] * 3
    moved = augmented.graph.ops.bytes_moved.tolist()
    assert [moved[n] for n, role in enumerate(augmented.roles) if role == WAITING] == [0, 0]  # no work, wherever it waits
    assert [moved[n] for n, role in enumerate(augmented.roles) if role == REPEATED] == [70, 50]
    assert augmented.augment_placement(("a", "b", "a", "b", "a", "b"))[:6] == ("a", "b", "a", "b", "a", "b")
    assert augmented.captured_placement(augmented.augment_placement(tuple("ababab"))) == tuple("ababab")


def test_what_the_forward_pass_reads_after_the_backward_pass_has_no_options() -> None:
    """h is read by the backward pass of a first loss, then by the forward pass of a second one."""
    graph = graph_of(
        [tensor("x", 10, "input"), tensor("h", 20), tensor("g", 1, "gradient"), tensor("y", 30)],
        [op("mm", 0, [0], [1]), op("mm.backward", 1, [1], [2], "backward"), op("relu", 2, [1], [3])],
    )
    assert add_options(graph, ALL).roles.tolist() == [CAPTURED] * 3


def test_an_output_has_no_options() -> None:
    """h is kept until the step ends, so nothing is gained if it waits or is repeated."""
    tensors = [tensor("x", 10, "input"), tensor("h", 20), tensor("g", 1, "gradient")]
    ops = [op("mm", 0, [0], [1]), op("mm.backward", 1, [1], [2], "backward")]
    assert set(add_options(graph_of(tensors, ops), ALL).roles.tolist()) == {CAPTURED, REPEATED, WAITING}
    assert add_options(graph_of(tensors, ops, outputs=[1]), ALL).roles.tolist() == [CAPTURED] * 2


def test_options_wait_for_the_last_gradient_that_their_reader_needs() -> None:
    graph = graph_of(
        [tensor("x", 10, "input"), tensor("h", 20), *(tensor(name, 1, "gradient") for name in ("f", "g", "d"))],
        [
            op("mm", 0, [0], [1]),
            op("f.backward", 1, [], [2], "backward"),
            op("g.backward", 2, [], [3], "backward"),
            op("mm.backward", 3, [1, 2, 3], [4], "backward"),
        ],
    )
    assert "mm.repeat: x -> h.repeat; g.backward" in rows(add_options(graph, ALL).graph)


def test_what_reads_a_unit_that_is_not_finished_is_not_repeated() -> None:
    """norm makes a and c; c is finished after relu has read a, so a repeated norm would come after a repeated relu."""
    graph = graph_of(
        [
            tensor("x", 10, "input"),
            tensor("a", 20),
            tensor("c", 20),
            tensor("b", 20),
            tensor("c'", 20, alias_of=2),
            tensor("g", 1, "gradient"),
        ],
        [
            op("norm", 0, [0], [1, 2]),
            op("relu", 1, [1], [3]),
            op("c.mul_", 0, [2], [4]),
            op("relu.backward", 2, [3], [5], "backward"),
        ],
    )
    assert REPEATED not in add_options(graph, ALL).roles.tolist()


def test_a_frozen_weight_gets_a_home_of_its_own() -> None:
    """w is read in both passes and never written: it may live anywhere, by default on its first reader's device."""
    graph = graph_of(
        [tensor("w", 40, "parameter"), tensor("h"), tensor("g", 1, "gradient")],
        [op("mm", 0, [0], [1]), op("mm.backward", 1, [0, 1], [2], "backward")],
    )
    augmented = add_options(graph, OptionalTensors(repeat=False, wait=False))
    assert rows(augmented.graph) == ["mm: w -> h", "w.wait: w -> w.wait; mm", "mm.backward: w.wait h -> g"]
    assert augmented.graph.tensors.home.tolist() == [2, -1, -1, -1]
    assert augmented.augment_placement(("gpu:0", "gpu:1")) == ("gpu:0", "gpu:1", "gpu:0", None)


def test_only_what_was_asked_for() -> None:
    def roles(**choice: bool) -> set[int]:
        return set(add_options(chain(), OptionalTensors(smallest_share=0, **choice)).roles.tolist())

    assert roles(repeat=False) == {CAPTURED, WAITING}
    assert roles(wait=False, visit=False) == {CAPTURED, REPEATED}
    assert roles(repeat=False, wait=False, visit=False) == {CAPTURED}


def same_graph(found: Graph, expected: Graph) -> bool:
    """Returns whether two graphs have the same ops and tensors; groups may have other numbers."""
    same_ops = [
        (f.reads.values.tolist(), f.writes.values.tolist(), f.after.values.tolist(), f.names, f.kinds, f.flops.tolist())
        for f in (found.ops, expected.ops)
    ]
    return same_ops[0] == same_ops[1] and found.outputs.tolist() == expected.outputs.tolist()


def assert_right_values(augmented: AugmentedGraph, is_there: Bools) -> None:
    """Follows values through the ops that are left, as names: every captured op reads what it would read without options.

    A storage has one value at a time, so an op that reads what has been overwritten is found too.
    """
    left = leave_out(augmented.graph, is_there)
    graph, captured, storages = left.graph, augmented.captured, left.graph.storage.tolist()
    values = {t: augmented.tensors[left.tensors[t]] for t in range(len(graph.tensors)) if graph.producer[t] < 0}
    memory = {t: t for t in values}  # storage -> the tensor that it holds
    for n, whole in enumerate(left.ops.tolist()):
        origin, role = int(augmented.ops[whole]), augmented.roles[whole]
        reads = graph.ops.reads[n].tolist()
        assert all(memory[storages[t]] == t for t in reads), f"{graph.ops.names[n]} reads what was overwritten"
        wanted = [] if origin < 0 else captured.ops.reads[origin].tolist()
        if role in (WAITING, KEEPING):
            made = [values[reads[0]]]
        elif role == TAKING:
            made = captured.ops.writes[origin].tolist()
            assert [values[t] for t in reads] == [*wanted, *made]  # memory that is written, and what was drawn
        else:
            known = [values[t] for t in reads]
            assert set(known) <= set(wanted)
            assert role == REPEATED or sorted(known) == sorted(wanted)
            made = captured.ops.writes[origin].tolist()
        for t in graph.ops.writes[n].tolist():
            values[t] = augmented.tensors[left.tensors[t]]
            assert values[t] in made
            memory[storages[t]] = t
    assert [values[t] for t in graph.outputs.tolist()] == captured.outputs.tolist()


class Blocks(nn.Module):
    """Convolutions with batch norm, activations in place, dropout and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)) for _ in range(3)]
        )
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return x.mean((2, 3))


def blocks_graph() -> Graph:
    """Returns the step of such a model, in 2 micro-batches."""
    model, batch = Blocks(), (torch.zeros(4, 3, 8, 8), torch.zeros(4, 3))
    return capture_with_mse(model, torch.optim.SGD(model.parameters(), 0.1), batch, micro_batches=2).graph


def random_graph(seed: int) -> Graph:
    """Returns the step of a random network."""
    torch.manual_seed(seed)
    net, batch = RandomNet(seed, 12), (torch.zeros(6, 4), torch.zeros(6, 4))
    return capture_with_mse(net, torch.optim.SGD(net.parameters(), 0.1), batch).graph


@pytest.mark.parametrize("name", [*TINY_ZOO, "blocks", *range(8)])
def test_every_choice_of_options_computes_the_same(name: str | int) -> None:
    graph = (
        blocks_graph() if name == "blocks" else random_graph(name) if isinstance(name, int) else load_graph(TINY_ZOO[name])
    )
    augmented, rng = add_options(graph, ALL), np.random.default_rng(0)
    optional = augmented.graph.optional_groups
    assert same_graph(leave_out(augmented.graph, ~optional).graph, graph)
    assert {REPEATED, WAITING} <= set(augmented.roles.tolist())
    assert len(set(augmented.graph.ops.names)) == len(augmented.graph.ops)
    for share in (0, 0.1, 0.5, 0.9, 1):
        assert_right_values(augmented, ~optional | (rng.random(len(optional)) < share))


def test_what_dropout_draws_is_kept_as_bytes() -> None:
    """Of 12 numbers of 4 bytes that are drawn, 12 bytes are kept; the repetition copies them, and divides by 0.5 again."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))
    batch = (torch.zeros(4, 3), torch.zeros(4, 3))
    augmented = add_options(capture_with_mse(net, torch.optim.SGD(net.parameters(), 0.1), batch).graph, ALL)
    found = [row for row in rows(augmented.graph) if row.startswith("1.") and "wait" not in row]
    drawn, again = "1.empty_like", "1.empty_like.repeat"
    assert [row.partition(";")[0] for row in found[:8]] == [
        f"1.empty_like:  -> {drawn}",
        f"1.bernoulli_: {drawn} -> {drawn}'",
        f"1.bernoulli_.keep: {drawn}' -> {drawn}'.keep",
        f"1.div_: {drawn}' -> {drawn}'",
        f"1.mul: 0.addmm {drawn}' -> 1.mul",
        f"{again}:  -> {again}",
        f"1.bernoulli_.repeat: {again} {drawn}'.keep -> {drawn}'.repeat",
        f"1.div_.repeat: {drawn}'.repeat -> {drawn}'.repeat_1",
    ]
    graph = augmented.graph
    kept = graph.tensors.names.index(f"{drawn}'.keep")
    assert graph.tensors.nbytes[kept] == 12
    reader, maker = graph.ops.names.index("1.bernoulli_.repeat"), int(graph.producer[kept])
    assert graph.ops.groups[reader] == graph.ops.groups[maker]  # kept only for what reads it
    assert graph.ops.bytes_moved[[reader, maker]].tolist() == [60, 60]


def test_random_ops_and_running_statistics_are_left_alone() -> None:
    augmented = add_options(blocks_graph(), ALL)
    kinds = {augmented.graph.ops.kinds[n] for n in np.flatnonzero(augmented.roles == REPEATED)}
    assert {"aten._batch_norm_with_update", "aten.relu_", "aten.mul"} <= kinds
    assert "aten.bernoulli_" in augmented.graph.ops.kinds
    assert [kind for kind in kinds if RANDOM.search(kind)] == []
    written = augmented.graph.ops.writes.values[augmented.graph.ops.optional[augmented.graph.ops.writes.rows]]
    assert (augmented.graph.producer[augmented.graph.storage[written]] >= 0).all()  # no resident


def test_random_operators_are_known_by_name() -> None:
    """All ops of PyTorch that draw random numbers, and none that is common in forward passes."""
    names = {
        name.partition("::")[2].partition(".") for name in torch._C._dispatch_get_all_op_names() if name[:6] == "aten::"
    }
    drawing = {
        packet
        for packet, _, overload in names
        if torch.Tag.nondeterministic_seeded in getattr(getattr(torch.ops.aten, packet), overload or "default").tags
    }
    assert len(drawing) > 40
    assert [name for name in sorted(drawing) if not RANDOM.search(name)] == []
    common = (
        "convolution native_batch_norm native_layer_norm native_group_norm relu_ gelu mm addmm bmm add mul cat embedding"
    )
    assert [name for name in common.split() if RANDOM.search(name)] == []


def test_the_same_graph_on_every_call() -> None:
    graph = load_graph(TINY_ZOO["resnet"])
    assert add_options(graph).graph.digest == add_options(graph).graph.digest
