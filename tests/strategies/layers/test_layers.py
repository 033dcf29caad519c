"""Placements by layer: experts, Accelerate, pipelines; and by micro-batch."""

import itertools
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from builders import graph_of, graphs, mixed_cluster, op, tensor, tiny_cluster, wired
from hypothesis import given
from hypothesis import strategies as st
from simulated import GROUPINGS, Step, gpus, steps
from torch import Tensor, nn

import placewise as pw
from placewise.core.arrays import Ints
from placewise.core.cluster import Cluster
from placewise.core.contracts import Proposal
from placewise.core.errors import ProblemError, StrategyError
from placewise.core.graph import PHASES, TENSOR_KINDS, Graph
from placewise.core.grouping import module_path
from placewise.core.problem import Problem
from placewise.formats.cluster_file import parse_cluster
from placewise.models import load_graph
from placewise.simulate.simulator import Simulator
from placewise.strategies import make
from placewise.strategies.layers.model_layers import find_layers, layer_bytes
from placewise.strategies.layers.pipeline_order import one_forward_one_backward, turns_of
from placewise.strategies.layers.placers import cut_stages, lstm_places

NAMES = ("expert", "balanced", "pipeline", "towers")
NMT = "nmt:layers=2,hidden=8,length=3,batch=4,vocab=11"
GPT = "gpt:layers=4,hidden=8,heads=2,length=5,vocab=13,batch=4,micro_batches=4"
ZOO = (
    NMT,
    GPT,
    "rnnlm:layers=3,hidden=8,steps=3,batch=4,vocab=11",
    "bert:layers=2,hidden=8,heads=2,length=5,vocab=13,batch=4",
    "cifar-cnn:batch=2",
    "resnet:batch=2,image=33,classes=5",
    "inception-v3:batch=2,classes=5",
)


@cache
def zoo_graph(model: str) -> Graph:
    return load_graph(model)


def machine(memory: list[int], cpu: int | None = None, speeds: tuple[float, ...] = ()) -> Cluster:
    """Returns GPUs with these memories, and a CPU if its memory is given."""
    rest = {"bytes_per_second": 1e9}
    speeds = speeds or (1e9,) * len(memory)
    devices: list[dict[str, Any]] = [
        {"name": f"gpu:{i}", "kind": "gpu", "memory": m, "flops": f, **rest}
        for i, (m, f) in enumerate(zip(memory, speeds, strict=True))
    ]
    if cpu is not None:
        devices.append({"name": "cpu:0", "kind": "cpu", "memory": cpu, "flops": 1e8, **rest})
    return parse_cluster(
        {"name": "m", "devices": devices, "default_link": {"latency_seconds": 1e-5, "bytes_per_second": 1e9}}
    )


def proposals(name: str, problem: Problem, **settings: str) -> list[Proposal]:
    """Returns all that a strategy proposes: valid placements, in valid orders."""
    found = list(make(name, settings).search(problem, np.random.default_rng(0)))
    for proposal in found:
        problem.check_placements(proposal.placements)
        for order in [] if proposal.orders is None else proposal.orders:
            problem.check_order(order)
    return found


def placed(name: str, problem: Problem, **settings: str) -> Ints:
    """Returns the first placement that a strategy proposes: [groups]."""
    placement: Ints = proposals(name, problem, **settings)[0].placements[0]
    return placement


def by_module(problem: Problem, placement: Ints) -> dict[str, list[int]]:
    """Returns the devices of each module's ops."""
    devices: dict[str, set[int]] = {}
    for n, device in enumerate(placement[problem.op_groups].tolist()):
        devices.setdefault(module_path(problem.graph, n), set()).add(device)
    return {path: sorted(found) for path, found in devices.items()}


def by_parameter(problem: Problem, placement: Ints) -> dict[str, int]:
    """Returns the device of each parameter."""
    tensors = problem.graph.tensors
    where = np.flatnonzero((tensors.kinds == TENSOR_KINDS.index("parameter")) & (tensors.home >= 0))
    return {tensors.names[t]: int(placement[problem.merged[tensors.home[t]]]) for t in where.tolist()}


# Layers


