"""Captured graphs of models small enough to count by hand, and what capture refuses."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from command_line import script_command
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import placewise as pw
from placewise import models, zoo
from placewise.core.errors import CaptureError
from placewise.core.graph import PHASES, TENSOR_KINDS, Graph
from placewise.graph_capture.capture import CapturedStep, capture_step
from placewise.graph_capture.program import Slot

Loss = Callable[..., Tensor]


def captured(model: nn.Module, batch: Any, loss_fn: Loss = torch.sum, lr: float = 0.1, **options: Any) -> CapturedStep:
    return pw.capture(model, loss_fn, torch.optim.SGD(model.parameters(), lr), batch, **options)


def op(graph: Graph, name: str) -> int:
    assert name in graph.ops.names, f"{name} is not among {graph.ops.names}"
    return graph.ops.names.index(name)


def tensor(graph: Graph, name: str) -> int:
    assert name in graph.tensors.names, f"{name} is not among {graph.tensors.names}"
    return graph.tensors.names.index(name)


def by_phase(graph: Graph) -> dict[str, list[str]]:
    return {
        phase: [name for name, p in zip(graph.ops.names, graph.ops.phases, strict=True) if p == i]
        for i, phase in enumerate(PHASES)
    }


class Two(nn.Module):
    """Two layers and what happens between them, in named modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.middle = nn.Sequential(nn.ReLU(), nn.Flatten())
        self.last = nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]


# --- the graph's meaning ---


def test_ops_phases_and_module_paths() -> None:
    """Three modules do work. Sum's gradient is expanded (a view); x needs no gradient, so first has one product less.

    Each of the three parameters is updated by one in-place add.
    """
    graph = captured(Two(), torch.randn(5, 3)).graph
    assert by_phase(graph) == {
        "forward": ["first.addmm", "middle.0.relu", "last.mm", "sum"],
        "backward": [
            *("ones_like.backward", "last.mm.backward", "last.mm.backward_1", "middle.0.threshold_backward.backward"),
            *("first.mm.backward", "first.sum.backward"),
        ],
        "update": ["first.weight.add_.update", "first.bias.add_.update", "last.weight.add_.update"],
    }
    assert graph.ops.kinds[op(graph, "first.addmm")] == "aten.addmm"
    assert set(graph.ops.micro_batches.tolist()) == {-1}


