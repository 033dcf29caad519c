"""Autocast is recorded with PyTorch's own casts: op by op the same, and the same bits as eager code on the CPU."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_steps import compiled
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import placewise as pw
from placewise.core.errors import CaptureError
from placewise.graph_capture.autocast import LOWER_PRECISION, PROMOTED, SETS_DTYPE, WITH_DTYPE, cast_ops, recorded_autocast

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


class Log(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each op with the dtypes of what it reads and makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str, list[str], list[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, made = ([str(t.dtype) for t in tree_leaves(value) if isinstance(t, Tensor)] for value in (args, out))
        self.ops.append((str(func), read, made))
        return out


class Attention(nn.Module):
    """Products, a softmax, an einsum, a norm and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 24), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = torch.einsum("bij,bjk->bik", (query @ key.transpose(1, 2)).softmax(-1), value)
        result: Tensor = self.out(torch.cat([mixed, x], -1))
        return result


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)), (4, 8)),
    "attention": (Attention, (2, 5, 8)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), (2, 3, 6, 6)),
    "recurrent": (lambda: nn.GRUCell(8, 8), (2, 8)),
}


def squared(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


class UnderAutocast(nn.Module):
    """Calls another module under autocast."""

    def __init__(self, inner: nn.Module, device: str) -> None:
        super().__init__()
        self.inner, self.device = inner, device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            result: Tensor = self.inner(x)
        return result


@pytest.mark.parametrize("name", MODELS)
def test_casts_are_those_of_torch(name: str, same_kernels: None) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(shape)
    logs = [Log(), Log()]
    with logs[0], torch.autocast("cpu", torch.bfloat16):
        theirs = squared(model(x))
    with recorded_autocast(), logs[1], torch.autocast("cpu", torch.bfloat16):
        ours = squared(model(x))
    assert logs[0].ops == logs[1].ops
    assert any("bfloat16" in dtype for _, read, _ in logs[1].ops for dtype in read)
    assert torch.equal(ours, theirs)
    assert not torch._C._is_any_autocast_enabled()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_with_autocast_has_the_bits_of_eager_code(name: str, micro_batches: int, same_kernels: None) -> None:
    make, shape = MODELS[name]
    if name == "convolution" and micro_batches > 1:
        pytest.skip("batch norm sees other batches")
    ours = UnderAutocast(make(), "cpu")
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(model.parameters(), 0.01) for model in (ours, theirs)]
    batches = [torch.randn(shape) for _ in range(3)]
    step = pw.capture(ours, squared, optimizers[0], batches[0], micro_batches=micro_batches)
    train_step = compiled(step, seed=micro_batches)  # a random placement on two devices of one thread each
    for batch in batches:
        optimizers[1].zero_grad()
        total = torch.zeros(())
        for part in batch.chunk(micro_batches):
            loss = squared(theirs(part)) / micro_batches if micro_batches > 1 else squared(theirs(part))
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        optimizers[1].step()
        assert torch.equal(train_step(batch), total)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_gpus_casts_are_recorded_without_a_gpu() -> None:
    """On a GPU a softmax computes in float32 and a product in bfloat16; a weight is cast once."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4))
    for step in (
        pw.capture(model, squared, torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4), autocast=torch.bfloat16),
        pw.capture(UnderAutocast(model, "cuda"), squared, torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4)),
    ):
        ops, tensors = step.graph.ops, step.graph.tensors
        made: dict[str, list[str]] = {kind: [] for kind in ops.kinds}
        for op, kind in enumerate(ops.kinds):
            if ops.phases[op] == 0:
                shape = tensors.shape_of(ops.writes[op][0])
                assert shape is not None
                made[kind].append(shape.dtype)
        assert made["aten._softmax"] == ["float32"]
        assert made["aten.addmm"] == ["bfloat16"] * 2
        assert made["aten._to_copy"].count("bfloat16") == 2 + 4, "the inputs of both products, two weights, two biases"


def test_a_weight_is_cast_once_for_all_micro_batches() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    graph = pw.capture(model, squared, optimizer, torch.ones(6, 4), autocast=torch.bfloat16, micro_batches=3).graph
    casts = [op for op, kind in enumerate(graph.ops.kinds) if kind == "aten._to_copy" and not graph.ops.phases[op]]
    shapes = [graph.tensors.shape_of(graph.ops.writes[op][0]) for op in casts]
    assert [shape.dtype for shape in shapes if shape is not None].count("bfloat16") == 3 + 1, "three inputs and a weight"


def test_ops_that_choose_their_type_take_it_by_name_and_by_position() -> None:
    """F.cross_entropy calls log_softmax in C++, with None as its fourth argument."""
    a = torch.empty(4, 4, device="meta", dtype=torch.bfloat16)
    with recorded_autocast(), torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(a, torch.empty(4, dtype=torch.long, device="meta"))
        found = [
            loss,
            a.sum(),
            a.sum(0),
            a.softmax(0),
            a.cumsum(0),
            a.prod(),
            torch.linalg.vector_norm(a),
            a.norm(),
            a.norm(2, 0),
        ]
        assert {tensor.dtype for tensor in found} == {torch.float32}
        assert a.softmax(0, dtype=torch.float64).dtype == torch.float64


def test_contexts_can_be_nested_and_switched_off() -> None:
    with recorded_autocast(), torch.autocast("cuda", torch.bfloat16):
        a = torch.empty(4, 4, device="meta")
        assert (a @ a).dtype == torch.bfloat16
        with torch.autocast("cuda", enabled=False):
            assert (a @ a).dtype == torch.float32
        with torch.autocast(a.device.type, torch.float16):
            assert (a @ a).dtype == torch.float16
        assert (a @ a).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cuda")
    assert not torch._C._is_any_autocast_enabled()


@pytest.mark.filterwarnings("ignore:CUDA is not available|User provided device_type of 'cuda'")
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_an_autocast_for_cuda_that_is_off_without_cuda_is_refused() -> None:
    """It would be a step in float32, with PyTorch's own warning alone."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(
        CaptureError, match=r'"cuda"\) switches itself off where CUDA is missing: pass autocast=torch.bfloat16'
    ):
        pw.capture(model, squared, optimizer, torch.ones(3, 4), autocast=torch.autocast("cuda", torch.bfloat16))


