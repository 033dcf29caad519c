"""Attention as one op forward and one backward: eager's bits, its kernel's memory, and plain products where it must be."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compiled_steps import assert_runs_like_eager, capture_with_mse, compiled
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from placewise.core.errors import CaptureError
from placewise.graph_capture.capture import CapturedStep, capture_step
from placewise.graph_capture.resolved_program import ResolvedProgram, is_random
from placewise.graph_capture.training_step import TrainingStep
from placewise.graph_capture.whole_passes import ATTENTION, ForwardPass
from placewise.measure.ops import RunnableOp, op_calls

NAME = "aten.scaled_dot_product_attention"
BATCH, HEADS, LENGTH, WIDTH = 2, 4, 6, 8


pytestmark = pytest.mark.usefixtures("one_thread")


class Attending(nn.Module):
    """A layer of attention whose options are given; keys and values may have fewer heads."""

    def __init__(
        self, groups: int = HEADS, mask: Tensor | None = None, dtype: torch.dtype = torch.float32, **how: Any
    ) -> None:
        super().__init__()
        self.query = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, dtype=dtype)
        self.key, self.value = (nn.Linear(HEADS * WIDTH, groups * WIDTH, dtype=dtype) for _ in range(2))
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH, dtype=dtype)
        self.mask: Tensor | None
        self.register_buffer("mask", mask)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, heads x width]."""
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for layer in layers)
        found = F.scaled_dot_product_attention(query, key, value, self.mask, **self.how)
        mixed: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return mixed


def batches(count: int = 2, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    return [tuple(torch.randn(2, BATCH, LENGTH, HEADS * WIDTH, dtype=dtype)) for _ in range(count)]


def captured(**how: Any) -> CapturedStep:
    model = Attending(**how)
    return capture_with_mse(model, torch.optim.SGD(model.parameters(), 0.1), batches(1)[0])


def capture_built(build: Any) -> CapturedStep:
    model, optimizer = build()
    return capture_with_mse(model, optimizer, batches(1)[0])


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.5},
    "grouped": {"groups": 2, "enable_gqa": True},
    "masked": {"mask": torch.ones(LENGTH, LENGTH).tril().bool()},
    "biased": {"mask": torch.linspace(-1, 1, LENGTH * LENGTH).reshape(1, 1, LENGTH, LENGTH)},
    "double": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16, "is_causal": True},
    "with dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_have_eagers_bits(way: str) -> None:
    how = WAYS[way]

    def build() -> Any:
        torch.manual_seed(0)
        model = Attending(**how)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    torch.manual_seed(1)
    given = batches(3, how.get("dtype", torch.float32))
    for seed in range(2):
        assert_runs_like_eager(build, nn.MSELoss(), given, 2, seed=seed)