def linear_step() -> Graph:
    """Returns two linear layers a and b with a relu between them and a loss, forward, backward and update.

    Layer a is op 0 (a.mm), its relu (op 1), and their backward ops 7 and 6; the update op 8. Layer b is op 2 (b.mm), the
    loss (op 3) and all that the loss's backward needs: ops 4 and 5.
    """
    tensors = [
        tensor("a.w", 100, "parameter", home=8),
        tensor("b.w", 200, "parameter", home=9),
        *(tensor(f"t{i}", 10**i) for i in range(3, 11)),
        tensor("a.w'", 100, "parameter", alias_of=0),
        tensor("b.w'", 200, "parameter", alias_of=1),
    ]
    ops = [
        op("a.mm", 0, [0], [2]),
        op("relu", 1, [2], [3]),
        op("b.mm", 2, [3, 1], [4]),
        op("loss", 3, [4], [5]),
        op("ones.backward", 4, [], [6], "backward"),
        op("b.mm.backward", 5, [6, 3], [7], "backward"),
        op("relu.backward", 6, [7, 3], [8], "backward"),
        op("a.mm.backward", 7, [8], [9], "backward"),
        op("a.w.sub_.update", 8, [0, 9], [10], "update", after=[0]),
        op("b.w.sub_.update", 9, [1, 7], [11], "update", after=[2]),
    ]
    return graph_of(tensors, ops)


def test_ops_outside_of_layers_follow_what_they_read() -> None:
    """The relu and its backward are with a, whose result they read; the loss with b; a constant with its reader."""
    layers = find_layers(Problem.of(linear_step(), tiny_cluster()))
    assert layers.names == ("a", "b")
    assert layers.of_group.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 0, 1]


def test_layer_bytes_are_what_outlives_a_phase() -> None:
    """Layer a keeps its parameter (100), the relu's result (10⁴) and its gradient (10¹⁰); b its own 200 and 10⁸.

    The 10⁸ bytes are what b.mm.backward writes. Nothing of micro-batches: the second column is 0.
    """
    problem = Problem.of(linear_step(), tiny_cluster())
    always, passing = layer_bytes(problem, find_layers(problem))
    assert always.tolist() == [100 + 10**4 + 10**10, 200 + 10**8]
    assert passing.tolist() == [0, 0]


def test_a_graph_without_modules_has_a_layer_for_each_forward_op() -> None:
    """Ops 0, 1 are forward and layers; op 2 is backward and reads op 0's and op 1's results: with op 1, the later one."""
    rows = [op("x", 0, [], [0]), op("y", 1, [0], [1]), op("z", 2, [1, 0], [2], "backward"), op("u", 3, [2], [], "update")]
    layers = find_layers(Problem.of(graph_of([tensor(), tensor(), tensor()], rows), tiny_cluster()))
    assert layers.names == ("x", "y")
    assert layers.of_group.tolist() == [0, 1, 1, 1]


def test_a_group_is_with_its_first_op_or_first_reader() -> None:
    """Group 1 has no op, only the home of b.w, whose first reader is b.mm in group 2; group 0 spans a and b: with a."""
    tensors = [tensor("a.w", 1, "parameter", home=0), tensor("b.w", 1, "parameter", home=1), tensor(), tensor()]
    rows = [op("a.mm", 0, [0], [2]), op("b.mm", 2, [2, 1], [3]), op("b.add", 0, [3])]
    assert find_layers(Problem.of(graph_of(tensors, rows), tiny_cluster())).of_group.tolist() == [0, 1, 1]


@pytest.mark.parametrize("model", ZOO)
def test_layers_of_the_zoo_are_its_modules_with_parameters(model: str) -> None:
    graph = zoo_graph(model)
    problem = Problem.of(graph, machine([2**30] * 2))
    layers = find_layers(problem)
    names = [n for n, k in zip(graph.tensors.names, graph.tensors.kinds, strict=True) if TENSOR_KINDS[k] == "parameter"]
    modules = {name.rpartition(".")[0] for name in names if "'" not in name}
    assert set(layers.names) - modules <= {"head"}  # gpt's head has the embedding's weights
    assert modules <= set(layers.names)
    for n in range(len(graph.ops)):
        path = module_path(graph, n)
        if path in modules and PHASES[graph.ops.phases[n]] == "forward":
            assert layers.names[layers.of_group[problem.op_groups[n]]] == path


# Expert


