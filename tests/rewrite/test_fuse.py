"""Fused steps: run piece by piece, call after call, they give eager's bits; compiled, they give the same up to rounding."""

import copy
import json
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compiled_steps import RandomNet, capture_with_mse, compiled, cpu_cluster, one_thread_each
from eager_steps import Mixture, bitwise, eager_step, snapshot, token_batches
from simulated import random_placements
from torch import Tensor, nn

import placewise as pw
from placewise.cli import main
from placewise.core.errors import PlanError
from placewise.core.graph import PHASES
from placewise.core.plan import Plan, digest_of_graph
from placewise.core.problem import Problem
from placewise.formats.graph_file import read_graph
from placewise.graph_capture.capture import CapturedStep, capture_step
from placewise.graph_capture.training_step import TrainingStep
from placewise.measure.ops import RunnableOp, op_calls
from placewise.rewrite import channels_last
from placewise.rewrite.augmented_graph import OPTIONS
from placewise.rewrite.channels_last import ChannelsLast
from placewise.rewrite.fuse import block_of
from placewise.rewrite.memory_options import rewrite_graph
from placewise.rewrite.piece import LaidOut, Like, Piece
from placewise.rewrite.rewritten_steps import FUSE, rewrite
from placewise.run import inductor, piece_kernels
from placewise.run.piece_kernels import Wanted, compile_all
from placewise.run.step.compiling import compile_placement

pytestmark = [pytest.mark.usefixtures("same_kernels"), pytest.mark.filterwarnings("ignore:TF32 acceleration")]


@pytest.fixture
def call_after_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces run their calls one after the other, and nothing is compiled."""

    def not_compiled(wanted: Wanted) -> Any:
        return partial(wanted.piece.run, torch.device(wanted.device))

    monkeypatch.setattr(piece_kernels, "_kernels", {})
    monkeypatch.setattr(piece_kernels, "_mark", lambda wanted: None)
    monkeypatch.setattr(piece_kernels, "FEW", 10**6)
    monkeypatch.setattr(piece_kernels, "_compiled", not_compiled)


TINY_MODEL = "rnnlm:layers=1,hidden=8,steps=2,batch=2,vocab=10"


class Block(nn.Module):
    """A product, and a chain of small ops after it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) * 2 + x


def step_of_block(fuse: bool = True) -> CapturedStep:
    model = Block()
    return pw.capture_inference(model, (torch.randn(6, 4),), fuse=fuse)


def pieces_of(step: CapturedStep) -> list[Piece]:
    return [call.function for call in step.program.calls if isinstance(call.function, Piece)]


def test_a_chain_becomes_one_op() -> None:
    """tanh(x @ w) * 2 + x: mm, then tanh, mul and add in one op, which reads mm and x and makes 6 * 4 numbers.

    Each of the three tensors has 96 bytes; the two inside are no tensors of the graph. One flop for each number in mul and
    add, six in tanh: 8 * 24.
    """
    graph = step_of_block().graph
    assert graph.ops.kinds == ("aten.mm", "fused.tanh_mul_add")
    assert graph.ops.names == ("mm", "fused_tanh_mul_add")
    assert graph.ops.bytes_moved[1] == 3 * 96
    assert graph.ops.flops[1] == 8 * 24
    assert len(graph.tensors) == 4
    assert graph.num_groups == 2
    assert graph.rewrites == ("fuse 2",)