class Steepness(Attending):
    """Attention whose gradient the model itself asks for first."""

    keeps_graph = False

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, heads x width]."""
        x = x.clone().requires_grad_()
        found = super().forward(x)
        (slope,) = torch.autograd.grad(found.sum(), x, retain_graph=True, create_graph=self.keeps_graph)
        return found + slope


@pytest.mark.parametrize("options", [False, True])
def test_gradients_may_be_asked_for_twice(options: bool) -> None:
    """By the model (retain_graph), and then by the loss; also of attention whose inputs may go meanwhile."""

    def build() -> Any:
        torch.manual_seed(0)
        model = Steepness()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    for seed in range(3):
        assert_runs_like_eager(build, nn.MSELoss(), batches(2), seed=seed, in_program_order=False, options=options)


def test_gradients_of_gradients_are_refused() -> None:
    model = Steepness()
    model.keeps_graph = True
    with pytest.raises(CaptureError, match=r"differentiates the gradients of attention .*: run it under .*SDPBackend.MATH"):
        capture_with_mse(model, torch.optim.SGD(model.parameters(), 0.1), batches(1)[0])


def test_it_is_one_op_each_way_in_one_group_and_keeps_a_number_for_each_query() -> None:
    """Two products of 2 x 4 heads x 6 x 6 pairs x 8 numbers, 2 flops each: 9,216; backward five of them."""
    graph = captured().graph
    forward, backward = (graph.ops.kinds.index(kind) for kind in (NAME, f"{NAME}_backward"))
    assert [graph.ops.kinds.count(kind) for kind in (NAME, f"{NAME}_backward", "aten.bmm")] == [1, 1, 0]
    assert graph.ops.groups[forward] == graph.ops.groups[backward]
    assert (graph.ops.flops[forward], graph.ops.flops[backward]) == (9216, 9216 * 5 / 2)
    out, saved = graph.ops.writes[forward]
    assert graph.tensors.nbytes[saved] == BATCH * HEADS * LENGTH * 4
    assert {out, saved} < set(graph.ops.reads[backward].tolist())
    assert graph.ops.names[backward] == "scaled_dot_product_attention_backward.backward"


def test_the_result_is_in_the_order_of_the_query_but_for_plain_ones() -> None:
    """Layers of torch have positions outside of the batch in memory; a plain query gets heads inside of positions."""
    plain = torch.empty(BATCH, HEADS, LENGTH, WIDTH, device="meta")
    outside = plain.new_empty(LENGTH, BATCH, HEADS, WIDTH).permute(1, 2, 0, 3)
    part = plain.new_empty(BATCH, LENGTH, 3, HEADS, WIDTH)[:, :, 1].transpose(1, 2)  # of a packed projection
    inside = plain.new_empty(BATCH, LENGTH, HEADS, WIDTH).transpose(1, 2)
    forward = ForwardPass((False, False, False))
    for query, like in ((plain, inside), (outside, outside), (part, inside), (inside, inside)):
        (out,) = forward.on_meta(query, query, query, None)
        assert (out.shape, out.stride()) == (like.shape, like.stride())


def test_a_trace_knows_what_the_kernel_saves() -> None:
    step = captured()
    train_step = compiled(step)
    trace = train_step.trace(batches(1)[0])
    numbers = [n for n, s in enumerate(train_step.placed.instructions.sequence) if getattr(s, "op", -1) >= 0]
    forward = next(
        n
        for n in numbers
        if step.graph.ops.kinds[train_step.placed.instructions.sequence[n].op] == NAME  # type: ignore[union-attr]
    )
    train_step.close()
    assert trace.nbytes[forward] == BATCH * HEADS * LENGTH * (WIDTH + 1) * 4


def test_both_ops_can_be_timed_alone() -> None:
    step = captured(is_causal=True)
    calls = op_calls(step.program, len(step.graph.ops))
    for kind in (NAME, f"{NAME}_backward"):
        op = RunnableOp(calls[step.graph.ops.kinds.index(kind)], "cpu")
        op.run()
        op.run()
        assert not op.changes_inputs


def test_inference_has_the_forward_op_alone() -> None:
    model = Attending()
    step = capture_step(TrainingStep(model, None, None, batches(1)[0][0]))
    (found,) = [kind for kind in step.graph.ops.kinds if NAME in kind]
    assert found == NAME
    train_step = compiled(step)
    x = torch.randn(BATCH, LENGTH, HEADS * WIDTH)
    assert torch.equal(train_step(x), model(x))
    train_step.close()


def test_plain_products_where_the_user_has_chosen_them() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        assert "aten.bmm" in captured().graph.ops.kinds


def test_a_kernel_that_drops_is_a_random_op() -> None:
    """So it waits for other random ops, and is not repeated."""
    step = captured(dropout_p=0.1)
    assert "aten.bmm" not in step.graph.ops.kinds
    resolved = ResolvedProgram.of(step)
    random = [kind for kind, call in zip(step.graph.ops.kinds, resolved.op_calls, strict=True) if is_random(call)]
    assert random == [NAME]


class Checkpointing(nn.Module):
    """Attention that is computed again in the backward pass."""

    def __init__(self, is_reentrant: bool, **how: Any) -> None:
        super().__init__()
        self.first, self.inside, self.is_reentrant = nn.Linear(HEADS * WIDTH, HEADS * WIDTH), Attending(**how), is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, length, heads x width]."""
        found: Tensor = checkpoint(self.inside, self.first(x), use_reentrant=self.is_reentrant)
        return found


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_attends_twice_and_keeps_nothing_of_the_first_time(is_reentrant: bool) -> None:
    """What the first forward op saves has no reader; the second one's group has the backward op."""

    def build() -> Any:
        torch.manual_seed(0)
        model = Checkpointing(is_reentrant)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert_runs_like_eager(build, nn.MSELoss(), batches(2))
    ops = capture_built(build).graph.ops
    first, second = (op for op, kind in enumerate(ops.kinds) if kind == NAME)
    backward = ops.kinds.index(f"{NAME}_backward")
    assert not set(ops.writes[first].tolist()) & set(ops.reads[backward].tolist())
    assert set(ops.writes[second].tolist()) < set(ops.reads[backward].tolist())
    assert ops.groups[second] == ops.groups[backward]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_attention_with_dropout_draws_the_same_numbers_again(is_reentrant: bool) -> None:
    """A kernel could not, so it is taken apart."""

    def build() -> Any:
        torch.manual_seed(0)
        model = Checkpointing(is_reentrant, dropout_p=0.3)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert_runs_like_eager(build, nn.MSELoss(), batches(2))
    assert NAME not in capture_built(build).graph.ops.kinds


def test_plain_products_where_the_user_handles_what_is_saved() -> None:
    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out, target)

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
                found: Tensor = self.inside(x)
            return found

    assert NAME not in capture_step(TrainingStep(Hooked(), loss_fn, optimizer, batches(1)[0])).graph.ops.kinds


def test_layers_of_torch_attend_with_eagers_bits() -> None:
    def build() -> Any:
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(HEADS * WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
        return model, torch.optim.SGD(model.parameters(), 0.1)

    assert NAME in capture_built(build).graph.ops.kinds
    assert F.scaled_dot_product_attention is ATTENTION
    assert_runs_like_eager(build, nn.MSELoss(), batches(2))


def test_a_causal_model_of_transformers_without_padding_attends_without_a_mask() -> None:
    """It reads positions to find out that no texts are packed: these are the same in every step."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=17, num_hidden_layers=1, **sizes))
    tokens = torch.randint(0, 17, (2, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = capture_step(TrainingStep(model, None, optimizer, {"input_ids": tokens, "labels": tokens}))
    (attention,) = [call for call in step.program.calls if isinstance(call.function, ForwardPass)]
    assert attention.args[3] is None
    assert attention.kwargs["is_causal"]
    assert not step.program.preconditions