def test_the_expert_of_an_lstm_network_has_a_layer_on_each_gpu() -> None:
    """NMT-2 on 2 GPUs: embeddings and layers 0 on GPU 0, layers 1, attention, projection and the loss on GPU 1."""
    problem = Problem.of(zoo_graph(NMT), machine([2**30] * 2, 2**30))
    (proposal,) = proposals("expert", problem)
    assert proposal.notes == {"rule": "layer-per-gpu"}
    devices = by_module(problem, proposal.placements[0])
    for path, gpu in {"embedding": 0, "layers.0": 0, "layers.1": 1}.items():
        assert devices[f"encoder.{path}"] == devices[f"decoder.{path}"] == [gpu]
    for path in ("attention", "attention.key", "attention.join", "projection"):
        assert devices[path] == [1]
    for n, name in enumerate(problem.graph.ops.names):
        if name.startswith(("_log_softmax", "nll_loss")):
            assert proposal.placements[0][problem.op_groups[n]] == 1


def test_more_and_fewer_gpus_than_lstm_layers() -> None:
    """3 layers: on 2 GPUs 0, 0, 1 (floor of i · 2/3); on 8 the first three; on 1 all. A foreign module: no rule."""
    names = ("embedding", "layers.0", "layers.1", "layers.2", "projection")
    expected = {1: [0, 0, 0, 0, 0], 2: [0, 0, 0, 1, 1], 3: [0, 0, 1, 2, 2], 8: [0, 0, 1, 2, 2]}
    for num_gpus, places in expected.items():
        found = lstm_places(names, num_gpus)
        assert found is not None
        assert found.tolist() == places
    assert lstm_places((*names, "head"), 2) is None
    assert lstm_places(("embedding",), 2) is None


def test_the_expert_of_a_cnn_has_one_gpu() -> None:
    """The second GPU is twice as fast."""
    problem = Problem.of(zoo_graph("cifar-cnn:batch=2"), machine([2**30] * 2, 2**30, (1e9, 2e9)))
    (proposal,) = proposals("expert", problem)
    assert proposal.notes == {"rule": "one-gpu"}
    assert set(proposal.placements[0].tolist()) == {1}


def test_the_expert_of_any_other_model_is_a_pipeline() -> None:
    problem = Problem.of(zoo_graph(GPT), machine([2**30] * 2))
    for mine, theirs in zip(proposals("expert", problem), proposals("pipeline", problem), strict=True):
        np.testing.assert_array_equal(mine.placements, theirs.placements)


# Pipeline


def test_stages_by_hand() -> None:
    """Times 1, 2, 3, 4 on two stages: 1 + 2 + 3 | 4, slowest 6, beats 1 + 2 | 3 + 4, slowest 7."""
    times = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]])
    plenty = np.array([100.0, 100.0])
    assert cut_stages(times, times, plenty).tolist() == [0, 0, 0, 1]


def test_stages_keep_to_the_memory() -> None:
    """A byte for each second: 5 bytes in the first stage leave 1 + 2 | 3 + 4.

    With 2 and 6 bytes nothing fits. 1 + 2 | 3 + 4 overflows by 1 + 1, 1 | 2 + 3 + 4 by 3, 1 + 2 + 3 | 4 by 4.
    """
    times = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]])
    assert cut_stages(times, times, np.array([5.0, 100.0])).tolist() == [0, 0, 1, 1]
    assert cut_stages(times, times, np.array([2.0, 6.0])).tolist() == [0, 0, 1, 1]