def test_a_product_in_the_middle_stays_between_the_pieces() -> None:
    """a = x + 1 is read by b = a @ a and by c = a * 2 + b: add and the rest can't be one op, mm is between them."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = (x + 1).tanh()
            return a * 2 + a @ a

    graph = pw.capture_inference(Model(), (torch.randn(4, 4),), fuse=True).graph
    assert graph.ops.kinds == ("fused.add_tanh_mul", "aten.mm", "aten.add")


@pytest.mark.parametrize(
    ("path", "block"),
    [("layers.3.mlp.act", "layers.3"), ("layers.3", "layers.3"), ("features.1", ""), ("norm", ""), ("a.0.b.1.c", "a.0")],
)
def test_a_block_is_a_numbered_module_with_modules_inside(path: str, block: str) -> None:
    assert block_of(path, frozenset({"layers", "layers.3", "layers.3.mlp", "features", "a", "a.0", "a.0.b"})) == block


def assert_fused_like_eager(
    build: Any, loss_fn: nn.Module, batches: list[Any], micro_batches: int, seed: int, *, options: bool = False
) -> None:
    """Asserts that a fused step in a random placement leaves eager's bits behind."""
    (model, optimizer), (fused_model, fused_optimizer) = build(), build()
    fused_model.load_state_dict(copy.deepcopy(model.state_dict()))
    step = TrainingStep(fused_model, loss_fn, fused_optimizer, batches[0], micro_batches, fuse=True)
    captured = capture_step(step)
    assert captured.captured is not None
    assert len(captured.graph.ops) < len(captured.captured.graph.ops)
    train_step = compiled(captured, seed, in_program_order=bool(seed % 2), options=options)
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        parts = eager_step(TrainingStep(model, loss_fn, optimizer, batch, micro_batches))
        torch.manual_seed(number)
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        assert bitwise(train_step(batch), expected)
        found, wanted = snapshot(fused_model, fused_optimizer), snapshot(model, optimizer)
        assert [key for key in wanted if not bitwise(found[key], wanted[key])] == []
    train_step.close()