def test_backward_of_a_view_has_the_path_of_its_module() -> None:
    """Select is a view, no op; but its gradient is a table of zeros around the row."""

    class Row(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[1]

    graph = captured(nn.Sequential(nn.Linear(3, 3), Row()), torch.randn(2, 3)).graph
    assert "1.select_backward.backward" in graph.ops.names
    assert not [name for name in graph.ops.names if name.startswith("1.select") and "backward" not in name]


def test_flops_and_bytes_of_a_linear_layer() -> None:
    """x is 5x3, the weight 4x3: 2*5*3*4 = 120 flops forward; it moves 4 bytes for 4 + 15 + 12 + 20 numbers."""
    graph = captured(Two(), torch.randn(5, 3)).graph
    n = op(graph, "first.addmm")
    assert graph.ops.flops[n] == 120
    assert graph.ops.bytes_moved[n] == 4 * (4 + 15 + 12 + 20)
    assert graph.ops.flops[op(graph, "first.mm.backward")] == 120
    assert graph.ops.flops[op(graph, "last.mm")] == 2 * 5 * 4 * 2
    relu = op(graph, "middle.0.relu")
    assert (graph.ops.flops[relu], graph.ops.bytes_moved[relu]) == (20, 4 * (20 + 20))
    update = op(graph, "first.weight.add_.update")
    assert (graph.ops.flops[update], graph.ops.bytes_moved[update]) == (12, 4 * (12 + 12 + 12))


def test_an_embedding_moves_the_rows_that_it_looks_up() -> None:
    """5 tokens of a table of 1000 rows of 4 floats: 5 indices of 8 bytes, 5 rows read, 5 rows written."""
    graph = captured(nn.Embedding(1000, 4), torch.randint(1000, (5,))).graph
    n = op(graph, "embedding")
    assert graph.ops.bytes_moved[n] == 5 * 8 + 2 * 5 * 16
    assert graph.ops.flops[n] == 0


def test_writes_move_the_window_alone() -> None:
    """A row of 4 floats is copied into a table of 100 rows: 16 bytes read, 16 written, and the table made: 1600."""

    class Into(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            table = torch.zeros(100, 4)
            table[2] = super().forward(x)
            table[torch.tensor([4, 5])] = 1.0
            return table

    graph = captured(Into(4, 4), torch.randn(4)).graph
    assert graph.ops.bytes_moved[op(graph, "zeros")] == 1600
    assert graph.ops.bytes_moved[op(graph, "copy_")] == 32
    assert graph.ops.bytes_moved[op(graph, "index_put_")] < 100


def test_tensors_have_the_shapes_that_they_were_made_with() -> None:
    """A batch of 5 goes through 3 -> 4 -> 2; a parameter that was updated in place is shaped as before."""
    graph = captured(Two(), torch.randn(5, 3)).graph
    found = {name: str(graph.tensors.shape_of(t)) for t, name in enumerate(graph.tensors.names)}
    assert "None" not in found.values()
    assert len(set(found.values())) == len(graph.tensors.shapes)
    expected = {"first.weight": [4, 3], "first.bias": [4], "first.addmm": [5, 4], "last.mm": [5, 2], "sum": []}
    expected |= {"first.weight'": [4, 3], "first.sum.backward": [1, 4], "last.mm.backward": [2, 4]}
    assert {name: found[name] for name in expected} == {name: f"float32 {sizes}" for name, sizes in expected.items()}


def test_a_storage_has_the_shape_of_its_first_window() -> None:
    """A table of 6 x 4 whole numbers is made, and one of its rows written: the memory's shape is still the table's."""

    class Into(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            table = torch.zeros(6, 4, dtype=torch.int32)
            table[2] = 1
            return super().forward(x + table.view(24)[:4])

    graph = captured(Into(4, 4), torch.randn(4)).graph
    for name in ("zeros", "zeros'"):
        assert str(graph.tensors.shape_of(tensor(graph, name))) == "int32 [6, 4]"


def test_views_are_no_ops_and_share_the_storage() -> None:
    class Views(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).view(3, 2, 2).transpose(0, 1)[:, 1:].unsqueeze(0)
            return y.exp()

    graph = captured(Views(4, 4), torch.randn(3, 4)).graph
    assert by_phase(graph)["forward"] == ["addmm", "exp", "sum"]
    assert tensor(graph, "addmm") in graph.ops.reads[op(graph, "exp")]


def test_an_in_place_op_makes_a_version_and_waits_for_readers() -> None:
    """y = wx is read by exp, then doubled in place: the new version shares y's memory, and mul_ is after exp."""

    class InPlace(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            z = y.detach().exp()
            return y.mul_(2) + z

    graph = captured(InPlace(2, 2), torch.randn(3, 2)).graph
    y, doubled, write = tensor(graph, "addmm"), tensor(graph, "addmm'"), op(graph, "mul_")
    assert graph.tensors.alias_of[doubled] == y
    assert graph.ops.writes[write].tolist() == [doubled]
    assert graph.ops.reads[write].tolist() == [y]
    assert graph.ops.after[write].tolist() == [op(graph, "exp")]
    assert graph.ops.groups[write] == graph.ops.groups[op(graph, "addmm")] != graph.ops.groups[op(graph, "exp")]
    assert doubled in graph.ops.reads[op(graph, "add")]


def test_a_parameter_its_state_and_its_update_are_one_group() -> None:
    model = Two()
    graph = pw.capture(model, torch.sum, torch.optim.Adam(model.parameters()), torch.randn(5, 3)).graph
    for name, _ in model.named_parameters():
        home = graph.tensors.home[tensor(graph, name)]
        updates = [n for n, other in enumerate(graph.ops.names) if other.startswith(f"{name}.") and "update" in other]
        assert len(updates) >= 5
        assert {int(graph.ops.groups[n]) for n in updates} == {home}
        assert {int(graph.tensors.home[tensor(graph, f"{name}.{key}")]) for key in ("exp_avg", "exp_avg_sq")} == {home}
    homes = [graph.tensors.home[tensor(graph, name)] for name, _ in model.named_parameters()]
    assert len(set(homes)) == 3


def test_what_is_resident() -> None:
    """Parameters, Adam's two averages for each, buffers, the input and constants; the host keeps step counters."""

    class Norm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.tensor([1.0, 2.0, 3.0])

    model = Norm(3)
    step = pw.capture(model, torch.sum, torch.optim.Adam(model.parameters()), torch.randn(4, 3))
    t = step.graph.tensors
    resident = [i for i in range(len(t)) if step.graph.producer[i] < 0]
    kinds = {t.names[i]: TENSOR_KINDS[t.kinds[i]] for i in resident}
    averages = {f"{name}.{key}": "state" for name in ("weight", "bias") for key in ("exp_avg", "exp_avg_sq")}
    buffers = dict.fromkeys(("running_mean", "running_var", "num_batches_tracked"), "buffer")
    constant = next(name for name in kinds if name.startswith("constant"))
    assert kinds == {"weight": "parameter", "bias": "parameter", "batch": "input", constant: "constant"} | averages | buffers
    assert int(t.nbytes[resident].sum()) == 2 * 12 + 4 * 12 + 12 + 12 + 8 + 48 + 12
    on_host = [(r.kind, r.name, r.key) for r in step.program.residents if r.tensor < 0]
    numbers = ["lr", "betas[0]", "betas[1]", "eps", "weight_decay"]
    flags = ["amsgrad", "maximize", "differentiable", "decoupled_weight_decay"]
    assert on_host[:2] == [("state", "weight", "step"), ("state", "bias", "step")]
    assert on_host[2:7] == [("hyper-parameter", name, 0) for name in numbers]
    assert {name for _, name, _ in on_host[7:]} == set(flags)


def test_frozen_and_unused_parameters_stay_without_gradient_or_update() -> None:
    model = Two()
    model.first.requires_grad_(False)
    model.spare = nn.Parameter(torch.zeros(7))
    graph = captured(model, torch.randn(5, 3)).graph
    assert by_phase(graph)["update"] == ["last.weight.add_.update"]
    assert not any(name.startswith("first") for name in by_phase(graph)["backward"])
    for name in ("first.weight", "first.bias", "spare"):
        assert graph.tensors.home[tensor(graph, name)] == -1
    assert graph.first_reader[tensor(graph, "spare")] == -1
    assert graph.tensors.nbytes[tensor(graph, "spare")] == 28


@pytest.mark.parametrize("options", [{"foreach": True}, {}])
def test_updates_are_recorded_parameter_by_parameter(options: dict[str, bool]) -> None:
    model = Two()
    plain = pw.capture(model, torch.sum, torch.optim.Adam(model.parameters(), foreach=False), torch.randn(5, 3)).graph
    optimizer = torch.optim.Adam(model.parameters(), **options)  # type: ignore[arg-type]
    graph = pw.capture(model, torch.sum, optimizer, torch.randn(5, 3)).graph
    assert graph.digest == plain.digest
    assert optimizer.param_groups[0].get("foreach") == options.get("foreach")


def test_micro_batches_are_numbered_and_add_up_in_one_place() -> None:
    """Gradients of both parts are added in place: one tensor with its versions, then one update."""
    graph = captured(Two(), torch.randn(6, 3), micro_batches=2).graph
    forward = [n for n, name in enumerate(graph.ops.names) if name.startswith("first.addmm")]
    assert graph.ops.micro_batches[forward].tolist() == [0, 1]
    update = op(graph, "last.weight.add_.update")
    assert graph.ops.micro_batches[update] == -1
    gradient = graph.ops.reads[update][1]
    assert TENSOR_KINDS[graph.tensors.kinds[gradient]] == "gradient"
    assert graph.tensors.alias_of[gradient] >= 0
    sizes = {name: int(graph.tensors.nbytes[i]) for i, name in enumerate(graph.tensors.names) if name.startswith("batch")}
    assert sizes == {"batch[micro-batch 0]": 36, "batch[micro-batch 1]": 36}
    assert len(graph.outputs) == 2


def test_checkpointed_modules_run_again_in_backward_under_their_own_path() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    graph = captured(Checkpointed(), torch.randn(2, 3)).graph
    phases = {name: PHASES[graph.ops.phases[n]] for n, name in enumerate(graph.ops.names) if "addmm" in name}
    assert phases == {"inner.0.addmm": "forward", "inner.0.addmm.backward": "backward"}


def test_inference_is_the_forward_pass() -> None:
    graph = pw.capture_inference(Two(), torch.randn(5, 3)).graph
    assert by_phase(graph) == {"forward": ["first.addmm", "middle.0.relu", "last.mm"], "backward": [], "update": []}
    assert graph.outputs.tolist() == [tensor(graph, "last.mm")]


def test_devices_that_can_run_an_op() -> None:
    """Products of integers have no GPU kernel."""

    class Integers(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (torch.ones(2, 2, dtype=torch.long) @ torch.ones(2, 2, dtype=torch.long))

    graph = captured(Integers(2, 2), torch.randn(2, 2)).graph
    assert graph.ops.devices[op(graph, "mm")] == ("cpu",)
    assert graph.ops.devices[op(graph, "addmm")] is None


def test_program_and_graph_are_the_same_ops() -> None:
    """Every op is called once, in order; every slot is filled before it is read."""
    step = zoo_step("nmt:layers=2,hidden=8,length=3,batch=4,vocab=11,micro_batches=2")
    assert [call.op for call in step.program.calls if call.op >= 0] == list(range(len(step.graph.ops)))
    filled = {resident.slot for resident in step.program.residents}

    def slots(value: Any) -> list[Slot]:
        if isinstance(value, (list, tuple)):
            return [slot for entry in value for slot in slots(entry)]
        return [value] if type(value) is Slot else []

    for call in step.program.calls:
        assert filled.issuperset(slots(call.args) + slots(list(call.kwargs.values())))
        filled.update(call.results)
    assert filled.issuperset(step.program.outputs)


def zoo_step(text: str) -> CapturedStep:
    return models.load_step(text)


def test_resnet_50_flops_are_the_closed_form() -> None:
    """Forward 2 flops for each multiply-add of every convolution and of the last layer; backward twice that.

    The first convolution's input needs no gradient, so its backward is once. Norms and the rest are below 2%.
    """
    step = zoo.build_step("resnet:depth=50,batch=32")
    forward: list[float] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weights = module.weight
        assert isinstance(weights, Tensor)
        positions = output.numel() // output.shape[1]
        forward.append(2.0 * positions * weights.numel())

    layers = [module for module in step.model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    handles = [layer.register_forward_hook(count) for layer in layers]
    step.model(step.batch[0])
    for handle in handles:
        handle.remove()
    assert len(forward) == 54
    assert sum(forward) / 32 == pytest.approx(2 * 4.089e9, rel=1e-3)  # the 4.09 billion multiply-adds of the literature
    graph = capture_step(step).graph
    assert graph.ops.flops.sum() == pytest.approx(3 * sum(forward) - forward[0], rel=0.02)


# --- the arguments are not changed ---


def test_nothing_that_was_given_changes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters(), 0.1, foreach=True)
    batch = torch.randn(5, 3)
    model(batch).sum().backward()
    optimizer.step()
    before = [
        t.clone() for t in (*model.state_dict().values(), *(p.grad for p in model.parameters()), batch) if t is not None
    ]
    groups, state, generator = repr(optimizer.param_groups), repr(optimizer.state), torch.get_rng_state()
    loss = nn.MSELoss()
    pw.capture(model, lambda out: loss(out, out * 0), optimizer, batch)
    after = [t for t in (*model.state_dict().values(), *(p.grad for p in model.parameters()), batch) if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (repr(optimizer.param_groups), repr(optimizer.state)) == (groups, state)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*model.modules(), loss))
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_a_scheduler_does_not_lead_back_to_the_given_optimizer() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weight = model.weight.clone()
    model(torch.ones(1, 2)).sum().backward()
    pw.capture(model, torch.sum, optimizer, torch.randn(3, 2))
    assert torch.equal(model.weight, weight)
    assert not optimizer.state


def test_a_model_on_the_meta_device_is_captured_alike() -> None:
    class WithPlainTensor(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.scale = torch.ones(2)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    with torch.device("meta"):
        on_meta = captured(WithPlainTensor(), torch.randn(5, 3))
    assert on_meta.graph.digest == captured(WithPlainTensor(), torch.randn(5, 3)).graph.digest


@pytest.mark.parametrize("build", [torch.optim.Adam, torch.optim.ASGD, torch.optim.Adadelta])
def test_capture_inside_a_device_context(build: Callable[..., torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 2)
    expected = pw.capture(model, torch.sum, build(model.parameters()), torch.ones(2, 3)).graph.digest
    with torch.device("meta"):
        assert pw.capture(model, torch.sum, build(model.parameters()), torch.ones(2, 3)).graph.digest == expected


LLAMA_70B = """
import resource, torch, transformers, placewise as pw
config = transformers.LlamaConfig(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
                                  intermediate_size=28672, vocab_size=32000)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.zeros(1, 128, dtype=torch.long)
optimizer = torch.optim.AdamW(model.parameters())
graph = pw.capture(model, None, optimizer, {"input_ids": tokens, "labels": tokens}).graph
parameters = sum(p.numel() for p in model.parameters())
print(parameters, len(graph.ops), int(graph.tensors.nbytes[graph.producer < 0].sum()), int(graph.ops.flops.sum()),
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_a_model_of_70_billion_parameters_is_captured_without_its_memory(tmp_path: Path) -> None:
    """Parameters and two averages are 3 * 276 GB; a step is 6 flops for each parameter and token.

    Attention (128 positions) and AdamW add 2%.
    """
    pytest.importorskip("transformers")
    script = tmp_path / "llama.py"
    script.write_text(LLAMA_70B)
    done = subprocess.run(script_command(script), capture_output=True, text=True, check=True)
    parameters, num_ops, resident, flops, memory = (float(word) for word in done.stdout.split())
    assert parameters == 68_976_648_192
    assert num_ops > 10_000
    assert resident >= 3 * 4 * parameters
    table = 32000 * 8192  # looked up, not multiplied
    assert flops == pytest.approx(6 * 128 * (parameters - table), rel=0.03)
    assert memory < 3 * 2**30


def test_capture_is_a_function_before_and_after_its_package_is_loaded() -> None:
    code = """
import placewise as pw
assert pw.capture.__name__ == "capture"
import placewise.graph_capture.recorder, placewise.zoo, torch
model = torch.nn.Linear(2, 2)
step = pw.capture(model, torch.sum, torch.optim.SGD(model.parameters(), 0.1), torch.ones(1, 2))
assert len(step.graph.ops) == 7, step.graph.ops.names
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parameters_that_lie_side_by_side_in_one_memory_are_placed_apart() -> None:
    """As cuDNN's recurrent weights do."""
    model, memory = Two(), torch.randn(20)
    model.first.weight.data, model.last.weight.data = memory[:12].view(4, 3), memory[12:].view(2, 4)
    graph = captured(model, torch.randn(5, 3)).graph
    assert graph.tensors.nbytes[tensor(graph, "first.weight")] == 48
    assert graph.tensors.home[tensor(graph, "first.weight")] != graph.tensors.home[tensor(graph, "last.weight")]


# --- how a batch is read ---


class Pair(NamedTuple):
    inputs: Tensor
    target: Tensor


class Named(nn.Linear):
    def forward(self, x: Tensor, scale: float = 1.0, bias: Any = None) -> Tensor:
        return super().forward(x) * scale + (0 if bias is None else bias["b"])


@pytest.mark.parametrize(
    ("batch", "loss_fn", "inputs"),
    [
        (torch.ones(4, 3), torch.sum, {"batch"}),
        ((torch.ones(4, 3), torch.ones(4, 2)), nn.MSELoss(), {"batch[0]", "batch[1]"}),
        ([torch.ones(4, 3), torch.ones(4, 2)], nn.MSELoss(), {"batch[0]", "batch[1]"}),
        (Pair(torch.ones(4, 3), torch.ones(4, 2)), nn.MSELoss(), {"batch[0]", "batch[1]"}),
        (((torch.ones(4, 3), 2.0), torch.ones(4, 2)), nn.MSELoss(), {"batch[0][0]", "batch[1]"}),
        (
            ({"x": torch.ones(4, 3), "bias": {"b": torch.ones(4, 1)}}, torch.ones(4, 2)),
            nn.MSELoss(),
            {"batch[0]['x']", "batch[0]['bias']['b']", "batch[1]"},
        ),
        ({"x": torch.ones(4, 3), "scale": 3.0}, torch.sum, {"batch['x']"}),
    ],
)
def test_the_form_of_a_batch_decides_how_the_model_is_called(batch: Any, loss_fn: Loss, inputs: set[str]) -> None:
    step = captured(Named(3, 2), batch, loss_fn)
    assert {r.name for r in step.program.residents if r.kind == "input"} == inputs
    captured(Named(3, 2), batch, loss_fn, micro_batches=2)


# --- what can't be captured ---


class Branch(nn.Module):
    """Applies a function of the data inside a named module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * self.function(x).sum()  # type: ignore[no-any-return]


READS_DATA: dict[str, Callable[[Tensor], Any]] = {
    "condition": lambda x: x if x.sum() > 0 else -x,
    "item": lambda x: x * x.sum().item(),
    "float": lambda x: x * float(x.sum()),
    "int": lambda x: x[: int(x[0, 0])],
    "index": lambda x: x[range(3)[x.argmax()]],
    "tolist": lambda x: x * x.tolist()[0][0],
    "numpy": lambda x: x.detach().numpy(),
    "tensor-of-tensors": lambda x: torch.tensor([x[0, 0], x[0, 1]]),
    "nonzero": lambda x: x.nonzero(),
    "masked-select": lambda x: x.masked_select(x > 0),
    "mask-as-index": lambda x: x[x > 0],
    "unique": lambda x: torch.unique(x),
    "one-hot": lambda x: F.one_hot(x.long()),
    "shape": lambda x: x @ torch.ones(7, 7),
}


@pytest.mark.parametrize("name", READS_DATA)
def test_what_depends_on_data_is_refused_with_its_place(name: str) -> None:
    function = READS_DATA[name]
    line = inspect.getsourcelines(function)[1]
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.ReLU(), Branch(function)))
    with pytest.raises(CaptureError, match=rf"in module '1\.1' \({Path(__file__).name}:{line}\)$") as caught:
        captured(model, torch.randn(3, 3))
    assert "\n" not in str(caught.value)


def refuses(message: str, model: nn.Module, batch: Any, loss_fn: Loss = torch.sum, **options: Any) -> None:
    with pytest.raises(CaptureError, match=message):
        captured(model, batch, loss_fn, **options)


def test_refused_batches_and_losses() -> None:
    model = nn.Linear(3, 2)
    refuses("batch has 5 rows, which can't be split into 2 micro-batches", model, torch.ones(5, 3), micro_batches=2)
    refuses(r"batch\[1\] has 3 rows", model, (torch.ones(4, 3), torch.ones(3, 2)), nn.MSELoss(), micro_batches=4)
    refuses("at least 1, got 0", model, torch.ones(5, 3), micro_batches=0)
    refuses(r"got a tensor of shape \[5, 2\]", model, torch.ones(5, 3), lambda out: out)
    refuses("got a float", model, torch.ones(5, 3), lambda out: 1.0)  # type: ignore[return-value, arg-type]
    refuses(r"got a tensor of shape \[\]", model, torch.ones(5, 3), lambda out: out.detach().sum())
    refuses("batch is a object: a batch consists of", model, object())
    refuses("positional argument", model, (torch.ones(5, 3), torch.ones(5, 3), torch.ones(5, 3)))


def test_refused_models() -> None:
    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.count = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x)

    refuses("register it as a buffer", Counts(), torch.ones(5, 3))
    refuses("sparse gradients", nn.Embedding(5, 3, sparse=True), torch.zeros(5, dtype=torch.long))

    overlapping = nn.Linear(3, 3)
    overlapping.register_buffer("row", overlapping.weight.data[1])
    refuses("row shares part of its memory", overlapping, torch.ones(5, 3))


def test_a_loss_that_reaches_into_the_given_model_is_refused() -> None:
    model = nn.Linear(3, 2)
    message = "uses 'weight' of the original model"
    refuses(message, model, torch.ones(5, 3), lambda out: out.sum() + model.weight.square().sum())
    refuses(message, model, torch.ones(5, 3), lambda out: out.sum() + model.weight.detach()[0].sum())
    assert model.weight.grad is None
    with torch.device("meta"):
        on_meta = nn.Linear(3, 2)
    refuses(message, on_meta, torch.ones(5, 3), lambda out: out.sum() + on_meta.weight.square().sum())


def test_refused_optimizers() -> None:
    model, batch = nn.Linear(3, 2), torch.ones(5, 3)
    other = torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1)
    with pytest.raises(CaptureError, match="has a parameter that is neither in the model nor in a loss that is a module"):
        pw.capture(model, torch.sum, other, batch)
    model.spare = nn.Parameter(torch.ones(2))
    with pytest.raises(CaptureError, match="no parameter of the optimizer gets a gradient"):
        pw.capture(model, torch.sum, torch.optim.SGD([model.spare], 0.1), batch)
    with pytest.raises(CaptureError, match="closure"):
        pw.capture(model, torch.sum, torch.optim.LBFGS(model.parameters()), batch)


def test_running_statistics_are_written_by_the_forward_pass_alone() -> None:
    """The backward op in training does not look at them."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    graph = pw.capture(model, lambda out: out.sum(), optimizer, torch.randn(8, 4), micro_batches=2).graph
    norms = [n for n, kind in enumerate(graph.ops.kinds) if kind == "aten._batch_norm_with_update"]
    backward = [n for n, kind in enumerate(graph.ops.kinds) if kind == "aten.batch_norm_backward"]
    written = [[graph.tensors.names[t] for t in graph.ops.writes[n] if graph.tensors.alias_of[t] >= 0] for n in norms]
    assert written == [["1.running_mean'", "1.running_var'"]] * 2
    assert not [t for n in backward for t in graph.ops.reads[n] if "running" in graph.tensors.names[t]]
    assert graph.ops.groups[norms[0]] == graph.ops.groups[norms[1]]
    evaluated = pw.capture_inference(model.eval(), torch.randn(8, 4)).graph
    assert not [t for t in evaluated.ops.writes.values if evaluated.tensors.alias_of[t] >= 0]