def test_stages_on_unequal_devices() -> None:
    """The second device takes three times as long: 1 1 1 | 3. A layer stays with the earlier device where both are as good.

    A second device that takes ten times as long gets nothing.
    """
    slow = np.tile([1.0, 3.0], (4, 1))
    assert cut_stages(slow, np.zeros((4, 2)), np.ones(2)).tolist() == [0, 0, 0, 1]
    assert cut_stages(np.tile([1.0, 10.0], (4, 1)), np.zeros((4, 2)), np.ones(2)).tolist() == [0, 0, 0, 0]
    assert cut_stages(np.tile([10.0, 1.0], (4, 1)), np.zeros((4, 2)), np.ones(2)).tolist() == [1, 1, 1, 1]
    assert cut_stages(np.ones((1, 3)), np.zeros((1, 3)), np.ones(3)).tolist() == [0]


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_stages_against_all_cuts(num_layers: int, num_stages: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    times, sizes = rng.integers(0, 6, (2, num_layers, num_stages)).astype(np.float64)
    memory = rng.integers(0, 12, num_stages).astype(np.float64)

    def worth(stages: tuple[int, ...]) -> tuple[float, float]:
        pick = np.array(stages)
        totals = [(sizes[pick == s, s].sum() - memory[s], times[pick == s, s].sum()) for s in range(num_stages)]
        return sum(max(over, 0.0) for over, _ in totals), max(time for _, time in totals)

    found = tuple(cut_stages(times, sizes, memory).tolist())
    assert found == tuple(sorted(found))
    assert worth(found) == min(map(worth, itertools.combinations_with_replacement(range(num_stages), num_layers)))


def test_pipeline_stages_are_contiguous_layers() -> None:
    problem = Problem.of(zoo_graph(GPT), machine([2**30] * 3, 2**30))
    layers = find_layers(problem)
    for stages in ("0", "2"):
        placement = placed("pipeline", problem, stages=stages)
        of_layer = {layer: placement[layers.of_group == layer] for layer in range(layers.num_layers)}
        firsts = [int(devices[0]) for devices in of_layer.values()]
        assert all((devices == devices[0]).all() for devices in of_layer.values())
        assert firsts == sorted(firsts)
        assert set(firsts) == set(range(int(stages) or 3))
    with pytest.raises(StrategyError, match="stages must be at least 0, it is -1"):
        make("pipeline", {"stages": "-1"})


def test_of_many_layers_neighbours_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ops of 1 s are four stages of two; with three places to cut they are stages of three, three and two."""
    problem = Problem.of(wired([(n, n + 1) for n in range(7)], 8, seconds=[{"gpu": 1.0}] * 8), machine([2**30] * 4))
    assert placed("pipeline", problem).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    monkeypatch.setattr("placewise.strategies.layers.placers.MOST_PLACES", 3)
    assert np.unique(placed("pipeline", problem), return_counts=True)[1].tolist() == [3, 3, 2]


def test_turns_by_hand() -> None:
    """Two stages, three micro-batches. Stage 0 starts with two forward passes, stage 1 with one.

    turn      0    1    2    3    4    5    6    7
    stage 0   F0   F1        B0   F2   B1        B2
    stage 1        F0   B0   F1   B1   F2   B2
    """
    forward, backward = turns_of(3, 2)
    assert forward.T.tolist() == [[0, 1, 4], [1, 3, 5]]
    assert backward.T.tolist() == [[3, 5, 7], [2, 4, 6]]


@given(st.integers(1, 9), st.integers(1, 5))
def test_turns_are_a_schedule(num_micro_batches: int, num_stages: int) -> None:
    forward, backward = turns_of(num_micro_batches, num_stages)
    assert (np.diff(forward, axis=1) > 0).all()
    assert (np.diff(backward, axis=1) < 0).all()
    assert (backward > forward).all()
    for stage in range(num_stages):
        done = np.concatenate([forward[:, stage], backward[:, stage]])
        assert len(np.unique(done)) == 2 * num_micro_batches
        under_way = [(forward[:, stage] <= t).sum() - (backward[:, stage] < t).sum() for t in done]
        assert max(under_way) <= num_stages - stage
    assert backward.max() == 2 * (num_micro_batches + num_stages - 1) - 1


def test_the_pipeline_order_overlaps_the_stages_in_less_memory() -> None:
    """Program order runs one micro-batch after the other; in turns, four micro-batches take less than 4/5 of that time."""
    problem = Problem.of(zoo_graph(GPT.replace("hidden=8", "hidden=64")), machine([2**40] * 2))
    plain, turned = proposals("pipeline", problem)
    program = Simulator(problem, order="program")(plain.placements).step_seconds[0]
    assert turned.orders is not None
    assert Simulator(problem)(turned.placements, turned.orders).step_seconds[0] < 0.8 * program


@given(drawn=steps(), num_stages=st.integers(1, 4))
def test_the_pipeline_order_is_one_of_any_graph(drawn: tuple[Step, np.random.Generator], num_stages: int) -> None:
    problem, rng = drawn[0].problem, drawn[1]
    stages = rng.integers(0, num_stages, problem.num_ops)
    problem.check_order(one_forward_one_backward(problem, stages, num_stages))


# Towers


def test_micro_batches_are_dealt_to_gpus() -> None:
    """Micro-batches 0, 1, 2 on GPUs 0, 1, 0; a group of micro-batches 1 and 2, and one of none, on GPU 0."""
    rows = [op(f"op{i}", i, micro_batch=i) for i in range(3)]
    rows += [op("both", 3, micro_batch=1), op("both", 3, micro_batch=2), op("update", 4), op("more", 1, micro_batch=1)]
    problem = Problem.of(graph_of([], rows), tiny_cluster())
    (proposal,) = proposals("towers", problem)
    assert proposal.placements.tolist() == [[0, 1, 0, 0, 0]]
    assert proposal.notes == {"micro_batches": 3}


def test_towers_of_the_zoo() -> None:
    problem = Problem.of(zoo_graph(GPT), machine([2**30] * 2, 2**30))
    placement, ops = placed("towers", problem), problem.graph.ops
    forward = (ops.phases == PHASES.index("forward")) & (ops.micro_batches >= 0)
    assert (placement[problem.op_groups] == ops.micro_batches % 2)[forward].all()
    assert set(by_parameter(problem, placement).values()) == {0}


def test_towers_without_micro_batches_are_one_gpu() -> None:
    problem = Problem.of(zoo_graph(NMT), machine([2**30] * 2, 2**30, (1e9, 2e9)))
    (proposal,) = proposals("towers", problem)
    assert set(proposal.placements[0].tolist()) == {1}
    assert proposal.notes == {"micro_batches": 0}


# Balanced


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.expand(self.norm(x)))
        out: Tensor = x + self.contract(inner) * self.scale
        return out


class Stack(nn.Module):
    """An embedding, blocks and a head, that may share the embedding's weights."""

    def __init__(self, vocab: int, width: int, depth: int, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Scaled(nn.Module):
    """A parameter of the outermost module, and a part with its own parameter besides its children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(x * self.scale))
        return out


class Pair(nn.Module):
    """Two parts of three linear layers; the first weight of one is the last of the other, which has a bias of its own."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.left, self.right = linears([width, inner, inner, width]), linears([width, inner, width, inner])
        self.last = linears([inner, inner])
        self.right[2].weight = self.left[0].weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.right(self.left(x)))
        return out


def linears(widths: list[int]) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


TOKENS = torch.zeros(2, 3, dtype=torch.long)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linears": (lambda: linears([8, 8, 8, 8, 8, 8, 8]), torch.zeros(2, 8)),
    "unequal": (lambda: linears([4, 50, 3, 20, 20, 1, 40]), torch.zeros(2, 4)),
    "one": (lambda: linears([4, 4]), torch.zeros(2, 4)),
    "blocks": (lambda: Stack(20, 8, 6, tied=False), TOKENS),
    "tied": (lambda: Stack(20, 8, 6, tied=True), TOKENS),
    "tied-large": (lambda: Stack(300, 8, 3, tied=True), TOKENS),
    "parts": (lambda: Pair(8, 8), torch.zeros(2, 8)),
    "unequal-parts": (lambda: Pair(3, 40), torch.zeros(2, 3)),
    "scaled": (Scaled, torch.zeros(2, 16)),
}