@pytest.mark.usefixtures("call_after_call")
@pytest.mark.parametrize(("seed", "options"), [*((seed, False) for seed in range(8)), *((seed, True) for seed in range(4))])
def test_random_networks_have_eagers_bits(seed: int, options: bool) -> None:
    """Writes in place, views, buffers, shared weights; with and without micro-batches, placed and ordered at random.

    With options, fused ops are repeated and wait like others: half of all options.
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = RandomNet(seed, 14)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    rows = 6 * (1 + seed % 2)
    batches = [(torch.randn(rows, 4), torch.randn(rows, 4)) for _ in range(2)]
    assert_fused_like_eager(build, nn.MSELoss(), batches, 1 + seed % 2, seed, options=options)


@pytest.mark.usefixtures("call_after_call")
@pytest.mark.parametrize("options", [False, True])
def test_a_model_of_everything_has_eagers_bits(options: bool) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = Mixture()
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)

    assert_fused_like_eager(build, nn.CrossEntropyLoss(), token_batches(count=2), 2, 3, options=options)


class Counting(torch.optim.Optimizer):
    """Multiplies the gradient by a counter, increases it, and divides by it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["step"] = torch.tensor(1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            counter = self.state[parameter]["step"]
            scaled = parameter.grad * counter
            counter += 1
            parameter.add_(scaled / counter, alpha=-0.1)


@pytest.mark.usefixtures("call_after_call")
def test_ops_between_which_the_host_changes_a_number_are_not_one() -> None:
    """Multiplying and dividing in one op would read the counter once, and the gradient would stay as it is."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        return model, Counting(model.parameters())

    assert_fused_like_eager(build, nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 4))] * 3, 1, 0)


# --- what is made again, and layouts ---


def capture_block(block: nn.Module) -> CapturedStep:
    """Captures a fused training step of a block on six rows of four numbers."""
    return pw.capture(block, lambda out: out.sum(), torch.optim.SGD(block.parameters(), 0.1), torch.randn(6, 4), fuse=True)


class Activated(nn.Module):
    """Two products, and an activation of the first one's result between them."""

    def __init__(self, is_multiplied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.is_multiplied = is_multiplied

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        active = (h * 2).tanh()
        return self.second(active * h if self.is_multiplied else active)  # type: ignore[no-any-return]


def test_a_cheap_value_is_made_again_in_the_backward_pass() -> None:
    """With t = tanh(2h) and t * h, the second product keeps t * h, the first one's backward pass reads h and t: t is made
    again from h. The forward piece leaves t * h alone, 96 bytes, and reads h; the backward one reads h and the gradient.
    """
    step = capture_block(Activated(is_multiplied=True))
    forward, backward = (piece for piece in pieces_of(step) if "tanh" in piece.name)
    assert (forward.name, len(forward.inputs), len(forward.made)) == ("mul_tanh", 1, 1)
    assert (backward.name, len(backward.inputs), len(backward.made)) == ("mul_tanh_backward_add", 2, 1)
    names = [str(call.function) for call in backward.calls]
    assert names.count("aten.tanh.default") == 1
    op = step.graph.ops.kinds.index("fused.mul_tanh_backward_add")
    assert step.graph.ops.bytes_moved[op] == 3 * 96
    assert step.captured is not None
    assert step.graph.ops.flops.sum() == step.captured.graph.ops.flops.sum() + 24 * (1 + 6)  # mul and tanh


def test_what_is_kept_anyway_is_not_made_again() -> None:
    """t = tanh(2h) is what the second product's backward pass reads, so it is there, and h is not kept."""
    step = capture_block(Activated(is_multiplied=False))
    _, backward = (piece for piece in pieces_of(step) if "tanh" in piece.name)
    assert "aten.tanh.default" not in [str(call.function) for call in backward.calls]


def test_what_the_step_returns_is_not_made_again() -> None:
    """The backward pass of tanh reads its result, which is the model's output: it is there."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for outputs in (False, True):
        step = pw.capture(model, nn.MSELoss(), optimizer, (torch.randn(6, 4),) * 2, fuse=True, outputs=outputs)
        (backward,) = (piece for piece in pieces_of(step) if "backward" in piece.name)
        assert ("aten.tanh.default" in [str(call.function) for call in backward.calls]) != outputs


class Overwritten(nn.Module):
    """An activation of a product, which is then overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        active = (h * 2).tanh()
        h.add_(1)
        made: Tensor = self.second(h) + active * 3
        return made


class Summed(nn.Module):
    """A sum of squares of a product, by columns, which is multiplied with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.second((h * h).sum(0).tanh() * h)  # type: ignore[no-any-return]


def test_sums_are_not_made_again() -> None:
    """The backward pass keeps h, of which the sum could be made; of the two sums in it one is the gradient's."""
    backward = [piece for piece in pieces_of(capture_block(Summed())) if "backward" in piece.name]
    names = [str(call.function) for piece in backward for call in piece.calls]
    assert names.count("aten.sum.dim_IntList") == 1


@pytest.mark.usefixtures("call_after_call")
def test_what_is_overwritten_is_not_read_again() -> None:
    """tanh(2h) can't be made again from h, which is h + 1 by then."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Overwritten()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert_fused_like_eager(build, nn.MSELoss(), [(torch.randn(6, 4), torch.randn(6, 4))] * 2, 1, 0)


class Doubled(torch.autograd.Function):
    """Twice a tensor, with the gradient of something else, which is computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward((h * 3).tanh())
        return h * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return gradient * slope


class Sloped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Doubled.apply(self.first(x)))  # type: ignore[no-any-return,no-untyped-call]


def test_a_piece_of_which_nothing_else_is_read_is_not_repeated() -> None:
    """The forward pass computes the slope for the backward pass alone: made again there, it would have been for nothing."""
    assert [(piece.name, len(piece.made)) for piece in pieces_of(capture_block(Sloped()))] == [("mul_tanh", 1)]


class Images(nn.Module):
    """Two convolutions with batch norm, and a product of what they make, made flat."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, channels, 3, bias=False), nn.BatchNorm2d(channels)
        self.second, self.last = nn.Conv2d(channels, channels, 3, bias=False), nn.Linear(channels * 4, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(images)))
        return self.last(self.second(x).flatten(1))  # type: ignore[no-any-return]


def step_of_images(channels: int, fuse: bool = True, fused_update: bool = False) -> CapturedStep:
    torch.manual_seed(0)
    model = Images(channels).double()
    batch = (torch.randn(5, 3, 6, 6, dtype=torch.double), torch.randn(5, 2, dtype=torch.double))
    return capture_with_mse(model, torch.optim.AdamW(model.parameters(), 0.1, fused=fused_update), batch, fuse=fuse)


def test_convolutions_compute_with_their_channels_last() -> None:
    """The first convolution's result and relu's are laid out anew: [5, 72, 4, 4] with strides 1152, 1, 288, 72.

    The second one is viewed as [5, 288], which it could not be. Gradients are laid out anew, those for weights only if the
    update is compiled. Fewer channels are not worth it.
    """
    last = (1152, 1, 288, 72)

    def strides_of(step: CapturedStep) -> list[list[tuple[int, ...]]]:
        convolutions = [call for call in step.program.calls if isinstance(call.function, ChannelsLast)]
        return [[layout.strides for slot in c.results if (layout := step.program.layouts[slot])] for c in convolutions]

    step = step_of_images(72)
    assert strides_of(step) == [[last], [(288, 4, 2, 1)], [last, (648, 1, 216, 72)], [(27, 1, 9, 3)]]
    as_weights = step_of_images(72, fused_update=True)
    assert strides_of(as_weights) == [[last], [(288, 4, 2, 1)], [last, (648, 9, 3, 1)], [(27, 9, 3, 1)]]
    normalized = next(piece for piece in pieces_of(step) if piece.name == "batch_norm_with_update_relu")
    assert {like.strides for like in normalized.made if len(like.sizes) == 4} == {last}
    assert step_of_images(64).graph.ops.kinds == step.graph.ops.kinds
    assert not any(isinstance(call.function, ChannelsLast) for call in step_of_images(64).program.calls)
    assert [op.signature.partition("(")[0] for op in op_calls(step.program, len(step.graph.ops))].count(
        "aten.convolution.default"
    ) == 2


@pytest.mark.usefixtures("call_after_call")
@pytest.mark.parametrize("fused_update", [False, True])
def test_convolutions_with_their_channels_last_compute_the_same(fused_update: bool) -> None:
    step = step_of_images(72, fused_update=fused_update)
    eager = step_of_images(72, fuse=False, fused_update=fused_update)
    train_step = compiled(step, seed=1)
    for _ in range(3):
        torch.testing.assert_close(train_step(step.step.batch), eager_step(eager.step)[0])
    found, wanted = step.step.model.state_dict(), eager.step.model.state_dict()
    torch.testing.assert_close(found, wanted)
    train_step.close()


def test_what_the_step_returns_keeps_its_channels() -> None:
    """The first of two convolutions is laid out, the second is the output, whose layout is eager's."""
    model = nn.Sequential(nn.Conv2d(3, 72, 3), nn.Conv2d(72, 72, 3))
    step = pw.capture_inference(model, (torch.randn(5, 3, 6, 6),), fuse=True)
    convolutions = [call for call in step.program.calls if isinstance(call.function, ChannelsLast)]
    made = [step.program.layouts[call.results[0]] for call in convolutions]
    assert [layout and tuple(layout.strides) for layout in made] == [(1152, 1, 288, 72), (288, 4, 2, 1)]


def test_few_convolutions_in_a_large_step_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "MOST_CALLS", 5)
    assert not any(isinstance(call.function, ChannelsLast) for call in step_of_images(72).program.calls)