def test_what_cannot_be_recorded_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="autocast is on around the capture"):
        pw.capture(model, squared, optimizer, torch.ones(2, 2))
    both = UnderAutocast(UnderAutocast(model, "cuda"), "cpu")
    with pytest.raises(CaptureError, match="autocast for 'cpu' and for 'cuda'"):
        pw.capture(both, squared, optimizer, torch.ones(2, 2))
    assert not torch._C._is_any_autocast_enabled()


def test_every_listed_op_is_one_that_torch_casts() -> None:
    known = cast_ops("cuda") | cast_ops("cpu")
    assert known >= LOWER_PRECISION
    assert cast_ops("cuda") >= SETS_DTYPE | set(WITH_DTYPE) | PROMOTED["cuda"]
    assert cast_ops("cpu") >= PROMOTED["cpu"]


class Float32Product(torch.autograd.Function):
    """A function of its own that asks for inputs in float32."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class WithFunction(nn.Module):
    """Autocast around a function with custom_fwd."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return Float32Product.apply(self.layer(x), self.weight)  # type: ignore[no-untyped-call]


def test_inputs_of_functions_with_custom_fwd_are_cast(same_kernels: None) -> None:
    model = WithFunction()
    twin = copy.deepcopy(model)
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    step = compiled(pw.capture(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1), batch))
    loss = nn.functional.mse_loss(twin(batch[0]), batch[1])
    torch.autograd.backward(loss)
    torch.optim.SGD(twin.parameters(), 0.1).step()
    assert torch.equal(step(batch), loss.detach())
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    step.close()