@pytest.mark.parametrize("no_split", ["", "Block"])
@pytest.mark.parametrize("num_gpus", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", MODELS)
def test_balanced_is_what_accelerate_does(name: str, num_gpus: int, no_split: str) -> None:
    """With all memory of the world, and with less and less of the model's bytes on each GPU, until some is on the CPU."""
    accelerate = pytest.importorskip("accelerate", reason="the package to compare with is not installed")
    build, batch = MODELS[name]
    model = build()
    graph = pw.capture(model, torch.sum, torch.optim.SGD(model.parameters(), 0.1), batch).graph
    total = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
    for memory in (10**9, total, *(int(share * total) for share in (0.8, 0.6, 0.4, 0.3, 0.2, 0.1))):
        limits: dict[int | str, int] = dict.fromkeys([*range(num_gpus), "cpu"], memory) | {"cpu": 10**9}
        classes = [no_split] if no_split else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of GPUs that are not there, of buffers on the CPU
            balanced = accelerate.utils.get_balanced_memory(model, dict(limits), no_split_module_classes=classes)
            expected = accelerate.infer_auto_device_map(model, balanced, no_split_module_classes=classes, clean_result=False)
        problem = Problem.of(graph, machine([memory] * num_gpus, 10**9))
        found = by_parameter(problem, placed("balanced", problem, no_split=r"blocks\.\d+" if no_split else ""))
        assert found == {n: accelerate_device(expected, n, num_gpus) for n, _ in model.named_parameters()}, memory


def accelerate_device(device_map: dict[str, int | str], name: str, num_gpus: int) -> int:
    """Returns the device of a parameter in Accelerate's map; the CPU and the disk are our CPU."""
    while name not in device_map:
        name = name.rpartition(".")[0]
    device = device_map[name]
    return num_gpus if isinstance(device, str) else device


@pytest.mark.parametrize("num_gpus", [2, 4, 8])
@pytest.mark.parametrize("model", [NMT, GPT, "resnet:batch=2,image=33,classes=5"])
def test_balanced_is_what_accelerate_does_with_the_zoo(model: str, num_gpus: int) -> None:
    accelerate = pytest.importorskip("accelerate", reason="the package to compare with is not installed")
    from placewise import zoo

    module = zoo.build_step(model).model
    classes = ["GptBlock", "LSTMCell"]
    balanced = accelerate.utils.get_balanced_memory(
        module, dict.fromkeys(range(num_gpus), 2**30), no_split_module_classes=classes
    )
    expected = accelerate.infer_auto_device_map(module, balanced, no_split_module_classes=classes)
    problem = Problem.of(zoo_graph(model), machine([2**30] * num_gpus))
    found = by_parameter(problem, placed("balanced", problem))
    assert found == {name: accelerate_device(expected, name, 99) for name, _ in module.named_parameters()}


def test_balanced_by_hand() -> None:
    """Six layers of 8 x 9 floats (288 bytes) on 3 GPUs: a share is 576 and a quarter more than a layer, 936 bytes.

    The first GPU keeps 288 of it free and takes two layers (576 of 648), the second three (864 of 936), the third one.
    """
    model = linears([8] * 7)
    graph = pw.capture(model, torch.sum, torch.optim.SGD(model.parameters(), 0.1), torch.zeros(2, 8)).graph
    problem = Problem.of(graph, machine([10**6] * 3))
    devices = by_module(problem, placed("balanced", problem))
    assert [devices[f"{i}"] for i in range(6)] == [[0], [0], [1], [1], [1], [2]]
    with pytest.raises(StrategyError, match="no_split must be a regular expression"):
        make("balanced", {"no_split": "("})


# All


@pytest.mark.parametrize("name", NAMES)
@given(graph=graphs())
def test_any_graph_is_placed(name: str, graph: Graph) -> None:
    for cluster in (mixed_cluster(), tiny_cluster(), machine([0, 10])):
        try:
            problem = Problem.of(graph, cluster)
        except ProblemError:
            continue  # the machine can't run it
        assert proposals(name, problem)


@pytest.mark.parametrize("name", NAMES)
@given(drawn=steps())
def test_any_grouping_is_placed(name: str, drawn: tuple[Step, np.random.Generator]) -> None:
    assert proposals(name, drawn[0].problem)


@pytest.mark.parametrize("grouping", sorted(set(GROUPINGS)))
@pytest.mark.parametrize("model", [NMT, GPT])
def test_the_zoo_is_placed_in_any_grouping(model: str, grouping: str) -> None:
    problem = Problem.of(zoo_graph(model), machine([2**30] * 2, 2**30), grouping)
    for name in NAMES:
        assert proposals(name, problem)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_gpus", [1, 3])
def test_the_smallest_problems(name: str, num_gpus: int) -> None:
    """No op; one op; a home that nobody reads."""
    for tensors, rows in (([], []), ([], [op()]), ([tensor("a.w", 5, "parameter", home=1)], [op("a.mm", 0)])):
        problem = Problem.of(graph_of(tensors, rows), parse_cluster(gpus(num_gpus)))
        assert placed(name, problem).shape == (problem.num_groups,)