@pytest.mark.usefixtures("call_after_call")
def test_what_is_viewed_inside_a_piece_has_the_strides_of_its_view() -> None:
    """Instance norm views [4, 72, 8, 8] as [1, 288, 8, 8]; silu's gradient has its channels last, as the one it reads."""

    def train(fuse: bool) -> tuple[CapturedStep, Tensor]:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 72, 3), nn.InstanceNorm2d(72, affine=True), nn.SiLU(), nn.Conv2d(72, 2, 3)]
        model = nn.Sequential(*layers).double()
        batch = (torch.randn(4, 3, 8, 8, dtype=torch.double), torch.randn(4, 2, 4, 4, dtype=torch.double))
        step = capture_with_mse(model, torch.optim.SGD(model.parameters(), 0.1), batch, fuse=fuse)
        if not fuse:
            return step, eager_step(step.step)[0]
        train_step = compiled(step)
        loss = train_step(batch)
        train_step.close()
        return step, loss

    (step, loss), (eager, wanted) = train(fuse=True), train(fuse=False)
    assert any(isinstance(call.function, LaidOut) for piece in pieces_of(step) for call in piece.calls)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(step.step.model.state_dict(), eager.step.model.state_dict())


# --- compiled ---


class Net(nn.Module):
    """Two equal blocks, each of them with a piece forward and one backward, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Linear(4, 4, bias=False), nn.GELU(), nn.LayerNorm(4, elementwise_affine=False)) for _ in range(2)]
        self.blocks = nn.Sequential(*[nn.Sequential(*block) for block in layers])
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(x)).tanh()  # type: ignore[no-any-return]


def trained_net(fuse: bool) -> tuple[nn.Module, CapturedStep]:
    torch.manual_seed(0)
    model = Net()
    batch = (torch.randn(6, 4), torch.randn(6, 4))
    return model, capture_with_mse(model, torch.optim.AdamW(model.parameters(), 0.1), batch, fuse=fuse)


@pytest.fixture(scope="module")
def fused_net() -> tuple[nn.Module, CapturedStep]:
    """A fused step, and its kernels, which Inductor compiles once for the tests below."""
    torch.set_num_threads(1)
    model, step = trained_net(fuse=True)
    compile_all(Wanted(piece, "cpu", 1) for piece in pieces_of(step))
    return model, step


def test_compiled_pieces_compute_what_their_calls_do(fused_net: tuple[nn.Module, CapturedStep]) -> None:
    """Three steps on two devices in a random placement, and eager code, each with a smaller learning rate: equal up to
    rounding.

    The update of a parameter is one kernel, which reads the learning rate and the step counter as numbers.
    """
    model, step = fused_net
    assert [why for piece in pieces_of(step) if (why := piece_kernels.why_not_compiled(piece, "cpu", 1))] == []
    eager_model, eager = trained_net(fuse=False)
    train_step = compiled(step, seed=1)
    for _ in range(3):
        torch.testing.assert_close(train_step(step.step.batch), eager_step(eager.step)[0])
        for optimizer in (step.step.optimizer, eager.step.optimizer):
            assert optimizer is not None
            optimizer.param_groups[0]["lr"] *= 0.5
    torch.testing.assert_close(model.state_dict(), eager_model.state_dict())
    train_step.close()


def test_the_update_of_a_parameter_is_one_op(fused_net: tuple[nn.Module, CapturedStep]) -> None:
    """AdamW has eight ops for each of the four parameters."""
    step = fused_net[1]
    assert step.captured is not None
    update = PHASES.index("update")
    assert int((step.captured.graph.ops.phases == update).sum()) == 4 * 8
    assert int((step.graph.ops.phases == update).sum()) == 4


def test_equal_pieces_are_one_kernel(fused_net: tuple[nn.Module, CapturedStep]) -> None:
    pieces = pieces_of(fused_net[1])
    assert len(set(pieces)) < len(pieces)


def test_a_kernel_lets_other_threads_run(fused_net: tuple[nn.Module, CapturedStep]) -> None:
    """Two CPU devices run at a time, because Python's lock is released: what is replaced in Inductor is still there."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    assert CppPythonBindingsCodeCache.call_entry_function == "kernel({}); Py_RETURN_NONE;"


def test_a_piece_is_timed_as_any_op(fused_net: tuple[nn.Module, CapturedStep]) -> None:
    _, step = fused_net
    calls = op_calls(step.program, len(step.graph.ops))
    fused = [call for call, kind in zip(calls, step.graph.ops.kinds, strict=True) if kind.startswith("fused.")]
    assert len({call.signature for call in fused}) == len(set(pieces_of(step)))
    torch.set_num_threads(1)
    for call, writes in ((fused[0], False), (fused[-1], True)):  # the last one is an update, which reads numbers
        op = RunnableOp(call, "cpu")
        assert op.changes_inputs == writes
        op.run()
        op.restore()


def test_a_plan_says_that_it_is_fused_and_fuses_the_captured_step(
    fused_net: tuple[nn.Module, CapturedStep], tmp_path: Any
) -> None:
    _, step = fused_net
    cluster = cpu_cluster(1)
    plan = pw.place(step, cluster, strategy="cpu-only")
    assert plan.rewrites == ("fuse 2",)
    assert "fused: results differ from eager's by rounding (fuse 2)" in str(plan)
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.rewrites == ("fuse 2",)
    _, plain = trained_net(fuse=False)
    problem = Problem.of(plain.graph, cluster)
    assert len(plan.placement) != problem.num_groups
    train_step = plan.compile(plain, cluster)
    assert "fuse 2" in train_step.placed.resolved.graph.rewrites
    train_step.close()
    other = pw.place(plain, cluster, strategy="cpu-only")
    train_step = other.compile(step, cluster)
    assert train_step.placed.resolved.graph.rewrites == ()
    train_step.close()


@pytest.mark.usefixtures("call_after_call")
def test_a_plan_of_a_fused_step_with_options_is_compiled_from_the_captured_one() -> None:
    """It names both rewrites, in their order; half of the options are used, and the losses are eager's bits.

    A repeated batch norm leaves the running statistics alone.
    """
    model, plain = trained_net(fuse=False)
    graph, cluster = rewrite_graph(trained_net(fuse=True)[1].graph, [OPTIONS]), cpu_cluster(2)
    assert graph.rewrites == ("fuse 2", OPTIONS)
    problem = Problem.of(graph, cluster)
    optional = [kind for kind, is_so in zip(graph.ops.kinds, graph.ops.optional, strict=True) if is_so]
    assert {"fused.gelu_native_layer_norm", "fused.batch_norm_with_update_tanh_mse_loss"} <= set(optional)
    placement = np.where(problem.optional, np.arange(problem.num_groups) % 3 - 1, 0)
    plan = Plan(problem.expand(placement), graph_digest=digest_of_graph(graph), rewrites=graph.rewrites)
    train_step = plan.compile(plain, cluster)
    assert train_step.placed.resolved.graph.rewrites == graph.rewrites
    batch = plain.step.batch
    eager = copy.deepcopy(model)
    expected = plain.step.loss_fn(eager(batch[0]), batch[1])  # type: ignore[misc]
    assert bitwise(train_step(batch), expected)
    for found, wanted in zip(model.buffers(), eager.buffers(), strict=True):
        assert bitwise(found, wanted)
    train_step.close()


def test_a_plan_with_another_rewrite_is_refused(fused_net: tuple[nn.Module, CapturedStep]) -> None:
    plan = Plan(("cpu:0",), graph_digest="0" * 64, rewrites=("fuse 9",))
    with pytest.raises(
        PlanError,
        match=r"made by 'fuse 9', which this version does not have \(it has fuse 2, options 3, recompute 3, park 2\)",
    ):
        plan.compile(fused_net[1], cpu_cluster(1))


def test_without_a_compiler_the_calls_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says why; the results are eager's bits."""

    def fail(wanted: Wanted) -> Any:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(piece_kernels, "_kernels", {})
    monkeypatch.setattr(piece_kernels, "FEW", 10**6)
    monkeypatch.setattr(piece_kernels, "_compiled", fail)
    _, step = trained_net(fuse=True)
    lines: list[str] = []
    compile_all([Wanted(piece, "cpu", 1) for piece in pieces_of(step)], lines.append)
    assert "can't be compiled and will run unfused, op by op: RuntimeError: No working C++ compiler found" in lines[-1]
    _, eager = trained_net(fuse=False)
    problem = Problem.of(step.graph, cpu_cluster(2))
    placement = random_placements(problem, np.random.default_rng(0), 1)[0]
    train_step = compile_placement(problem, placement, None, step, one_thread_each(cpu_cluster(2)))
    assert bitwise(train_step(step.step.batch), eager_step(eager.step)[0])
    train_step.close()


def test_a_damaged_cache_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can't be compiled with the cache that there is, is compiled with another one, and the first stays set."""
    before, folders = os.environ.get("TORCHINDUCTOR_CACHE_DIR"), list[str | None]()

    def compile_once_damaged(piece: Piece, device: torch.device, threads: int) -> Any:
        folders.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))
        if len(folders) == 1:
            raise ImportError("file too short")
        return piece.run

    monkeypatch.setattr(inductor, "compile_piece", compile_once_damaged)
    _, step = trained_net(fuse=True)
    assert piece_kernels._compiled(Wanted(pieces_of(step)[0], "cpu", 1)) == pieces_of(step)[0].run
    assert folders[0] == before == os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    assert folders[1] not in (None, before)


# --- the command line ---


def test_the_command_line_fuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", TINY_MODEL, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main(["info", TINY_MODEL, "--fuse", "--json"]) == 0
    fused = json.loads(capsys.readouterr().out)
    assert fused["num_ops"] < plain["num_ops"]
    assert fused["name"] == f"fused:{TINY_MODEL}"


def test_a_file_can_not_be_fused(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    assert main(["capture", TINY_MODEL, "--fuse", "-o", str(path)]) == 0
    assert read_graph(path).rewrites == ("fuse 2",)
    assert main(["info", str(path), "--fuse"]) == 2
    refused = capsys.readouterr().err
    assert "a file can't be fused: fuse the model when you capture it (placewise capture --fuse)" in refused


def test_softmax_and_losses_are_fused() -> None:
    """log_softmax, the loss's lookup and their backward ops are two pieces."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 5))

        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(x @ self.weight, torch.zeros(6, dtype=torch.long))

    model = Model()
    kinds = pw.capture(model, None, torch.optim.SGD(model.parameters()), torch.randn(6, 4), fuse=True).graph.ops.kinds
    assert [kind for kind in kinds if kind.startswith("fused.")] == [
        "fused.zeros_log_softmax_nll_loss_forward",
        "fused.ones_like_nll_loss_backward_log_softmax_backward_data",
    ]


@pytest.mark.parametrize("sizes", [(5, 7), (7,), (2, 7, 3, 4)])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_the_gradient_of_a_loss_is_pytorchs(sizes: tuple[int, ...], reduction: int) -> None:
    """With and without weights of the seven classes, and with an entry that is ignored."""
    aten, images = torch.ops.aten, "2d" if len(sizes) == 4 else ""
    scores = torch.randn(sizes).log_softmax(0 if len(sizes) == 1 else 1)
    target = torch.randint(7, (sizes[0], *sizes[2:]) if len(sizes) > 1 else ())
    if len(sizes) > 1:
        target[1] = -100
    for weight in (None, torch.rand(7)):
        loss, total = getattr(aten, f"nll_loss{images}_forward")(scores, target, weight, reduction, -100)
        given = (torch.randn_like(loss), scores, target, weight, reduction, -100, total)
        expected = getattr(aten, f"nll_loss{images}_backward")(*given)
        torch.testing.assert_close(inductor._nll_loss_backward(*given), expected)


def test_results_have_the_sizes_that_the_piece_says() -> None:
    """PyTorch 2.11 gives a large sum that keeps its dimensions without them."""
    piece: Any = SimpleNamespace(made=(Like(torch.float32, (1, 1, 3), (3, 3, 1)), Like(torch.float32, (2, 3), (3, 1))))
    fitted = inductor._with_sizes(lambda: [torch.zeros(3), torch.ones(2, 3)], piece)
    assert [tuple(tensor.size()) for tensor in fitted()] == [(1, 1, 3), (2, 3)]


class Checked(nn.Module):
    """A chain of small ops of which the model checks a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight) * 2 + x
        too_large = (y.sum() - 100).sign() * 2
        if too_large > 1:
            raise ValueError("too large")
        return y


@pytest.mark.usefixtures("call_after_call")
@pytest.mark.parametrize("model_class", [Block, Checked])
def test_a_step_that_a_scaler_skips_is_skipped_whole_when_it_is_fused(model_class: Any) -> None:
    """The third batch makes gradients that are not finite, and no parameter or counter changes."""
    torch.manual_seed(0)
    model = model_class()
    eager_model = copy.deepcopy(model)
    optimizer, eager_optimizer = (torch.optim.AdamW(m.parameters(), 0.01) for m in (model, eager_model))
    scaler, eager_scaler = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2))
    batches = [(torch.randn(6, 4), torch.randn(6, 4)) for _ in range(5)]
    batches[2][1][0] = torch.inf
    training = TrainingStep(model, F.mse_loss, optimizer, batches[0], grad_scaler=scaler)
    step = rewrite(capture_step(training), [FUSE])
    assert pieces_of(step)
    train_step = compiled(step, seed=1)
    for number, batch in enumerate(batches):
        before = copy.deepcopy(snapshot(eager_model, eager_optimizer))
        (loss,) = eager_step(TrainingStep(eager_model, F.mse_loss, eager_optimizer, batch, grad_scaler=eager_scaler))
        assert bitwise(train_step(batch), loss)
        wanted, found = snapshot(eager_model, eager_optimizer), snapshot(model, optimizer)
        assert [key for key in wanted if not bitwise(found[key], wanted[key])] == [], number
        assert scaler.state_dict() == eager_scaler.state_dict()
        assert bitwise(before["model.weight"], wanted["model.weight"]) == (number == 2)
    if model_class is Checked:
        with pytest.raises(pw.ExecutionError, match=r"the model's own check fails: if too_large > 1"):
            train_step((torch.full((6, 4), 99.0), batches[0][1]))
    train_step.close()
